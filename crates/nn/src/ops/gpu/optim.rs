//! Calls for [`ops::optim`](crate::ops::optim).
//!
//! Ranges of elements go by value, [`RANGES`] in a call. The scratch of a measurement is, in f64,
//! the sum over the tensors of earlier calls, then the sum of squares of each chunk; the scratch of
//! an optimiser that counts steps is the rate and the root of each parameter, in f32, then the
//! matrices of [`muon`].

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};

use super::{Emission, READ, WRITE, emitted, kernel, muon, plain, read, source, write};
use crate::graph::OptimiserKind;
use crate::ops::OptimOp;

pub(super) static SOURCE: KernelSource = source!("optim.cu");

const SUMS: Operand = Operand::read::<f64>();
const NUMBERS: Operand = Operand::read::<f64>();
const METRICS: Operand = Operand::write::<f64>();
const STEPS: Operand = Operand::write::<i64>();

static SQUARES: Kernel = kernel::<Ranges>(&SOURCE, "squares", &[READ, METRICS]);
static NORMS: Kernel =
    kernel::<TensorValues>(&SOURCE, "norms", &[SUMS, NUMBERS, METRICS, METRICS, WRITE]);
static CLIP: Kernel = kernel::<Ranges>(&SOURCE, "clip", &[WRITE, READ]);
static CLIPPED: Kernel = kernel::<()>(&SOURCE, "clipped", &[WRITE]);
static SGD: Kernel = kernel::<Ranges>(&SOURCE, "sgd", &[READ, READ, NUMBERS, WRITE, WRITE]);
static NESTEROV: Kernel =
    kernel::<Ranges>(&SOURCE, "nesterov", &[READ, READ, NUMBERS, WRITE, WRITE]);
static LION: Kernel = kernel::<Ranges>(&SOURCE, "lion", &[READ, READ, NUMBERS, WRITE, WRITE]);
static ADAM_BEGIN: Kernel = kernel::<Adam>(&SOURCE, "adam_begin", &[NUMBERS, STEPS, WRITE]);
static ADAM: Kernel =
    kernel::<Adam>(&SOURCE, "adam", &[READ, READ, NUMBERS, READ, WRITE, WRITE, WRITE]);

const THREADS: u32 = 256;

/// Elements of a block that sums, and of one that updates.
const SUM_CHUNK: usize = 4096;
const CHUNK: usize = 1024;

/// Ranges of a call.
const RANGES: usize = 120;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Ranges {
    count: u32,
    start: [u32; RANGES],
    len: [u32; RANGES],
    block: [u32; RANGES],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Adam {
    rate: u32,
    decoupled: u32,
    ranges: Ranges,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TensorValues {
    count: u32,
    begins: u32,
    ends: u32,
    norm_factor: f32,
    first: [u32; RANGES + 1],
}

/// Chunks of a range.
fn chunks(range: &Range<usize>, chunk: usize) -> usize {
    range.len().div_ceil(chunk)
}

/// Ranges by calls, each with its number of blocks.
fn tables(ranges: &[Range<usize>], chunk: usize) -> impl Iterator<Item = (Ranges, u32)> {
    ranges.chunks(RANGES).map(move |some| {
        let mut table = Ranges { count: some.len() as u32, ..Ranges::zeroed() };
        let mut blocks = 0;
        for (i, range) in some.iter().enumerate() {
            table.start[i] = range.start as u32;
            table.len[i] = range.len() as u32;
            table.block[i] = blocks;
            blocks += chunks(range, chunk) as u32;
        }
        (table, blocks)
    })
}

pub(super) fn scratch(op: &OptimOp) -> usize {
    match op {
        OptimOp::Measure { tensors, .. } => {
            2 + 2 * tensors.iter().map(|tensor| chunks(tensor, SUM_CHUNK)).sum::<usize>()
        }
        OptimOp::Clip { .. } => 0,
        OptimOp::Update { optimiser, runs, matrices, .. } => {
            let counted = if optimiser.counts_steps() { 2 * runs.len() } else { 0 };
            counted + muon::scratch(matrices)
        }
    }
}

pub(super) fn emit(op: &OptimOp) -> Emission {
    match op {
        OptimOp::Measure { tensors, norm_factor, .. } => measure(tensors, *norm_factor),
        OptimOp::Clip { tensors, .. } => {
            let clip = tables(tensors, CHUNK).map(|(table, blocks)| {
                emitted(Call::new(&CLIP, blocks, THREADS), &[write(0), write(1)], table)
            });
            clip.chain([plain(Call::new(&CLIPPED, 1, 32), &[write(1)])]).collect()
        }
        OptimOp::Update { optimiser, runs, matrices, len } => match optimiser {
            OptimiserKind::Sgd => each_range(&SGD, runs),
            OptimiserKind::Nesterov => each_range(&NESTEROV, runs),
            OptimiserKind::Lion => each_range(&LION, runs),
            OptimiserKind::Adam => adam((RATE, false), runs, *len),
            OptimiserKind::AdamW => adam((RATE, true), runs, *len),
            OptimiserKind::Muon => {
                let mut calls = adam((OTHERS_RATE, true), runs, *len);
                calls.extend(muon::emit(matrices, 2 * runs.len(), *len));
                calls
            }
        },
    }
}

/// Numbers with the learning rates of Adam, and of the AdamW of Muon.
const RATE: u32 = 1;
const OTHERS_RATE: u32 = 7;

/// The calls of an optimiser with one number of state for each element.
fn each_range(kernel: &'static Kernel, runs: &[Range<usize>]) -> Emission {
    let operands = [read(0), read(1), read(2), write(0), write(1)];
    let step = tables(runs, CHUNK)
        .map(|(ranges, blocks)| emitted(Call::new(kernel, blocks, THREADS), &operands, ranges));
    step.collect()
}

/// The squares of all chunks, then the norms of the tensors, in order.
fn measure(tensors: &[Range<usize>], norm_factor: f32) -> Emission {
    let mut calls = Emission::new();
    let mut before = 0;
    for (table, blocks) in tables(tensors, SUM_CHUNK) {
        let sums = write(2).part(2 + 2 * before, blocks as usize);
        calls.push(emitted(Call::new(&SQUARES, blocks, THREADS), &[read(0), sums], table));
        before += blocks as usize;
    }
    let (sums, carried) = (write(2).part(2, before), write(2).part(0, 1));
    // Without tensors the norm is 0.
    let count = tensors.len().div_ceil(RANGES).max(1);
    let mut first = 0;
    for n in 0..count {
        let some = &tensors[n * RANGES..tensors.len().min((n + 1) * RANGES)];
        let [begins, ends] = [n == 0, n + 1 == count].map(u32::from);
        let mut of = TensorValues {
            count: some.len() as u32,
            begins,
            ends,
            norm_factor,
            ..TensorValues::zeroed()
        };
        of.first[0] = first;
        for (to, tensor) in of.first[1..].iter_mut().zip(some) {
            first += chunks(tensor, SUM_CHUNK) as u32;
            *to = first;
        }
        let operands = [sums, read(1), carried, write(0), write(1)];
        calls.push(emitted(Call::new(&NORMS, 1, THREADS), &operands, of));
    }
    calls
}

/// Counts and corrections of the parameters' steps, then the steps.
fn adam((rate, decoupled): (u32, bool), runs: &[Range<usize>], len: usize) -> Emission {
    let (average, square) = (write(1).part(0, len), write(1).part(len, len));
    let mut calls = Emission::new();
    for (n, (ranges, blocks)) in tables(runs, CHUNK).enumerate().filter(|(_, (_, b))| *b > 0) {
        let (first, count) = (n * RANGES, ranges.count as usize);
        // Parts begin at elements counted in f32; counts of steps are twice as large.
        let (steps, corrections) = (write(2).part(2 * first, count), write(3));
        let corrections = corrections.part(2 * first, 2 * count);
        let values = Adam { rate, decoupled: decoupled.into(), ranges };
        let begin = [read(2), steps, corrections];
        calls.push(emitted(Call::new(&ADAM_BEGIN, 1, 128), &begin, values));
        let operands = [read(0), read(1), read(2), corrections, write(0), average, square];
        calls.push(emitted(Call::new(&ADAM, blocks, THREADS), &operands, values));
    }
    calls
}

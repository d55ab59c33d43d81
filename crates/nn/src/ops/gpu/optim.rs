//! Calls for [`ops::optim`](crate::ops::optim).
//!
//! Ranges of elements go by value, [`RANGES`] in a call. The scratch of a measurement is, in f64,
//! the sum over the tensors of earlier calls, then the sum of squares of each chunk; the scratch of
//! Adam's step is its rate and its root, in f32.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::{Emission, READ, WRITE, emitted, kernel, plain, read, source, write};
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
static ADAM_BEGIN: Kernel = kernel::<()>(&SOURCE, "adam_begin", &[NUMBERS, STEPS, WRITE]);
static ADAM: Kernel =
    kernel::<Ranges>(&SOURCE, "adam", &[READ, READ, NUMBERS, READ, WRITE, WRITE, WRITE]);

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
        OptimOp::Clip { .. } | OptimOp::Update { optimiser: OptimiserKind::Sgd, .. } => 0,
        OptimOp::Update { optimiser: OptimiserKind::Adam, .. } => 2,
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
        OptimOp::Update { optimiser: OptimiserKind::Sgd, runs, .. } => {
            let operands = [read(0), read(1), read(2), write(0), write(1)];
            let step = tables(runs, CHUNK).map(|(ranges, blocks)| {
                emitted(Call::new(&SGD, blocks, THREADS), &operands, ranges)
            });
            step.collect()
        }
        OptimOp::Update { optimiser: OptimiserKind::Adam, runs, len } => adam(runs, *len),
    }
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

/// The step's count and corrections, then the step.
fn adam(runs: &[Range<usize>], len: usize) -> Emission {
    let corrections = write(3).part(0, 2);
    let (average, square) = (write(1).part(0, len), write(1).part(len, len));
    let operands = [read(0), read(1), read(2), corrections, write(0), average, square];
    let begin = [read(2), write(2), corrections];
    let mut calls: Emission = smallvec![plain(Call::new(&ADAM_BEGIN, 1, 32), &begin)];
    calls.extend(
        tables(runs, CHUNK)
            .map(|(ranges, blocks)| emitted(Call::new(&ADAM, blocks, THREADS), &operands, ranges)),
    );
    calls
}

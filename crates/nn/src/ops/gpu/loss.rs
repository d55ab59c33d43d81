//! Calls for [`ops::loss`](crate::ops::loss).
//!
//! A batch that fits one block is one call. A larger one is two: each block leaves its sums in
//! scratch, `[blocks][loss, hits, squares]` in f64, and one block adds them up.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::{CallOperand, Emission, Emitted, READ, WRITE, emitted, kernel, read, source, write};
use crate::ops::loss::{Logits, LossOp};

pub(super) static SOURCE: KernelSource = source!("loss.cu");

const LABELS: Operand = Operand::read::<u32>();
const SUMS: Operand = Operand::read::<f64>();
const METRICS: Operand = Operand::write::<f64>();

static TRAIN: Kernel =
    kernel::<LossValues>(&SOURCE, "train", &[READ, LABELS, WRITE, METRICS, METRICS]);
static PARTIAL: Kernel =
    kernel::<LossValues>(&SOURCE, "partial", &[READ, LABELS, WRITE, WRITE, WRITE, METRICS]);
static TRAIN_SUM: Kernel = kernel::<u32>(&SOURCE, "train_sum", &[SUMS, METRICS, METRICS]);
static EVALUATE: Kernel =
    kernel::<EvaluationValues>(&SOURCE, "evaluate", &[READ, LABELS, METRICS, WRITE, WRITE]);
static EVALUATE_SUM: Kernel = kernel::<ScoreRows>(&SOURCE, "evaluate_sum", &[SUMS, METRICS]);

/// Threads of a block that has samples, and of one that adds sums.
const THREADS: usize = 512;
const SUM_THREADS: u32 = 128;

/// Rounds in which a block goes through its samples, at most.
const ROUNDS: usize = 8;

/// Rows of the scores that one call adds to.
const ROWS: usize = 62;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LossValues {
    samples: u32,
    classes: u32,
    lanes: u32,
    rows: u32,
    is_first: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ScoreRows {
    samples: u32,
    count: u32,
    rows: [u32; ROWS],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct EvaluationValues {
    of: LossValues,
    to: ScoreRows,
}

/// Division of a batch, and its number of blocks. A thread has two classes of a small sample, so
/// that one waits for the other's result.
fn batch(of: Logits) -> (LossValues, u32) {
    let lanes = of.classes.div_ceil(2).next_power_of_two().min(32);
    let at_once = THREADS / lanes;
    let rows = at_once * of.batch.div_ceil(at_once).clamp(1, ROUNDS);
    let blocks = of.batch.div_ceil(rows).max(1) as u32;
    let [samples, classes, lanes, rows] = [of.batch, of.classes, lanes, rows].map(|n| n as u32);
    (LossValues { samples, classes, lanes, rows, is_first: 0 }, blocks)
}

/// Rows of the scores, in as many calls as it takes.
fn rows(samples: usize, all: &[usize]) -> impl Iterator<Item = ScoreRows> {
    all.chunks(ROWS).map(move |some| {
        let mut rows = [0; ROWS];
        rows.iter_mut().zip(some).for_each(|(to, row)| *to = *row as u32);
        ScoreRows { samples: samples as u32, count: some.len() as u32, rows }
    })
}

/// Whether all of it is one call.
fn is_one_call(op: &LossOp) -> bool {
    match op {
        LossOp::Train { logits, .. } => batch(*logits).1 == 1,
        LossOp::Evaluate { logits, rows } => batch(*logits).1 == 1 && rows.len() <= ROWS,
    }
}

pub(super) fn scratch(op: &LossOp) -> usize {
    let (LossOp::Train { logits, .. } | LossOp::Evaluate { logits, .. }) = op;
    if is_one_call(op) { 0 } else { 6 * batch(*logits).1 as usize }
}

/// The sums of all blocks, to scratch: `gradient`, the losses of the first configuration and of
/// this one, each empty where it is not wanted, and the scratch.
fn partial(
    logits: Logits,
    gradient: CallOperand,
    first: CallOperand,
    own: CallOperand,
    sums: CallOperand,
    is_first: bool,
) -> Emitted {
    let (of, blocks) = batch(logits);
    let call = Call::new(&PARTIAL, blocks, THREADS as u32);
    let values = LossValues { is_first: is_first.into(), ..of };
    emitted(call, &[read(0), read(1), gradient, first, own, sums], values)
}

pub(super) fn emit(op: &LossOp) -> Emission {
    let (one, threads) = (is_one_call(op), THREADS as u32);
    match op {
        LossOp::Train { logits, .. } if one => {
            let operands = [read(0), read(1), write(0), write(1), write(2)];
            smallvec![emitted(Call::new(&TRAIN, 1, threads), &operands, batch(*logits).0)]
        }
        LossOp::Train { logits, .. } => {
            let sums = write(3).part(0, 3 * batch(*logits).1 as usize);
            let none = write(0).part(0, 0);
            let call = Call::new(&TRAIN_SUM, 1, SUM_THREADS);
            let samples = logits.batch as u32;
            smallvec![
                partial(*logits, write(0), none, none, sums, false),
                emitted(call, &[sums, write(1), write(2)], samples),
            ]
        }
        LossOp::Evaluate { logits, rows: all } if one => {
            let call = Call::new(&EVALUATE, 1, threads);
            let of = LossValues { is_first: all.contains(&0).into(), ..batch(*logits).0 };
            let operands = [read(0), read(1), write(0), write(1), write(2)];
            let each = rows(logits.batch, all)
                .map(|to| emitted(call.clone(), &operands, EvaluationValues { of, to }));
            each.collect()
        }
        LossOp::Evaluate { logits, rows: all } => {
            let sums = write(3).part(0, 3 * batch(*logits).1 as usize);
            let each = rows(logits.batch, all).map(|to| {
                let call = Call::new(&EVALUATE_SUM, 1, SUM_THREADS);
                emitted(call, &[sums, write(0)], to)
            });
            // No gradient is wanted.
            let gradient = write(0).part(0, 0);
            let is_first = all.contains(&0);
            let partial = partial(*logits, gradient, write(1), write(2), sums, is_first);
            std::iter::once(partial).chain(each).collect()
        }
    }
}

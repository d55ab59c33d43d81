//! Calls for [`ops::loss`](crate::ops::loss).
//!
//! A batch that fits one block is one call. A larger one is two: each block leaves its sums in
//! scratch, `[blocks][sums]` in f64, and one block adds them up. An evaluation that adds to more
//! than [`ROWS`] rows of the scores has further calls for them. Each kind of loss has a file of
//! kernels: plain cross-entropy, which also adds up the sums of smoothed labels; smoothed labels;
//! losses of numbers.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::{CallOperand, Emission, Emitted, READ, WRITE, emitted, kernel, read, source, write};
use crate::kernels::loss::ElementLoss;
use crate::ops::loss::{BatchLoss, LossFormula, LossOp};

pub(super) static SOURCE: KernelSource = source!("loss.cu");
static SMOOTHED: KernelSource = source!("smoothed_loss.cu");
static ELEMENTS: KernelSource = source!("element_loss.cu");

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

/// Kernels of a file, and its sums of a block.
struct LossKernels {
    train: &'static Kernel,
    partial: &'static Kernel,
    train_sum: &'static Kernel,
    evaluate: &'static Kernel,
    evaluate_sum: &'static Kernel,
    /// Number of sums of a block: loss, correct samples, squares; or loss, squares, and the sums of
    /// the score.
    sums: usize,
}

static CROSS_ENTROPY: LossKernels = LossKernels {
    train: &TRAIN,
    partial: &PARTIAL,
    train_sum: &TRAIN_SUM,
    evaluate: &EVALUATE,
    evaluate_sum: &EVALUATE_SUM,
    sums: 3,
};

/// Its kernels leave the same sums as those of [`CROSS_ENTROPY`], which add them up.
static SMOOTHED_CROSS_ENTROPY: LossKernels = LossKernels {
    train: &kernel::<FormulaValues>(
        &SMOOTHED,
        "train",
        &[READ, LABELS, READ, WRITE, METRICS, METRICS],
    ),
    partial: &kernel::<FormulaValues>(
        &SMOOTHED,
        "partial",
        &[READ, LABELS, READ, WRITE, WRITE, WRITE, METRICS],
    ),
    evaluate: &kernel::<FormulaEvaluation>(
        &SMOOTHED,
        "evaluate",
        &[READ, LABELS, READ, METRICS, WRITE, WRITE],
    ),
    train_sum: &TRAIN_SUM,
    evaluate_sum: &EVALUATE_SUM,
    sums: 3,
};

static OF_ELEMENTS: LossKernels = LossKernels {
    train: &kernel::<FormulaValues>(
        &ELEMENTS,
        "train",
        &[READ, READ, WRITE, METRICS, METRICS, METRICS],
    ),
    partial: &kernel::<FormulaValues>(
        &ELEMENTS,
        "partial",
        &[READ, READ, WRITE, WRITE, WRITE, METRICS],
    ),
    train_sum: &kernel::<u32>(&ELEMENTS, "train_sum", &[SUMS, METRICS, METRICS, METRICS]),
    evaluate: &kernel::<FormulaEvaluation>(
        &ELEMENTS,
        "evaluate",
        &[READ, READ, METRICS, WRITE, WRITE],
    ),
    evaluate_sum: &kernel::<ScoreRows>(&ELEMENTS, "evaluate_sum", &[SUMS, METRICS]),
    sums: 6,
};

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

/// Number of a formula in its file of kernels, and its constant: delta, or the smoothing.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Formula {
    formula: u32,
    constant: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct FormulaValues {
    of: LossValues,
    formula: Formula,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct FormulaEvaluation {
    of: FormulaValues,
    to: ScoreRows,
}

/// Division of a batch, and its number of blocks. With few classes a thread has two of them, so
/// that it computes one while it waits for the other's result.
fn batch(of: BatchLoss) -> (LossValues, u32) {
    let lanes = of.outputs.div_ceil(2).next_power_of_two().min(32);
    let at_once = THREADS / lanes;
    let rows = at_once * of.batch.div_ceil(at_once).clamp(1, ROUNDS);
    let blocks = of.batch.div_ceil(rows).max(1) as u32;
    let [samples, classes, lanes, rows] = [of.batch, of.outputs, lanes, rows].map(|n| n as u32);
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

impl BatchLoss {
    /// Operands that are read.
    fn read_operands(&self) -> &'static [CallOperand] {
        const ALL: &[CallOperand] = &[read(0), read(1), read(2)];
        if self.reads_weights() { ALL } else { &ALL[..2] }
    }

    fn kernels(&self) -> &'static LossKernels {
        match self.formula {
            LossFormula::CrossEntropy => &CROSS_ENTROPY,
            LossFormula::SmoothedCrossEntropy { .. } => &SMOOTHED_CROSS_ENTROPY,
            LossFormula::Elements(_) => &OF_ELEMENTS,
        }
    }

    /// Number and constant of the formula; none for plain cross-entropy.
    fn constants(&self) -> Option<Formula> {
        let (formula, constant) = match self.formula {
            LossFormula::CrossEntropy => return None,
            LossFormula::SmoothedCrossEntropy { label_smoothing } => (0, label_smoothing),
            LossFormula::Elements(ElementLoss::BinaryCrossEntropy) => (0, 0.0),
            LossFormula::Elements(ElementLoss::Square) => (1, 0.0),
            LossFormula::Elements(ElementLoss::Huber { delta }) => (2, delta),
            LossFormula::Elements(ElementLoss::Absolute) => (3, 0.0),
        };
        Some(Formula { formula, constant })
    }

    /// The call with the values of a batch.
    fn call(&self, call: Call, operands: &[CallOperand], of: LossValues) -> Emitted {
        match self.constants() {
            None => emitted(call, operands, of),
            Some(formula) => emitted(call, operands, FormulaValues { of, formula }),
        }
    }

    /// The call with the values of an evaluation.
    fn evaluation(
        &self,
        call: Call,
        operands: &[CallOperand],
        of: LossValues,
        to: ScoreRows,
    ) -> Emitted {
        match self.constants() {
            None => emitted(call, operands, EvaluationValues { of, to }),
            Some(formula) => {
                let of = FormulaValues { of, formula };
                emitted(call, operands, FormulaEvaluation { of, to })
            }
        }
    }
}

/// Kernels of a formula that [`SOURCE`] does not have.
pub(super) fn source_of(formula: LossFormula) -> Option<&'static KernelSource> {
    match formula {
        LossFormula::CrossEntropy => None,
        LossFormula::SmoothedCrossEntropy { .. } => Some(&SMOOTHED),
        LossFormula::Elements(_) => Some(&ELEMENTS),
    }
}

/// Whether all of it is one call.
fn is_one_call(op: &LossOp) -> bool {
    match op {
        LossOp::Train { of, .. } => batch(*of).1 == 1,
        LossOp::Evaluate { of, rows } => batch(*of).1 == 1 && rows.len() <= ROWS,
    }
}

/// Sums of all blocks, f64.
fn sums_len(of: BatchLoss) -> usize {
    of.kernels().sums * batch(of).1 as usize
}

pub(super) fn scratch(op: &LossOp) -> usize {
    let (LossOp::Train { of, .. } | LossOp::Evaluate { of, .. }) = op;
    if is_one_call(op) { 0 } else { 2 * sums_len(*of) }
}

/// Results of a call that leaves the sums of all blocks in scratch, each empty where it is not
/// wanted.
struct PartialResults {
    gradient: CallOperand,
    /// Losses of the first configuration, and of this one.
    first: CallOperand,
    own: CallOperand,
    sums: CallOperand,
}

fn partial(of: BatchLoss, to: PartialResults, is_first: bool) -> Emitted {
    let (values, blocks) = batch(of);
    let call = Call::new(of.kernels().partial, blocks, THREADS as u32);
    let values = LossValues { is_first: is_first.into(), ..values };
    let PartialResults { gradient, first, own, sums } = to;
    of.call(call, &[of.read_operands(), &[gradient, first, own, sums]].concat(), values)
}

pub(super) fn emit(op: &LossOp) -> Emission {
    match op {
        LossOp::Train { of, .. } => train(*of, is_one_call(op)),
        LossOp::Evaluate { of, rows } => evaluate(*of, rows, is_one_call(op)),
    }
}

fn train(of: BatchLoss, is_one_call: bool) -> Emission {
    let (kernels, threads) = (of.kernels(), THREADS as u32);
    // Counts, the ring, and sums of the score if the metrics have them.
    let metrics = &[write(1), write(2), write(3)][..if of.has_score_sums() { 3 } else { 2 }];
    if is_one_call {
        let operands = [of.read_operands(), &[write(0)], metrics].concat();
        let call = Call::new(kernels.train, 1, threads);
        return smallvec![of.call(call, &operands, batch(of).0)];
    }
    let sums = write(1 + metrics.len()).part(0, sums_len(of));
    let none = write(0).part(0, 0);
    let to = PartialResults { gradient: write(0), first: none, own: none, sums };
    let call = Call::new(kernels.train_sum, 1, SUM_THREADS);
    let operands = [&[sums], metrics].concat();
    smallvec![partial(of, to, false), emitted(call, &operands, of.batch as u32)]
}

fn evaluate(of: BatchLoss, all: &[usize], is_one_call: bool) -> Emission {
    let is_first = all.contains(&0);
    if is_one_call {
        let call = Call::new(of.kernels().evaluate, 1, THREADS as u32);
        let values = LossValues { is_first: is_first.into(), ..batch(of).0 };
        let operands = [of.read_operands(), &[write(0), write(1), write(2)]].concat();
        let each = rows(of.batch, all).map(|to| of.evaluation(call.clone(), &operands, values, to));
        return each.collect();
    }
    let sums = write(3).part(0, sums_len(of));
    let each = rows(of.batch, all).map(|to| {
        let call = Call::new(of.kernels().evaluate_sum, 1, SUM_THREADS);
        emitted(call, &[sums, write(0)], to)
    });
    // No gradient is wanted.
    let to = PartialResults { gradient: write(0).part(0, 0), first: write(1), own: write(2), sums };
    std::iter::once(partial(of, to, is_first)).chain(each).collect()
}

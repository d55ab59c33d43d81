//! Cases of losses, optimisers, and checks of state.

use meristem_device::DType;
use meristem_nn::MetricsLayout;
use meristem_nn::graph::{
    AdamConfig, LionConfig, MuonConfig, Optimiser, OptimiserKind, ParamKind, SgdConfig,
};
use meristem_nn::kernels::loss::ElementLoss;
use meristem_nn::layout::Packing;
use meristem_nn::ops::loss::{BatchLoss, LossFormula};
use meristem_nn::ops::{LossOp, OptimOp, Spec, StateOp};

use super::case::{Case, Data, Random, case};
use super::cases::FUNCTION;

fn cross_entropy(batch: usize, outputs: usize) -> BatchLoss {
    BatchLoss { formula: LossFormula::CrossEntropy, batch, outputs }
}

/// Smoothed labels with and without weights, for the same batches.
pub(super) fn smoothed_loss_cases() -> Vec<Case> {
    let mut random = Random(13);
    let mut cases = vec![];
    for (batch, outputs) in [(1, 1), (3, 2), (130, 10), (1100, 10), (300, 100)] {
        for (label_smoothing, is_weighted) in [(0.1, false), (0.0, true), (0.5, true)] {
            let formula = LossFormula::SmoothedCrossEntropy { label_smoothing };
            let of = BatchLoss { formula, batch, outputs };
            let samples = batch as f64;
            let targets = (0..batch).map(|_| (random.bits() % outputs as u64) as u32).collect();
            let (targets, weights) = (Data::U32(targets), (0..outputs).map(|c| (c % 3) as f32));
            let weights = Data::F32(if is_weighted { weights.collect() } else { vec![] });
            // Exponentials are at most 1, and targets add up to 2.
            let train = case(LossOp::Train { of, log: batch % 3 }, FUNCTION, 1.0)
                .bound(0, FUNCTION, 2.0 / samples)
                .bound(1, FUNCTION, 4.0 * samples)
                .writing(1, Data::F64(vec![1.0, 2.0, 3.0, 7.0]));
            let rows = (0..batch % 80).rev().collect();
            let with_first = case(LossOp::Evaluate { of, rows }, FUNCTION, 4.0);
            let with_first = with_first.bound(0, FUNCTION, 4.0 * samples);
            // Squares of differences below 16 of losses.
            let rows = (1..(batch % 80).max(2)).collect();
            let others = case(LossOp::Evaluate { of, rows }, FUNCTION, 4.0);
            let others = others.bound(0, FUNCTION, 32.0 * samples);
            for case in [train, with_first, others] {
                cases.push(case.reading(1, targets.clone()).reading(2, weights.clone()));
            }
        }
    }
    cases
}

/// Losses of numbers, for the same batches, with NaN and infinity in one. Values are up to 8 in
/// magnitude, and targets 0, ½ or 1. Sums are f64, so their errors are those of the functions in
/// f32, up to 1 for each sample. A sample's loss is at most 81 and rounded to f32 at the end; its
/// gradient is at most 18 over the number of elements. The square of a difference of losses changes
/// by twice the difference, at most 82, times their rounding.
pub(super) fn element_loss_cases() -> Vec<Case> {
    let mut random = Random(11);
    let mut cases = vec![];
    let functions = [
        ElementLoss::BinaryCrossEntropy,
        ElementLoss::Square,
        ElementLoss::Huber { delta: 0.75 },
        ElementLoss::Absolute,
    ];
    for (batch, outputs) in [(1, 1), (3, 2), (130, 10), (1100, 1), (300, 100)] {
        for loss in functions {
            let of = BatchLoss { formula: LossFormula::Elements(loss), batch, outputs };
            let values = (0..batch * outputs).map(|i| match i % 97 {
                55 if batch == 130 => f32::NAN,
                77 if batch == 130 => f32::INFINITY,
                _ => 8.0 * random.unit(),
            });
            let values = Data::F32(values.collect());
            let mut target = || (random.bits() % 3) as f32 / 2.0;
            let targets = Data::F32((0..batch * outputs).map(|_| target()).collect());
            let samples = batch as f64;
            let train = case(LossOp::Train { of, log: batch % 3 }, FUNCTION, 1.0)
                .bound(0, FUNCTION, 18.0 / (batch * outputs) as f64)
                .bound(1, FUNCTION, samples)
                .writing(1, Data::F64(vec![1.0, 2.0, 3.0, 7.0]))
                .writing(3, Data::F64(vec![4.0, 3.0, 2.0, 1.0]));
            let rows = (0..batch % 80).rev().collect();
            let with_first = case(LossOp::Evaluate { of, rows }, 4, 81.0);
            let with_first = with_first.bound(0, FUNCTION, samples);
            let rows = (1..(batch % 80).max(2)).collect();
            let others = case(LossOp::Evaluate { of, rows }, 4, 81.0);
            let others = others.bound(0, FUNCTION, 164.0 * samples);
            for case in [train, with_first, others] {
                cases.push(case.reading(0, values.clone()).reading(1, targets.clone()));
            }
        }
    }
    cases
}

/// Batches of several blocks of a GPU, and of one block with idle threads; classes for one thread,
/// and for more than a warp; ties and NaN, which affect the hits.
pub(super) fn loss_cases() -> Vec<Case> {
    let mut random = Random(7);
    let mut cases = vec![];
    for (batch, classes) in [(1, 1), (3, 2), (130, 10), (1100, 10), (300, 100)] {
        let of = cross_entropy(batch, classes);
        let targets = (0..batch).map(|_| (random.bits() % classes as u64) as u32).collect();
        let train = case(LossOp::Train { of, log: batch % 3 }, 4 * FUNCTION, 1.0)
            .reading(1, Data::U32(targets))
            .writing(1, Data::F64(vec![1.0, 2.0, 3.0, 7.0]));
        cases.push(train);
        // Three distinct values, so that most samples have a tie of the largest logit.
        let values = (0..batch * classes).map(|_| match random.bits() % 4 {
            0 if batch % 3 == 1 => f32::NAN,
            n => n as f32 / 4.0,
        });
        let values = Data::F32(values.collect());
        let targets = Data::U32(vec![(classes / 2) as u32; batch]);
        let rows = (0..batch % 80).rev().collect();
        let with_first = case(LossOp::Evaluate { of, rows }, 4 * FUNCTION, 1.0);
        // Squares of differences of two losses, with the errors of both.
        let rows = (1..(batch % 80).max(2)).collect();
        let others = case(LossOp::Evaluate { of, rows }, 16 * FUNCTION, 16.0);
        for evaluate in [with_first, others] {
            cases.push(evaluate.reading(0, values.clone()).reading(1, targets.clone()));
        }
    }
    cases
}

/// Numbers of an optimiser in device memory.
pub(super) fn numbers(of: Optimiser) -> Data {
    Data::F64(of.hyperparameters().to_vec())
}

/// Groups with more tensors than a GPU takes in one call, with empty tensors and tensors larger
/// than a block; very small and very large norms. Sums are f64 throughout.
pub(super) fn group_cases() -> Vec<Case> {
    let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };
    let adam =
        AdamConfig { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-5, weight_decay: 0.0, clip_norm: 5.0 };
    let mut cases = vec![];
    for (count, long) in [(0, 1), (3, 9000), (130, 17), (250, 3000)] {
        let mut tensors = vec![];
        let mut len = 0;
        for i in 0..count {
            let size = [long, 40, 0, 1][i % 4];
            tensors.push(len..len + size);
            len += size + 5;
        }
        let mut random = Random(count as u64);
        let gradient = (0..len).map(|i| match i % 300 {
            0..100 => random.unit() * 1e-12,
            _ => random.unit(),
        });
        let gradient = Data::F32(gradient.collect());
        let row = Data::F64(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let measure = OptimOp::Measure { len, tensors: tensors.clone(), norm_factor: 0.5 };
        // The norm is below 500; it and the coefficient are rounded once or twice.
        cases.push(
            case(measure, 2, 1.0)
                .reading(0, gradient)
                .reading(1, numbers(sgd.into()))
                .writing(0, row),
        );
        cases.push(case(OptimOp::Clip { len, tensors: tensors.clone() }, 1, 0.0));
        let update = |of: Optimiser| {
            let runs = tensors.clone();
            let op = OptimOp::Update { len, optimiser: of.kind(), runs, matrices: vec![] };
            case(op, if of == sgd.into() { 5 } else { 2 }, 2.0).reading(2, numbers(of))
        };
        cases.push(update(sgd.into()));
        let squares = Data::F32((0..2 * len).map(|i| 0.5 + (i % 7) as f32 / 7.0).collect());
        for steps in [0, 1, 1_000_000] {
            let step = update(adam.into()).writing(1, squares.clone());
            // The counts of parameters that are not equally old.
            let counts = (0..count as i64).map(|i| steps + i % 3).collect();
            cases.push(step.writing(2, Data::I64(counts)));
        }
        cases.push(update(Optimiser::Nesterov(sgd)));
        cases.push(update(lion().into()));
        let decoupled = update(Optimiser::AdamW(AdamConfig { weight_decay: 0.1, ..adam }));
        let decoupled = decoupled.writing(1, squares.clone());
        cases.push(decoupled.writing(2, Data::I64(vec![7; count])));
    }
    cases.extend(matrix_cases());
    cases
}

fn lion() -> LionConfig {
    LionConfig { lr: 1e-3, betas: [0.9, 0.99], weight_decay: 0.1, clip_norm: 5.0 }
}

/// Matrices and kernels of all forms, more than a GPU takes in one call; smaller and larger than
/// its tiles; gradients of all sizes, and of zeros. Sums of products have one order on all
/// backends. The norm is summed in another order, in f64, so that a factor may differ by a
/// rounding. An iteration multiplies a difference by at most 3.44, and the update has the factor
/// 0.02·√3: 3.44⁵·0.035 = 17 roundings of values near 1.
fn matrix_cases() -> Vec<Case> {
    let others =
        AdamConfig { lr: 1e-3, betas: [0.9, 0.95], eps: 1e-10, weight_decay: 0.1, clip_norm: 5.0 };
    let muon = Optimiser::Muon(MuonConfig { lr: 0.02, momentum: 0.95, others });
    let shapes: [(&[usize], usize); 6] = [
        (&[40, 3, 3, 3], 1),
        (&[17, 1, 3, 3], 17),
        (&[12, 5, 1, 3], 3),
        (&[70, 33], 1),
        (&[33, 70], 1),
        (&[1, 1], 1),
    ];
    let mut cases = vec![];
    for (count, size) in [(1, 1.0), (6, 1e-6), (70, 1.0), (2, 0.0)] {
        let (mut matrices, mut runs, mut len) = (vec![], vec![], 0);
        for (shape, groups) in shapes.into_iter().cycle().take(count) {
            let kind = match shape.len() {
                4 => ParamKind::ConvWeight { groups },
                _ => ParamKind::LinearWeight,
            };
            let packing = Packing::new(kind, shape);
            matrices.push(packing.matrix(len));
            // A matrix has no range; it is followed by a vector.
            runs.extend([len..len, len + packing.len()..len + packing.len() + 5]);
            len += packing.len() + 16;
        }
        let mut random = Random(count as u64);
        let gradient = Data::F32((0..len).map(|_| size * random.unit()).collect());
        let moments = Data::F32((0..2 * len).map(|i| size * (i % 5) as f32).collect());
        let steps = Data::I64(vec![3; runs.len()]);
        let op = OptimOp::Update { len, optimiser: muon.kind(), runs, matrices };
        cases.push(
            case(op, 17, 2.0)
                .reading(0, gradient)
                .reading(2, numbers(muon))
                .writing(1, moments)
                .writing(2, steps),
        );
    }
    cases
}

pub(super) fn training_cases() -> Vec<Case> {
    let of = cross_entropy(6, 10);
    let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };
    let adam =
        AdamConfig { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-5, weight_decay: 0.0, clip_norm: 5.0 };
    let (len, tensors) = (48, vec![0..20, 32..41]);
    let squares = Data::F32((0..96).map(|i| 0.5 + i as f32 / 96.0).collect());
    let update = |optimiser| {
        let (runs, matrices) = (tensors.clone(), vec![]);
        OptimOp::Update { len, optimiser, runs, matrices }
    };
    // The count of steps, which determines the positions in the ring.
    let counts = Data::F64(vec![1.0, 2.0, 3.0, 4.0]);
    vec![
        case(LossOp::Train { of, log: 3 }, 10 * FUNCTION, 4.0).writing(1, counts),
        case(LossOp::Evaluate { of, rows: vec![0, 2] }, 10 * FUNCTION, 4.0),
        // Squares of differences of two losses, with the errors of both.
        case(LossOp::Evaluate { of, rows: vec![1, 2] }, 40 * FUNCTION, 16.0),
        case(
            OptimOp::Measure { len, tensors: tensors.clone(), norm_factor: 0.5 },
            30, // Sums are f64; the coefficient is one division.
            1.0,
        )
        .reading(1, numbers(sgd.into())),
        case(OptimOp::Clip { len, tensors: tensors.clone() }, 1, 1.0),
        case(update(OptimiserKind::Sgd), 5, 2.0).reading(2, numbers(sgd.into())),
        case(update(OptimiserKind::Adam), 8, 2.0)
            .reading(2, numbers(adam.into()))
            .writing(1, squares),
    ]
}

pub(super) fn state_cases() -> Vec<Case> {
    let layout = MetricsLayout { groups: 2, configs: 3, log: 4, score_sums: false };
    let large = MetricsLayout { groups: 9, configs: 300, log: 100, score_sums: true };
    let spoiled = Data::F32(vec![f32::NAN, 1.0, f32::INFINITY]);
    let tensors = vec![Spec::new(DType::F32, 5), Spec::new(DType::I64, 2)];
    let lengths = [0, 9000, 1, 4096, 0, 300, 4097, 2048, 2, 5000, 0];
    let spoilt = |len: usize| {
        let value = |i| if i % 7 == 2 { f32::NAN } else { i as f32 };
        Data::F32((0..len).map(value).collect())
    };
    let types = [DType::F32, DType::I64, DType::F64].into_iter().cycle();
    let mixed = lengths.into_iter().zip(types).map(|(len, dtype)| Spec::new(dtype, len));
    vec![
        case(StateOp::ResetMetrics(layout), 1, 0.0),
        case(StateOp::CountNonFinite(vec![3, 4]), 1, 0.0).reading(0, spoiled),
        case(StateOp::Fingerprint(tensors), 1, 0.0),
        // More tensors than a GPU takes in one call, and tensors longer than a block.
        case(StateOp::ResetMetrics(large), 1, 0.0),
        case(StateOp::CountNonFinite(vec![]), 1, 0.0),
        case(StateOp::CountNonFinite(lengths.to_vec()), 1, 0.0)
            .reading(1, spoilt(lengths[1]))
            .reading(3, spoilt(lengths[3]))
            .reading(9, spoilt(lengths[9])),
        case(StateOp::Fingerprint(vec![]), 1, 0.0),
        case(StateOp::Fingerprint(mixed.collect()), 1, 0.0),
    ]
}

//! Cases of every kind of operation.

use std::sync::Arc;

use meristem_device::DType;
use meristem_nn::graph::{AdamConfig, BlendMode, Optimiser, SgdConfig};
use meristem_nn::kernels::ImageShape;
use meristem_nn::kernels::conv::ConvShape;
use meristem_nn::kernels::lstm::LstmShape;
use meristem_nn::kernels::norm::Activation;
use meristem_nn::kernels::pool::PoolShape;
use meristem_nn::kernels::ppo::{PpoHead, PpoLoss};
use meristem_nn::kernels::rows::Columns;
use meristem_nn::kernels::sample::{SampleStep, Sampler};
use meristem_nn::ops::elementwise::Function;
use meristem_nn::ops::norm::{BatchNorm, GroupNorm};
use meristem_nn::ops::ppo::Pass;
use meristem_nn::ops::rows::Lookup;
use meristem_nn::ops::{Backend, Op, Spec};
use meristem_nn::ops::{
    blend, conv, elementwise, loss, lstm, norm, optim, pool, ppo, rows, sample, state,
};
use meristem_nn::{Isa, MetricsLayout};

use super::case::{Case, Data, Random, case};

const IMAGE: ImageShape = ImageShape { batch: 3, h: 7, w: 6, c: 20 };

fn images(shape: &ImageShape, positive: bool) -> Data {
    let mut random = Random(99);
    let value = |v: f32| if positive { 0.5 + v.abs() } else { v };
    Data::F32((0..shape.len()).map(|_| value(random.unit())).collect())
}

fn per_channel(positive: bool) -> Data {
    images(&ImageShape { batch: 1, h: 1, w: 1, c: IMAGE.c }, positive)
}

fn conv_cases() -> Vec<Case> {
    let shape = |groups, kernel: usize, in_c, out_c| ConvShape {
        batch: 3,
        in_c,
        in_h: 7,
        in_w: 6,
        out_c,
        kernel: [kernel; 2],
        stride: [1; 2],
        padding: [kernel / 2; 2],
        groups,
    };
    let mut cases = vec![];
    let shapes = [shape(1, 3, 3, 8), shape(1, 1, 20, 33), shape(20, 3, 20, 20), shape(2, 3, 8, 6)];
    for shape in shapes.into_iter().chain([ConvShape::linear(5, 21, 10)]) {
        let taps = shape.kernel[0] * shape.kernel[1] * shape.in_c / shape.groups;
        let outputs = shape.output().batch * shape.output().pixels();
        cases.push(case(conv::Op::Forward(shape), taps + 1, 1.0));
        // Sums of outputs are f64 throughout: what differs is the outputs, by `taps` roundings
        // each, and in the variance times twice their size, which is below `taps`.
        let stats = case(conv::Op::ForwardWithStats(shape), taps + 1, 1.0);
        cases.push(stats.bound(2, taps + 1, 2.0 * taps as f64));
        cases.push(case(conv::Op::WeightGradient(shape), outputs + 1, 1.0));
        let back = shape.kernel[0] * shape.kernel[1] * shape.out_c / shape.groups;
        for accumulate in [false, true] {
            cases.push(case(conv::Op::DataGradient { shape, accumulate }, back + 1, 1.0));
        }
    }
    // Padding lanes of weights are zero.
    for case in &mut cases {
        let at = match case.op {
            Op::Conv(conv::Op::WeightGradient(_)) => continue,
            _ => 1,
        };
        let len = case.op.signature().reads[at].len;
        case.reads.push((at, Data::F32(vec![0.5; len])));
    }
    cases
}

/// Variances are at least ½, so a deviation's inverse is at most √2 and a normalised value at most
/// 2·√2·γ; two norms of 126 values per channel.
fn norm_cases() -> Vec<Case> {
    let values = IMAGE.batch * IMAGE.pixels();
    let mut cases = vec![
        case(norm::Op::Statistics(IMAGE), values, 4.0),
        case(norm::Op::UpdateRunning { channels: 20, momentum: 0.1, count: 126 }, 4, 2.0),
    ];
    for (act, pool) in
        [(Activation::None, false), (Activation::Relu, false), (Activation::Relu, true)]
    {
        let norm = BatchNorm { shape: IMAGE, eps: 1e-5, act, pool };
        let forward = case(norm::Op::Forward(norm), 8, 3.0).reading(2, per_channel(true));
        let codes = forward.run(Backend::Cpu(Isa::portable())).remove(1);
        // The gradient reads the codes of the same forward pass: x, mean, γ, β as there.
        cases.push(forward);
        // dx is four products of what is known but for sums that are f64; dγ and dβ are such sums.
        let mut gradient = case(norm::Op::Gradient { norm, accumulate: true }, values, 8.0)
            .bound(0, 16, 8.0)
            .reading(0, images(&IMAGE, false))
            .reading(2, per_channel(true));
        if pool {
            gradient = gradient.reading(6, codes);
        }
        cases.push(gradient);
    }
    let norm = GroupNorm { shape: IMAGE, groups: 2, eps: 1e-5 };
    cases.push(case(norm::Op::GroupForward(norm), IMAGE.pixels() * 10, 4.0));
    let deviations = Data::F32(vec![1.5; 6]);
    let gradient = norm::Op::GroupGradient { norm, accumulate: false };
    cases.push(case(gradient, IMAGE.pixels() * 10, 8.0).reading(3, deviations));
    cases
}

fn pool_cases() -> Vec<Case> {
    let shape = PoolShape { input: IMAGE, kernel: 2, stride: 2 };
    vec![
        case(pool::Op::Max(shape), 1, 1.0),
        case(pool::Op::MaxGradient { shape, accumulate: true }, 2, 1.0),
        case(pool::Op::NormCodes { len: 37 }, 1, 1.0),
        case(pool::Op::Average(IMAGE), IMAGE.pixels(), 1.0),
        case(pool::Op::AverageGradient { shape: IMAGE, accumulate: false }, 2, 1.0),
    ]
}

/// `exp` and `tanh` are the same polynomial on every instruction set, up to contraction: a few
/// ulps.
const FUNCTION: usize = 12;

fn elementwise_cases() -> Vec<Case> {
    let len = 77;
    let mut cases = vec![
        case(elementwise::Op::Fill { len, value: 2.5 }, 1, 3.0),
        case(elementwise::Op::Multiply { len, factor: 0.3 }, 1, 1.0),
        case(elementwise::Op::Pass { len, accumulate: true }, 2, 1.0),
        case(elementwise::Op::Add { len }, 2, 1.0),
        case(elementwise::Op::Scale { shape: IMAGE, factor: 2.0 }, 2, 2.0),
        case(
            elementwise::Op::ScaleGradient { shape: IMAGE, factor: 2.0, accumulate: [true, false] },
            IMAGE.pixels(),
            2.0,
        ),
    ];
    for function in [Function::Relu, Function::Sigmoid, Function::Tanh] {
        cases.push(case(elementwise::Op::Forward { function, len }, FUNCTION, 1.0));
        let gradient = elementwise::Op::Gradient { function, len, accumulate: true };
        cases.push(case(gradient, 4, 1.0));
    }
    cases
}

fn blend_cases() -> Vec<Case> {
    let mut cases = vec![];
    for mode in [BlendMode::Add, BlendMode::Multiply, BlendMode::Gate] {
        let blend = blend::Blend { mode, len: 60, samples: 5 };
        cases.push(case(blend::Op::Forward(blend), FUNCTION, 4.0));
        for accumulate in [[true; 4], [false; 4]] {
            cases.push(case(blend::Op::Gradient { blend, accumulate }, FUNCTION + 12, 4.0));
        }
    }
    cases.push(case(blend::Op::TanhMix { len: 60 }, FUNCTION, 2.0));
    let gradient = blend::Op::TanhMixGradient { len: 60, accumulate: [true, false] };
    cases.push(case(gradient, 60 + FUNCTION, 4.0));
    cases
}

fn rows_cases() -> Vec<Case> {
    let of = Lookup { indices: 9, entries: 2, size: 4 };
    let at = Columns { width: 7, first: 2, count: 3 };
    vec![
        case(rows::Op::Embed(of), 1, 1.0),
        case(rows::Op::EmbedGradient(of), 10, 1.0),
        case(rows::Op::CopyIndices { len: 9 }, 1, 0.0),
        case(rows::Op::Put { rows: 5, at }, 1, 1.0),
        case(rows::Op::Take { rows: 5, at, accumulate: true }, 2, 1.0),
    ]
}

fn lstm_cases() -> Vec<Case> {
    let shape = LstmShape { steps: 4, sequences: 3, inputs: 5, hidden: 8 };
    let keep = Data::F32([1.0, 0.0, 1.0].repeat(4));
    let products = [shape.input_product(), shape.state_product()];
    let [ih, hh] = products.map(|of| Data::F32(vec![0.125; of.weight_len()]));
    // Four steps, each a product of 13 terms and a few functions, one through the other.
    let terms = 4 * (13 + 4 * FUNCTION);
    vec![
        case(lstm::Op::Forward(shape), terms, 1.0)
            .reading(1, keep.clone())
            .reading(3, ih)
            .reading(4, hh.clone()),
        case(lstm::Op::Gradient { shape, accumulate: true }, terms, 4.0)
            .reading(0, keep.clone())
            .reading(2, hh),
        case(lstm::Op::StatesBefore(shape), 1, 1.0).reading(1, keep),
    ]
}

fn training_cases() -> Vec<Case> {
    let logits = loss::Logits { batch: 6, classes: 10 };
    let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };
    let adam = AdamConfig { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-5, clip_norm: 5.0 };
    let (len, tensors) = (48, vec![0..20, 32..41]);
    let squares = Data::F32((0..96).map(|i| 0.5 + i as f32 / 96.0).collect());
    // A count of steps that the ring's positions follow from.
    let counts = Data::F64(vec![1.0, 2.0, 3.0, 4.0]);
    vec![
        case(loss::Op::Train { logits, log: 3 }, 10 * FUNCTION, 4.0).writing(1, counts),
        case(loss::Op::Evaluate { logits, rows: vec![0, 2] }, 10 * FUNCTION, 4.0),
        case(
            optim::Op::Measure { len, tensors: tensors.clone(), norm_max: 0.5 },
            30, // Sums are f64; the coefficient is one division.
            1.0,
        ),
        case(optim::Op::Clip { len, tensors: tensors.clone() }, 1, 1.0),
        case(optim::Op::Update { len, optimiser: sgd.into(), runs: tensors.clone() }, 5, 2.0),
        case(optim::Op::Update { len, optimiser: Optimiser::Adam(adam), runs: tensors }, 8, 2.0)
            .writing(1, squares),
    ]
}

fn ppo_cases() -> Vec<Case> {
    let head = |choices, used_by| PpoHead {
        choices,
        used_by,
        floor: 0.02,
        entropy_coefficient: 0.05,
        entropy_floor: 0.3,
    };
    let heads = vec![head(3, 0b111), head(2, 0b010)];
    let step = SampleStep { step: 5, first_env: 2, value_scale: 0.5 }.to_words();
    let draw = |greedy| {
        let sampler = Arc::new(Sampler { heads: heads.clone(), seed: 3, greedy });
        case(sample::Op::Draw { sampler, rows: 4 }, 1, 0.0)
            .reading(1, Data::U32(vec![2, 0, 2, 2, 0, 0, 0, 2]))
            .reading(2, Data::U32(step.to_vec()))
    };
    let draws = [draw(false), draw(true)];
    let loss = Arc::new(PpoLoss {
        heads,
        clip: 0.2,
        value_coefficient: 0.5,
        entropy_floor_coefficient: 1.0,
    });
    let legal = Data::U8(vec![1; 4 * 5]);
    let of = |pass| {
        let loss = Arc::clone(&loss);
        // Probabilities are the same on every instruction set.
        case(ppo::Op::Objective { loss, pass, rows: 4 }, 1, 0.0).reading(2, legal.clone())
    };
    [of(Pass::First), of(Pass::Later)].into_iter().chain(draws).collect()
}

fn state_cases() -> Vec<Case> {
    let layout = MetricsLayout { groups: 2, configs: 3, log: 4 };
    let spoiled = Data::F32(vec![f32::NAN, 1.0, f32::INFINITY]);
    let tensors = vec![Spec::new(DType::F32, 5), Spec::new(DType::I64, 2)];
    vec![
        case(state::Op::ResetMetrics(layout), 1, 0.0),
        case(state::Op::CountNonFinite(vec![3, 4]), 1, 0.0).reading(0, spoiled),
        case(state::Op::Fingerprint(tensors), 1, 0.0),
    ]
}

/// Every case.
pub(super) fn cases() -> Vec<Case> {
    let families = [
        conv_cases,
        norm_cases,
        pool_cases,
        elementwise_cases,
        blend_cases,
        rows_cases,
        lstm_cases,
        training_cases,
        ppo_cases,
        state_cases,
    ];
    families.into_iter().flat_map(|family| family()).collect()
}

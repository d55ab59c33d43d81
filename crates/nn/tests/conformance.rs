//! Every operation of a plan, on every backend, against the portable kernels: the same entry
//! ([`ops::run`]), the same operands. A backend is conformant when it passes here.
//!
//! The portable kernels themselves are held by `tests/kernels` against slow exact versions, and by
//! goldens. Here each case states how many f32 terms the longest sum of a result has: two ways of
//! adding n terms of magnitude at most m differ by at most `2·n·m·n·2⁻²⁴`, and `m` is stated too.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

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
use meristem_nn::ops::{self, Backend, Op, Operands, Role, Slice, SliceMut, Spec};
use meristem_nn::ops::{
    blend, conv, elementwise, loss, lstm, norm, optim, pool, ppo, rows, sample, state,
};
use meristem_nn::{Error, Isa, MetricsLayout};

/// The backends of this machine besides the portable kernels.
fn backends() -> Vec<Backend> {
    Isa::available().into_iter().filter(|isa| *isa != Isa::portable()).map(Backend::Cpu).collect()
}

/// Number of kinds of operations; see [`kind`].
const KINDS: usize = 45;

/// A number for each kind of operation. A new one does not compile before it has a number, and the
/// test fails until it has a case.
fn kind(op: &Op) -> usize {
    match op {
        Op::Conv(conv::Op::Forward(_)) => 0,
        Op::Conv(conv::Op::ForwardWithStats(_)) => 1,
        Op::Conv(conv::Op::WeightGradient(_)) => 2,
        Op::Conv(conv::Op::DataGradient { .. }) => 3,
        Op::Norm(norm::Op::Statistics(_)) => 7,
        Op::Norm(norm::Op::UpdateRunning { .. }) => 8,
        Op::Norm(norm::Op::Forward(_)) => 9,
        Op::Norm(norm::Op::Gradient { .. }) => 10,
        Op::Norm(norm::Op::GroupForward(_)) => 11,
        Op::Norm(norm::Op::GroupGradient { .. }) => 12,
        Op::Pool(pool::Op::Max(_)) => 13,
        Op::Pool(pool::Op::MaxGradient { .. }) => 14,
        Op::Pool(pool::Op::NormCodes { .. }) => 15,
        Op::Pool(pool::Op::Average(_)) => 16,
        Op::Pool(pool::Op::AverageGradient { .. }) => 17,
        Op::Elementwise(elementwise::Op::Fill { .. }) => 18,
        Op::Elementwise(elementwise::Op::Multiply { .. }) => 19,
        Op::Elementwise(elementwise::Op::Pass { .. }) => 20,
        Op::Elementwise(elementwise::Op::Forward { .. }) => 21,
        Op::Elementwise(elementwise::Op::Gradient { .. }) => 22,
        Op::Elementwise(elementwise::Op::Add { .. }) => 23,
        Op::Elementwise(elementwise::Op::Scale { .. }) => 24,
        Op::Elementwise(elementwise::Op::ScaleGradient { .. }) => 25,
        Op::Blend(blend::Op::Forward(_)) => 26,
        Op::Blend(blend::Op::Gradient { .. }) => 27,
        Op::Blend(blend::Op::TanhMix { .. }) => 28,
        Op::Blend(blend::Op::TanhMixGradient { .. }) => 29,
        Op::Rows(rows::Op::Embed(_)) => 30,
        Op::Rows(rows::Op::EmbedGradient(_)) => 31,
        Op::Rows(rows::Op::CopyIndices { .. }) => 4,
        Op::Rows(rows::Op::Put { .. }) => 32,
        Op::Rows(rows::Op::Take { .. }) => 33,
        Op::Lstm(lstm::Op::Forward(_)) => 34,
        Op::Lstm(lstm::Op::Gradient { .. }) => 35,
        Op::Lstm(lstm::Op::StatesBefore(_)) => 36,
        Op::Loss(loss::Op::Train { .. }) => 37,
        Op::Loss(loss::Op::Evaluate { .. }) => 38,
        Op::Optim(optim::Op::Measure { .. }) => 39,
        Op::Optim(optim::Op::Clip { .. }) => 40,
        Op::Optim(optim::Op::Update { .. }) => 41,
        Op::Ppo(ppo::Op::Objective { .. }) => 42,
        Op::State(state::Op::ResetMetrics(_)) => 43,
        Op::State(state::Op::CountNonFinite(_)) => 44,
        Op::State(state::Op::Fingerprint(_)) => 6,
        Op::Sample(sample::Op::Draw { .. }) => 5,
    }
}

/// The elements of an operand.
#[derive(Clone, Debug, PartialEq)]
enum Data {
    F32(Vec<f32>),
    F64(Vec<f64>),
    U32(Vec<u32>),
    I64(Vec<i64>),
    U8(Vec<u8>),
}

impl Data {
    fn slice(&self) -> Slice<'_> {
        match self {
            Data::F32(v) => Slice::of(v),
            Data::F64(v) => Slice::of(v),
            Data::U32(v) => Slice::of(v),
            Data::I64(v) => Slice::of(v),
            Data::U8(v) => Slice::of(v),
        }
    }

    fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Data::F32(v) => SliceMut::of(v),
            Data::F64(v) => SliceMut::of(v),
            Data::U32(v) => SliceMut::of(v),
            Data::I64(v) => SliceMut::of(v),
            Data::U8(v) => SliceMut::of(v),
        }
    }
}

/// splitmix64: variety, not randomness.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [−1, 1).
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn data(&mut self, spec: &Spec) -> Data {
        let n = 0..spec.len;
        match spec.dtype {
            DType::F32 if spec.role == Role::Scratch => Data::F32(vec![f32::NAN; spec.len]),
            DType::F32 => Data::F32(n.map(|_| self.unit()).collect()),
            DType::F64 => Data::F64(n.map(|_| f64::from(self.unit())).collect()),
            DType::I64 => Data::I64(n.map(|_| (self.bits() % 100) as i64).collect()),
            DType::U32 => Data::U32(n.map(|_| (self.bits() % 2) as u32).collect()),
            _ => Data::U8(n.map(|_| (self.bits() % 2) as u8).collect()),
        }
    }
}

/// An operation with the sizes that bound its rounding, and operands that may not be just anything.
struct Case {
    op: Op,
    /// Terms of the longest sum of a result.
    terms: usize,
    /// Largest magnitude of a term, inputs being below 1.
    most: f64,
    /// Other terms and magnitude, by position among the writes.
    bounds: Vec<(usize, usize, f64)>,
    /// By position among the reads.
    reads: Vec<(usize, Data)>,
    /// By position among the writes.
    writes: Vec<(usize, Data)>,
}

fn case(op: impl Into<Op>, terms: usize, most: f64) -> Case {
    Case { op: op.into(), terms, most, bounds: vec![], reads: vec![], writes: vec![] }
}

impl Case {
    fn bound(mut self, write: usize, terms: usize, most: f64) -> Self {
        self.bounds.push((write, terms, most));
        self
    }

    fn reading(mut self, at: usize, data: Data) -> Self {
        self.reads.push((at, data));
        self
    }

    fn writing(mut self, at: usize, data: Data) -> Self {
        self.writes.push((at, data));
        self
    }

    fn run(&self, on: Backend) -> Vec<Data> {
        let (signature, mut random) = (self.op.signature(), Random(kind(&self.op) as u64));
        let mut make = |specs: &[Spec], given: &[(usize, Data)]| -> Vec<Data> {
            let of = |(at, spec): (usize, &Spec)| {
                let fixed = given.iter().find(|(position, _)| *position == at);
                fixed.map_or_else(|| random.data(spec), |(_, data)| data.clone())
            };
            specs.iter().enumerate().map(of).collect()
        };
        let reads = make(&signature.reads, &self.reads);
        let mut writes = make(&signature.writes, &self.writes);
        let operands = Operands {
            reads: reads.iter().map(Data::slice).collect(),
            writes: writes.iter_mut().map(Data::slice_mut).collect(),
        };
        ops::run(on, &self.op, operands).unwrap();
        let results = writes.into_iter().zip(&signature.writes);
        results.filter(|(_, spec)| spec.role != Role::Scratch).map(|(data, _)| data).collect()
    }

    /// Panics unless both results are the same up to rounding; whole numbers are the same.
    fn compare(&self, on: Backend, expected: &[Data]) {
        for (at, (got, expected)) in self.run(on).iter().zip(expected).enumerate() {
            let own = self.bounds.iter().find(|(write, ..)| *write == at);
            let (terms, most) = own.map_or((self.terms, self.most), |(_, n, most)| (*n, *most));
            let limit = 2.0 * (terms * terms) as f64 * most * 2f64.powi(-24);
            let near = |a: f64, b: f64| a == b || (a - b).abs() <= limit;
            let same = match (got, expected) {
                (Data::F32(a), Data::F32(b)) => {
                    a.iter().zip(b).all(|(a, b)| near(f64::from(*a), f64::from(*b)))
                }
                (Data::F64(a), Data::F64(b)) => a.iter().zip(b).all(|(a, b)| near(*a, *b)),
                (a, b) => a == b,
            };
            assert!(same, "{on:?}: {:?}: write {at}: {got:?}, expected {expected:?}", self.op);
        }
    }
}

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

fn cases() -> Vec<Case> {
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

#[test]
fn every_backend_computes_what_the_portable_kernels_do() {
    for case in cases() {
        let expected = case.run(Backend::Cpu(Isa::portable()));
        backends().into_iter().for_each(|on| case.compare(on, &expected));
    }
}

#[test]
fn every_kind_of_operation_has_a_case() {
    let mut seen = [false; KINDS];
    cases().iter().for_each(|case| seen[kind(&case.op)] = true);
    let missing: Vec<usize> = (0..KINDS).filter(|kind| !seen[*kind]).collect();
    assert!(missing.is_empty(), "no case for the kinds {missing:?}");
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let op = Op::from(elementwise::Op::Pass { len: 3, accumulate: false });
    let (three, four, bytes) = ([0.0f32; 3], [0.0f32; 4], [0u8; 3]);
    for read in [Slice::of(&four), Slice::of(&bytes), Slice::of::<f32>(&[])] {
        let mut y = [0.5f32; 3];
        let reads = [read].into_iter().collect();
        let operands = Operands { reads, writes: [SliceMut::of(&mut y)].into_iter().collect() };
        let error = ops::run(Backend::Cpu(Isa::portable()), &op, operands).unwrap_err();
        assert!(matches!(error, Error::Operand { ref operand, .. } if operand == "read 0"));
        assert_eq!(y, [0.5; 3], "nothing has run");
    }
    let reads = [Slice::of(&three), Slice::of(&three)].into_iter().collect();
    let operands = Operands { reads, ..Operands::default() };
    let error = ops::run(Backend::Cpu(Isa::portable()), &op, operands).unwrap_err();
    assert!(error.to_string().contains("read: expected 1 in all, got 2 in all"), "{error}");
}

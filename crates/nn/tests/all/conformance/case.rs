//! One operation with operands, run on a backend and compared.

use meristem_device::DType;
use meristem_nn::Precision;
use meristem_nn::ops::conv::Product;
use meristem_nn::ops::{self, Backend, Op, Operands, Role, Slice, SliceMut, Spec};
use meristem_nn::ops::{
    blend, conv, elementwise, loss, lstm, norm, optim, pool, ppo, rows, sample, stage, state,
};

/// Number of kinds of operations; see [`kind`].
pub(super) const KINDS: usize = 53;

/// A number for each kind of operation. A new one does not compile before it has a number, and the
/// test fails until it has a case.
pub(super) fn kind(op: &Op) -> usize {
    match op {
        Op::Conv(conv::Op::Forward(_)) => 0,
        Op::Conv(conv::Op::ForwardWithStats(_)) => 1,
        Op::Conv(conv::Op::WeightGradient(_)) => 2,
        Op::Conv(conv::Op::DataGradient { .. }) => 3,
        Op::Norm(norm::Op::Statistics(_)) => 7,
        Op::Norm(norm::Op::UpdateRunning { .. }) => 8,
        Op::Norm(norm::Op::Forward(_)) => 9,
        Op::Norm(norm::Op::GradientSums(_)) => 10,
        Op::Norm(norm::Op::InputGradient { .. }) => 52,
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
        Op::Chain(_) => 51,
        Op::Stage(stage::Op::Begin { .. }) => 45,
        Op::Stage(stage::Op::Forward { .. }) => 46,
        Op::Stage(stage::Op::Backward { .. }) => 47,
        Op::Stage(stage::Op::Sums(_)) => 48,
        Op::Stage(stage::Op::Head(_)) => 49,
        Op::Stage(stage::Op::HeadGradient(_)) => 50,
    }
}

/// The precision of an operation that multiplies.
pub(super) fn precision(op: &mut Op) -> Option<&mut Precision> {
    use stage::Op as Stage;
    match op {
        Op::Conv(
            conv::Op::Forward(of)
            | conv::Op::ForwardWithStats(of)
            | conv::Op::WeightGradient(of)
            | conv::Op::DataGradient { product: of, .. },
        ) => {
            let Product { precision, .. } = of;
            Some(precision)
        }
        Op::Stage(Stage::Forward { stage: of, .. } | Stage::Backward { stage: of, .. }) => {
            Some(&mut of.precision)
        }
        Op::Stage(Stage::Head(of) | Stage::HeadGradient(of)) => Some(&mut of.precision),
        _ => None,
    }
}

/// The most that an addition moves a sum, by the largest magnitude in it. Processors and the units
/// of f32 round to the nearest. A tensor core aligns a few products, 4 at least, and the sum before
/// with the largest of them, cuts off what lies below the last place, and cuts off the result: 1 +
/// 2/4 errors of a place for each product. (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of
/// NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021, on Volta to Ampere; NVIDIA documents
/// nothing, and later ones keep more bits.)
fn rounding(op: &Op) -> f64 {
    match precision(&mut op.clone()) {
        None | Some(Precision::F32) => 2f64.powi(-24),
        Some(Precision::Tf32 | Precision::Bf16) => 1.5 * 2f64.powi(-23),
    }
}

/// The elements of an operand.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Data {
    F32(Vec<f32>),
    F64(Vec<f64>),
    U32(Vec<u32>),
    I64(Vec<i64>),
    U8(Vec<u8>),
}

impl Data {
    #[cfg(feature = "cuda")]
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Data::F32(values) if values.is_empty())
    }

    pub(super) fn slice(&self) -> Slice<'_> {
        match self {
            Data::F32(v) => Slice::of(v),
            Data::F64(v) => Slice::of(v),
            Data::U32(v) => Slice::of(v),
            Data::I64(v) => Slice::of(v),
            Data::U8(v) => Slice::of(v),
        }
    }

    pub(super) fn slice_mut(&mut self) -> SliceMut<'_> {
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
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [−1, 1).
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(super) fn data(&mut self, spec: &Spec) -> Data {
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
#[derive(Clone)]
pub(super) struct Case {
    pub(super) op: Op,
    /// Terms of the longest sum of a result.
    terms: usize,
    /// Largest magnitude of a term, inputs being below 1.
    most: f64,
    /// Other terms and magnitude, by position among the writes.
    bounds: Vec<(usize, usize, f64)>,
    /// By position among the reads.
    pub(super) reads: Vec<(usize, Data)>,
    /// By position among the writes.
    pub(super) writes: Vec<(usize, Data)>,
}

pub(super) fn case(op: impl Into<Op>, terms: usize, most: f64) -> Case {
    Case { op: op.into(), terms, most, bounds: vec![], reads: vec![], writes: vec![] }
}

impl Case {
    pub(super) fn bound(mut self, write: usize, terms: usize, most: f64) -> Self {
        self.bounds.push((write, terms, most));
        self
    }

    pub(super) fn reading(mut self, at: usize, data: Data) -> Self {
        self.reads.push((at, data));
        self
    }

    pub(super) fn writing(mut self, at: usize, data: Data) -> Self {
        self.writes.push((at, data));
        self
    }

    /// The operands on a target: what is read, and what is written.
    pub(super) fn operands(&self, target: ops::Target) -> [Vec<Data>; 2] {
        let (signature, mut random) = (self.op.signature(target), Random(kind(&self.op) as u64));
        let mut make = |specs: &[Spec], given: &[(usize, Data)]| -> Vec<Data> {
            let of = |(at, spec): (usize, &Spec)| {
                let fixed = given.iter().find(|(position, _)| *position == at);
                fixed.map_or_else(|| random.data(spec), |(_, data)| data.clone())
            };
            specs.iter().enumerate().map(of).collect()
        };
        [make(&signature.reads, &self.reads), make(&signature.writes, &self.writes)]
    }

    /// Runs it over these operands; returns what it wrote, but for scratch.
    pub(super) fn run_over(
        &self,
        on: Backend<'_>,
        [reads, mut writes]: [Vec<Data>; 2],
    ) -> Vec<Data> {
        let operands = Operands {
            reads: reads.iter().map(Data::slice).collect(),
            writes: writes.iter_mut().map(Data::slice_mut).collect(),
        };
        ops::run(on, &self.op, operands).unwrap();
        let signature = self.op.signature(on.target());
        let results = writes.into_iter().zip(&signature.writes);
        results.filter(|(_, spec)| spec.role != Role::Scratch).map(|(data, _)| data).collect()
    }

    pub(super) fn run(&self, on: Backend<'_>) -> Vec<Data> {
        self.run_over(on, self.operands(on.target()))
    }

    /// The elements that are read at a position, as far as they are given; else ones.
    #[cfg(feature = "cuda")]
    pub(super) fn read(&self, at: usize, spec: &Spec) -> Data {
        let given = self.reads.iter().find(|(position, _)| *position == at);
        given.map_or_else(|| Data::F32(vec![1.0; spec.len]), |(_, data)| data.clone())
    }

    /// Elements of the largest operand.
    #[cfg(feature = "cuda")]
    pub(super) fn elements(&self) -> usize {
        let signature = self.op.signature(ops::Target::Cpu);
        signature.reads.iter().chain(&signature.writes).map(|spec| spec.len).max().unwrap_or(0)
    }

    /// Panics unless both results are the same up to rounding; whole numbers are the same.
    pub(super) fn compare(&self, on: Backend<'_>, expected: &[Data]) {
        let results = self.run(on);
        for (at, (got, expected)) in results.iter().zip(expected).enumerate() {
            let own = self.bounds.iter().find(|(write, ..)| *write == at);
            let (terms, most) = own.map_or((self.terms, self.most), |(_, n, most)| (*n, *most));
            // No partial sum is larger than all terms. The portable kernels', and those of `on`.
            let addition = 2f64.powi(-24) + rounding(&self.op);
            let limit = (terms * terms) as f64 * most * addition;
            let near =
                |a: f64, b: f64| a == b || (a - b).abs() <= limit || (a.is_nan() && b.is_nan());
            let same = match (got, expected) {
                (Data::F32(a), Data::F32(b)) => {
                    a.iter().zip(b).all(|(a, b)| near(f64::from(*a), f64::from(*b)))
                }
                (Data::F64(a), Data::F64(b)) => a.iter().zip(b).all(|(a, b)| near(*a, *b)),
                (a, b) => a == b,
            };
            let differ = differences(got, expected);
            assert!(same, "{on:?}: {:?}: write {at} differs: {differ}", self.op);
        }
    }
}

/// The first elements that are not the same, each with its index.
fn differences(got: &Data, expected: &Data) -> String {
    fn of<T: PartialEq + std::fmt::Debug>(got: &[T], expected: &[T]) -> String {
        let pairs = got.iter().zip(expected).enumerate().filter(|(_, (a, b))| a != b);
        let text = pairs.take(8).map(|(i, (a, b))| format!("[{i}] {a:?}, expected {b:?}"));
        text.collect::<Vec<_>>().join("; ")
    }
    match (got, expected) {
        (Data::F32(a), Data::F32(b)) => of(a, b),
        (Data::F64(a), Data::F64(b)) => of(a, b),
        (Data::U32(a), Data::U32(b)) => of(a, b),
        (Data::I64(a), Data::I64(b)) => of(a, b),
        (Data::U8(a), Data::U8(b)) => of(a, b),
        _ => format!("{got:?} is of another type than {expected:?}"),
    }
}

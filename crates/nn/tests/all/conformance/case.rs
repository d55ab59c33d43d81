//! One operation with operands, run on a backend and compared.

use half::bf16;
use meristem_device::DType;
use meristem_nn::ops::conv::ConvProduct;
use meristem_nn::ops::{
    self, BlendOp, ConvOp, DropoutOp, ElementwiseOp, FusedOp, LossOp, LstmOp, NormOp, OpBackend,
    OperandRole, OptimOp, PoolOp, PpoOp, RowsOp, SampleOp, Slice, SliceMut, Spec, StateOp, StepOp,
    StepOperands,
};
use meristem_nn::{Precision, ValueType};

/// Number of kinds of operations; see [`kind`].
pub(super) const KINDS: usize = 64;

/// A number for each kind of operation. A new operation does not compile without a number, and the
/// test fails until it has a case.
pub(super) fn kind(op: &StepOp) -> usize {
    match op {
        StepOp::Conv(ConvOp::Forward(_)) => 0,
        StepOp::Conv(ConvOp::ForwardWithStats(_)) => 1,
        StepOp::Conv(ConvOp::WeightGradient(_)) => 2,
        StepOp::Conv(ConvOp::DataGradient { .. }) => 3,
        StepOp::Norm(NormOp::Statistics(_)) => 7,
        StepOp::Norm(NormOp::UpdateRunning { .. }) => 8,
        StepOp::Norm(NormOp::Forward(_)) => 9,
        StepOp::Norm(NormOp::GradientSums(_)) => 10,
        StepOp::Norm(NormOp::InputGradient { .. }) => 52,
        StepOp::Norm(NormOp::GroupForward(_)) => 11,
        StepOp::Norm(NormOp::GroupGradient { .. }) => 12,
        StepOp::Norm(NormOp::LayerForward(_)) => 57,
        StepOp::Norm(NormOp::LayerGradient { .. }) => 58,
        StepOp::Pool(PoolOp::Max(_)) => 13,
        StepOp::Pool(PoolOp::MaxGradient { .. }) => 14,
        StepOp::Pool(PoolOp::NormCodes { .. }) => 15,
        StepOp::Pool(PoolOp::WindowAverage(_)) => 54,
        StepOp::Pool(PoolOp::WindowAverageGradient { .. }) => 55,
        StepOp::Pool(PoolOp::Average(_)) => 16,
        StepOp::Pool(PoolOp::AverageGradient { .. }) => 17,
        StepOp::Elementwise(ElementwiseOp::Fill { .. }) => 18,
        StepOp::Elementwise(ElementwiseOp::Multiply { .. }) => 19,
        StepOp::Elementwise(ElementwiseOp::Pass { .. }) => 20,
        StepOp::Elementwise(ElementwiseOp::Narrow { .. }) => 62,
        StepOp::Elementwise(ElementwiseOp::Widen { .. }) => 63,
        StepOp::Elementwise(ElementwiseOp::Forward { .. }) => 21,
        StepOp::Elementwise(ElementwiseOp::Gradient { .. }) => 22,
        StepOp::Elementwise(ElementwiseOp::Add { .. }) => 23,
        StepOp::Elementwise(ElementwiseOp::Product { .. }) => 56,
        StepOp::Elementwise(ElementwiseOp::Scale { .. }) => 24,
        StepOp::Elementwise(ElementwiseOp::ScaleGradient { .. }) => 25,
        StepOp::Dropout(DropoutOp::Draw { .. }) => 59,
        StepOp::Dropout(DropoutOp::Apply { .. }) => 60,
        StepOp::Dropout(DropoutOp::Count) => 61,
        StepOp::Blend(BlendOp::Forward(_)) => 26,
        StepOp::Blend(BlendOp::Gradient { .. }) => 27,
        StepOp::Blend(BlendOp::TanhMix { .. }) => 28,
        StepOp::Blend(BlendOp::TanhMixGradient { .. }) => 29,
        StepOp::Rows(RowsOp::Embed(_)) => 30,
        StepOp::Rows(RowsOp::EmbedGradient(_)) => 31,
        StepOp::Rows(RowsOp::CopyIndices { .. }) => 4,
        StepOp::Rows(RowsOp::Put { .. }) => 32,
        StepOp::Rows(RowsOp::Take { .. }) => 33,
        StepOp::Rows(RowsOp::Transpose { .. }) => 53,
        StepOp::Lstm(LstmOp::Forward(_)) => 34,
        StepOp::Lstm(LstmOp::Gradient { .. }) => 35,
        StepOp::Lstm(LstmOp::StatesBefore(_)) => 36,
        StepOp::Loss(LossOp::Train { .. }) => 37,
        StepOp::Loss(LossOp::Evaluate { .. }) => 38,
        StepOp::Optim(OptimOp::Measure { .. }) => 39,
        StepOp::Optim(OptimOp::Clip { .. }) => 40,
        StepOp::Optim(OptimOp::Update { .. }) => 41,
        StepOp::Ppo(PpoOp::Objective { .. }) => 42,
        StepOp::State(StateOp::ResetMetrics(_)) => 43,
        StepOp::State(StateOp::CountNonFinite(_)) => 44,
        StepOp::State(StateOp::Fingerprint(_)) => 6,
        StepOp::Sample(SampleOp::Draw { .. }) => 5,
        StepOp::Chain(_) => 51,
        StepOp::Fused(FusedOp::Begin { .. }) => 45,
        StepOp::Fused(FusedOp::Forward { .. }) => 46,
        StepOp::Fused(FusedOp::Backward { .. }) => 47,
        StepOp::Fused(FusedOp::Sums(_)) => 48,
        StepOp::Fused(FusedOp::Head(_)) => 49,
        StepOp::Fused(FusedOp::HeadGradient(_)) => 50,
    }
}

/// The precision of an operation that multiplies.
pub(super) fn precision(op: &mut StepOp) -> Option<&mut Precision> {
    match op {
        StepOp::Conv(
            ConvOp::Forward(of)
            | ConvOp::ForwardWithStats(of)
            | ConvOp::WeightGradient(of)
            | ConvOp::DataGradient { product: of, .. },
        ) => {
            let ConvProduct { precision, .. } = of;
            Some(precision)
        }
        StepOp::Fused(FusedOp::Forward { conv: of, .. } | FusedOp::Backward { conv: of, .. }) => {
            Some(&mut of.precision)
        }
        StepOp::Fused(FusedOp::Head(of) | FusedOp::HeadGradient(of)) => Some(&mut of.precision),
        _ => None,
    }
}

/// Largest rounding error of an addition, relative to the largest magnitude in the sum. Processors
/// and the units of f32 round to the nearest. A tensor core aligns a few products, 4 at least, and
/// the sum before with the largest of them, cuts off bits below the last place, and cuts off the
/// result: 1 + 2/4 errors of a place for each product. (Fasi, Higham, Mikaitis, Pranesh, "Numerical
/// behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021, on Volta to Ampere;
/// NVIDIA documents nothing, and later ones keep more bits.)
fn rounding(op: &StepOp) -> f64 {
    match precision(&mut op.clone()) {
        None | Some(Precision::F32) => 2f64.powi(-24),
        Some(Precision::Tf32 | Precision::Bf16) => 1.5 * 2f64.powi(-23),
    }
}

/// Relative error of a value that is rounded to the 8 significant bits of bf16: half a place.
pub(super) const BF16: f64 = 1.0 / 256.0;

/// Factor of the error of a sum that is over values which the operation itself has stored before,
/// relative to the error of one such value. A sum of at most `terms` terms of at most `most` is off
/// by at most [`BF16`] times `terms · most` if its terms are. A variance is a mean of squares,
/// which are off twice as much as the values, less the square of a mean, which is off twice as much
/// as the mean: 4.
fn stored_between(op: &StepOp) -> f64 {
    match op {
        StepOp::Conv(ConvOp::ForwardWithStats(_)) | StepOp::Fused(FusedOp::Forward { .. }) => 4.0,
        StepOp::Fused(FusedOp::Backward { .. } | FusedOp::HeadGradient(_)) => 1.0,
        _ => 0.0,
    }
}

/// Elements of an operand.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Data {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
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
            Data::F32(v) => Slice::from_elements(v),
            Data::Bf16(v) => Slice::from_elements(v),
            Data::F64(v) => Slice::from_elements(v),
            Data::U32(v) => Slice::from_elements(v),
            Data::I64(v) => Slice::from_elements(v),
            Data::U8(v) => Slice::from_elements(v),
        }
    }

    /// Values as bf16 stores them; other elements as they are.
    pub(super) fn stored(self) -> Data {
        match self {
            Data::F32(values) => Data::Bf16(values.into_iter().map(bf16::from_f32).collect()),
            other => other,
        }
    }

    /// Stored values as f32; other elements as they are.
    pub(super) fn widened(self) -> Data {
        match self {
            Data::Bf16(values) => Data::F32(values.into_iter().map(bf16::to_f32).collect()),
            other => other,
        }
    }

    pub(super) fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Data::F32(v) => SliceMut::from_elements(v),
            Data::Bf16(v) => SliceMut::from_elements(v),
            Data::F64(v) => SliceMut::from_elements(v),
            Data::U32(v) => SliceMut::from_elements(v),
            Data::I64(v) => SliceMut::from_elements(v),
            Data::U8(v) => SliceMut::from_elements(v),
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

    /// A uniform number in [−1, 1).
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(super) fn data(&mut self, spec: &Spec) -> Data {
        let n = 0..spec.len;
        match spec.dtype {
            DType::F32 if spec.role == OperandRole::Scratch => Data::F32(vec![f32::NAN; spec.len]),
            DType::F32 => Data::F32(n.map(|_| self.unit()).collect()),
            DType::F64 => Data::F64(n.map(|_| f64::from(self.unit())).collect()),
            DType::I64 => Data::I64(n.map(|_| (self.bits() % 100) as i64).collect()),
            DType::U32 => Data::U32(n.map(|_| (self.bits() % 2) as u32).collect()),
            _ => Data::U8(n.map(|_| (self.bits() % 2) as u8).collect()),
        }
    }
}

/// An operation, with the sizes that bound its rounding errors and with operands that have to meet
/// conditions.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) op: StepOp,
    /// Terms of the longest sum of a result.
    terms: usize,
    /// Largest magnitude of a term, for inputs below 1.
    most: f64,
    /// Different bounds of some results: position among the writes, terms, magnitude.
    bounds: Vec<(usize, usize, f64)>,
    /// Bound of the errors by values that the operation stores as bf16 and reads again.
    pub(super) stored: f64,
    /// Given operands, with their positions among the reads.
    pub(super) reads: Vec<(usize, Data)>,
    /// Given operands, with their positions among the writes.
    pub(super) writes: Vec<(usize, Data)>,
}

pub(super) fn case(op: impl Into<StepOp>, terms: usize, most: f64) -> Case {
    Case { op: op.into(), terms, most, bounds: vec![], stored: 0.0, reads: vec![], writes: vec![] }
}

impl Case {
    /// The same case with these bounds of results that have no others.
    pub(super) fn bounded(self, terms: usize, most: f64) -> Self {
        Self { terms, most, ..self }
    }

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

    /// The operands on a backend: read ones, and written ones.
    pub(super) fn operands(&self, on: OpBackend<'_>) -> [Vec<Data>; 2] {
        let signature = self.op.signature(on.target(), ValueType::F32);
        let mut random = Random(kind(&self.op) as u64);
        let mut make = |specs: &[Spec], given: &[(usize, Data)]| -> Vec<Data> {
            let of = |(at, spec): (usize, &Spec)| {
                let fixed = given.iter().find(|(position, _)| *position == at);
                let data = fixed.map_or_else(|| random.data(spec), |(_, data)| data.clone());
                let stored = spec.is_values && on.values() == ValueType::Bf16;
                if stored { data.stored() } else { data }
            };
            specs.iter().enumerate().map(of).collect()
        };
        [make(&signature.reads, &self.reads), make(&signature.writes, &self.writes)]
    }

    /// Runs the operation with these operands; returns the written ones, without scratch.
    pub(super) fn run_over(
        &self,
        on: OpBackend<'_>,
        [reads, mut writes]: [Vec<Data>; 2],
    ) -> Vec<Data> {
        let operands = StepOperands {
            reads: reads.iter().map(Data::slice).collect(),
            writes: writes.iter_mut().map(Data::slice_mut).collect(),
        };
        ops::run(on, &self.op, operands).unwrap();
        let signature = self.op.signature(on.target(), on.values());
        let results = writes.into_iter().zip(&signature.writes);
        results
            .filter(|(_, spec)| spec.role != OperandRole::Scratch)
            .map(|(data, _)| data)
            .collect()
    }

    pub(super) fn run(&self, on: OpBackend<'_>) -> Vec<Data> {
        self.run_over(on, self.operands(on))
    }

    /// The given elements of the read operand at position `at`; ones if none are given.
    #[cfg(feature = "cuda")]
    pub(super) fn read(&self, at: usize, spec: &Spec) -> Data {
        let given = self.reads.iter().find(|(position, _)| *position == at);
        given.map_or_else(|| Data::F32(vec![1.0; spec.len]), |(_, data)| data.clone())
    }

    /// Elements of the largest operand.
    #[cfg(feature = "cuda")]
    pub(super) fn elements(&self) -> usize {
        let signature = self.op.signature(ops::PlanTarget::Cpu, ValueType::F32);
        signature.reads.iter().chain(&signature.writes).map(|spec| spec.len).max().unwrap_or(0)
    }

    /// Panics unless both results are the same up to rounding; whole numbers are the same.
    pub(super) fn compare(&self, on: OpBackend<'_>, expected: &[Data]) {
        let results = self.run(on);
        for (at, (got, expected)) in results.iter().zip(expected).enumerate() {
            let own = self.bounds.iter().find(|(write, ..)| *write == at);
            let (terms, most) = own.map_or((self.terms, self.most), |(_, n, most)| (*n, *most));
            // No partial sum is larger than all terms. Additions of the portable kernels, and of
            // `on`.
            let addition = 2f64.powi(-24) + rounding(&self.op);
            let mut limit = (terms * terms) as f64 * most * addition;
            if on.values() == ValueType::Bf16 {
                limit += self.stored + terms as f64 * most * BF16 * stored_between(&self.op);
            }
            // A result that is stored as bf16 is rounded once.
            let last = if matches!(got, Data::Bf16(_)) { BF16 } else { 0.0 };
            let near = |a: f64, b: f64| {
                // Below the normal numbers places are 2⁻¹³³ wide.
                let limit = limit + last * (b.abs() + limit) + last.min(2f64.powi(-134));
                a == b || (a - b).abs() <= limit || (a.is_nan() && b.is_nan())
            };
            let got = &got.clone().widened();
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

/// The first different elements, each with its index.
fn differences(got: &Data, expected: &Data) -> String {
    fn list<T: PartialEq + std::fmt::Debug>(got: &[T], expected: &[T]) -> String {
        let pairs = got.iter().zip(expected).enumerate().filter(|(_, (a, b))| a != b);
        let text = pairs.take(8).map(|(i, (a, b))| format!("[{i}] {a:?}, expected {b:?}"));
        text.collect::<Vec<_>>().join("; ")
    }
    match (got, expected) {
        (Data::F32(a), Data::F32(b)) => list(a, b),
        (Data::F64(a), Data::F64(b)) => list(a, b),
        (Data::U32(a), Data::U32(b)) => list(a, b),
        (Data::I64(a), Data::I64(b)) => list(a, b),
        (Data::U8(a), Data::U8(b)) => list(a, b),
        _ => format!("{got:?} is of another type than {expected:?}"),
    }
}

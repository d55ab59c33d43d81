//! Operations on a GPU: for every operation the calls of CUDA kernels that carry it out.
//!
//! Each family of [`ops`](crate::ops) has a file here, and a file of kernels beside it (`.cu`). An
//! operation becomes one call or several, each over some of the operation's operands, at the places
//! that the plan assigned. Nothing here depends on the `cuda` feature: calls are plain values,
//! which a build without the feature never runs.
//!
//! # Conventions of the kernels
//! - Layouts are the same as in [`kernels`](crate::kernels); results are the same up to rounding. A
//!   result depends on shapes alone, never on the number of blocks that run at once: no float
//!   atomics, and every sum has one order.
//! - Only `blockIdx.x` is used: `blockIdx.y` is the number of a network in a fleet.
//! - An operand that is absent has no elements.
//! - Scratch is counted in f32 by [`scratch`], as the blocks of a GPU need another amount than the
//!   tiles of a processor.

mod blend;
mod chain;
mod conv;
mod divisor;
mod dropout;
mod elementwise;
mod fused;
mod loss;
mod lstm;
mod muon;
mod norm;
mod optim;
mod over_pixels;
mod policy;
mod pool;
mod ppo;
mod rows;
mod sample;
mod state;
mod windows;

use bytemuck::Pod;
use meristem_device::{Call, DType, Kernel, KernelHeader, KernelSource, Operand, Piece};
use smallvec::SmallVec;

use crate::graph::{Graph, OptimiserKind};
use crate::ops::loss::LossFormula;
use crate::ops::{PlanTarget, Signature, StepOp};
use crate::precision::{Precision, ValueType};

/// Headers of the kernels of all families.
static HEADERS: [KernelHeader; 9] = [
    KernelHeader { name: c"nn.cuh", text: include_str!("nn.cuh") },
    KernelHeader { name: c"norm.cuh", text: include_str!("norm.cuh") },
    KernelHeader { name: c"policy.cuh", text: include_str!("policy.cuh") },
    KernelHeader { name: c"window.cuh", text: include_str!("window.cuh") },
    KernelHeader { name: c"mma.cuh", text: include_str!("mma.cuh") },
    KernelHeader { name: c"loss.cuh", text: include_str!("loss.cuh") },
    KernelHeader { name: c"cross_entropy.cuh", text: include_str!("cross_entropy.cuh") },
    KernelHeader { name: c"tiles.cuh", text: include_str!("tiles.cuh") },
    KernelHeader { name: c"philox.cuh", text: include_str!("philox.cuh") },
];

/// A family's file of kernels.
macro_rules! source {
    ($file:literal) => {
        meristem_device::KernelSource {
            name: concat!("crates/nn/src/ops/gpu/", $file),
            text: include_str!($file),
            headers: &$crate::ops::gpu::HEADERS,
        }
    };
}
use source;

/// Headers of sources whose kernels have values among their operands, for each element type of
/// values: these, and a file of the folder `value`.
macro_rules! value_headers {
    ($($header:expr),* $(,)?) => {
        value_headers!(@each [$($header),*] "value/f32.cuh", "value/bf16.cuh")
    };
    (@each $headers:tt $($value:literal),*) => {
        [$(value_headers!(@one $headers $value)),*]
    };
    (@one [$($header:expr),*] $value:literal) => {
        [$($header,)* KernelHeader { name: c"value.cuh", text: include_str!($value) }]
    };
}
use value_headers;

/// Headers of these sources, except those of fused convolutions.
static VALUE_HEADERS: [[KernelHeader; 5]; 2] = value_headers![
    KernelHeader { ..HEADERS[0] },
    KernelHeader { ..HEADERS[1] },
    KernelHeader { ..HEADERS[7] },
    KernelHeader { ..HEADERS[8] },
];

/// A file of kernels that have values among their operands, for each element type of values.
macro_rules! value_sources {
    ($headers:ident, $file:literal) => {
        [
            KernelSource { headers: &$headers[0], ..$crate::ops::gpu::source!($file) },
            KernelSource { headers: &$headers[1], ..$crate::ops::gpu::source!($file) },
        ]
    };
}
use value_sources;

/// Headers of sources that multiply, for each precision: these, and a file of the folder `product`.
macro_rules! product_headers {
    ($($header:expr),* $(,)?) => {
        product_headers!(
            @each [$($header),*] "product/f32.cuh", "product/tf32.cuh", "product/bf16.cuh"
        )
    };
    (@each $headers:tt $($product:literal),*) => {
        [$(product_headers!(@one $headers $product)),*]
    };
    (@one [$($header:expr),*] $product:literal) => {
        [$($header,)* KernelHeader { name: c"product.cuh", text: include_str!($product) }]
    };
}
use product_headers;

/// A file of kernels that multiply, for each precision, with its headers.
macro_rules! product_sources {
    ($headers:ident, $file:literal) => {
        [
            KernelSource { headers: &$headers[0], ..$crate::ops::gpu::source!($file) },
            KernelSource { headers: &$headers[1], ..$crate::ops::gpu::source!($file) },
            KernelSource { headers: &$headers[2], ..$crate::ops::gpu::source!($file) },
        ]
    };
}
use product_sources;

/// Operands by their element types.
const READ: Operand = Operand::read::<f32>();
const WRITE: Operand = Operand::write::<f32>();
/// Operands with values of the network, or gradients of values: bf16, or f32 in the variant of a
/// kernel for f32. No kernel has other operands of bf16.
const READ_VALUES: Operand = Operand::Read(DType::BF16);
const WRITE_VALUES: Operand = Operand::Write(DType::BF16);

/// Operands of the variant for f32.
const fn in_f32<const N: usize>(mut operands: [Operand; N]) -> [Operand; N] {
    let mut n = 0;
    while n < N {
        operands[n] = match operands[n] {
            READ_VALUES => READ,
            WRITE_VALUES => WRITE,
            other => other,
        };
        n += 1;
    }
    operands
}

/// A kernel of a family, with a struct of values of type `V`; `()` for none.
const fn kernel<V>(
    source: &'static KernelSource,
    entry: &'static str,
    operands: &'static [Operand],
) -> Kernel {
    Kernel { source, entry, operands, values: size_of::<V>() }
}

/// A kernel for each element type of values.
macro_rules! value_kernels {
    ($values:ty, $sources:ident, $entry:literal, $operands:expr) => {
        [
            kernel::<$values>(&$sources[0], $entry, const { &$crate::ops::gpu::in_f32($operands) }),
            kernel::<$values>(&$sources[1], $entry, const { &$operands }),
        ]
    };
}
use value_kernels;

/// A kernel that multiplies, for each precision.
macro_rules! product_kernels {
    ($values:ty, $sources:ident, $entry:literal, $operands:expr) => {
        [
            kernel::<$values>(&$sources[0], $entry, const { &$crate::ops::gpu::in_f32($operands) }),
            kernel::<$values>(&$sources[1], $entry, const { &$crate::ops::gpu::in_f32($operands) }),
            kernel::<$values>(&$sources[2], $entry, const { &$operands }),
        ]
    };
}
use product_kernels;

/// Selects the variant for values of this type.
fn by_values<T>(each: &[T; 2], values: ValueType) -> &T {
    let [f32, bf16] = each;
    match values {
        ValueType::F32 => f32,
        ValueType::Bf16 => bf16,
    }
}

/// Selects the variant for `precision`.
fn by_precision<T>(each: &[T; 3], precision: Precision) -> &T {
    let [f32, tf32, bf16] = each;
    match precision {
        Precision::F32 => f32,
        Precision::Tf32 => tf32,
        Precision::Bf16 => bf16,
    }
}

/// An operand of the operation, or a range of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CallOperand {
    written: bool,
    /// Position among the operation's reads or writes.
    index: usize,
    /// First element, counted in f32, and the number of elements; `None` for all.
    part: Option<(usize, usize)>,
}

/// The operation's n-th read.
const fn read(index: usize) -> CallOperand {
    CallOperand { written: false, index, part: None }
}

/// The operation's n-th write.
const fn write(index: usize) -> CallOperand {
    CallOperand { written: true, index, part: None }
}

impl CallOperand {
    /// `len` of its elements from `start` on, which is counted in f32 as scratch is.
    const fn part(self, start: usize, len: usize) -> CallOperand {
        CallOperand { part: Some((start, len)), ..self }
    }
}

/// A call with the operands that are its tensors.
#[derive(Clone, Debug)]
pub(crate) struct Emitted {
    call: Call,
    operands: SmallVec<[CallOperand; 8]>,
}

/// A call over these operands, with these values.
fn emitted<V: Pod>(call: Call, operands: &[CallOperand], values: V) -> Emitted {
    Emitted { call: call.values(values), operands: SmallVec::from_slice(operands) }
}

/// A call over these operands without values.
fn plain(call: Call, operands: &[CallOperand]) -> Emitted {
    Emitted { call, operands: SmallVec::from_slice(operands) }
}

/// Calls of an operation, in order.
type Emission = SmallVec<[Emitted; 2]>;

impl Emitted {
    /// The call with the places of its operands: `lies(written, index)` returns the place of the
    /// operation's read or write with this index.
    pub(crate) fn place(self, lies: impl Fn(bool, usize) -> Piece) -> Call {
        self.call.with_pieces(self.operands.into_iter().map(
            |CallOperand { written, index, part }| {
                let whole = lies(written, index);
                let (first, len) = part.filter(|_| whole.len > 0).unwrap_or((0, whole.len));
                Piece { start: whole.start + first * size_of::<f32>(), len, ..whole }
            },
        ))
    }
}

/// Kernels without values among their operands.
static SOURCES: [&KernelSource; 5] =
    [&loss::SOURCE, &optim::SOURCE, &ppo::SOURCE, &sample::SOURCE, &state::SOURCE];

/// Kernels with values among their operands that have no variant for each precision, for each
/// element type of values. Those of the LSTM and of the classifier multiply, too.
static VALUES: [&[KernelSource; 2]; 10] = [
    &blend::SOURCE,
    &conv::SUMS,
    &elementwise::SOURCE,
    &lstm::SOURCE,
    &norm::SOURCE,
    &norm::GROUP,
    &norm::LAYER,
    &pool::SOURCE,
    &rows::SOURCE,
    &fused::HEAD,
];

/// Kernels of products with a variant for each precision.
static PRODUCTS: [&[KernelSource; 3]; 5] =
    [&conv::ANY, &conv::DEPTHWISE, &conv::WINDOW, &fused::FORWARD, &fused::BACKWARD];

/// All kernels of all families, with products of this precision, except the kernels of losses that
/// [`loss_source`] has. Kernels of Muon and dropout are included only if the graph needs them.
pub(crate) fn sources(graph: &Graph, precision: Precision) -> Vec<&'static KernelSource> {
    let values = precision.value_type();
    let all = VALUES.iter().map(|each| by_values(each, values));
    let products = PRODUCTS.iter().map(|each| by_precision(each, precision));
    // Of values that are not f32: conversions, and steps over parameters, which are f32.
    let others = [by_values(&elementwise::CONVERT, values), &elementwise::SOURCE[0]];
    let others = others.into_iter().filter(|_| values != ValueType::F32);
    let all = SOURCES.into_iter().chain(all).chain(products).chain(others);
    all.chain(graph_sources(graph, precision)).collect()
}

/// Kernels of a loss other than cross-entropy, which only networks with this loss load.
pub(crate) fn loss_source(formula: LossFormula) -> Option<&'static KernelSource> {
    loss::source_of(formula)
}

/// Kernels that only some graphs load: of Muon, of dropout.
fn graph_sources(graph: &Graph, of: Precision) -> impl Iterator<Item = &'static KernelSource> {
    let is_muon = |kind| kind == OptimiserKind::Muon;
    let has_muon = graph.groups.iter().any(|group| is_muon(group.optimiser.kind()));
    let has_dropout = !graph.dropouts.is_empty();
    let dropout = has_dropout.then_some(by_values(&dropout::SOURCE, of.value_type()));
    has_muon.then_some(&muon::SOURCE).into_iter().chain(dropout)
}

/// The calls that carry out an operation with values of this type, which is the type of its
/// precision if it multiplies.
///
/// # Panics
/// If a tensor has 2³¹ elements or more, which the kernels' indices do not reach.
pub(crate) fn emit(op: &StepOp, values: ValueType) -> Emission {
    let Signature { reads, writes } = op.signature(PlanTarget::Cuda, values);
    let most = reads.iter().chain(&writes).map(|spec| spec.len).max().unwrap_or(0);
    assert!(
        most < 1 << 31,
        "a tensor of {most} elements: expected less than 2³¹ on a GPU, in {op:?}"
    );
    match op {
        StepOp::Conv(op) => conv::emit(op),
        StepOp::Norm(op) => norm::emit(op, values),
        StepOp::Pool(op) => pool::emit(op, values),
        StepOp::Elementwise(op) => elementwise::emit(op, values),
        StepOp::Dropout(op) => dropout::emit(op, values),
        StepOp::Blend(op) => blend::emit(op, values),
        StepOp::Rows(op) => rows::emit(op, values),
        StepOp::Lstm(op) => lstm::emit(op, values),
        StepOp::Loss(op) => loss::emit(op),
        StepOp::Optim(op) => optim::emit(op),
        StepOp::Ppo(op) => ppo::emit(op),
        StepOp::Sample(op) => sample::emit(op),
        StepOp::Chain(op) => chain::emit(op, values),
        StepOp::Fused(op) => fused::emit(op, values),
        StepOp::State(op) => state::emit(op),
    }
}

/// Elements of scratch that the calls of an operation need.
pub(crate) fn scratch(op: &StepOp) -> usize {
    match op {
        StepOp::Conv(op) => conv::scratch(op),
        StepOp::Norm(op) => norm::scratch(op),
        StepOp::Blend(op) => blend::scratch(op),
        StepOp::Loss(op) => loss::scratch(op),
        StepOp::Optim(op) => optim::scratch(op),
        StepOp::Ppo(op) => ppo::scratch(op),
        StepOp::Chain(op) => chain::scratch(op),
        StepOp::Fused(op) => fused::scratch(op),
        StepOp::Pool(_)
        | StepOp::Elementwise(_)
        | StepOp::Dropout(_)
        | StepOp::Rows(_)
        | StepOp::Lstm(_)
        | StepOp::Sample(_)
        | StepOp::State(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::ElementwiseOp;

    #[test]
    #[should_panic(expected = "a tensor of 2147483648 elements: expected less than 2³¹")]
    fn a_tensor_that_indices_do_not_reach_is_refused() {
        let _ =
            emit(&StepOp::from(ElementwiseOp::Fill { len: 1 << 31, value: 0.0 }), ValueType::F32);
    }
}

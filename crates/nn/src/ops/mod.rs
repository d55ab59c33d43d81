//! Steps of a plan as values: an operation with its shapes, over typed operands.
//!
//! A [`StepOp`] is the computation of a step, without the places of its operands. Each family has a
//! file: an enum, the [`Signature`] of each variant (element types and lengths of its operands, in
//! order), and the way from operands to the kernel in [`kernels`](crate::kernels). Everything that
//! a step reads or writes is an operand: labels, metrics, counters, alphas and clip coefficients
//! too.
//!
//! [`run`] executes one operation on a backend. The conformance suite uses it to compare a
//! backend's results for every variant of [`StepOp`] with the portable kernels'.

pub mod blend;
pub mod chain;
pub mod conv;
mod cost;
mod cuda;
pub mod dropout;
pub mod elementwise;
pub mod fused;
pub(crate) mod gpu;
pub mod loss;
pub mod lstm;
pub mod norm;
mod operand;
pub mod optim;
pub mod pool;
pub mod ppo;
pub(crate) mod reduction;
pub mod rows;
pub mod sample;
mod samples;
pub mod state;

pub use blend::BlendOp;
pub use conv::ConvOp;
pub use dropout::DropoutOp;
pub use elementwise::ElementwiseOp;
pub use fused::FusedOp;
pub use loss::LossOp;
pub use lstm::LstmOp;
pub use norm::NormOp;
pub use operand::{OperandForm, OperandRole, Signature, Slice, SliceMut, Spec, StepOperands};
pub use optim::OptimOp;
pub use pool::PoolOp;
pub use ppo::PpoOp;
pub use rows::RowsOp;
pub use sample::SampleOp;
pub use state::StateOp;

use std::sync::Arc;

use meristem_device::{Device, DeviceId, Stream};

use self::chain::Chain;
use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::precision::ValueType;

/// Device that runs an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpBackend<'s> {
    /// The calling thread, with the kernels of an instruction set.
    Cpu(Isa),
    /// The CUDA device of a stream, with values of a type.
    Cuda(&'s Stream, ValueType),
}

/// Kind of device that a plan is compiled for. It decides which steps are fused or chained, the
/// element type of values, and how much scratch the operations get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PlanTarget {
    /// Kernels of the processor, of any instruction set.
    #[default]
    Cpu,
    /// CUDA kernels.
    Cuda,
}

impl PlanTarget {
    /// The target of a device.
    pub(crate) fn for_device(device: &Device) -> PlanTarget {
        match device.id() {
            DeviceId::Cpu(_) => PlanTarget::Cpu,
            DeviceId::Cuda(_) => PlanTarget::Cuda,
        }
    }
}

impl OpBackend<'_> {
    /// Kind of its device.
    pub fn target(&self) -> PlanTarget {
        match self {
            OpBackend::Cpu(_) => PlanTarget::Cpu,
            OpBackend::Cuda(..) => PlanTarget::Cuda,
        }
    }

    /// Element type of the values that it stores.
    pub fn values(&self) -> ValueType {
        match self {
            OpBackend::Cpu(_) => ValueType::F32,
            OpBackend::Cuda(_, values) => *values,
        }
    }
}

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($family:ty)),* $(,)?) => {
        /// Operation of a step, with its shapes.
        #[derive(Clone, Debug, PartialEq)]
        pub enum StepOp {
            $($(#[$doc])* $variant($family),)*
        }

        $(impl From<$family> for StepOp {
            fn from(op: $family) -> Self {
                StepOp::$variant(op)
            }
        })*

        impl StepOp {
            /// Element types and lengths of its operands on a target, in order, for values of a
            /// type. Scratch is the last write, if there is any; nothing else depends on the
            /// target.
            pub fn signature(&self, target: PlanTarget, values: ValueType) -> Signature {
                let signature = match self { $(StepOp::$variant(op) => op.signature(),)* };
                let signature = signature.with_values(values);
                match target {
                    PlanTarget::Cpu => signature,
                    PlanTarget::Cuda => signature.with_scratch(gpu::scratch(self)),
                }
            }

            /// Runs on the calling thread. The operands fit the signature.
            ///
            /// # Panics
            /// If the operands do not match the signature; the plan compiler checks this once for
            /// all runs.
            pub(crate) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
                match self { $(StepOp::$variant(op) => op.run(isa, operands),)* }
            }
        }
    };
}

families! {
    /// 2-d convolution and linear layer.
    Conv(ConvOp),
    /// Batch norm, group norm, layer norm and RMS norm.
    Norm(NormOp),
    /// Pooling.
    Pool(PoolOp),
    /// Element by element, and per channel.
    Elementwise(ElementwiseOp),
    /// Dropout.
    Dropout(DropoutOp),
    /// Blends of a module with its host.
    Blend(BlendOp),
    /// Embeddings, vectors side by side, transposes.
    Rows(RowsOp),
    /// LSTM.
    Lstm(LstmOp),
    /// Losses.
    Loss(LossOp),
    /// Gradient norms, clipping, optimisers.
    Optim(OptimOp),
    /// The objective of proximal policy optimisation.
    Ppo(PpoOp),
    /// Draws of actions.
    Sample(SampleOp),
    /// Steps that go sample by sample, a block of samples at a time.
    Chain(Arc<Chain>),
    /// Convolutions with their neighbours.
    Fused(FusedOp),
    /// Metrics, and checks of a network's state.
    State(StateOp),
}

/// Runs one operation: the entry for tests of backends. Waits until it is done.
///
/// # Errors
/// [`Error::Operand`] for operands that do not fit the signature; nothing has run. Errors of the
/// device.
///
/// # Panics
/// On a processor, for indices out of range: labels, embedding indices and choices among the
/// elements, ranges of parameters in the operation. On a GPU a label, a choice or an embedding
/// index out of range gives NaN.
pub fn run(on: OpBackend<'_>, op: &StepOp, operands: StepOperands<'_>) -> Result<()> {
    let signature = op.signature(on.target(), on.values());
    let reads: Vec<OperandForm> = operands.reads.iter().map(Slice::form).collect();
    let writes: Vec<OperandForm> = operands.writes.iter().map(SliceMut::form).collect();
    if let Some([operand, expected, got]) = signature.misfit(&reads, &writes) {
        return Err(Error::Operand { op: format!("{op:?}"), operand, expected, got });
    }
    match on {
        OpBackend::Cpu(isa) => op.run(isa, operands),
        OpBackend::Cuda(stream, values) => cuda::run(stream, op, values, operands)?,
    }
    Ok(())
}

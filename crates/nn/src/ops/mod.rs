//! Steps of a plan as values: an operation with its shapes, over typed operands.
//!
//! An [`Op`] says what a step computes and nothing about where its operands lie. Each family has a
//! file: an enum, the [`Signature`] of each variant (element types and lengths of its operands, in
//! order), and the way from operands to the kernel in [`kernels`](crate::kernels). Whatever a step
//! reads or writes is an operand: labels, metrics, counters, alphas and clip coefficients too.
//!
//! [`run`] executes one operation on a backend. It is the entry of the conformance suite: a backend
//! that implements every variant of [`Op`] is held against the portable kernels by it.

pub mod blend;
pub mod chain;
pub mod conv;
mod cost;
mod cuda;
pub mod elementwise;
pub(crate) mod gpu;
pub mod loss;
pub mod lstm;
pub mod norm;
mod operand;
pub mod optim;
pub mod pool;
pub mod ppo;
pub mod rows;
pub mod sample;
mod samples;
pub mod stage;
pub mod state;

pub use operand::{Form, Operands, Role, Signature, Slice, SliceMut, Spec};

use meristem_device::{Device, DeviceId, Stream};

use crate::error::{Error, Result};
use crate::kernels::Isa;

/// Device that runs an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend<'s> {
    /// The calling thread, with the kernels of an instruction set.
    Cpu(Isa),
    /// The CUDA device of a stream.
    Cuda(&'s Stream),
}

/// Kind of device that a plan is compiled for: it decides how much scratch the operations get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Target {
    /// Kernels of the processor, of any instruction set.
    #[default]
    Cpu,
    /// CUDA kernels.
    Cuda,
}

impl Target {
    /// The target of a device.
    pub fn of(device: &Device) -> Target {
        match device.id() {
            DeviceId::Cpu(_) => Target::Cpu,
            DeviceId::Cuda(_) => Target::Cuda,
        }
    }
}

impl Backend<'_> {
    /// Kind of its device.
    pub fn target(&self) -> Target {
        match self {
            Backend::Cpu(_) => Target::Cpu,
            Backend::Cuda(_) => Target::Cuda,
        }
    }
}

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($family:ident)),* $(,)?) => {
        /// Operation of a step, with its shapes.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op {
            $($(#[$doc])* $variant($family::Op),)*
        }

        $(impl From<$family::Op> for Op {
            fn from(op: $family::Op) -> Self {
                Op::$variant(op)
            }
        })*

        impl Op {
            /// Element types and lengths of its operands on a target, in order. Scratch is the last
            /// write, if there is any; nothing else depends on the target.
            pub fn signature(&self, target: Target) -> Signature {
                let signature = match self { $(Op::$variant(op) => op.signature(),)* };
                match target {
                    Target::Cpu => signature,
                    Target::Cuda => signature.with_scratch(gpu::scratch(self)),
                }
            }

            /// Runs on the calling thread. The operands fit the signature.
            ///
            /// # Panics
            /// If they do not: the plan compiler checks them once for all runs.
            pub(crate) fn run(&self, isa: Isa, operands: Operands<'_>) {
                match self { $(Op::$variant(op) => op.run(isa, operands),)* }
            }
        }
    };
}

families! {
    /// 2-d convolution and linear layer.
    Conv(conv),
    /// Batch norm and group norm.
    Norm(norm),
    /// Pooling.
    Pool(pool),
    /// Element by element, and per channel.
    Elementwise(elementwise),
    /// Where a module meets its host.
    Blend(blend),
    /// Embeddings, and vectors side by side.
    Rows(rows),
    /// LSTM.
    Lstm(lstm),
    /// Cross-entropy.
    Loss(loss),
    /// Gradient norms, clipping, optimisers.
    Optim(optim),
    /// The objective of proximal policy optimisation.
    Ppo(ppo),
    /// Draws of actions.
    Sample(sample),
    /// Steps that go sample by sample, a block of samples at a time.
    Chain(chain),
    /// Convolutions with their neighbours.
    Stage(stage),
    /// Metrics, and checks of a network's state.
    State(state),
}

/// Runs one operation: the entry for tests of backends. Waits until it is done.
///
/// # Errors
/// [`Error::Operand`] for operands that do not fit the signature; nothing has run. Errors of the
/// device.
///
/// # Panics
/// For indices out of range: labels, embedding indices and choices among the elements, ranges of
/// parameters in the operation.
pub fn run(on: Backend<'_>, op: &Op, operands: Operands<'_>) -> Result<()> {
    let signature = op.signature(on.target());
    let reads: Vec<Form> = operands.reads.iter().map(Slice::form).collect();
    let writes: Vec<Form> = operands.writes.iter().map(SliceMut::form).collect();
    if let Some([operand, expected, got]) = signature.misfit(&reads, &writes) {
        return Err(Error::Operand { op: format!("{op:?}"), operand, expected, got });
    }
    match on {
        Backend::Cpu(isa) => op.run(isa, operands),
        Backend::Cuda(stream) => cuda::run(stream, op, operands)?,
    }
    Ok(())
}

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
pub mod conv;
pub mod elementwise;
pub mod loss;
pub mod lstm;
pub mod norm;
mod operand;
pub mod optim;
pub mod pool;
pub mod ppo;
pub mod rows;
pub mod sample;
pub mod state;

pub use operand::{Form, Operands, Role, Signature, Slice, SliceMut, Spec};

use crate::error::{Error, Result};
use crate::kernels::Isa;

/// The processor that runs an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// The calling thread, with the kernels of an instruction set.
    Cpu(Isa),
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
            /// Element types and lengths of its operands, in order.
            pub fn signature(&self) -> Signature {
                match self { $(Op::$variant(op) => op.signature(),)* }
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
    /// Metrics, and checks of a network's state.
    State(state),
}

/// Runs one operation: the entry for tests of backends. Waits until it is done.
///
/// # Errors
/// [`Error::Operand`] for operands that do not fit the signature; nothing has run.
///
/// # Panics
/// For indices out of range: labels, embedding indices and choices among the elements, ranges of
/// parameters in the operation.
pub fn run(on: Backend, op: &Op, operands: Operands<'_>) -> Result<()> {
    let reads: Vec<Form> = operands.reads.iter().map(Slice::form).collect();
    let writes: Vec<Form> = operands.writes.iter().map(SliceMut::form).collect();
    if let Some([operand, expected, got]) = op.signature().misfit(&reads, &writes) {
        return Err(Error::Operand { op: format!("{op:?}"), operand, expected, got });
    }
    match on {
        Backend::Cpu(isa) => op.run(isa, operands),
    }
    Ok(())
}

//! One kernel call of a plan: what it computes, and which memory it touches.

use std::fmt::Debug;

use smallvec::SmallVec;

use super::Objective;
use super::memory::Memory;
use super::value::{Span, ValueId};
use crate::kernels::Isa;
use crate::network::metrics::MetricsView;

/// What a step computes, with its shapes. It gets the operands that were declared when it was
/// emitted, in that order, and no others.
pub(crate) trait Call: Debug + Send + Sync {
    /// Runs on the CPU.
    fn run(&self, cx: &mut Context<'_, '_>);
}

/// What a running step may use.
pub(crate) struct Context<'r, 'm> {
    /// Instruction set of the kernels.
    pub(crate) isa: Isa,
    /// The step's f32 operands.
    pub(crate) operands: Operands<'r, 'm>,
    /// Labels of the batch.
    pub(crate) targets: &'r [u32],
    /// Row of the evaluation metrics.
    pub(crate) config: usize,
    /// Whether gradients were measured and clipped before the updates.
    pub(crate) clipped: bool,
    /// Where losses, hits and norms go.
    pub(crate) metrics: &'r mut MetricsView<'m>,
    /// The caller's function of [`Mode::Objective`](super::Mode::Objective).
    pub(crate) objective: Option<&'r mut Objective<'r>>,
}

/// The operands of one step.
pub(crate) struct Operands<'r, 'm> {
    pub(super) memory: &'r mut Memory<'m>,
    pub(super) reads: &'r [Span],
    pub(super) writes: &'r [Span],
}

impl Operands<'_, '_> {
    /// Everything that the step declared: reads, then writes. `R` and `W` are the numbers declared.
    pub(crate) fn split<const R: usize, const W: usize>(
        &mut self,
    ) -> ([&[f32]; R], [&mut [f32]; W]) {
        let pick = |spans: &[Span], i: usize| spans[i];
        debug_assert_eq!((self.reads.len(), self.writes.len()), (R, W), "operands of a step");
        let reads = std::array::from_fn(|i| pick(self.reads, i));
        let writes = std::array::from_fn(|i| pick(self.writes, i));
        self.memory.split(reads, writes)
    }

    /// Adds one to a counter of a group; what it then is.
    pub(crate) fn count(&mut self, group: usize, counter: usize) -> i64 {
        let counter = &mut self.memory.counters(group)[counter];
        *counter += 1;
        *counter
    }
}

/// A list of operands: short, on the stack while a plan is built.
pub(crate) type ValueList = SmallVec<[ValueId; 8]>;

/// A step before memory is assigned.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) call: Box<dyn Call>,
    pub(crate) reads: ValueList,
    pub(crate) writes: ValueList,
    /// Has an effect besides its writes (metrics): never dropped.
    pub(crate) effect: bool,
    /// Updates parameters: one of a training plan's last steps, and has an effect.
    pub(crate) update: bool,
}

/// A step of a finished plan.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) call: Box<dyn Call>,
    pub(crate) reads: SmallVec<[Span; 8]>,
    pub(crate) writes: SmallVec<[Span; 8]>,
}

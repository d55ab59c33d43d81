//! Steps of a plan: an operation with the places of its operands.

use meristem_device::DType;
use smallvec::SmallVec;

use super::memory::PlanMemory;
use super::value::ValueId;
use crate::kernels::Isa;
use crate::ops::StepOp;
use crate::precision::ValueType;
use crate::space::{Space, SpaceSpan};

/// The parts of a plan, in order. A run executes one phase, or several consecutive ones. In a plan
/// of many rows of alphas, steps that compute scores stand between steps that compute values; all
/// of its steps belong to the first phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The graph's values; in training batch norm's running statistics move. If the caller computes
    /// the loss, also the copy of the output for it.
    Forward,
    /// Loss and gradients.
    Backward,
    /// Norms of the gradients, and clip coefficients.
    Measure,
    /// The optimisers' steps.
    Update,
    /// Copies of the results to where the caller keeps them, after the draw of actions if there is
    /// one.
    Deliver,
}

impl Phase {
    pub(super) const COUNT: usize = 5;
}

/// A list of operands: short, on the stack while a plan is built.
pub(crate) type ValueList = SmallVec<[ValueId; 8]>;

/// A step before memory is assigned.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) op: StepOp,
    /// Element type of activations and their gradients among the operands.
    pub(crate) values: ValueType,
    pub(crate) reads: ValueList,
    pub(crate) writes: ValueList,
    pub(crate) phase: Phase,
}

/// A step: an operation and its operands. Both are values that any backend can read.
#[derive(Clone, Debug)]
pub struct PlanStep {
    /// The operation with its shapes.
    pub op: StepOp,
    /// Element type of activations and their gradients among the operands.
    pub values: ValueType,
    /// Pieces it reads, in the order of the operation's signature.
    pub reads: SmallVec<[SpaceSpan; 8]>,
    /// Pieces it writes.
    pub writes: SmallVec<[SpaceSpan; 8]>,
}

impl PlanStep {
    /// A step whose activations and their gradients, if it has any, are f32.
    pub(crate) fn new(op: impl Into<StepOp>, reads: &[SpaceSpan], writes: &[SpaceSpan]) -> Self {
        let (reads, writes) = (SmallVec::from_slice(reads), SmallVec::from_slice(writes));
        Self { op: op.into(), values: ValueType::F32, reads, writes }
    }

    /// Runs on the calling thread.
    pub(crate) fn run(&self, isa: Isa, memory: &mut PlanMemory<'_>) {
        self.op.run(isa, memory.operands(&self.reads, &self.writes));
    }
}

/// A memory that steps use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceUse {
    /// Memory.
    pub space: Space,
    /// Whether any of the steps writes it.
    pub written: bool,
    /// Element type; the arena has operands of several types.
    pub dtype: DType,
    /// Bytes up to the end of the last piece that is used.
    pub bytes: usize,
}

impl SpaceUse {
    /// Whether the memory must have exactly [`SpaceUse::bytes`] bytes: steps that use it use all of
    /// it.
    pub fn is_whole(&self) -> bool {
        let Self { space, .. } = self;
        matches!(space, Space::Input(_) | Space::Output(_) | Space::Targets | Space::ClassWeights)
    }
}

/// The memories that these steps use, in the order of first use.
pub(crate) fn uses<'s>(steps: impl IntoIterator<Item = &'s PlanStep>) -> Vec<SpaceUse> {
    let mut uses = vec![];
    for step in steps {
        let reads = step.reads.iter().map(|span| (span, false));
        for (span, written) in reads.chain(step.writes.iter().map(|span| (span, true))) {
            if span.len > 0 {
                let SpaceSpan { space, dtype, .. } = *span;
                add_use(&mut uses, SpaceUse { space, written, dtype, bytes: span.bytes().end });
            }
        }
    }
    uses
}

/// Adds a use to the list; a known space is extended.
pub(crate) fn add_use(uses: &mut Vec<SpaceUse>, of: SpaceUse) {
    match uses.iter_mut().find(|known| known.space == of.space) {
        Some(known) => {
            known.written |= of.written;
            known.bytes = known.bytes.max(of.bytes);
        }
        None => uses.push(of),
    }
}

//! Memories that steps read and write, and pieces of them.

use meristem_device::DType;

use crate::graph::GroupId;
use crate::layout::ParamPlace;

/// Memory of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// The arena, f32 with pieces of other types: everything that lives within one run.
    Arena,
    /// The n-th input: f32, or the type that a step declares. Read only.
    Input(usize),
    /// Targets of the batch: labels, u32, or numbers, f32. Read only.
    Targets,
    /// Weight of each class in the loss, f32. Read only.
    ClassWeights,
    /// Numbers of the optimisers, f64, by group
    /// ([`Optimiser::hyperparameters`](crate::graph::Optimiser)), then those of the dropout layers.
    /// Read only.
    Hyperparameters,
    /// Factors of the steps of the host's packed parameters, f32, then 1 minus each of them
    /// ([`Graph::with_step_factors`](crate::graph::Graph::with_step_factors)). Read only.
    StepFactors,
    /// The rows of alphas of this run, f32. Read only.
    Alphas,
    /// Metrics but the scores, f64.
    Metrics,
    /// The rows of evaluation metrics of this run, f64.
    Scores,
    /// Packed parameters of a group, f32.
    Values(GroupId),
    /// State of the optimiser of these parameters
    /// ([`GroupSize::moments`](crate::layout::GroupSize)), f32.
    OptimiserState(GroupId),
    /// Running statistics of a group, f32.
    RunningStats(GroupId),
    /// Batches counted by each batch norm of a group, the steps of its parameters, and the batches
    /// counted by its dropout layers, i64.
    Counters(GroupId),
    /// The n-th result, which the caller keeps.
    Output(usize),
}

impl Space {
    /// Whether a plan may never write here.
    pub(crate) fn is_read_only(self) -> bool {
        matches!(
            self,
            Space::Input(_)
                | Space::Targets
                | Space::ClassWeights
                | Space::Hyperparameters
                | Space::StepFactors
                | Space::Alphas
        )
    }
}

/// A piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceSpan {
    /// Memory.
    pub space: Space,
    /// Element type.
    pub dtype: DType,
    /// First element: the space is counted in elements of this type.
    pub start: usize,
    /// Elements.
    pub len: usize,
}

impl SpaceSpan {
    /// No elements.
    pub(crate) const EMPTY: Self = Self::new(Space::Arena, DType::F32, 0, 0);

    /// A piece of a space.
    pub(crate) const fn new(space: Space, dtype: DType, start: usize, len: usize) -> Self {
        Self { space, dtype, start, len }
    }

    /// A parameter or running statistics, in one of their group's memories.
    pub(crate) fn for_place(place: ParamPlace, space: fn(GroupId) -> Space, dtype: DType) -> Self {
        Self::new(space(place.group), dtype, place.start, place.len)
    }

    /// Range of the elements in the space's memory.
    pub fn range(self) -> std::ops::Range<usize> {
        self.start..self.start + self.len
    }

    /// Range of the bytes in the space's memory; an end beyond the largest address is reduced to
    /// it.
    pub fn bytes(self) -> std::ops::Range<usize> {
        let (size, end) = (self.dtype.size(), self.start.saturating_add(self.len));
        self.start.saturating_mul(size)..end.saturating_mul(size)
    }

    /// Whether the two have a byte in common.
    pub fn overlaps(self, other: Self) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        self.space == other.space && a.start.max(b.start) < a.end.min(b.end)
    }
}

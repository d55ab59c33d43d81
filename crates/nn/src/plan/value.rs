//! Values of a plan that is being built: operands of steps before memory is assigned.

use meristem_device::DType;

use crate::space::SpaceSpan;

/// A value while a plan is built; memory is assigned when all steps are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ValueId(pub(crate) u32);

impl ValueId {
    /// An absent operand (a layer without bias): an empty slice at run time.
    pub(crate) const NONE: Self = Self(u32::MAX);

    /// Position in the plan's list of values.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Place of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueHome {
    /// In memory of the caller.
    Fixed(SpaceSpan),
    /// In the arena, at an offset that depends on lifetimes.
    Arena,
    /// A piece of another value.
    Part {
        /// The whole.
        of: ValueId,
        /// First element of the piece.
        start: usize,
    },
}

/// A value while the plan is built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanValue {
    pub(crate) home: ValueHome,
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    /// Written by the caller before the run: lives from the first step on.
    pub(crate) from_start: bool,
    /// Read by the caller after the run: lives to the last step.
    pub(crate) to_end: bool,
}

impl PlanValue {
    /// f32 elements of the arena that it takes.
    pub(crate) fn arena_len(&self) -> usize {
        (self.len * self.dtype.size()).div_ceil(DType::F32.size())
    }
}

/// The value that owns the memory of `id`.
pub(crate) fn root(values: &[PlanValue], mut id: ValueId) -> ValueId {
    while let ValueHome::Part { of, .. } = values[id.index()].home {
        id = of;
    }
    id
}

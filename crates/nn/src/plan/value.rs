//! Values of a plan: what a step reads and writes, before and after memory is assigned.

use crate::graph::GroupId;
use crate::layout::Place;

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

/// Which memory a value lies in. All are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// The arena: everything that lives within one step.
    Arena,
    /// The n-th input. Read only.
    Input(usize),
    /// The row of alphas of this run. Read only.
    Alphas,
    /// Packed parameters of a group.
    Values(GroupId),
    /// What their optimiser remembers ([`GroupSize::moments`](crate::layout::GroupSize)).
    Momentum(GroupId),
    /// Running statistics of a group.
    State(GroupId),
}

impl Space {
    /// Whether a plan may never write here.
    pub fn is_read_only(self) -> bool {
        matches!(self, Space::Input(_) | Space::Alphas)
    }
}

/// A piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which memory.
    pub space: Space,
    /// First element.
    pub start: usize,
    /// Elements.
    pub len: usize,
}

impl Span {
    /// No elements.
    pub const EMPTY: Self = Self { space: Space::Arena, start: 0, len: 0 };

    /// A piece of the arena.
    pub(crate) fn arena(start: usize, len: usize) -> Self {
        Self { space: Space::Arena, start, len }
    }

    /// A place of a layout, in one of its group's memories.
    pub(crate) fn of(place: Place, space: fn(GroupId) -> Space) -> Self {
        Self { space: space(place.group), start: place.start, len: place.len }
    }

    /// As a range of its memory.
    pub fn range(self) -> std::ops::Range<usize> {
        self.start..self.start + self.len
    }

    /// Whether the two have an element in common.
    pub fn overlaps(self, other: Self) -> bool {
        let (a, b) = (self.range(), other.range());
        self.space == other.space && a.start.max(b.start) < a.end.min(b.end)
    }
}

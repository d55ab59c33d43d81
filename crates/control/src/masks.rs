//! Masks of the legal choices of every head, and the layout of the heads in a row.

use meristem_grow::Host;

use crate::action::Op;
use crate::heads::{HEADS, HeadKind};
use crate::rules::legal_slots;

/// Number of heads.
pub const HEAD_COUNT: usize = HEADS.len();

/// Layout of the heads' choices in a row of logits, probabilities or mask: head after head in the
/// order of [`HEADS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    sizes: [usize; HEAD_COUNT],
    offsets: [usize; HEAD_COUNT],
    total: usize,
}

impl HeadLayout {
    /// The layout for hosts with this many enabled slots and blueprints.
    pub fn new(slots: usize, blueprints: usize) -> Self {
        let sizes = HEADS.map(|head| head.size.of(slots, blueprints));
        let mut offsets = [0; HEAD_COUNT];
        let mut total = 0;
        for (offset, size) in offsets.iter_mut().zip(sizes) {
            *offset = total;
            total += size;
        }
        Self { sizes, offsets, total }
    }

    /// Number of choices per head.
    pub fn sizes(&self) -> [usize; HEAD_COUNT] {
        self.sizes
    }

    /// Choices of all heads: the length of a row.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The part of a row that belongs to a head.
    pub fn range(&self, head: usize) -> std::ops::Range<usize> {
        self.offsets[head]..self.offsets[head] + self.sizes[head]
    }
}

/// Legal ops of one env, and the slots in which each is legal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Legality {
    slots: [Vec<bool>; Op::ALL.len()], // [op][slot]
}

impl Legality {
    /// Legality in the host's current state.
    pub fn of(host: &Host) -> Self {
        Self { slots: Op::ALL.map(|op| legal_slots(op, host)) }
    }

    /// Whether an op is legal: WAIT always, the others if they are legal in some slot.
    pub fn op(&self, op: Op) -> bool {
        op == Op::Wait || self.slots[op.index()].contains(&true)
    }

    /// Slots in which an op is legal; none for WAIT.
    pub fn slots(&self, op: Op) -> &[bool] {
        &self.slots[op.index()]
    }

    /// Writes for each slot the ops that are legal there, op i as bit i.
    pub fn write_places(&self, places: &mut [u32]) {
        for (slot, place) in places.iter_mut().enumerate() {
            let is = |op: &Op| self.slots(*op).get(slot).is_some_and(|legal| *legal);
            *place = Op::ALL.iter().filter(|op| is(op)).fold(0, |bits, op| bits | 1 << op.index());
        }
    }

    /// Writes the mask of the ops, 1 legal and 0 not, over the op head's part of a row.
    pub fn write_ops(&self, layout: &HeadLayout, mask: &mut [u8]) {
        let ops = &mut mask[layout.range(HeadKind::Op as usize)];
        ops.iter_mut().zip(Op::ALL).for_each(|(legal, op)| *legal = u8::from(self.op(op)));
    }

    /// Writes the masks of all heads after the op, given the op that was chosen: the slot head gets
    /// the slots of that op, a head that the op does not use is pinned to choice 0, the others are
    /// free. With one choice left a head's log-probability and entropy are 0.
    pub fn write_rest(&self, op: Op, layout: &HeadLayout, mask: &mut [u8]) {
        for (index, head) in HEADS.iter().enumerate().skip(1) {
            let part = &mut mask[layout.range(index)];
            if !head.is_used_by(op) {
                part.fill(0);
                part.iter_mut().take(1).for_each(|choice| *choice = 1);
            } else if head.kind == HeadKind::Slot {
                let slots = part.iter_mut().zip(self.slots(op));
                slots.for_each(|(choice, legal)| *choice = u8::from(*legal));
            } else {
                part.fill(1);
            }
        }
    }
}

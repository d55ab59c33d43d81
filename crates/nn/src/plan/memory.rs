//! The memory that a plan runs over, and the one place where it is split into operands.

use std::marker::PhantomData;

use smallvec::SmallVec;

use super::value::{Space, Span};
use crate::layout::GroupSize;

/// The tensors of one parameter group.
#[derive(Debug)]
pub struct GroupMemory<'a> {
    /// Packed parameters.
    pub values: &'a mut [f32],
    /// What the optimiser remembers: momentum in the same layout, or Adam's two averages.
    pub momentum: &'a mut [f32],
    /// Running statistics.
    pub state: &'a mut [f32],
    /// Batches seen by each batch norm.
    pub counters: &'a mut [i64],
}

/// A base pointer with its length, in f32 elements.
#[derive(Clone, Copy, Debug)]
struct Base {
    pointer: *mut f32,
    len: usize,
}

impl Base {
    fn new(slice: &mut [f32]) -> Self {
        Self { pointer: slice.as_mut_ptr(), len: slice.len() }
    }

    /// The pointer is only ever read through: [`Space::is_read_only`].
    fn read_only(slice: &[f32]) -> Self {
        Self { pointer: slice.as_ptr().cast_mut(), len: slice.len() }
    }
}

/// All memory of one run of a plan. Holds the borrow of every slice for `'a`.
#[derive(Debug)]
pub struct Memory<'a> {
    arena: Base,
    alphas: Base,
    inputs: SmallVec<[Base; 2]>,
    groups: SmallVec<[[Base; 3]; 12]>,
    counters: SmallVec<[&'a mut [i64]; 12]>,
    borrows: PhantomData<&'a mut [f32]>,
}

impl<'a> Memory<'a> {
    /// The arena (at least [`Plan::arena_len`](super::Plan::arena_len) elements), the inputs (NHWC)
    /// and one row of alphas; groups follow with [`Memory::push_group`].
    pub fn new(arena: &'a mut [f32], inputs: &[&'a [f32]], alphas: &'a [f32]) -> Self {
        Self {
            arena: Base::new(arena),
            alphas: Base::read_only(alphas),
            inputs: inputs.iter().map(|x| Base::read_only(x)).collect(),
            groups: SmallVec::new(),
            counters: SmallVec::new(),
            borrows: PhantomData,
        }
    }

    /// Adds the next group, in the graph's order.
    pub fn push_group(&mut self, group: GroupMemory<'a>) {
        let GroupMemory { values, momentum, state, counters } = group;
        self.groups.push([values, momentum, state].map(Base::new));
        self.counters.push(counters);
    }

    /// The counters of a group.
    pub(crate) fn counters(&mut self, group: usize) -> &mut [i64] {
        self.counters[group]
    }

    /// Lengths of the arena, the alphas, the inputs and the groups.
    pub(crate) fn lengths(&self) -> (usize, usize, Vec<usize>, Vec<GroupSize>) {
        let sizes = self.groups.iter().zip(&self.counters).map(|([v, m, s], counters)| GroupSize {
            values: v.len,
            moments: m.len,
            state: s.len,
            counters: counters.len(),
        });
        let inputs = self.inputs.iter().map(|input| input.len).collect();
        (self.arena.len, self.alphas.len, inputs, sizes.collect())
    }

    fn base(&self, space: Space) -> Base {
        match space {
            Space::Arena => self.arena,
            Space::Alphas => self.alphas,
            Space::Input(n) => self.inputs[n],
            Space::Values(g) => self.groups[g.index()][0],
            Space::Momentum(g) => self.groups[g.index()][1],
            Space::State(g) => self.groups[g.index()][2],
        }
    }

    fn pointer(&self, span: Span) -> *mut f32 {
        let base = self.base(span.space);
        assert!(span.start + span.len <= base.len, "{span:?} ends after {} elements", base.len);
        base.pointer.wrapping_add(span.start)
    }

    /// The operands of one step, which the borrow of `self` keeps apart from any other step's.
    ///
    /// # Panics
    /// If a written span overlaps another operand, is read only, or a span ends after its memory. A
    /// compiled plan has been checked for the first two, its caller for the last.
    pub(crate) fn split<const R: usize, const W: usize>(
        &mut self,
        reads: [Span; R],
        writes: [Span; W],
    ) -> ([&[f32]; R], [&mut [f32]; W]) {
        for (i, write) in writes.iter().enumerate() {
            let others = reads.iter().chain(&writes[..i]);
            let apart = others.copied().all(|other| !write.overlaps(other));
            assert!(
                apart && (write.len == 0 || !write.space.is_read_only()),
                "{write:?} is shared"
            );
        }
        let read = reads.map(|span| {
            let pointer = self.pointer(span);
            // SAFETY: `pointer` checked that the span lies within a slice borrowed for 'a, and 'a
            // outlives the borrow of `self`. No write of this call overlaps it (asserted above),
            // and no other call's write is alive: `split` borrows `self` mutably.
            unsafe { std::slice::from_raw_parts(pointer, span.len) }
        });
        let write = writes.map(|span| {
            let pointer = self.pointer(span);
            // SAFETY: as above; the memory was borrowed mutably (not read only, asserted above), and
            // overlaps no other operand of this call.
            unsafe { std::slice::from_raw_parts_mut(pointer, span.len) }
        });
        (read, write)
    }

    /// Reads one span.
    pub(crate) fn read(&mut self, span: Span) -> &[f32] {
        let ([slice], []) = self.split([span], []);
        slice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: usize, len: usize) -> Span {
        Span { space: Space::Arena, start, len }
    }

    #[test]
    fn operands_are_windows_and_reads_may_be_shared() {
        let mut arena: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let mut memory = Memory::new(&mut arena, &[], &[]);
        let ([a, b, none], [w]) = memory.split([span(0, 4), span(2, 2), Span::EMPTY], [span(4, 2)]);
        w.copy_from_slice(&[a[1], b[0]]);
        assert!(none.is_empty());
        drop(memory);
        assert_eq!(arena[4..6], [1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "is shared")]
    fn a_write_may_not_overlap_a_read() {
        let mut arena = [0.0; 8];
        Memory::new(&mut arena, &[], &[]).split([span(0, 4)], [span(3, 2)]);
    }

    #[test]
    #[should_panic(expected = "is shared")]
    fn an_input_is_never_written() {
        let (mut arena, input) = ([0.0; 8], [0.0; 8]);
        let span = Span { space: Space::Input(0), start: 0, len: 1 };
        Memory::new(&mut arena, &[&input], &[]).split([], [span]);
    }

    #[test]
    #[should_panic(expected = "ends after")]
    fn a_span_may_not_end_after_its_memory() {
        let mut arena = [0.0; 8];
        Memory::new(&mut arena, &[], &[]).split([span(6, 4)], []);
    }
}

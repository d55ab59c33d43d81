//! The memory that a plan runs over, and the one place where it is split into operands.

use std::marker::PhantomData;

use meristem_device::Element;
use smallvec::SmallVec;

use crate::graph::GroupId;
use crate::ops::{Slice, SliceMut, StepOperands};
use crate::space::{Space, SpaceSpan};

/// The tensors of one parameter group.
#[derive(Debug)]
pub struct GroupMemory<'a> {
    /// Packed parameters.
    pub values: &'a mut [f32],
    /// State of the optimiser: one or two tensors in the layout of the values
    /// ([`OptimiserKind::moments`](crate::graph::OptimiserKind::moments)), one after the other.
    pub optimiser_state: &'a mut [f32],
    /// Running statistics of batch norms.
    pub running_stats: &'a mut [f32],
    /// Batches counted by each batch norm, the steps of each parameter if the optimiser counts
    /// them, and the batches of dropout.
    pub counters: &'a mut [i64],
}

/// Address and length of a space.
#[derive(Clone, Copy, Debug)]
struct Base {
    pointer: *mut u8,
    bytes: usize,
    /// Whether steps may write here: the memory was borrowed mutably, and its space is not read
    /// only.
    writable: bool,
}

impl Base {
    /// A space that was not bound: it has no elements.
    const EMPTY: Self =
        Self { pointer: std::ptr::NonNull::dangling().as_ptr(), bytes: 0, writable: false };
}

/// All memory of one run of a plan. Holds the borrow of every slice for `'a`.
#[derive(Debug, Default)]
pub struct PlanMemory<'a> {
    /// By [`place`].
    bases: SmallVec<[Base; 40]>,
    groups: usize,
    borrows: PhantomData<&'a mut [u8]>,
}

/// Position of a space among the bases.
fn place(space: Space) -> usize {
    let (n, kind) = match space {
        Space::Arena => return 0,
        Space::Targets => return 1,
        Space::Alphas => return 2,
        Space::Metrics => return 3,
        Space::Scores => return 4,
        Space::ClassWeights => return 5,
        Space::Hyperparameters => return 6,
        Space::StepFactors => return 7,
        Space::Input(n) => (n, 8),
        Space::Output(n) => (n, 9),
        Space::Values(group) => (group.index(), 10),
        Space::OptimiserState(group) => (group.index(), 11),
        Space::RunningStats(group) => (group.index(), 12),
        Space::Counters(group) => (group.index(), 13),
    };
    6 * n + kind
}

impl<'a> PlanMemory<'a> {
    /// The arena (at least [`Plan::arena_len`](super::Plan::arena_len) elements), the inputs (NHWC)
    /// and one row of alphas; groups follow with [`PlanMemory::push_group`].
    pub fn new(arena: &'a mut [f32], inputs: &[&'a [f32]], alphas: &'a [f32]) -> Self {
        let mut memory = Self::default();
        memory.bind_mut(Space::Arena, arena);
        memory.bind(Space::Alphas, alphas);
        for (n, input) in inputs.iter().enumerate() {
            memory.bind(Space::Input(n), input);
        }
        memory
    }

    /// Adds the next group, in the graph's order.
    pub fn push_group(&mut self, group: GroupMemory<'a>) {
        let GroupMemory { values, optimiser_state, running_stats, counters } = group;
        let id = GroupId(self.groups);
        self.groups += 1;
        self.bind_mut(Space::Values(id), values);
        self.bind_mut(Space::OptimiserState(id), optimiser_state);
        self.bind_mut(Space::RunningStats(id), running_stats);
        self.bind_mut(Space::Counters(id), counters);
    }

    /// Binds a space that is only read.
    pub(crate) fn bind<T: Element>(&mut self, space: Space, slice: &'a [T]) {
        let bytes: &[u8] = bytemuck::cast_slice(slice);
        let (pointer, bytes) = (bytes.as_ptr().cast_mut(), bytes.len());
        self.put(space, Base { pointer, bytes, writable: false });
    }

    /// Binds a space.
    pub(crate) fn bind_mut<T: Element>(&mut self, space: Space, slice: &'a mut [T]) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(slice);
        let (pointer, bytes) = (bytes.as_mut_ptr(), bytes.len());
        self.put(space, Base { pointer, bytes, writable: !space.is_read_only() });
    }

    fn put(&mut self, space: Space, base: Base) {
        let at = place(space);
        if self.bases.len() <= at {
            self.bases.resize(at + 1, Base::EMPTY);
        }
        self.bases[at] = base;
    }

    /// Bytes of a space; 0 if it was not bound.
    pub(crate) fn bytes(&self, space: Space) -> usize {
        self.base(space).bytes
    }

    fn base(&self, space: Space) -> Base {
        self.bases.get(place(space)).copied().unwrap_or(Base::EMPTY)
    }

    fn pointer(&self, span: SpaceSpan, write: bool) -> *mut u8 {
        let base = self.base(span.space);
        let at = span.bytes();
        assert!(at.end <= base.bytes, "{span:?} ends after {} bytes", base.bytes);
        assert!(!write || base.writable, "{span:?} is read only");
        let pointer = base.pointer.wrapping_add(at.start);
        assert!(pointer.addr().is_multiple_of(span.dtype.size()), "{span:?} is not aligned");
        pointer
    }

    /// The operands of one step, which the borrow of `self` keeps apart from any other step's.
    ///
    /// # Panics
    /// If a written span overlaps another operand or is read only, or a span ends after its memory.
    /// In debug builds compilation checks a plan for overlaps and for writes to read-only spaces;
    /// the plan's caller checks the memories.
    pub(crate) fn operands(
        &mut self,
        reads: &[SpaceSpan],
        writes: &[SpaceSpan],
    ) -> StepOperands<'_> {
        for (i, write) in writes.iter().enumerate() {
            let others = reads.iter().chain(&writes[..i]);
            let apart = write.len == 0 || others.copied().all(|other| !write.overlaps(other));
            assert!(apart, "{write:?} is shared");
        }
        let memory = &*self;
        let reads = reads.iter().map(|span| memory.slice(*span)).collect();
        // SAFETY: no written span overlaps another operand of this step (asserted above), and no
        // other step's operands are alive: this borrows `self` mutably.
        let writes = writes.iter().map(|span| unsafe { memory.slice_mut(*span) }).collect();
        StepOperands { reads, writes }
    }

    fn slice(&self, span: SpaceSpan) -> Slice<'_> {
        let bytes = match span.len {
            0 => &[],
            // SAFETY: `pointer` checked that the span lies within a slice whose borrow `self`
            // holds. Slices that write there are alive only within `operands`, which keeps them
            // apart.
            _ => unsafe {
                std::slice::from_raw_parts(self.pointer(span, false), span.bytes().len())
            },
        };
        Slice::new(span.dtype, bytes)
    }

    /// # Safety
    /// While the result is alive, nothing else that this gave out overlaps it.
    unsafe fn slice_mut(&self, span: SpaceSpan) -> SliceMut<'_> {
        let bytes = match span.len {
            0 => &mut [][..],
            // SAFETY: as above; the memory was borrowed mutably (`pointer` looked at `writable`),
            // and the caller keeps others away.
            _ => unsafe {
                std::slice::from_raw_parts_mut(self.pointer(span, true), span.bytes().len())
            },
        };
        SliceMut::new(span.dtype, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meristem_device::DType;

    fn span(start: usize, len: usize) -> SpaceSpan {
        SpaceSpan::new(Space::Arena, DType::F32, start, len)
    }

    #[test]
    fn operands_are_windows_and_reads_may_be_shared() {
        let mut arena: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let mut memory = PlanMemory::new(&mut arena, &[], &[]);
        let reads = [span(0, 4), span(2, 2), SpaceSpan::EMPTY];
        let (reads, writes) = memory.operands(&reads, &[span(4, 2)]).split::<3, 1>();
        let ([a, b, none], [to]) = (reads.map(Slice::elements::<f32>), writes);
        to.elements::<f32>().copy_from_slice(&[a[1], b[0]]);
        assert!(none.is_empty());
        assert_eq!(arena[4..6], [1.0, 2.0]);
    }

    #[test]
    fn a_span_has_the_type_that_it_declares() {
        let (mut arena, mut metrics) = ([1.0f32, 0.0], [0.5f64]);
        let mut memory = PlanMemory::new(&mut arena, &[], &[]);
        memory.bind_mut(Space::Metrics, &mut metrics);
        let bytes = SpaceSpan::new(Space::Arena, DType::U8, 2, 2);
        assert_eq!(memory.slice(bytes).elements::<u8>(), &1.0f32.to_le_bytes()[2..]);
        assert_eq!(
            memory.slice(SpaceSpan::new(Space::Metrics, DType::F64, 0, 1)).elements::<f64>(),
            [0.5]
        );
    }

    #[test]
    #[should_panic(expected = "is shared")]
    fn a_write_may_not_overlap_a_read() {
        let mut arena = [0.0; 8];
        // Bytes 12 to 16, which are the fourth f32.
        let byte = SpaceSpan::new(Space::Arena, DType::U8, 15, 1);
        PlanMemory::new(&mut arena, &[], &[]).operands(&[byte], &[span(3, 2)]);
    }

    #[test]
    #[should_panic(expected = "is read only")]
    fn an_input_is_never_written() {
        let (mut arena, input) = ([0.0; 8], [0.0; 8]);
        let span = SpaceSpan::new(Space::Input(0), DType::F32, 0, 1);
        PlanMemory::new(&mut arena, &[&input], &[]).operands(&[], &[span]);
    }

    #[test]
    #[should_panic(expected = "is read only")]
    fn memory_that_was_lent_for_reading_is_never_written() {
        let running_stats = [0.0f32; 8];
        let space = Space::RunningStats(GroupId::HOST);
        let mut memory = PlanMemory::default();
        memory.bind(space, &running_stats);
        memory.operands(&[], &[SpaceSpan::new(space, DType::F32, 0, 1)]);
    }

    #[test]
    #[should_panic(expected = "ends after")]
    fn a_span_may_not_end_after_its_memory() {
        let mut arena = [0.0; 8];
        PlanMemory::new(&mut arena, &[], &[]).operands(&[span(6, 4)], &[]);
    }
}

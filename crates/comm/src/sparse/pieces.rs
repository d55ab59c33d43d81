//! Elements in several slices that a kernel accesses as one sequence.

use std::iter::FusedIterator;

use smallvec::{SmallVec, smallvec};

use crate::number::SumElement;

/// Slices in order.
#[derive(Clone)]
pub(crate) struct SliceList<'a, T> {
    slices: SmallVec<[&'a [T]; 4]>,
}

impl<'a, T: SumElement> SliceList<'a, T> {
    pub(crate) fn new(slices: impl Iterator<Item = &'a [T]>) -> Self {
        SliceList { slices: slices.collect() }
    }

    pub(crate) fn slices(&self) -> &[&'a [T]] {
        &self.slices
    }

    /// All elements, in order.
    pub(crate) fn iter(&self) -> impl FusedIterator<Item = T> + Clone {
        self.slices.iter().flat_map(|slice| slice.iter().copied())
    }

    /// The elements `start..start + N`, which must exist.
    #[inline(always)]
    pub(crate) fn run<const N: usize>(&self, start: usize) -> [T; N] {
        let mut first = 0;
        for slice in &self.slices {
            // A run in one slice is copied as a value, without a call, so that the reads of several
            // runs overlap.
            if let Some(run) = slice.get(start - first..).and_then(<[T]>::first_chunk) {
                return *run;
            }
            first += slice.len();
            if start < first {
                break;
            }
        }
        let mut run = [T::ZERO; N];
        self.copy(start, &mut run);
        run
    }

    /// Copies the elements from `start` on into `out`.
    #[inline(always)]
    pub(crate) fn copy(&self, mut start: usize, mut out: &mut [T]) {
        for slice in &self.slices {
            if let Some(rest) = slice.get(start..).filter(|rest| !rest.is_empty()) {
                let (now, later) = out.split_at_mut(rest.len().min(out.len()));
                now.copy_from_slice(&rest[..now.len()]);
                (out, start) = (later, 0);
            } else {
                start -= slice.len();
            }
            if out.is_empty() {
                return;
            }
        }
    }
}

impl<'a, T: SumElement> From<&'a [T]> for SliceList<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        SliceList { slices: smallvec![slice] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_read_as_one_sequence() {
        let all: Vec<f32> = (0..20).map(|i| i as f32).collect();
        let pieces = SliceList::new([&all[..7], &all[7..8], &[], &all[8..20]].into_iter());
        assert_eq!(pieces.iter().collect::<Vec<_>>(), all);
        for start in 0..=16 {
            assert_eq!(pieces.run::<4>(start), all[start..start + 4]);
        }
        for start in 0..=20 {
            for len in 0..=20 - start {
                let mut out = vec![99.0; len];
                pieces.copy(start, &mut out);
                assert_eq!(out, all[start..start + len]);
            }
        }
    }
}

//! Assigns arena offsets: values with overlapping lifetimes get disjoint memory.

use crate::layout::padded;

/// The life of an arena value: the steps `first..=last` touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lifetime {
    /// First step that writes it.
    pub first: usize,
    /// Last step that reads or writes it.
    pub last: usize,
    /// f32 elements.
    pub len: usize,
}

impl Lifetime {
    /// Whether both are alive at some step. A step's output and its inputs are alive together.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Assigned memory: an offset per value, and the arena's length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// First element of each value; a multiple of a vector.
    pub offsets: Vec<usize>,
    /// Elements of the arena.
    pub len: usize,
}

/// Greedy by size: the largest value first, each at the lowest offset that is free during its whole
/// life. Deterministic; within a few per cent of the lower bound for the plans of this crate.
pub(crate) fn assign(values: &[Lifetime]) -> Assignment {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(values[i].len), values[i].first, i));
    let mut offsets = vec![0; values.len()];
    let mut placed: Vec<usize> = vec![]; // by offset
    let mut len = 0;
    for i in order.into_iter().filter(|&i| values[i].len > 0) {
        let size = padded(values[i].len);
        let mut offset = 0;
        for &j in placed.iter().filter(|&&j| values[j].overlaps(&values[i])) {
            if offset + size <= offsets[j] {
                break;
            }
            offset = offset.max(offsets[j] + padded(values[j].len));
        }
        offsets[i] = offset;
        len = len.max(offset + size);
        let at = placed.partition_point(|&j| offsets[j] <= offset);
        placed.insert(at, i);
    }
    Assignment { offsets, len }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lifetimes() -> impl Strategy<Value = Vec<Lifetime>> {
        let one = (0usize..40, 0usize..12, 0usize..300).prop_map(|(first, life, len)| Lifetime {
            first,
            last: first + life,
            len,
        });
        proptest::collection::vec(one, 0..60)
    }

    proptest! {
        #[test]
        fn values_that_live_together_do_not_overlap(values in lifetimes()) {
            let Assignment { offsets, len } = assign(&values);
            for (i, a) in values.iter().enumerate() {
                prop_assert!(offsets[i] + a.len <= len);
                prop_assert_eq!(offsets[i] % crate::layout::LANES, 0);
                for (j, b) in values.iter().enumerate().take(i) {
                    let ends = [offsets[i] + a.len, offsets[j] + b.len];
                    let apart = ends[0] <= offsets[j] || ends[1] <= offsets[i];
                    prop_assert!(apart || !a.overlaps(b) || a.len == 0 || b.len == 0);
                }
            }
        }

        /// Not worse than no reuse, not better than the most that is ever alive.
        #[test]
        fn the_arena_is_between_its_bounds(values in lifetimes()) {
            let len = assign(&values).len;
            let all: usize = values.iter().map(|v| padded(v.len)).sum();
            let alive = |t: usize| -> usize {
                values.iter().filter(|v| v.first <= t && t <= v.last).map(|v| padded(v.len)).sum()
            };
            let peak = (0..60).map(alive).max().unwrap_or(0);
            prop_assert!(peak <= len && len <= all, "{} <= {} <= {}", peak, len, all);
        }

        #[test]
        fn a_chain_needs_two_buffers(n in 2usize..50, len in 1usize..1000) {
            let values: Vec<_> = (0..n).map(|i| Lifetime { first: i, last: i + 1, len }).collect();
            prop_assert_eq!(assign(&values).len, 2 * padded(len));
        }
    }
}

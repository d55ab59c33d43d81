//! Places of a product's rows, and of its depth, as nested loops.

/// Three nested loops, outermost first, as an index map: index `i` of
/// `counts[0]·counts[1]·counts[2]` lies at `Σ iₗ·strides[l]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nest {
    pub(crate) counts: [usize; 3],
    pub(crate) strides: [usize; 3],
}

impl Nest {
    pub(super) fn len(&self) -> usize {
        self.counts.iter().product()
    }

    /// Offset of the last index; the nest is not empty.
    pub(super) fn last(&self) -> usize {
        self.counts.iter().zip(self.strides).map(|(n, stride)| (n - 1) * stride).sum()
    }

    /// Whether elements `i..i + len` of different indices do not overlap, as each loop passes over
    /// all elements of the loops inside it; the nest is not empty.
    pub(super) fn are_apart(&self, len: usize) -> bool {
        let inner = self.counts.iter().zip(self.strides).rev();
        let mut apart = inner.scan(len, |len, (&n, stride)| {
            let apart = n == 1 || *len <= stride;
            *len += (n - 1) * stride;
            Some(apart)
        });
        apart.all(|apart| apart)
    }
}

/// Walks over the rows of a job.
pub(super) struct RowWalk {
    nest: Nest,
    at: [usize; 3],
}

impl RowWalk {
    /// Starts at the first row.
    pub(super) fn new(nest: Nest) -> Self {
        Self { nest, at: [0; 3] }
    }

    /// The addresses of the next rows.
    ///
    /// # Safety
    /// At least `to.len()` rows remain, and they lie within the memory that starts at `a`.
    pub(super) unsafe fn next(&mut self, a: *const f32, mut to: &mut [*const f32]) {
        let Nest { counts, strides } = self.nest;
        while !to.is_empty() {
            let [i, j, k] = self.at;
            let run = to.len().min(counts[2] - k);
            let (here, rest) = to.split_at_mut(run);
            let start = i * strides[0] + j * strides[1] + k * strides[2];
            for (r, pointer) in here.iter_mut().enumerate() {
                // SAFETY: the offset of a row, at most `nest.last()`.
                *pointer = unsafe { a.add(start + r * strides[2]) };
            }
            to = rest;
            self.at[2] += run;
            if self.at[2] == counts[2] {
                self.at = if j + 1 == counts[1] { [i + 1, 0, 0] } else { [i, j + 1, 0] };
            }
        }
    }
}

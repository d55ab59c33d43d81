//! Lists of (index, value) in order of index, padded at the end with [`NONE`]. Only the lists of an
//! all-gather with given indices have another order. On a CUDA device a union of lists has [`NONE`]
//! between its entries as well.

use std::ops::RangeFrom;

use meristem_device::simd::{Vectorized, vectorize, write_blocks};
use meristem_device::{Args, DType, Isa, Owner, Stream, Tensor};
use smallvec::SmallVec;

use super::select::{MagnitudeCut, candidates_len};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::gpu;
use crate::number::{SumElement, divide};
use crate::transport::{CollectiveCall, Parcel, others};

/// Index of padding, which no tensor has.
pub(crate) const NONE: u32 = u32::MAX;

/// Lists of one length on the device, in consecutive rows.
pub(crate) struct Lists {
    /// [rows, len] x u32
    pub(crate) indices: Tensor,
    /// [rows, len] x the type of the elements
    pub(crate) values: Tensor,
    pub(crate) len: usize,
}

impl Lists {
    pub(crate) fn new(stream: &Stream, dtype: DType, rows: usize, len: usize) -> Result<Lists> {
        let make = |dtype| Tensor::empty(stream, [rows * len], dtype, Owner::Collectives);
        Ok(Lists { indices: make(DType::U32)?, values: make(dtype)?, len })
    }

    /// One row.
    pub(crate) fn row(&self, row: usize) -> Result<Lists> {
        let (at, len) = (row * self.len, self.len);
        let (indices, values) = (self.indices.view(at, [len])?, self.values.view(at, [len])?);
        Ok(Lists { indices, values, len })
    }

    /// Indices and values as arguments `first` and `first + 1` of a launch, for a CUDA device.
    pub(crate) fn at(&self, first: usize) -> gpu::ListPieces {
        let indices = gpu::whole(first, &self.indices);
        gpu::ListPieces { indices, values: gpu::whole(first + 1, &self.values) }
    }

    /// All-gathers the rows: sends this rank's row to all other ranks and receives their rows.
    pub(crate) fn gather(&self, comm: &mut Communicator, call: &CollectiveCall) -> Result<()> {
        let (own, n) = (self.row(comm.rank())?, comm.size());
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for peer in others(comm.rank(), n) {
            sends.extend(own.parcels(peer)?);
            receives.extend(self.row(peer)?.parcels(peer)?);
        }
        comm.exchange(call, self.indices.stream(), &sends, &receives)
    }

    /// Indices and values as parcels to or from a peer.
    pub(crate) fn parcels(&self, peer: usize) -> Result<[Parcel; 2]> {
        Ok([Parcel::new(peer, &self.indices)?, Parcel::new(peer, &self.values)?])
    }
}

/// Memory of a selection.
pub(crate) struct Candidates {
    pub(crate) lists: Lists,
    /// On a CUDA device only.
    pub(crate) tables: Option<gpu::SelectionTables>,
}

impl Candidates {
    /// Memory for the selection of k of `len` elements.
    pub(crate) fn new(stream: &Stream, dtype: DType, len: usize, k: usize) -> Result<Candidates> {
        let tables = if k == 0 { None } else { gpu::SelectionTables::new(stream, 1, len)? };
        let room = match tables {
            Some(_) => gpu::candidates_len(len, k),
            None => candidates_len(len, k),
        };
        Ok(Candidates { lists: Lists::new(stream, dtype, 1, room)?, tables })
    }
}

/// Checks that k of `len` elements can be selected, with indices that fit u32.
pub(crate) fn check_k(operation: &'static str, len: usize, k: usize) -> Result<()> {
    if len > NONE as usize {
        let expected = format!("one of at most {NONE} elements");
        return Err(Error::argument(operation, "input", expected, len));
    }
    if k > len {
        let expected = format!("at most {len}, the number of elements");
        return Err(Error::argument(operation, "k", expected, k));
    }
    Ok(())
}

/// A list in a kernel.
#[derive(Clone, Copy)]
pub(crate) struct ListEntries<'a, T> {
    pub(crate) indices: &'a [u32],
    pub(crate) values: &'a [T],
}

impl<'a, T: SumElement> ListEntries<'a, T> {
    /// Splits rows into lists of `len` entries, without padding.
    pub(crate) fn rows(
        indices: &'a [u32],
        values: &'a [T],
        len: usize,
    ) -> impl Iterator<Item = ListEntries<'a, T>> + Clone {
        // Chunks must not be empty; a list of length 0 has no entries.
        let len = len.max(1);
        indices
            .chunks(len)
            .zip(values.chunks(len))
            .map(|(indices, values)| ListEntries::used(indices, values))
    }

    /// The first `at` entries, and the rest.
    pub(crate) fn split_at(self, at: usize) -> (ListEntries<'a, T>, ListEntries<'a, T>) {
        let (indices, more_indices) = self.indices.split_at(at);
        let (values, more_values) = self.values.split_at(at);
        (
            ListEntries { indices, values },
            ListEntries { indices: more_indices, values: more_values },
        )
    }

    /// A list without its padding.
    pub(crate) fn used(indices: &'a [u32], values: &'a [T]) -> ListEntries<'a, T> {
        let used = indices.partition_point(|index| *index != NONE);
        ListEntries { indices: &indices[..used], values: &values[..used] }
    }
}

/// Merges two lists. Values with the same index are added, `a`'s value first. Returns the number of
/// entries; the targets must be large enough.
pub(crate) fn merge<T: SumElement>(
    a: ListEntries<'_, T>,
    b: ListEntries<'_, T>,
    indices: &mut [u32],
    values: &mut [T],
) -> usize {
    let (mut i, mut j, mut n) = (0, 0, 0);
    while i < a.indices.len() || j < b.indices.len() {
        let left = a.indices.get(i).copied().unwrap_or(NONE);
        let right = b.indices.get(j).copied().unwrap_or(NONE);
        indices[n] = left.min(right);
        values[n] = match left.cmp(&right) {
            std::cmp::Ordering::Less => a.values[i],
            std::cmp::Ordering::Equal => a.values[i].plus(b.values[j]),
            std::cmp::Ordering::Greater => b.values[j],
        };
        i += usize::from(left <= right);
        j += usize::from(right <= left);
        n += 1;
    }
    n
}

/// Writes the entries of largest magnitude, at most `indices.len()`, and padding.
pub(crate) fn keep_largest<T: SumElement>(
    list: ListEntries<'_, T>,
    indices: &mut [u32],
    values: &mut [T],
) {
    let k = indices.len().min(list.indices.len());
    if k > 0 {
        let cut = MagnitudeCut::at(list.values.iter().map(|value| value.magnitude()), k);
        let elements = list.indices.iter().copied().zip(list.values.iter().copied());
        cut.keep(elements, &mut indices[..k], &mut values[..k]);
    }
    indices[k..].fill(NONE);
    values[k..].fill(T::ZERO);
}

/// Keeps the indices that are also in `kept`, and pads the rest. Both lists are in order.
pub(crate) fn intersect(indices: &mut [u32], kept: &[u32]) {
    let (mut n, mut j) = (0, 0);
    for i in 0..indices.len() {
        let index = indices[i];
        while kept.get(j).is_some_and(|other| *other < index) {
            j += 1;
        }
        if index != NONE && kept.get(j) == Some(&index) {
            indices[n] = index;
            n += 1;
        }
    }
    indices[n..].fill(NONE);
}

/// Writes a dense result into the kernel arguments `outputs`: zeros, plus the values of all lists
/// in order, divided by `divisor` if given.
pub(crate) fn scatter<'a, T: SumElement>(
    lists: impl Iterator<Item = ListEntries<'a, T>>,
    divisor: Option<usize>,
    args: &mut Args<'_>,
    outputs: RangeFrom<usize>,
) {
    let outputs = (outputs.start..args.len()).map(|at| args.write::<T>(at));
    let outputs = outputs.collect();
    scatter_to(args.isa(), lists, divisor, outputs);
}

fn scatter_to<'a, T: SumElement>(
    isa: Isa,
    lists: impl Iterator<Item = ListEntries<'a, T>>,
    divisor: Option<usize>,
    outputs: SmallVec<[&mut [T]; 4]>,
) {
    vectorize(isa, Scatter { isa, lists: lists.collect(), divisor, outputs });
}

struct Scatter<'a, 'b, T> {
    isa: Isa,
    lists: SmallVec<[ListEntries<'a, T>; 8]>,
    divisor: Option<usize>,
    outputs: SmallVec<[&'b mut [T]; 4]>,
}

impl<T: SumElement> Vectorized for Scatter<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Scatter { isa, mut lists, divisor, outputs } = self;
        let mut first = 0;
        for output in outputs {
            let len = output.len();
            write_blocks(isa, output, |start, block| {
                let start = first + start;
                block.fill(T::ZERO);
                for (rank, list) in lists.iter_mut().enumerate() {
                    let mut done = 0;
                    for (index, value) in list.indices.iter().zip(list.values) {
                        let Some(slot) = block.get_mut(*index as usize - start) else { break };
                        // Stored, not added to zero, so that the first value keeps the sign of a
                        // zero.
                        *slot = if rank == 0 { *value } else { slot.plus(*value) };
                        done += 1;
                    }
                    *list = list.split_at(done).1;
                }
                divide(block, divisor);
            });
            first += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn list<'a>(indices: &'a [u32], values: &'a [f32]) -> ListEntries<'a, f32> {
        ListEntries { indices, values }
    }

    #[test]
    fn merging_keeping_and_intersecting() {
        let a = list(&[1, 4, 9], &[1.0, -4.0, 9.0]);
        let b = list(&[0, 4, 12, 13], &[0.5, 1.0, -12.0, 0.1]);
        let (mut indices, mut values) = ([0; 7], [0.0; 7]);
        let n = merge(a, b, &mut indices, &mut values);
        assert_eq!(&indices[..n], [0, 1, 4, 9, 12, 13]);
        assert_eq!(&values[..n], [0.5, 1.0, -3.0, 9.0, -12.0, 0.1]);
        let (mut kept, mut of) = ([7; 3], [7.0; 3]);
        keep_largest(list(&indices[..n], &values[..n]), &mut kept, &mut of);
        assert_eq!((kept, of), ([4, 9, 12], [-3.0, 9.0, -12.0]));
        let (mut kept, mut of) = ([7; 4], [7.0; 4]);
        keep_largest(a, &mut kept, &mut of);
        assert_eq!((kept, of), ([1, 4, 9, NONE], [1.0, -4.0, 9.0, 0.0]));
        intersect(&mut kept, &[0, 4, 9, 20]);
        assert_eq!(kept, [4, 9, NONE, NONE]);
        intersect(&mut kept, &[]);
        assert_eq!(kept, [NONE; 4]);
        assert_eq!(merge(list(&[], &[]), list(&[], &[]), &mut [], &mut []), 0);
    }

    #[test]
    fn results_are_sums_in_order() {
        let indices = [0, 2, 2, NONE, 1, 2];
        let values = [-0.0f32, 1e8, 1.0, 0.0, -0.0, -1e8];
        let scattered = |indices, values, len, divisor, cut: usize| {
            let mut output = [7.0f32; 4];
            let (first, rest) = output.split_at_mut(cut);
            let lists = ListEntries::rows(indices, values, len);
            scatter_to(Isa::detect(), lists, divisor, smallvec![first, rest]);
            output.map(f32::to_bits)
        };
        // In one piece, and in two.
        for cut in 0..=4 {
            // (1e8 + 1) - 1e8 is 0 in f32; another order would give 1.
            let sum = [-0.0f32, 0.0, 0.0, 0.0].map(f32::to_bits);
            assert_eq!(scattered(&indices, &values, 2, None, cut), sum);
            let half = [0.0, 0.0, 0.0, 1.5].map(f32::to_bits);
            assert_eq!(scattered(&[3], &[3.0], 1, Some(2), cut), half);
            assert_eq!(scattered(&[], &[], 0, Some(2), cut), [0; 4]);
        }
    }
}

//! What a transport does: the one interface over which every algorithm is written.

use crate::error::Result;
use meristem_device::{DType, Stream, Tensor};
use std::ops::Range;

/// A collective call, as every rank describes it to the others: calls that differ fail on all
/// ranks, with an error that names the one that differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Name of the operation.
    pub operation: &'static str,
    /// Type of the elements, if the operation has any.
    pub dtype: Option<DType>,
    /// Number of elements, or 0.
    pub count: usize,
    /// Whatever else must be the same everywhere: a root, a reduction, a number of picks.
    pub parameter: u64,
    /// Digest of what the operation keeps between calls, where that must be the same everywhere, or 0.
    pub kept: u64,
}

/// A tensor for, or from, another rank.
#[derive(Debug, Clone)]
pub struct Parcel {
    /// The other rank.
    pub peer: usize,
    /// Contiguous elements in memory order.
    pub tensor: Tensor,
}

/// How to combine the ranks' values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reduction {
    /// Their sum.
    #[default]
    Sum,
    /// Their sum, divided by the number of ranks.
    Mean,
}

/// In which order a sum is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// From rank 0 upwards: the same bits on every rank, transport and run.
    #[default]
    Rank,
    /// As the transport likes best.
    Fast,
}

/// A dense sum over all ranks, in place if both tensors are one.
#[derive(Debug, Clone)]
pub struct Sum<'a> {
    /// This rank's values.
    pub input: &'a Tensor,
    /// Where the result goes: as many, of the same type, on the same stream.
    pub output: &'a Tensor,
    /// How to combine.
    pub reduction: Reduction,
    /// Order of the additions.
    pub order: Order,
}

/// The link of one rank to the others.
///
/// Calls are collective: every rank makes the same in the same order. They put work onto `stream`
/// and do not wait for the device, unless what they send must be in host memory (`mpi`); whether
/// they wait for the other ranks' calls is the transport's matter. Tensors are device memory of
/// `stream`, and nothing goes over the host in this interface, so it fits queues on an accelerator
/// (`ncclSend` and `ncclRecv` in a group) as well as MPI and shared memory.
///
/// Errors are the same on every rank, see [`Error`](crate::Error); where ranks are processes, one
/// that was through when another failed gets the error from its next call.
pub trait Transport: Send {
    /// Name, as on the command line.
    fn name(&self) -> &'static str;

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Sends and receives tensors, all at once. Parcels from one rank to another arrive in the
    /// order in which they were given; what is received fits what is sent, in type and number of
    /// elements. Nobody sends to itself.
    ///
    /// # Errors
    /// See the trait.
    fn exchange(
        &mut self,
        call: &Call,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()>;

    /// Sums by means of the transport's own, if it has any for this order; whether it has is the
    /// same on all ranks. Otherwise [`exchange`](Transport::exchange) is used.
    ///
    /// # Errors
    /// See the trait.
    fn all_reduce(&mut self, call: &Call, stream: &Stream, sum: &Sum<'_>) -> Result<bool>;

    /// Waits until all ranks have called it. Does not wait for the device.
    ///
    /// # Errors
    /// See the trait.
    fn barrier(&mut self, call: &Call) -> Result<()>;

    /// Tells the other ranks that this one met an error of its own, and will not come any more: they get
    /// [`RankFailed`](crate::Error::RankFailed), at once or from their next call. Not collective; after an error that
    /// all know it does nothing.
    fn abort(&mut self, reason: &str);

    /// New groups of ranks: those with equal `color` form one, ranked by `key` and then by rank.
    ///
    /// # Errors
    /// See the trait.
    fn split(&mut self, call: &Call, color: u64, key: u64) -> Result<Box<dyn Transport>>;
}

/// Elements of a cache line of the smallest type: shares start there, so no two ranks write one
/// line.
const LINE: usize = 32;

/// The share of `len` elements that rank `rank` of `size` works on: contiguous, all of them
/// together cover everything, and their lengths differ by a cache line at most.
pub(crate) fn share(len: usize, size: usize, rank: usize) -> Range<usize> {
    let lines = len.div_ceil(LINE);
    // No overflow: a tensor's lines are far fewer than usize::MAX / size.
    let at = |rank: usize| (lines / size * rank + (lines % size).min(rank)) * LINE;
    at(rank).min(len)..at(rank + 1).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once() {
        let near_2_31 = [(1usize << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 40) + 7];
        for len in (0..200).chain([1000, 4096, 100_003]).chain(near_2_31) {
            for size in [1, 2, 3, 4, 5, 7, 8, 64] {
                let shares: Vec<_> = (0..size).map(|rank| share(len, size, rank)).collect();
                assert_eq!((shares[0].start, shares[size - 1].end), (0, len));
                assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{len} {size}");
                let longest = shares.iter().map(|s| s.len()).max().unwrap();
                let shortest = shares.iter().map(|s| s.len()).min().unwrap();
                assert!(longest - shortest <= 2 * LINE, "{len} {size}");
            }
        }
    }
}

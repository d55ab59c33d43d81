//! The interface of transports; all algorithms use only this interface.

use std::ops::Range;
use std::time::Duration;

use meristem_device::{DType, Expect, MemoryFormat, Shape, Stream, Tensor};

use crate::check::{self, GroupRank};
use crate::error::{Error, Result};
use crate::spans::Spans;
use crate::watch::{DeadlineWatch, GroupWatch};

/// Description of a collective call. Ranks exchange it: if calls differ, they fail on all ranks,
/// with an error that names the differing rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveCall {
    /// Name of the operation.
    pub operation: &'static str,
    /// Type of the elements; `None` for an operation without elements.
    pub dtype: Option<DType>,
    /// Shape of a rank's tensor; `[0]` without elements.
    pub shape: Shape,
    /// Memory format of the elements.
    pub format: MemoryFormat,
    /// Another value that must be equal on all ranks: a root, a reduction, a number of elements.
    pub parameter: u64,
    /// Digest of the state that must be equal on all ranks; 0 without state.
    pub state_digest: u64,
}

impl CollectiveCall {
    /// A call without elements.
    pub fn new(operation: &'static str) -> CollectiveCall {
        let (shape, format) = ([0].into(), MemoryFormat::Contiguous);
        CollectiveCall { operation, dtype: None, shape, format, parameter: 0, state_digest: 0 }
    }

    /// A call on tensors like `tensor`.
    pub(crate) fn on(operation: &'static str, tensor: &Tensor) -> CollectiveCall {
        let (dtype, format) = (Some(tensor.dtype()), check::format(tensor));
        CollectiveCall { dtype, shape: tensor.shape(), format, ..CollectiveCall::new(operation) }
    }

    /// A call on elements in several pieces of memory.
    pub(crate) fn flat(operation: &'static str, spans: &Spans) -> CollectiveCall {
        CollectiveCall {
            dtype: Some(spans.dtype()),
            shape: [spans.len()].into(),
            ..CollectiveCall::new(operation)
        }
    }

    /// Number of elements.
    pub(crate) fn count(&self) -> usize {
        self.shape.numel()
    }
}

/// One message: elements to another rank, or from it.
#[derive(Debug, Clone)]
pub struct Parcel {
    /// The other rank.
    pub peer: usize,
    /// The elements, in place.
    pub elements: Spans,
}

impl Parcel {
    /// All elements of a tensor, in memory order.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(peer: usize, tensor: &Tensor) -> Result<Parcel> {
        Ok(Parcel { peer, elements: Spans::try_from(tensor)? })
    }
}

/// The parcels of one rank in an exchange.
#[derive(Clone, Copy)]
pub(crate) struct Parcels<'a> {
    pub(crate) sends: &'a [Parcel],
    pub(crate) receives: &'a [Parcel],
}

/// Checks that the parcels are for other ranks, and on the stream.
pub(crate) fn check_parcels(
    operation: &'static str,
    stream: &Stream,
    group: GroupRank,
    parcels: Parcels<'_>,
) -> Result<()> {
    let (expect, GroupRank { rank: me, size: n }) = (Expect::stream(stream), group);
    for (name, parcels) in [("sends", parcels.sends), ("receives", parcels.receives)] {
        for (i, Parcel { peer, elements }) in parcels.iter().enumerate() {
            if *peer >= n || *peer == me {
                let expected = format!("another rank, below {n}");
                return Err(Error::argument(
                    operation,
                    format!("{name}[{i}].peer"),
                    expected,
                    peer,
                ));
            }
            for piece in elements.pieces() {
                expect.check(operation, format_args!("{name}[{i}]"), piece)?;
            }
        }
    }
    Ok(())
}

/// Combination of the ranks' values in a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reduction {
    /// The sum.
    #[default]
    Sum,
    /// The sum, divided by the number of ranks.
    Mean,
}

/// Order of the additions in a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SumOrder {
    /// From rank 0 upwards: the same bits on every rank, transport and run.
    #[default]
    Rank,
    /// The fastest order of the transport.
    Fast,
}

/// A dense sum over all ranks; in place if both tensors are the same. Transports receive the
/// elements as [`Spans`].
#[derive(Debug, Clone)]
pub struct Sum<'a, T = Tensor> {
    /// This rank's values.
    pub input: &'a T,
    /// Result, with the shape, memory format, element type and stream of the input.
    pub output: &'a T,
    /// Sum or mean.
    pub reduction: Reduction,
    /// Order of the additions.
    pub order: SumOrder,
}

/// The connection of one rank to the other ranks.
///
/// Calls are collective: every rank makes the same calls in the same order. They enqueue work onto
/// `stream` and do not wait for the device, except to read elements into host memory (MPI, TCP,
/// threads on several devices), or before MPI gets their addresses. Whether a call waits for the
/// other ranks' calls depends on the transport. Tensors are device memory of `stream`. No host
/// memory is part of the interface, so it fits queues of an accelerator (`ncclSend` and `ncclRecv`
/// in a group) as well as MPI and shared memory.
///
/// Every rank gets the same error, see [`Error`]. Between processes, a rank may finish a call in
/// which another rank fails; its next call then returns the error.
pub trait Transport: Send {
    /// Name, as on the command line.
    fn name(&self) -> &'static str;

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Sends and receives elements in one exchange. Parcels from one rank to another arrive in the
    /// given order. A received parcel must match the sent one in type and number of elements, and
    /// shares no memory with another parcel of the call. No rank sends to itself.
    ///
    /// # Errors
    /// The errors of the trait; [`Error::BadArgument`] for parcels to this rank or on another
    /// stream, and over MPI for more than 32 parcels to one rank.
    fn exchange(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()>;

    /// Sums with an algorithm of the transport. Returns false, on all ranks, if the transport has
    /// none for this order or for the ranks' devices; [`exchange`](Transport::exchange) is used
    /// then.
    ///
    /// # Errors
    /// The errors of the trait.
    fn all_reduce(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sum: &Sum<'_, Spans>,
    ) -> Result<bool>;

    /// Waits until all ranks have called `barrier`. Does not wait for the device.
    ///
    /// # Errors
    /// The errors of the trait.
    fn barrier(&mut self, call: &CollectiveCall) -> Result<()>;

    /// Notifies the other ranks that this rank failed alone and makes no more calls. They get
    /// [`RankFailed`](crate::Error::RankFailed), at once or from their next call. Not collective;
    /// has no effect after an error of all ranks.
    fn abort(&mut self, reason: &str);

    /// Notifies the other ranks that this rank makes no more calls; its device may still be in an
    /// exchange. Later calls of other ranks get [`RankGone`](crate::Error::RankGone). Dropping the
    /// transport has the same effect.
    fn leave(&mut self) {}

    /// Longest time that a rank waits for another.
    fn deadline(&self) -> Duration;

    /// Returns a view of the group for another thread. The default view reports a loss only at the
    /// deadline, without the rank.
    ///
    /// # Errors
    /// The errors of the trait.
    fn watch(&mut self) -> Result<Box<dyn GroupWatch>> {
        Ok(Box::new(DeadlineWatch { deadline: self.deadline() }))
    }

    /// Splits the group: ranks with equal `color` form a new group, ordered by `key`, then by rank.
    ///
    /// # Errors
    /// The errors of the trait.
    fn split(&mut self, call: &CollectiveCall, color: u64, key: u64) -> Result<Box<dyn Transport>>;
}

/// All ranks except `me`.
pub(crate) fn others(me: usize, n: usize) -> impl Iterator<Item = usize> {
    (0..n).filter(move |peer| *peer != me)
}

/// Elements per cache line for the smallest type. Shards start at multiples of it, so that no two
/// ranks write one line.
const LINE: usize = 32;

/// The shard of rank `rank` among `size` ranks and `len` elements. Shards are contiguous and cover
/// all elements. Their lengths, in units of [`LINE`] elements and rounded up, differ by at most 1.
pub(crate) fn shard(len: usize, size: usize, rank: usize) -> Range<usize> {
    aligned_shard(len, LINE, size, rank)
}

/// A shard as from [`shard`], which starts at a multiple of `unit`.
pub(crate) fn aligned_shard(len: usize, unit: usize, size: usize, rank: usize) -> Range<usize> {
    let units = len.div_ceil(unit);
    // No overflow: a tensor's units are far fewer than usize::MAX / size.
    let at = |rank: usize| (units / size * rank + (units % size).min(rank)) * unit;
    at(rank).min(len)..at(rank + 1).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once() {
        let near_2_31 = [(1usize << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 40) + 7];
        for len in (0..200).chain([1000, 4096, 100_003]).chain(near_2_31) {
            for size in [1, 2, 3, 4, 5, 7, 8, 64] {
                let shares: Vec<_> = (0..size).map(|rank| shard(len, size, rank)).collect();
                assert_eq!((shares[0].start, shares[size - 1].end), (0, len));
                assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{len} {size}");
                let longest = shares.iter().map(|s| s.len()).max().unwrap();
                let shortest = shares.iter().map(|s| s.len()).min().unwrap();
                assert!(longest - shortest <= 2 * LINE, "{len} {size}");
            }
        }
    }
}

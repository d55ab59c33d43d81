//! What a transport does: the one interface over which every algorithm is written.

use crate::check;
use crate::error::{Error, Result};
use crate::spans::Spans;
use meristem_device::{DType, Expect, MemoryFormat, Shape, Stream, Tensor};
use std::ops::Range;

/// A collective call, as every rank describes it to the others: calls that differ fail on all
/// ranks, with an error that names the one that differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Name of the operation.
    pub operation: &'static str,
    /// Type of the elements, if the operation has any.
    pub dtype: Option<DType>,
    /// Shape of a rank's tensor, or `[0]`.
    pub shape: Shape,
    /// The order in which its elements lie.
    pub format: MemoryFormat,
    /// Whatever else must be the same everywhere: a root, a reduction, a number of picks.
    pub parameter: u64,
    /// Digest of what the operation keeps between calls, where that must be the same everywhere, or 0.
    pub kept: u64,
}

impl Call {
    /// An operation without elements.
    pub fn of(operation: &'static str) -> Call {
        let (shape, format) = ([0].into(), MemoryFormat::Contiguous);
        Call { operation, dtype: None, shape, format, parameter: 0, kept: 0 }
    }

    /// An operation on tensors like this one.
    pub(crate) fn on(operation: &'static str, tensor: &Tensor) -> Call {
        let (dtype, format) = (Some(tensor.dtype()), check::format(tensor));
        Call { dtype, shape: tensor.shape(), format, ..Call::of(operation) }
    }

    /// An operation on so many elements, wherever they lie.
    pub(crate) fn flat(operation: &'static str, spans: &Spans) -> Call {
        Call { dtype: Some(spans.dtype()), shape: [spans.len()].into(), ..Call::of(operation) }
    }

    /// Number of elements.
    pub(crate) fn count(&self) -> usize {
        self.shape.numel()
    }
}

/// Elements for, or from, another rank: one message.
#[derive(Debug, Clone)]
pub struct Parcel {
    /// The other rank.
    pub peer: usize,
    /// The elements, where they lie.
    pub elements: Spans,
}

impl Parcel {
    /// All elements of a tensor, in its memory order.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(peer: usize, tensor: &Tensor) -> Result<Parcel> {
        Ok(Parcel { peer, elements: Spans::try_from(tensor)? })
    }
}

/// Error unless the parcels of rank `me` of `n` are of other ranks and of the stream.
pub(crate) fn check_parcels(
    operation: &'static str,
    stream: &Stream,
    (me, n): (usize, usize),
    parcels: [&[Parcel]; 2],
) -> Result<()> {
    let expect = Expect::stream(stream);
    for (name, parcels) in ["sends", "receives"].into_iter().zip(parcels) {
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

/// A dense sum over all ranks, in place if both tensors are one. Transports see the elements as [`Spans`].
#[derive(Debug, Clone)]
pub struct Sum<'a, T = Tensor> {
    /// This rank's values.
    pub input: &'a T,
    /// Where the result goes: of the same shape, memory format and element type, on the same stream.
    pub output: &'a T,
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
/// Errors are the same on every rank, see [`Error`]; where ranks are processes, one
/// that was through when another failed gets the error from its next call.
pub trait Transport: Send {
    /// Name, as on the command line.
    fn name(&self) -> &'static str;

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Sends and receives elements, all at once. Parcels from one rank to another arrive in the
    /// order in which they were given; what is received fits what is sent, in type and number of
    /// elements. Nobody sends to itself.
    ///
    /// # Errors
    /// See the trait, and [`Error::BadArgument`] for parcels of no other rank, or of another stream.
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
    fn all_reduce(&mut self, call: &Call, stream: &Stream, sum: &Sum<'_, Spans>) -> Result<bool>;

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

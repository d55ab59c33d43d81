//! Dense all-reduce over any transport (X1): reduce-scatter, addition in rank order, all-gather.
//!
//! Each rank owns a shard of the elements. A rank sends every other rank the values of the
//! receiver's shard. It then adds the values for its own shard, from rank 0 upwards, and sends the
//! result to all ranks. A rank sends 2 (n - 1) / n of the values on average; the result is the
//! left-to-right sum, bit for bit.

use std::cmp::Ordering;
use std::ops::Range;

use meristem_device::simd::{Vectorized, vectorize};
use meristem_device::{Stream, Tensor};
use smallvec::SmallVec;

use crate::check::GroupRank;
use crate::error::Result;
use crate::gpu;
use crate::number::{SumElement, divide, with_number};
use crate::scratch::CollectiveScratch;
use crate::spans::{Spans, parts};
use crate::transport::{CollectiveCall, Parcel, Reduction, Sum, Transport, others, shard};

/// All-reduce by exchanges.
pub(crate) fn all_reduce(
    transport: &mut dyn Transport,
    scratch: &mut CollectiveScratch,
    call: &CollectiveCall,
    stream: &Stream,
    sum: &Sum<'_, Spans>,
) -> Result<()> {
    let (input, output) = (sum.input, sum.output);
    let (n, me, len) = (transport.size(), transport.rank(), input.len());
    let own = shard(len, n, me);
    let of = |rank: usize| shard(len, n, rank);
    let rows = scratch.get(stream, input.dtype(), own.len() * (n - 1))?;
    let mut sends = Vec::with_capacity(n - 1);
    let mut receives = Vec::with_capacity(n - 1);
    for (row, peer) in others(me, n).enumerate() {
        sends.push(Parcel { peer, elements: input.window(of(peer))? });
        receives.push(Parcel::new(peer, &rows.view(row * own.len(), [own.len()])?)?);
    }
    transport.exchange(call, stream, &sends, &receives)?;
    add(stream, &rows, sum, GroupRank { rank: me, size: n }, &own)?;

    sends.clear();
    receives.clear();
    let mine = output.window(own)?;
    for peer in others(me, n) {
        sends.push(Parcel { peer, elements: mine.clone() });
        receives.push(Parcel { peer, elements: output.window(of(peer))? });
    }
    transport.exchange(call, stream, &sends, &receives)
}

/// Adds the received rows and this rank's shard of the input in rank order, into the output's
/// shard.
pub(crate) fn add(
    stream: &Stream,
    rows: &Tensor,
    sum: &Sum<'_, Spans>,
    group: GroupRank,
    own: &Range<usize>,
) -> Result<()> {
    let GroupRank { rank: me, size: n } = group;
    let &Sum { input, output, reduction, .. } = sum;
    let in_place = input.is_same(output);
    let mut pieces = Vec::new();
    for part in parts([input, output].into_iter(), own) {
        pieces.extend(output.window(part.clone())?.into_pieces());
        if !in_place {
            pieces.extend(input.window(part)?.into_pieces());
        }
    }
    let mut launch = stream.launch("all_reduce, add").write(rows);
    for (i, piece) in pieces.iter().enumerate() {
        let is_output = in_place || i % 2 == 0;
        launch = if is_output { launch.write(piece) } else { launch.read(piece) };
    }
    let divisor = (reduction == Reduction::Mean).then_some(n);
    let len = own.len();
    let launch = launch.gpu(|| adds(&pieces, in_place, group, len, divisor));
    with_number!(
        input.dtype(),
        T => launch.run(move |args| {
            let (rows, mut start) = (&*args.write::<T>(0), 0);
            for at in (1..args.len()).step_by(if in_place { 1 } else { 2 }) {
                let own = args.write::<T>(at);
                if !in_place {
                    own.copy_from_slice(args.read(at + 1));
                }
                let rows = (0..n - 1).map(|row| &rows[row * len + start..][..own.len()]).collect();
                start += own.len();
                vectorize(args.isa(), AddRows { rows, own, me, divisor });
            }
        })?,
        unreachable!("all_reduce checks the element type")
    );
    Ok(())
}

/// The calls of [`add`] on a CUDA device, part by part. `pieces` are the arguments after argument
/// 0, which holds the received rows.
fn adds(
    pieces: &[Tensor],
    in_place: bool,
    group: GroupRank,
    len: usize,
    divisor: Option<usize>,
) -> Vec<gpu::Call> {
    let GroupRank { rank: me, size: n } = group;
    let mut start = 0;
    let part = |(i, part): (usize, &[Tensor])| {
        let (dtype, own) = (part[0].dtype(), part[0].numel());
        let at = 1 + i * part.len();
        let target = gpu::whole(at, &part[0]);
        let source = if in_place { target } else { gpu::whole(at + 1, &part[1]) };
        let row = |row: usize| gpu::part(0, dtype, row * len + start, own);
        let of = |rank: usize| match rank.cmp(&me) {
            Ordering::Less => row(rank),
            Ordering::Equal => source,
            Ordering::Greater => row(rank - 1),
        };
        let sources: SmallVec<[_; 8]> = (0..n).map(of).collect();
        // The partial sum overwrites a received row and not the target, because this rank's
        // elements in the target may be added by a later call.
        let partial = if n > 1 { row(0) } else { target };
        start += own;
        gpu::sum(
            dtype,
            &gpu::RankPieces { sources: &sources, targets: &[target], partial },
            divisor,
        )
    };
    let parts = pieces.chunks(if in_place { 1 } else { 2 }).enumerate();
    parts.flat_map(part).collect()
}

struct AddRows<'a, T> {
    /// Rows of the other ranks, each as long as `own`.
    rows: SmallVec<[&'a [T]; 8]>,
    own: &'a mut [T],
    me: usize,
    divisor: Option<usize>,
}

/// Block of elements added together, as in the sum over threads.
const BLOCK: usize = 1024;

impl<T: SumElement> Vectorized for AddRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let len = self.own.len();
        let mut buffer = [T::ZERO; BLOCK];
        for start in (0..len).step_by(BLOCK) {
            let end = len.min(start + BLOCK);
            let sum = &mut buffer[..end - start];
            for rank in 0..=self.rows.len() {
                let values = match rank.cmp(&self.me) {
                    Ordering::Less => &self.rows[rank][start..end],
                    Ordering::Equal => &self.own[start..end],
                    Ordering::Greater => &self.rows[rank - 1][start..end],
                };
                if rank == 0 {
                    sum.copy_from_slice(values);
                } else {
                    sum.iter_mut().zip(values).for_each(|(sum, x)| *sum = sum.plus(*x));
                }
            }
            divide(sum, self.divisor);
            self.own[start..end].copy_from_slice(sum);
        }
    }
}

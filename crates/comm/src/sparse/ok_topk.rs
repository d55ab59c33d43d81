//! Ok-Topk (X5): split and reduce (after Li and Hoefler, "Near-Optimal Sparse Allreduce for
//! Distributed Deep Learning", PPoPP 2022).
//!
//! The elements are divided into m = min(n, k) regions, each owned by a rank. A rank sends every
//! owner its k / m largest picks in the owner's region. The owner adds the lists in rank order and
//! sends the 2 k / m largest sums to all ranks. Every rank keeps the k largest of all received
//! sums. Picks that were not sent, or are not in the result, stay in the residual.
//!
//! Every T exchanges (`refresh`) the local threshold is recomputed exactly, and the bounds are
//! moved so that all regions have equally many elements of the last result. All ranks follow the
//! same schedule, so they agree without communication. In between, a selection that fills the picks
//! sets the threshold to their smallest magnitude, and the bounds stay.
//!
//! ```text
//! every rank:  picks = the elements of residual + gradient that reach the local threshold, about k
//!              for each owner o:  send the k / m largest picks of region o to o        (split)
//! owner o:     sum = merge of the lists of all ranks, in rank order
//!              send the 2 k / m largest entries of sum to all ranks                    (reduce)
//! every rank:  result = the k largest entries of all received sums                     (finish)
//!              residual' = residual + gradient, cleared at the sent picks that are in result
//!
//! 4 ranks, 4 regions     │ region 0 │ region 1 │ region 2 │ region 3 │
//! picks of rank 2        │  x     x │     x    │ own      │  x  x    │
//! sent by rank 2           to 0       to 1       kept       to 3
//! then each owner to all   ◀──────── 2 k / 4 sums of region 0 … 3 ────────▶
//! ```
//!
//! # Why it is fast
//! Gathered top-k sends every rank's list to every rank: 2 k (n - 1) words per rank, which grows
//! with n. Here a list entry goes to one owner, and only sums go to all ranks. Together the ranks
//! send at most 6 k (n - 1) words, or 6 k (n - 1) / n per rank: below 6 k for any number of ranks.
//! Messages have a fixed size, so no sizes are exchanged. A reused threshold replaces an exact
//! selection by one pass over the gradient.
//!
//! # Assumptions
//! Gradients change slowly. A threshold then stays usable for T exchanges (if fewer than half of k
//! elements reach it, or too many, the selection is exact), and the bounds balance the picks of the
//! next exchanges. Unbalanced picks are still correct: picks that do not fit into an owner's list
//! stay in the residual.

use std::hash::{DefaultHasher, Hash, Hasher};

use meristem_device::{Args, DType, Launch, Owner, Stream, Tensor};

use super::lists::{ListEntries, Lists, NONE, intersect, keep_largest, merge, scatter};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::gpu;
use crate::number::{SumElement, with_number};
use crate::spans::Spans;
use crate::transport::{CollectiveCall, others};

/// Memory for exchanges of one size.
pub(crate) struct OkTopKBuffers {
    /// `[1, k]`. An exchange leaves in its indices those sent picks that are in the result.
    picks: Lists,
    /// [m, k / m]: row o is sent to owner o.
    sends: Lists,
    /// [n, k / m]: row r is from rank r; only on owners.
    received: Lists,
    /// `[m, 2 k / m]`: row o is the list from owner o to all ranks.
    reduced: Lists,
    /// Two alternating buffers for the union of the lists that an owner received; the first one is
    /// also scratch memory of `finish`.
    unions: [Lists; 2],
    /// `[1, k]`
    result: Lists,
    /// `[m - 1]`: inner bounds of the regions.
    bounds: Tensor,
    /// `[1]` i64: the local threshold.
    threshold: Tensor,
    /// Number of completed exchanges.
    step: u64,
    /// Digest of the imported step and regions; 0 without an import.
    imported: u64,
    refresh: u64,
    me: usize,
    /// On a CUDA device only.
    tables: Option<gpu::SelectionTables>,
}

impl OkTopKBuffers {
    pub(crate) fn new(
        comm: &Communicator,
        stream: &Stream,
        dtype: DType,
        (len, k): (usize, usize),
        refresh: u64,
    ) -> Result<Self> {
        let (n, m) = (comm.size(), comm.size().min(k));
        let (room, back) = (k / m, 2 * k / m);
        let union = (n * room).max(m * back);
        let lists = |rows, len| Lists::new(stream, dtype, rows, len);
        // The first regions have equal sizes.
        let even: Vec<u32> = (1..m).map(|i| (i * len / m) as u32).collect();
        let bounds = Tensor::from_slice(stream, &even, [m - 1], Owner::Collectives)?;
        Ok(OkTopKBuffers {
            picks: lists(1, k)?,
            sends: lists(m, room)?,
            received: lists(if comm.rank() < m { n } else { 0 }, room)?,
            reduced: lists(m, back)?,
            unions: [lists(1, union)?, lists(1, union)?],
            result: lists(1, k)?,
            bounds,
            threshold: Tensor::zeros(stream, [1], DType::I64, Owner::Collectives)?,
            step: 0,
            imported: 0,
            refresh: refresh.max(1),
            me: comm.rank(),
            tables: gpu::SelectionTables::new(stream, m, union.max(k))?,
        })
    }

    pub(crate) fn picks(&self) -> Result<Lists> {
        self.picks.row(0)
    }

    /// The local threshold, and whether to recompute it exactly.
    pub(crate) fn threshold(&self) -> (&Tensor, bool) {
        (&self.threshold, self.step.is_multiple_of(self.refresh))
    }

    /// Digest of the state that must be equal on all ranks: the schedule, and the regions. Without
    /// an import all ranks have the same regions, which follow from the results; imported regions
    /// are part of `imported`.
    pub(crate) fn shared_digest(&self) -> u64 {
        digest(&(self.imported, self.step, self.refresh))
    }

    /// Exports step, threshold and bounds. Waits for the device.
    pub(crate) fn export(&self) -> Result<Vec<u8>> {
        let parts = meristem_device::read_back(&[&self.threshold, &self.bounds])?;
        Ok([self.step.to_ne_bytes().to_vec(), parts.concat()].concat())
    }

    /// Imports bytes of [`export`](OkTopKBuffers::export) with the same number of regions; ignores
    /// other bytes.
    pub(crate) fn import(&mut self, bytes: &[u8]) -> Result<()> {
        let Some((step, rest)) = bytes.split_first_chunk::<8>() else { return Ok(()) };
        let Some((threshold, rest)) = rest.split_first_chunk::<8>() else { return Ok(()) };
        if rest.len() != self.bounds.numel() * 4 {
            return Ok(());
        }
        let bounds: Vec<u32> = rest.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        self.threshold.copy_from_slice(&[i64::from_ne_bytes(*threshold)])?;
        self.bounds.copy_from_slice(&bounds)?;
        self.step = u64::from_ne_bytes(*step);
        self.imported = digest(&(self.step, bounds));
        Ok(())
    }

    /// Exchanges the picks and writes the result. Returns the indices of those sent picks that are
    /// in the result.
    pub(crate) fn sum(
        &mut self,
        comm: &mut Communicator,
        call: &CollectiveCall,
        divisor: Option<usize>,
        output: &Spans,
    ) -> Result<Tensor> {
        let (n, me, stream) = (comm.size(), self.me, output.stream());
        let owners = n.min(self.picks.len);
        self.split()?;
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for owner in others(me, n).filter(|owner| *owner < owners) {
            sends.extend(self.sends.row(owner)?.parcels(owner)?);
        }
        for peer in others(me, n).filter(|_| me < owners) {
            receives.extend(self.received.row(peer)?.parcels(peer)?);
        }
        comm.exchange(call, stream, &sends, &receives)?;
        sends.clear();
        receives.clear();
        if me < owners {
            self.reduce()?;
            let own = self.reduced.row(me)?;
            for peer in others(me, n) {
                sends.extend(own.parcels(peer)?);
            }
        }
        for owner in others(me, n).filter(|owner| *owner < owners) {
            receives.extend(self.reduced.row(owner)?.parcels(owner)?);
        }
        comm.exchange(call, stream, &sends, &receives)?;
        self.finish(divisor, output)?;
        self.step += 1;
        Ok(self.picks.indices.clone())
    }

    /// Divides the picks by region into the lists for the owners.
    fn split(&self) -> Result<()> {
        let (picks, sends) = (&self.picks, &self.sends);
        let room = sends.len;
        let launch = self.bounds.stream().launch("ok-topk, split");
        let launch = launch.read(&picks.indices).read(&picks.values).read(&self.bounds);
        let launch = launch.write(&sends.indices).write(&sends.values);
        let launch = self.with_tables(launch).gpu(|| self.split_on_gpu());
        with_number!(
            picks.values.dtype(),
            T => launch.run(move |args| split::<T>(args, room))?,
            unreachable!("checked when the exchange was made")
        );
        Ok(())
    }

    /// Adds the received lists of this rank's region.
    fn reduce(&self) -> Result<()> {
        let (me, room) = (self.me, self.sends.len);
        let (own, to) = (self.sends.row(me)?, self.reduced.row(me)?);
        let launch = self.bounds.stream().launch("ok-topk, reduce");
        let launch = launch.read(&own.indices).read(&own.values);
        let launch = launch.read(&self.received.indices).read(&self.received.values);
        let launch = launch.write(&to.indices).write(&to.values);
        let launch = self
            .unions
            .iter()
            .fold(launch, |launch, union| launch.write(&union.indices).write(&union.values));
        let launch = self.with_tables(launch).gpu(|| self.reduce_on_gpu(&own, &to));
        with_number!(
            own.values.dtype(),
            T => launch.run(move |args| reduce::<T>(args, me, room))?,
            unreachable!("checked when the exchange was made")
        );
        Ok(())
    }

    /// Keeps the largest of the received sums, writes the dense result, and keeps the sent picks
    /// that are in the result. On schedule it also moves the bounds of the regions.
    fn finish(&self, divisor: Option<usize>, output: &Spans) -> Result<()> {
        let back = self.reduced.len;
        let anew = self.step.is_multiple_of(self.refresh);
        let union = &self.unions[0];
        let launch = self.bounds.stream().launch("ok-topk, finish");
        let launch = launch.read(&self.reduced.indices).read(&self.reduced.values);
        let launch = launch.read(&self.sends.indices);
        let launch = launch.write(&union.indices).write(&union.values);
        let launch = launch.write(&self.result.indices).write(&self.result.values);
        let launch = launch.write(&self.picks.indices).write(&self.bounds);
        let launch = output.pieces().iter().fold(launch, |launch, piece| launch.write(piece));
        let launch = self.with_tables(launch).gpu(|| self.finish_on_gpu(divisor, output, anew));
        let room = self.sends.len;
        with_number!(
            output.dtype(),
            T => launch.run(move |args| finish::<T>(args, (room, back), divisor, anew))?,
            unreachable!("checked when the exchange was made")
        );
        Ok(())
    }
}

/// The calls on a CUDA device. Arguments are in the order of the launches, then the tables.
impl OkTopKBuffers {
    fn with_tables<'a>(&'a self, launch: Launch<'a>) -> Launch<'a> {
        let tables = self.tables.iter().flat_map(gpu::SelectionTables::tensors);
        tables.fold(launch, |launch, tensor| launch.write(tensor))
    }

    fn split_on_gpu(&self) -> Vec<gpu::Call> {
        let Some(tables) = &self.tables else { return Vec::new() };
        gpu::from_list(&gpu::ListSelection {
            dtype: self.picks.values.dtype(),
            list: self.picks.at(0),
            bounds: Some(gpu::whole(2, &self.bounds)),
            to: self.sends.at(3),
            tables: gpu::TableArguments::at(5, tables),
        })
    }

    fn reduce_on_gpu(&self, own: &Lists, to: &Lists) -> Vec<gpu::Call> {
        let Some(tables) = &self.tables else { return Vec::new() };
        let (dtype, received) = (own.values.dtype(), &self.received);
        let rows = received.indices.numel() / received.len;
        let merge =
            gpu::Merge { own: own.at(0), me: self.me, others: received.at(2), first: 0, rows };
        let union = self.unions[0].at(6);
        let used = |piece| gpu::Piece { len: rows * own.len, ..piece };
        let (indices, values) = (used(union.indices), used(union.values));
        let list = gpu::ListPieces { indices, values };
        let tables = gpu::TableArguments::at(10, tables);
        let listed = gpu::ListSelection { dtype, list, bounds: None, to: to.at(4), tables };
        let mut calls = vec![gpu::merge(dtype, &merge, list)];
        calls.extend(gpu::from_list(&listed));
        calls
    }

    fn finish_on_gpu(&self, divisor: Option<usize>, output: &Spans, anew: bool) -> Vec<gpu::Call> {
        let Some(tables) = &self.tables else { return Vec::new() };
        let (dtype, outputs) = (output.dtype(), output.pieces());
        let output_at = |(i, piece): (usize, &Tensor)| gpu::whole(9 + i, piece);
        let outputs_at: Vec<_> = outputs.iter().enumerate().map(output_at).collect();
        let tables = gpu::TableArguments::at(9 + outputs.len(), tables);
        let (list, result) = (self.reduced.at(0), self.result.at(5));
        let mut calls =
            gpu::from_list(&gpu::ListSelection { dtype, list, bounds: None, to: result, tables });
        if anew {
            calls.push(gpu::divide_up(result.indices, tables, gpu::whole(8, &self.bounds)));
        }
        calls.extend(gpu::scatter(dtype, result, self.result.len, &outputs_at, divisor));
        let sent = gpu::Compaction {
            list: gpu::whole(2, &self.sends.indices),
            holes: gpu::whole(3, &self.unions[0].indices),
            to: gpu::whole(7, &self.picks.indices),
            tables,
        };
        calls.extend(gpu::common(&sent, result.indices));
        calls
    }
}

/// Digest of a value, equal in all processes of one program.
fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn split<T: SumElement>(args: &mut Args<'_>, room: usize) {
    let mut picks = ListEntries::used(args.read(0), args.read::<T>(1));
    let bounds = args.read::<u32>(2);
    let (indices, values) = (args.write::<u32>(3), args.write::<T>(4));
    let rows = indices.chunks_mut(room).zip(values.chunks_mut(room));
    for (owner, (indices, values)) in rows.enumerate() {
        let end = bounds.get(owner).copied().unwrap_or(NONE);
        let (here, later) = picks.split_at(picks.indices.partition_point(|index| *index < end));
        picks = later;
        keep_largest(here, indices, values);
    }
}

fn reduce<T: SumElement>(args: &mut Args<'_>, me: usize, room: usize) {
    let own = ListEntries::used(args.read(0), args.read::<T>(1));
    let rows = ListEntries::rows(args.read(2), args.read::<T>(3), room);
    let (indices, values) = (args.write::<u32>(4), args.write::<T>(5));
    let (mut sum, mut sum_values) = (args.write::<u32>(6), args.write::<T>(7));
    let (mut next, mut next_values) = (args.write::<u32>(8), args.write::<T>(9));
    let mut len = 0;
    // In rank order; this rank's own row is stored elsewhere.
    for (rank, row) in rows.enumerate() {
        let row = if rank == me { own } else { row };
        let so_far = ListEntries { indices: &sum[..len], values: &sum_values[..len] };
        len = merge(so_far, row, next, next_values);
        std::mem::swap(&mut sum, &mut next);
        std::mem::swap(&mut sum_values, &mut next_values);
    }
    let all = ListEntries { indices: &sum[..len], values: &sum_values[..len] };
    keep_largest(all, indices, values);
}

fn finish<T: SumElement>(
    args: &mut Args<'_>,
    (room, back): (usize, usize),
    divisor: Option<usize>,
    anew: bool,
) {
    let rows = ListEntries::rows(args.read(0), args.read::<T>(1), back);
    let sent = args.read::<u32>(2);
    let (indices, values) = (args.write::<u32>(3), args.write::<T>(4));
    let (result_indices, result_values) = (args.write::<u32>(5), args.write::<T>(6));
    let (picks, bounds) = (args.write::<u32>(7), args.write::<u32>(8));
    // Regions are in ascending order, so the concatenated rows are, too.
    let mut len = 0;
    for row in rows {
        let to = len..len + row.indices.len();
        indices[to.clone()].copy_from_slice(row.indices);
        values[to.clone()].copy_from_slice(row.values);
        len = to.end;
    }
    let all = ListEntries { indices: &indices[..len], values: &values[..len] };
    keep_largest(all, result_indices, result_values);
    let result = ListEntries::used(result_indices, result_values);
    scatter([result].into_iter(), divisor, args, 9..);

    picks.fill(NONE);
    let sent = sent.chunks(room).flat_map(|row| row.iter().take_while(|index| **index != NONE));
    picks.iter_mut().zip(sent).for_each(|(pick, index)| *pick = *index);
    intersect(picks, result.indices);

    if anew {
        let m = bounds.len() + 1;
        for (i, bound) in bounds.iter_mut().enumerate() {
            // First index of the next region; unchanged for an empty result.
            let place = (i + 1) * result.indices.len() / m;
            *bound = result.indices.get(place).copied().unwrap_or(*bound);
        }
    }
}

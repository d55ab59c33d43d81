//! gTop-k (X4): k large elements of the global sum, by a tree of merges (Shi et al., "A Distributed
//! Synchronous SGD Algorithm with Global Top-k Sparsification", ICDCS 2019). For any number of
//! ranks. The exact k largest of the sum may differ: an element that a list dropped is not added.
//!
//! At level l, a rank whose number is an odd multiple of 2^l sends its list to the rank 2^l below
//! it, which merges both lists and keeps the k largest entries. The final list is then sent back
//! down the tree.
//!
//! The sender of a list also gets a bit mask: which of its entries are part of the result. Indices
//! alone do not show that, because an index may come from another list. All other entries return to
//! the residual of their rank. All ranks together send (n - 1)(4 k + k / 32) words, k / 32 rounded
//! up.

use meristem_device::{Args, DType, Launch, Owner, Stream, Tensor};

use super::lists::{ListEntries, Lists, NONE, intersect, keep_largest, merge};
use super::topk;
use crate::communicator::Communicator;
use crate::error::Result;
use crate::gpu;
use crate::number::{SumElement, with_number};
use crate::spans::Spans;
use crate::transport::{CollectiveCall, Parcel};

/// Memory for exchanges of one size.
pub(crate) struct GTopKBuffers {
    /// [levels + 1, k]: this rank's list after each merge.
    own: Lists,
    /// [levels, k]: the list received at each level.
    incoming: Lists,
    /// [1, k]: the final list.
    last: Lists,
    /// [1, 2 k]: the union of two lists.
    union: Lists,
    /// k / 32 u32, rounded up: a bit for each entry of the child's list.
    mask: Tensor,
    /// k u32: indices of the entries of the current list that are part of the result.
    alive: Tensor,
    levels: usize,
    /// On a CUDA device only.
    tables: Option<gpu::SelectionTables>,
}

impl GTopKBuffers {
    pub(crate) fn new(
        comm: &Communicator,
        stream: &Stream,
        dtype: DType,
        k: usize,
    ) -> Result<Self> {
        let levels = comm.size().next_power_of_two().trailing_zeros() as usize;
        let words = |len| Tensor::empty(stream, [len], DType::U32, Owner::Collectives);
        Ok(GTopKBuffers {
            own: Lists::new(stream, dtype, levels + 1, k)?,
            incoming: Lists::new(stream, dtype, levels, k)?,
            last: Lists::new(stream, dtype, 1, k)?,
            union: Lists::new(stream, dtype, 1, 2 * k)?,
            mask: words(k.div_ceil(32))?,
            alive: words(k)?,
            levels,
            tables: gpu::SelectionTables::new(stream, 1, 2 * k)?,
        })
    }

    pub(crate) fn picks(&self) -> Result<Lists> {
        self.own.row(0)
    }

    /// Exchanges the picks and writes the result. Returns the indices of the picks in the result.
    pub(crate) fn sum(
        &self,
        comm: &mut Communicator,
        call: &CollectiveCall,
        divisor: Option<usize>,
        output: &Spans,
    ) -> Result<Tensor> {
        let (n, me, stream) = (comm.size(), comm.rank(), output.stream());
        let mut merges = 0;
        for level in 0..self.levels {
            let (sends, receives) = match role(me, n, level) {
                TreeRole::Child(parent) => {
                    (self.own.row(merges)?.parcels(parent)?.to_vec(), vec![])
                }
                TreeRole::Parent(child) => {
                    (vec![], self.incoming.row(level)?.parcels(child)?.to_vec())
                }
                TreeRole::Idle => (vec![], vec![]),
            };
            comm.exchange(call, stream, &sends, &receives)?;
            if let TreeRole::Parent(_) = role(me, n, level) {
                self.merge(merges, level)?;
                merges += 1;
            }
        }
        let last = if me == 0 { self.own.row(merges)? } else { self.last.row(0)? };
        if me == 0 {
            stream.copy("gtopk, all of it", &[(&last.indices, &self.alive)])?;
        }
        for level in (0..self.levels).rev() {
            let with_mask = |peer| -> Result<Vec<Parcel>> {
                let [indices, values] = last.parcels(peer)?;
                Ok(vec![indices, values, Parcel::new(peer, &self.mask)?])
            };
            let (sends, receives) = match role(me, n, level) {
                TreeRole::Parent(child) => {
                    merges -= 1;
                    self.mark(merges, level)?;
                    (with_mask(child)?, vec![])
                }
                TreeRole::Child(parent) => (vec![], with_mask(parent)?),
                TreeRole::Idle => (vec![], vec![]),
            };
            comm.exchange(call, stream, &sends, &receives)?;
            if let TreeRole::Child(_) = role(me, n, level) {
                self.unmark(merges)?;
            }
        }
        topk::add(&last, divisor, output)?;
        Ok(self.alive.clone())
    }

    /// Merges the own list and the received list into the next own list.
    fn merge(&self, merges: usize, level: usize) -> Result<()> {
        let (own, came) = (self.own.row(merges)?, self.incoming.row(level)?);
        let next = self.own.row(merges + 1)?;
        let stream = self.alive.stream();
        let launch = stream.launch("gtopk, merge").read(&own.indices).read(&own.values);
        let launch = launch.read(&came.indices).read(&came.values);
        let launch = launch.write(&next.indices).write(&next.values);
        let launch = launch.write(&self.union.indices).write(&self.union.values);
        let launch = self.with_tables(launch).gpu(|| self.merge_on_gpu(&own, &came, &next));
        with_number!(
            own.values.dtype(),
            T => launch.run(merge_and_keep::<T>)?,
            unreachable!("checked when the exchange was made")
        );
        Ok(())
    }

    /// Computes the child's bit mask, and reduces `alive` to entries of the own list before the
    /// merge.
    fn mark(&self, merges: usize, level: usize) -> Result<()> {
        let (own, came) = (self.own.row(merges)?, self.incoming.row(level)?);
        let stream = self.alive.stream();
        let launch = stream.launch("gtopk, mark").read(&own.indices).read(&came.indices);
        let launch = launch.write(&self.alive).write(&self.mask).write(&self.union.indices);
        let launch = self.with_tables(launch).gpu(|| {
            let (own, came) = (gpu::whole(0, &own.indices), gpu::whole(1, &came.indices));
            let (alive, mask) = (gpu::whole(2, &self.alive), gpu::whole(3, &self.mask));
            let mut calls = vec![gpu::mark(came, alive, mask)];
            calls.extend(
                self.compaction(alive, alive, 4).iter().flat_map(|of| gpu::common(of, own)),
            );
            calls
        });
        launch.run(|args| {
            let (own, came) = (args.read::<u32>(0), args.read::<u32>(1));
            let (alive, mask) = (args.write::<u32>(2), args.write::<u32>(3));
            mask.fill(0);
            let mut at = 0;
            for (i, index) in came.iter().enumerate().take_while(|(_, index)| **index != NONE) {
                while alive.get(at).is_some_and(|other| other < index) {
                    at += 1;
                }
                mask[i / 32] |= u32::from(alive.get(at) == Some(index)) << (i % 32);
            }
            intersect(alive, own);
        })?;
        Ok(())
    }

    /// Sets `alive` to the entries of the list sent to the parent whose bits are set.
    fn unmark(&self, merges: usize) -> Result<()> {
        let own = self.own.row(merges)?;
        let stream = self.alive.stream();
        let launch = stream.launch("gtopk, unmark").read(&own.indices).read(&self.mask);
        let launch = launch.write(&self.alive).write(&self.union.indices);
        let launch = self.with_tables(launch).gpu(|| {
            let (own, mask) = (gpu::whole(0, &own.indices), gpu::whole(1, &self.mask));
            let of = self.compaction(own, gpu::whole(2, &self.alive), 3);
            of.iter().flat_map(|of| gpu::unmark(of, mask)).collect::<Vec<_>>()
        });
        launch.run(|args| {
            let (own, mask) = (args.read::<u32>(0), args.read::<u32>(1));
            let alive = args.write::<u32>(2);
            let mut n = 0;
            for (i, index) in own.iter().enumerate().filter(|(_, index)| **index != NONE) {
                if mask[i / 32] >> (i % 32) & 1 == 1 {
                    alive[n] = *index;
                    n += 1;
                }
            }
            alive[n..].fill(NONE);
        })?;
        Ok(())
    }
}

/// On a CUDA device only.
impl GTopKBuffers {
    fn with_tables<'a>(&'a self, launch: Launch<'a>) -> Launch<'a> {
        let tables = self.tables.iter().flat_map(gpu::SelectionTables::tensors);
        tables.fold(launch, |launch, tensor| launch.write(tensor))
    }

    /// The calls of [`merge_and_keep`], with the tables as the last arguments.
    fn merge_on_gpu(&self, own: &Lists, came: &Lists, next: &Lists) -> Vec<gpu::Call> {
        let Some(tables) = &self.tables else { return Vec::new() };
        let dtype = own.values.dtype();
        let rows = gpu::Merge { own: own.at(0), me: 0, others: came.at(2), first: 1, rows: 2 };
        let (list, to, tables) = (self.union.at(6), next.at(4), gpu::TableArguments::at(8, tables));
        let listed = gpu::ListSelection { dtype, list, bounds: None, to, tables };
        let mut calls = vec![gpu::merge(dtype, &rows, list)];
        calls.extend(gpu::from_list(&listed));
        calls
    }

    /// A compaction with `union.indices` as its holes: argument `first`, followed by the tables.
    fn compaction(
        &self,
        list: gpu::Piece,
        to: gpu::Piece,
        first: usize,
    ) -> Option<gpu::Compaction> {
        let tables = gpu::TableArguments::at(first + 1, self.tables.as_ref()?);
        Some(gpu::Compaction { list, holes: gpu::whole(first, &self.union.indices), to, tables })
    }
}

/// Role of a rank at a level of the tree.
enum TreeRole {
    /// The own rank receives the list of this child.
    Parent(usize),
    /// The own rank sends its list to this parent.
    Child(usize),
    Idle,
}

fn role(me: usize, n: usize, level: usize) -> TreeRole {
    let step = 1 << level;
    match me % (2 * step) {
        0 if me + step < n => TreeRole::Parent(me + step),
        rest if rest == step => TreeRole::Child(me - step),
        _ => TreeRole::Idle,
    }
}

fn merge_and_keep<T: SumElement>(args: &mut Args<'_>) {
    let own = ListEntries::used(args.read(0), args.read::<T>(1));
    let came = ListEntries::used(args.read(2), args.read::<T>(3));
    let (indices, values) = (args.write::<u32>(4), args.write::<T>(5));
    let (union, sums) = (args.write::<u32>(6), args.write::<T>(7));
    let n = merge(own, came, union, sums);
    let all = ListEntries { indices: &union[..n], values: &sums[..n] };
    keep_largest(all, indices, values);
}

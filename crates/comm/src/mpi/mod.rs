//! Ranks that are processes, over an MPI library (feature `mpi`).
//!
//! Handles of the `mpi` crate must stay on one thread. This thread makes all calls of the library;
//! ranks send it requests over a channel. MPI takes host memory, so an exchange waits once for the
//! stream of the elements to send. The stream copies received elements without a wait.
//!
//! Invariants
//! - All calls are non-blocking: sends, receives and probes are polled until a deadline. Messages
//!   of a lost process never arrive, and MPI's collectives would wait for them for ever. Finalizing
//!   is collective, so it is done only after all ranks have left in order.
//! - The size of a message is checked before it is received. The `mpi` crate drops status codes, so
//!   MPI's default error handler stays set, which ends the process.
//! - The memory of a request that may never end stays allocated: see [`thread`].

mod group;
mod thread;
mod transfer;

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use meristem_device::Stream;

use self::group::GROUPS_MAX;
use self::thread::{MpiExchange, MpiJob, unavailable};
use self::transfer::{Incoming, Outgoing};
use crate::check::GroupRank;
use crate::error::{Error, Result};
use crate::log::COMM_LOG;
use crate::spans::Spans;
use crate::sync::lock;
use crate::transport::{CollectiveCall, Parcel, Parcels, Sum, Transport, check_parcels, others};
use crate::watch::{ExchangeProblem, GroupStatus, GroupWatch, Heartbeat, endless};
use crate::{host, wire};

/// Time for the MPI thread to answer a watching thread; more than it takes to send notices.
const ANSWER: Duration = Duration::from_secs(5);

/// Connection to the MPI thread, shared by all groups of the process. Dropping it ends MPI.
struct MpiLink {
    jobs: Option<SyncSender<MpiJob>>,
    /// Channel that disconnects when the thread has finalized MPI, or has given up waiting for the
    /// other ranks.
    over: Mutex<Receiver<()>>,
    /// Number of the next group. Locked during a split, so that each number is assigned once.
    next_context: Mutex<i32>,
}

impl Drop for MpiLink {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = lock(&self.over).recv();
    }
}

/// The transport of a rank that is a process.
struct Mpi {
    link: Arc<MpiLink>,
    /// Number of the group.
    context: i32,
    /// Rank among all processes, per rank of this group.
    members: Arc<[i32]>,
    rank: usize,
    deadline: Duration,
    /// Receive buffers. A buffer is free again after a stream has copied it.
    pool: Vec<Arc<Vec<u8>>>,
}

/// Starts MPI in this process and connects all processes that were started together.
///
/// # Errors
/// [`Error::Unavailable`] on a second start, without thread support in the library, or for a
/// process that does not join within the deadline.
pub(crate) fn world(deadline: Duration) -> Result<Box<dyn Transport>> {
    let (jobs, todo) = sync_channel(64);
    let (finish, over) = sync_channel(0);
    let (ready, started) = sync_channel(1);
    std::thread::Builder::new()
        .name("mpi".to_owned())
        .spawn(move || thread::run(todo, &ready, deadline, finish))
        .map_err(|_| unavailable("cannot start its thread", "free some memory"))?;
    let gone = |error| match error {
        RecvTimeoutError::Disconnected => unavailable("it did not start", "read its output"),
        RecvTimeoutError::Timeout => unavailable(
            "not all processes joined within the deadline",
            "start the same program with the same transport in all processes",
        ),
    };
    let (rank, size) = started.recv_timeout(deadline).map_err(gone)??;
    tracing::debug!(target: COMM_LOG, rank, size, library = library(), "MPI has started");
    let next_context = Mutex::new(1);
    let link = Arc::new(MpiLink { jobs: Some(jobs), over: Mutex::new(over), next_context });
    let members = (0..size as i32).collect();
    Ok(Box::new(Mpi { link, context: 0, members, rank, deadline, pool: Vec::new() }))
}

/// Version text of the library.
pub(crate) fn library() -> Option<String> {
    let text = mpi::environment::library_version().ok()?;
    Some(text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned())
}

/// Variables that turn on logs of messages and connections in Open MPI, and a list of the settings
/// in MPICH.
pub(crate) const DEBUG_ENVIRONMENT: &[(&str, &str)] = &[
    ("OMPI_MCA_pml_base_verbose", "10"),
    ("OMPI_MCA_btl_base_verbose", "30"),
    ("MPIR_CVAR_DEBUG_SUMMARY", "1"),
];

impl Mpi {
    fn send_job(&self, job: MpiJob) -> Result<()> {
        let jobs = self.link.jobs.as_ref();
        let sent = jobs.is_some_and(|jobs| jobs.send(job).is_ok());
        sent.then_some(()).ok_or_else(|| unavailable("its thread ended", "read its output"))
    }

    /// Sends and receives bytes. Returns the received bytes in the order of `receives`.
    fn transfer(
        &self,
        call: &CollectiveCall,
        sends: Vec<Outgoing>,
        receives: Vec<Incoming>,
    ) -> Result<Vec<Vec<u8>>> {
        let (reply, answer) = sync_channel(1);
        let (context, call) = (self.context, *call);
        self.send_job(MpiJob::Exchange(Box::new(MpiExchange {
            context,
            call,
            sends,
            receives,
            reply,
        })))?;
        let gone = |_| unavailable("its thread ended", "read its output");
        answer.recv().map_err(gone)?
    }

    /// Reads the bytes of parcels. Waits for the device.
    fn fetch(&self, parcels: &[Parcel]) -> Result<Vec<Outgoing>> {
        let bytes = host::fetch(parcels)?;
        let outgoing = parcels.iter().zip(bytes).map(|(parcel, bytes)| Outgoing {
            peer: parcel.peer,
            content: (Some(parcel.elements.dtype()), parcel.elements.len()),
            bytes,
        });
        Ok(outgoing.collect())
    }

    /// The ranks of this rank's new group in order, and the group's number.
    fn group_of(&self, arguments: &[SplitArguments]) -> (Vec<usize>, i32) {
        let SplitArguments { color, .. } = arguments[self.rank];
        let mut colors: Vec<u64> = arguments.iter().map(|arguments| arguments.color).collect();
        colors.sort_unstable();
        colors.dedup();
        let place = colors.iter().position(|other| *other == color).unwrap_or(0);
        let first = arguments.iter().map(|arguments| arguments.next_context).max().unwrap_or(1);
        let mut ranks: Vec<usize> =
            (0..arguments.len()).filter(|rank| arguments[*rank].color == color).collect();
        ranks.sort_by_key(|rank| (arguments[*rank].key, *rank));
        (ranks, first.saturating_add(place as i32))
    }
}

/// A buffer of `len` bytes: the smallest free buffer of the pool with enough capacity. If none is
/// large enough, a new buffer replaces the smallest free one.
fn buffer(pool: &mut Vec<Arc<Vec<u8>>>, len: usize) -> Vec<u8> {
    let free = (0..pool.len()).filter(|i| Arc::strong_count(&pool[*i]) == 1);
    let best = free.min_by_key(|i| (pool[*i].capacity() < len, pool[*i].capacity()));
    let kept = best.and_then(|i| Arc::try_unwrap(pool.swap_remove(i)).ok());
    let mut buffer = kept.filter(|kept| kept.capacity() >= len).unwrap_or_default();
    buffer.resize(len, 0);
    buffer
}

/// A rank's arguments of a split, and the lowest group number that it has not assigned.
#[derive(Clone, Copy)]
struct SplitArguments {
    color: u64,
    key: u64,
    next_context: i32,
}

impl SplitArguments {
    const BYTES: usize = 20;

    fn encode(self) -> Vec<u8> {
        let (color, key) = (self.color.to_le_bytes(), self.key.to_le_bytes());
        [&color[..], &key[..], &self.next_context.to_le_bytes()[..]].concat()
    }

    fn decode(bytes: &[u8]) -> Option<SplitArguments> {
        let (color, rest) = bytes.split_first_chunk()?;
        let (key, rest) = rest.split_first_chunk()?;
        let (color, key) = (u64::from_le_bytes(*color), u64::from_le_bytes(*key));
        Some(SplitArguments { color, key, next_context: i32::from_le_bytes(rest.try_into().ok()?) })
    }
}

impl Transport for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn exchange(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        let group = GroupRank { rank: self.rank(), size: self.size() };
        check_parcels(call.operation, stream, group, Parcels { sends, receives })?;
        for peer in 0..self.size() {
            let number = sends.iter().filter(|parcel| parcel.peer == peer).count();
            if number > wire::PARCELS_MAX {
                let expected = format!("at most {} to one rank", wire::PARCELS_MAX);
                return Err(Error::argument(call.operation, "sends", expected, number));
            }
        }
        let outgoing = self.fetch(sends)?;
        let incoming = receives.iter().map(|Parcel { peer, elements }| {
            let content = (Some(elements.dtype()), elements.len());
            let buffer = buffer(&mut self.pool, elements.len() * elements.dtype().size());
            Incoming { peer: *peer, content, buffer }
        });
        let incoming = incoming.collect();
        let received = self.transfer(call, outgoing, incoming)?;
        for (Parcel { elements, .. }, bytes) in receives.iter().zip(received) {
            let bytes = Arc::new(bytes);
            host::deliver(elements, &bytes)?;
            self.pool.push(bytes);
        }
        Ok(())
    }

    fn all_reduce(&mut self, _: &CollectiveCall, _: &Stream, _: &Sum<'_, Spans>) -> Result<bool> {
        // MPI's own sums would wait for a lost rank, and add in an unspecified order.
        Ok(false)
    }

    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        self.transfer(call, Vec::new(), Vec::new()).map(drop)
    }

    fn abort(&mut self, reason: &str) {
        // A failed send is ignored: the error being reported explains more than a missing thread.
        let _ = self.send_job(MpiJob::Abort { context: self.context, reason: reason.to_owned() });
    }

    fn leave(&mut self) {
        let panicked = std::thread::panicking();
        // Without the thread no rank can be notified.
        let _ = self.send_job(MpiJob::Leave { context: self.context, panicked });
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn watch(&mut self) -> Result<Box<dyn GroupWatch>> {
        let (jobs, context) = (self.link.jobs.clone(), self.context);
        let (rank, deadline) = (self.rank, self.deadline);
        Ok(Box::new(MpiWatch { jobs, context, rank, deadline }))
    }

    fn split(&mut self, call: &CollectiveCall, color: u64, key: u64) -> Result<Box<dyn Transport>> {
        let link = self.link.clone();
        let mut next_context = lock(&link.next_context);
        let (n, me, content) = (self.size(), self.rank, (None, SplitArguments::BYTES));
        let own = SplitArguments { color, key, next_context: *next_context };
        let bytes = Arc::new(own.encode());
        let sends = others(me, n).map(|peer| Outgoing { peer, content, bytes: bytes.clone() });
        let receives = others(me, n).map(|peer| {
            let buffer = vec![0; SplitArguments::BYTES];
            Incoming { peer, content, buffer }
        });
        let received = self.transfer(call, sends.collect(), receives.collect())?;
        let mut arguments: Vec<SplitArguments> =
            received.iter().filter_map(|b| SplitArguments::decode(b)).collect();
        arguments.insert(me, own);
        let (ranks, context) = self.group_of(&arguments);
        let highest = arguments.iter().map(|arguments| arguments.next_context).max().unwrap_or(1);
        *next_context = highest.saturating_add(n as i32);
        if *next_context > GROUPS_MAX {
            return Err(unavailable("too many communicators were created", "reuse communicators"));
        }
        let members: Arc<[i32]> = ranks.iter().map(|rank| self.members[*rank]).collect();
        let rank = ranks.iter().position(|rank| *rank == me).unwrap_or(0);
        self.send_job(MpiJob::Join { context, members: members.clone(), rank })?;
        drop(next_context);
        let (deadline, pool) = (self.deadline, Vec::new());
        Ok(Box::new(Mpi { link, context, members, rank, deadline, pool }))
    }
}

/// The watching thread's view of a group over MPI. Notices name a rank that failed or panicked.
/// After the death of a rank, `mpirun` ends the other ranks, or they report the loss at the
/// deadline, without a name.
struct MpiWatch {
    jobs: Option<SyncSender<MpiJob>>,
    context: i32,
    rank: usize,
    deadline: Duration,
}

impl GroupWatch for MpiWatch {
    fn heartbeat(&mut self, heartbeat: &Heartbeat) -> GroupStatus {
        let (reply, answer) = sync_channel(1);
        let job = MpiJob::Watch { context: self.context, heartbeat: heartbeat.clone(), reply };
        // If the queue of the thread is full, the next heartbeat gets an answer.
        let asked = self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok());
        let answer = if asked { answer.recv_timeout(ANSWER).ok() } else { None };
        answer.unwrap_or_else(|| match &heartbeat.problem {
            Some(ExchangeProblem::Overdue | ExchangeProblem::Stuck) => {
                GroupStatus::Lost(endless(self.deadline))
            }
            Some(ExchangeProblem::Failed(reason)) => {
                GroupStatus::Lost(Error::RankFailed { rank: self.rank, reason: reason.clone() })
            }
            _ => GroupStatus::Sound,
        })
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        self.leave();
        // Without the thread there is no state to remove.
        let _ = self.send_job(MpiJob::Forget { context: self.context });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Repeated exchanges of several sizes need exactly one buffer per size.
    #[test]
    fn every_size_reuses_one_buffer() {
        let sizes = [1 << 20, 100, 5000, 1 << 20];
        let mut pool = Vec::new();
        for turn in 0..5 {
            let taken = sizes.map(|len| buffer(&mut pool, len));
            assert!(taken.iter().zip(sizes).all(|(taken, len)| taken.len() == len));
            assert!(pool.is_empty(), "turn {turn}");
            pool.extend(taken.map(Arc::new));
        }
        let bytes: usize = pool.iter().map(|kept| kept.capacity()).sum();
        assert_eq!(bytes, sizes.iter().sum::<usize>());
        // Buffers in use are kept; a buffer that is too small is replaced.
        let busy = pool.clone();
        assert_eq!((buffer(&mut pool, 7).len(), pool.len()), (7, 4));
        drop(busy);
        assert_eq!((buffer(&mut pool, 2 << 20).len(), pool.len()), (2 << 20, 3));
        assert!(pool.iter().all(|kept| kept.capacity() > 100));
    }
}

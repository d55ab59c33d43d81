//! Ranks that are processes, over an MPI library (feature `mpi`).
//!
//! Handles of the `mpi` crate must stay on one thread. A dedicated thread ([`thread`]) makes all
//! calls of the library; ranks send it requests over a channel.
//!
//! **Memory.** MPI knows no streams. An exchange therefore waits once for the device, and enqueues
//! what uses received elements after the transfer.
//! - The library gets addresses of a CUDA device if it says that it takes them
//!   ([`mpi_takes_cuda_memory`](meristem_device::mpi_takes_cuda_memory)). Nothing passes through
//!   host memory. The wait is for all work on the memory that the exchange sends or receives, also
//!   if it only receives; then the memory is lent ([`lend_on_device`]).
//! - Otherwise elements pass through host memory. The wait is for the elements to send. The stream
//!   copies received elements without a wait.
//!
//! Invariants
//! - All calls are non-blocking: sends, receives and probes are polled until a deadline. Messages
//!   of a lost process never arrive, and MPI's collectives would wait for them for ever. Finalizing
//!   is collective, so it is done only after all ranks have left in order.
//! - The size of a message is checked before it is received. The `mpi` crate drops status codes, so
//!   MPI's default error handler stays set, which ends the process.
//! - The memory of a request that may never end stays allocated: see [`thread`]. Device memory
//!   stays lent, so that it is not reused.

mod chunks;
#[allow(unsafe_code, reason = "MPI gets addresses of device memory")]
mod device_memory;
mod group;
mod thread;
mod transfer;

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use meristem_device::{DeviceId, Stream, Tensor, lend_on_device};

use self::device_memory::DeviceMemory;
use self::group::GROUPS_MAX;
use self::thread::{MpiExchange, MpiJob, MpiWorld, unavailable};
use self::transfer::{Incoming, Outgoing, ReceiveMemory, SendMemory};
use crate::check::GroupRank;
use crate::error::{Error, Result};
use crate::log::COMM_LOG;
use crate::packing::{PackedParcels, Packing, unpack};
use crate::spans::Spans;
use crate::sync::lock;
use crate::transport::{CollectiveCall, Parcel, Parcels, Sum, Transport, check_parcels, others};
use crate::watch::{ExchangeProblem, GroupStatus, GroupWatch, Heartbeat, endless};
use crate::wire::Content;
use crate::{host, wire};

/// Time for the MPI thread to answer a watching thread; more than it takes to send notices.
const ANSWER: Duration = Duration::from_secs(5);

/// Connection to the MPI thread, shared by all groups of the process. Dropping it ends MPI.
struct MpiLink {
    jobs: Option<SyncSender<MpiJob>>,
    /// Whether the library takes addresses of CUDA memory.
    takes_cuda_memory: bool,
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
    /// Device memory for parcels in several pieces.
    packing: Packing,
    /// Whether the log already says how a GPU's elements are transferred: by address or through
    /// host memory.
    has_logged_way: bool,
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
    let world = started.recv_timeout(deadline).map_err(gone)??;
    let MpiWorld { rank, size, takes_cuda_memory } = world;
    let library = library();
    tracing::debug!(target: COMM_LOG, rank, size, library, takes_cuda_memory, "MPI has started");
    let (jobs, over, next_context) = (Some(jobs), Mutex::new(over), Mutex::new(1));
    let link = Arc::new(MpiLink { jobs, takes_cuda_memory, over, next_context });
    let members = (0..size as i32).collect();
    Ok(Box::new(Mpi::new(link, 0, members, rank, deadline)))
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
    fn new(
        link: Arc<MpiLink>,
        context: i32,
        members: Arc<[i32]>,
        rank: usize,
        deadline: Duration,
    ) -> Mpi {
        let (pool, packing, has_logged_way) = (Vec::new(), Packing::default(), false);
        Mpi { link, context, members, rank, deadline, pool, packing, has_logged_way }
    }

    fn send_job(&self, job: MpiJob) -> Result<()> {
        let jobs = self.link.jobs.as_ref();
        let sent = jobs.is_some_and(|jobs| jobs.send(job).is_ok());
        sent.then_some(()).ok_or_else(|| unavailable("its thread ended", "read its output"))
    }

    /// Sends and receives elements. Returns those received into host memory, in the order of
    /// `receives`.
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

    /// Whether MPI gets addresses of the stream's elements.
    fn takes_addresses(&mut self, stream: &Stream) -> bool {
        let device = stream.device().id();
        let is_gpu = matches!(device, DeviceId::Cuda(_));
        let takes_addresses = is_gpu && self.link.takes_cuda_memory;
        if is_gpu && !std::mem::replace(&mut self.has_logged_way, true) {
            let (rank, ranks) = (self.rank, self.members.len());
            let way = if takes_addresses { "by address" } else { "through host memory" };
            tracing::debug!(target: COMM_LOG, rank, ranks, %device, "elements go {way}");
        }
        takes_addresses
    }

    /// Exchanges elements in the memory of a CUDA device. Waits for the device, once, if there are
    /// any.
    fn exchange_by_address(&mut self, call: &CollectiveCall, parcels: Parcels<'_>) -> Result<()> {
        let Parcels { sends, receives } = parcels;
        let packed = self.packing.pack("mpi, pack", parcels)?;
        let PackedParcels { sends: to_send, receives: to_receive } = &packed;
        let all: Vec<&Tensor> = to_send.iter().chain(to_receive).collect();
        let mut lent = lend_on_device(&all)?.into_iter().map(DeviceMemory::new);
        let outgoing = sends.iter().zip(lent.by_ref()).map(|(parcel, memory)| {
            let (peer, content) = (parcel.peer, content(parcel));
            Outgoing { peer, content, memory: SendMemory::Device(memory) }
        });
        let outgoing = outgoing.collect();
        let incoming = receives.iter().zip(lent).map(|(parcel, memory)| {
            let (peer, content) = (parcel.peer, content(parcel));
            Incoming { peer, content, memory: ReceiveMemory::Device(memory) }
        });
        self.transfer(call, outgoing, incoming.collect())?;
        unpack("mpi, unpack", receives, to_receive)
    }

    /// Exchanges elements through host memory. Waits for the elements to send.
    fn exchange_by_host(&mut self, call: &CollectiveCall, parcels: Parcels<'_>) -> Result<()> {
        let Parcels { sends, receives } = parcels;
        let outgoing = sends.iter().zip(host::fetch(sends)?).map(|(parcel, bytes)| {
            let (peer, content) = (parcel.peer, content(parcel));
            Outgoing { peer, content, memory: SendMemory::Host(bytes) }
        });
        let outgoing = outgoing.collect();
        let incoming = receives.iter().map(|parcel| {
            let (peer, content, elements) = (parcel.peer, content(parcel), &parcel.elements);
            let buffer = buffer(&mut self.pool, elements.len() * elements.dtype().size());
            Incoming { peer, content, memory: ReceiveMemory::Host(buffer) }
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

/// Type and number of a parcel's elements.
fn content(parcel: &Parcel) -> Content {
    (Some(parcel.elements.dtype()), parcel.elements.len())
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
        let parcels = Parcels { sends, receives };
        if self.takes_addresses(stream) {
            self.exchange_by_address(call, parcels)
        } else {
            self.exchange_by_host(call, parcels)
        }
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
        let sends = others(me, n).map(|peer| {
            let memory = SendMemory::Host(bytes.clone());
            Outgoing { peer, content, memory }
        });
        let receives = others(me, n).map(|peer| {
            let memory = ReceiveMemory::Host(vec![0; SplitArguments::BYTES]);
            Incoming { peer, content, memory }
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
        Ok(Box::new(Mpi::new(link, context, members, rank, self.deadline)))
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

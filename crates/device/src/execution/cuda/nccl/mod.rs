//! Memberships of devices in groups that exchange data over NCCL.
//!
//! Only sends and receives of bytes are used: sums are made by this project's own kernels, in an
//! order that NCCL does not promise.
//!
//! Communicators do not block (`ncclConfig_t::blocking` is 0): a call that takes long goes on in a
//! thread of NCCL's, and is asked for. So whoever waits can give up, and a watching thread can
//! abort a communicator at any time.
//!
//! Invariants
//! - A communicator is used under its lock, and is gone from it once it was aborted or destroyed.
//! - Members of a group are connected when they have joined: a later exchange waits for no process
//!   on the host.
//! - The events around an exchange say how far the device is. A lane keeps the membership until the
//!   exchange has landed.

mod library;

use super::block::block;
use super::context::Context;
use super::driver::{Called, Event, RawStream};
use crate::execution::args::Record;
use crate::ground::sync::{Arc, Mutex, OnceLock, lock};
use crate::ground::{
    CudaError, DeviceId, Error, ID_BYTES, NCCL_NEEDED, PeerPlace, PeerProgress, Result, Use,
};
use cudarc::nccl::sys as nccl;
use library::{IN_PROGRESS, check, load};
use std::collections::VecDeque;
use std::error::Error as StdError;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::panic::Location;
use std::ptr;
use std::time::{Duration, Instant};

/// Magic number of a configuration, from NCCL's header.
const MAGIC: u32 = 0xcafe_beef;
/// Value of a setting that is left to NCCL, from its header.
const UNDEFINED: c_int = c_int::MIN;
/// Time between two looks at a call that goes on in a thread of NCCL's.
const LOOK: Duration = Duration::from_micros(20);
/// Time in which the reason for an error of NCCL should be known: see [`Member::give_up`].
const NAMED_WITHIN: Duration = Duration::from_secs(10);

/// A communicator.
struct Raw(nccl::ncclComm_t);

// SAFETY: a handle, which may be used by one thread after another.
unsafe impl Send for Raw {}

impl Raw {
    /// The code of the latest call that went on in a thread, or of a failure since.
    fn state(&self) -> Called<u32> {
        let mut state = nccl::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives. The code is written as a number, as it may be one that
        // the bindings do not know.
        let code = unsafe { (load()?.ncclCommGetAsyncError)(self.0, &raw mut state) };
        check("ncclCommGetAsyncError", code)?;
        // SAFETY: written just now; an enum of 32 bits.
        Ok(unsafe { (&raw const state).cast::<u32>().read() })
    }
}

/// Events around an exchange that is not known to have ended.
struct Flight {
    before: Event,
    after: Event,
    reached: bool,
}

/// Exchanges in flight, in order.
#[derive(Default)]
struct Flights {
    all: VecDeque<Flight>,
    /// Events for reuse.
    spare: Vec<(Event, Event)>,
    ended: u64,
}

/// Membership of a device in a group.
pub(crate) struct Member {
    /// `None` once it was aborted or destroyed.
    raw: Mutex<Option<Raw>>,
    flights: Mutex<Flights>,
    /// The first error of an exchange.
    broken: OnceLock<CudaError>,
    context: Arc<Context>,
}

impl Member {
    /// Returns an error unless there is a library that can be used.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn check_library() -> Result<()> {
        load().map(drop).map_err(|source| Error::Cuda { device: DeviceId::Cuda(0), source })
    }

    /// A name for a new group.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn new_id(context: &Arc<Context>) -> Result<[u8; ID_BYTES]> {
        let mut id = nccl::ncclUniqueId { internal: [0; ID_BYTES] };
        let mut make = || {
            let functions = load()?;
            context.bind()?;
            // SAFETY: writes one name.
            check("ncclGetUniqueId", unsafe { (functions.ncclGetUniqueId)(&mut id) })
        };
        make().map_err(|source| Error::Cuda { device: context.id, source })?;
        Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// Joins a group and connects to all others. Waits for them as long as `proceed`, which is
    /// asked again and again, says so; then `None`.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn join(
        context: &Arc<Context>,
        place: &PeerPlace,
        proceed: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Arc<Member>>> {
        let mut join = || {
            let member = Member::begin(context, place)?;
            let connected = member.settle(proceed)? && member.connect(place, proceed)?;
            Ok(connected.then(|| Arc::new(member)))
        };
        join().map_err(|source| Error::Cuda { device: context.id, source })
    }

    /// Begins to join a group.
    fn begin(context: &Arc<Context>, place: &PeerPlace) -> Called<Member> {
        let functions = load()?;
        context.bind()?;
        let internal = place.id.map(|byte| c_char::from_ne_bytes([byte]));
        let mut config = nccl::ncclConfig_t {
            size: size_of::<nccl::ncclConfig_t>(),
            magic: MAGIC,
            // That of the layout, which newer libraries know.
            version: NCCL_NEEDED as u32,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
        };
        let (rank, size) = (place.rank as c_int, place.size as c_int);
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle, and reads the configuration; the context is current.
        let code = unsafe {
            let id = nccl::ncclUniqueId { internal };
            (functions.ncclCommInitRankConfig)(&mut raw, size, id, rank, &mut config)
        };
        check("ncclCommInitRankConfig", code)?;
        let (raw, flights) = (Mutex::new(Some(Raw(raw))), Mutex::default());
        Ok(Member { raw, flights, broken: OnceLock::new(), context: context.clone() })
    }

    /// Waits until nothing goes on in a thread of NCCL's; false if `proceed` or an abort ends that
    /// wait.
    fn settle(&self, proceed: &mut dyn FnMut() -> bool) -> Called<bool> {
        loop {
            let state = match &*lock(&self.raw) {
                Some(raw) => raw.state()?,
                None => return Ok(false),
            };
            if state != IN_PROGRESS {
                check("ncclCommGetAsyncError", state)?;
                return Ok(true);
            }
            if !proceed() {
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Exchanges a byte with all others. NCCL connects two ranks at their first exchange, which
    /// would otherwise be one that is enqueued under locks.
    fn connect(&self, place: &PeerPlace, proceed: &mut dyn FnMut() -> bool) -> Called<bool> {
        let memory = block(&self.context, 2 * place.size)?;
        let stream = RawStream::new()?;
        let others = (0..place.size).filter(|rank| *rank != place.rank);
        let message = |rank, usage| {
            let half = if matches!(usage, Use::Write) { place.size } else { 0 };
            Message { rank, usage, address: memory.address() + (half + rank) as u64, bytes: 1 }
        };
        let messages =
            others.flat_map(|rank| [message(rank, Use::Read), message(rank, Use::Write)]);
        let connected = self.enqueue(messages, &stream).and_then(|()| {
            let done = Event::new(false)?;
            let mut connected = self.settle(proceed)?;
            done.record(&stream)?;
            while connected && !done.is_done()? {
                connected = proceed();
                std::thread::sleep(LOOK);
            }
            Ok(connected)
        });
        if !matches!(connected, Ok(true)) {
            // Its kernel ends, so that the memory can be freed.
            self.end_communicator();
        }
        stream.synchronize()?;
        stream.destroy();
        connected
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Enqueues sends of the arguments that are read, and receives of those that are written, all
    /// at once; `ranks` are the other ranks. The context is current. Does nothing after an abort.
    pub(super) fn exchange(&self, record: &Record, ranks: &[usize], stream: &RawStream) -> Called {
        let spare = lock(&self.flights).spare.pop();
        let (before, after) = match spare {
            Some(pair) => pair,
            None => (Event::new(false)?, Event::new(false)?),
        };
        before.record(stream)?;
        let each = record.args.iter().zip(ranks).filter(|(arg, _)| arg.bytes > 0);
        let messages = each.map(|(arg, rank)| {
            let (usage, address, bytes) = (arg.usage, arg.address(), arg.bytes);
            Message { rank: *rank, usage, address, bytes }
        });
        let enqueued = self.enqueue(messages, stream);
        let settled = enqueued.and_then(|()| self.settle(&mut || !self.context.has_failed()));
        if let Err(cause) = settled {
            self.give_up(cause)?;
        }
        after.record(stream)?;
        lock(&self.flights).all.push_back(Flight { before, after, reached: false });
        Ok(())
    }

    /// Waits until whoever watches the group names the reason for an error of NCCL, and aborts.
    ///
    /// # Errors
    /// The error, if nobody does.
    fn give_up(&self, cause: CudaError) -> Called {
        let (cause, end) = (self.broken.get_or_init(|| cause), Instant::now() + NAMED_WITHIN);
        while !self.context.has_failed() {
            if Instant::now() >= end {
                return Err(cause.clone());
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Enqueues messages all at once, which may go on in a thread of NCCL's.
    fn enqueue(&self, messages: impl Iterator<Item = Message>, stream: &RawStream) -> Called {
        let raw = lock(&self.raw);
        let Some(Raw(comm)) = *raw else { return Ok(()) };
        let (functions, stream) = (load()?, stream.raw().cast());
        let byte = nccl::ncclDataType_t::ncclUint8;
        // SAFETY: takes nothing.
        check("ncclGroupStart", unsafe { (functions.ncclGroupStart)() })?;
        let enqueued = messages.into_iter().try_for_each(|message| {
            let Message { rank, usage, address, bytes } = message;
            let (address, rank) = (address as *mut c_void, rank as c_int);
            // SAFETY: the bytes are inside of a live block, and ordered like those of any other
            // launch; the communicator lives, as its lock is held.
            unsafe {
                match usage {
                    Use::Read => {
                        let send = functions.ncclSend;
                        check("ncclSend", send(address, bytes, byte, rank, comm, stream))
                    }
                    Use::Write => {
                        let receive = functions.ncclRecv;
                        check("ncclRecv", receive(address, bytes, byte, rank, comm, stream))
                    }
                }
            }
        });
        // SAFETY: takes nothing. It ends the group after an error, too.
        let ended = check("ncclGroupEnd", unsafe { (functions.ncclGroupEnd)() });
        enqueued.and(ended)
    }

    /// How far the device is. All exchanges count as ended once the device has failed.
    pub(crate) fn progress(&self) -> PeerProgress {
        let flights = &mut *lock(&self.flights);
        if let Err(cause) = self.look(flights) {
            self.context.fail("look how far an exchange is", Location::caller(), cause);
        }
        if self.context.has_failed() {
            flights.ended += flights.all.drain(..).count() as u64;
        }
        let (ended, all) = (flights.ended, &flights.all);
        let reached = ended + all.iter().take_while(|flight| flight.reached).count() as u64;
        PeerProgress { enqueued: ended + all.len() as u64, reached, ended }
    }

    fn look(&self, flights: &mut Flights) -> Called {
        self.context.bind()?;
        while let Some(first) = flights.all.front_mut() {
            first.reached = first.reached || first.before.is_done()?;
            if !first.reached || !first.after.is_done()? {
                break;
            }
            flights.ended += 1;
            let ended = flights.all.pop_front();
            flights.spare.extend(ended.map(|Flight { before, after, .. }| (before, after)));
        }
        Ok(())
    }

    /// Returns an error if the device has failed, or NCCL has noticed a failure of the group.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`], [`Error::Cuda`].
    pub(crate) fn check(&self) -> Result<()> {
        self.context.check()?;
        let state = || match &*lock(&self.raw) {
            Some(raw) => check("ncclCommGetAsyncError", raw.state()?),
            None => Ok(()),
        };
        let broken = self.broken.get().cloned();
        broken
            .map_or_else(state, Err)
            .map_err(|source| Error::Cuda { device: self.context.id, source })
    }

    /// Fails the device, as the results of its exchanges are lost, and ends them.
    pub(crate) fn abort(&self, cause: Arc<dyn StdError + Send + Sync>) {
        // First, so that whoever waits for a result finds the failure when the wait is over.
        let cause = CudaError::ExchangeAborted(cause);
        self.context.fail("exchange", Location::caller(), cause);
        self.end_communicator();
    }

    /// Leaves the group when its exchanges have ended. Waits until everything that was sent is on
    /// its way, for as long as `proceed` says so.
    pub(crate) fn close(&self, proceed: &mut dyn FnMut() -> bool) {
        let mut finalize = || {
            match &*lock(&self.raw) {
                None => return Ok(false),
                Some(Raw(comm)) => {
                    let finalize = load()?.ncclCommFinalize;
                    // SAFETY: the communicator lives, as its lock is held.
                    check("ncclCommFinalize", unsafe { finalize(*comm) })?;
                }
            }
            self.settle(proceed)
        };
        if self.context.bind().is_err() || !matches!(finalize(), Ok(true)) {
            return self.end_communicator();
        }
        let raw = lock(&self.raw).take();
        if let (Some(Raw(comm)), Ok(functions)) = (raw, load()) {
            // SAFETY: it was finalized, and nobody else can use it. A failure cannot be reported to
            // anyone.
            let _ = unsafe { (functions.ncclCommDestroy)(comm) };
        }
    }

    /// Ends the communicator with what it has enqueued, if it has not ended.
    fn end_communicator(&self) {
        let raw = lock(&self.raw).take();
        if let (Some(Raw(comm)), Ok(functions), Ok(())) = (raw, load(), self.context.bind()) {
            // SAFETY: nobody else can use it; NCCL ends what runs on the device, and in its
            // threads. A failure cannot be reported to anyone.
            let _ = unsafe { (functions.ncclCommAbort)(comm) };
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Only without a `close`. What was enqueued is done, or lost with the device: a lane keeps
        // the membership until an exchange has landed.
        self.end_communicator();
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member on {}", self.context.id)
    }
}

/// Bytes for another rank, or from it.
struct Message {
    rank: usize,
    usage: Use,
    address: u64,
    bytes: usize,
}

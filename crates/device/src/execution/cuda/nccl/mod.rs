//! Memberships of devices in groups that exchange data over NCCL. An exchange is a launch of a
//! stream: the arguments that it reads are sent, and the arguments that it writes are received.
//!
//! NCCL only moves bytes, by sends and receives. Kernels of this project compute the sums, in a
//! fixed order, which NCCL's own reductions do not guarantee.
//!
//! Communicators do not block (`ncclConfig_t::blocking` is 0): a long call continues in a thread of
//! NCCL, and is polled. So a waiting thread can give up, and a watching thread can abort a
//! communicator at any time.
//!
//! Invariants
//! - A communicator is used under its lock, and is `None` once it was aborted.
//! - Members of a group are connected when they have joined, so no later exchange makes the host
//!   wait for another process.
//! - An exchange is counted before any part of it is done. An event before it and an event after it
//!   show the device's progress. Events are queried without a lock, because the driver may not
//!   answer while a kernel hangs. A stream keeps the membership until the exchange is complete.
//! - After an exchange that NCCL refused, no task of the device completes, so no thread sees a
//!   result that lacks the exchange. The thread that watches the group fails the device with the
//!   reason.

mod library;
mod pending;

use std::error::Error as StdError;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::panic::Location;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::nccl::sys as nccl;
use library::{IN_PROGRESS, check, load, version};
use pending::{PendingExchange, PendingExchanges};

use super::block::block;
use super::context::CudaContext;
use super::driver::{Called, CudaEvent, RawStream};
use crate::execution::args::LaunchRecord;
use crate::ground::sync::{Arc, AtomicBool, Mutex, OnceLock, Ordering, lock};
use crate::ground::{
    AccessKind, CudaError, DeviceId, Error, ID_BYTES, NCCL_NEEDED, PeerPlace, PeerProgress, Result,
};

/// Magic number of a configuration, from NCCL's header.
const MAGIC: u32 = 0xcafe_beef;
/// Value that leaves a setting to NCCL, from its header.
const UNDEFINED: c_int = c_int::MIN;
/// Interval at which a call that continues in a thread of NCCL is polled.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// A communicator.
struct NcclComm(nccl::ncclComm_t);

// SAFETY: a handle without thread affinity, used under its lock.
unsafe impl Send for NcclComm {}

impl NcclComm {
    /// The code of the latest call that continued in a thread of NCCL, or of a later failure.
    fn state(&self) -> Called<u32> {
        let mut state = nccl::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives. The code is written as a number, because the bindings may
        // lack a variant for it.
        let code = unsafe { (load()?.ncclCommGetAsyncError)(self.0, &raw mut state) };
        check("ncclCommGetAsyncError", code)?;
        // SAFETY: written just now; an enum of 32 bits.
        Ok(unsafe { (&raw const state).cast::<u32>().read() })
    }
}

/// Membership of a device in a group.
pub(crate) struct PeerMembership {
    /// `None` once it was aborted.
    raw: Mutex<Option<NcclComm>>,
    pending: Mutex<PendingExchanges>,
    rank: usize,
    size: usize,
    patience: Duration,
    connected: AtomicBool,
    /// The first error of a call.
    broken: OnceLock<CudaError>,
    /// The reason for which it was aborted.
    aborted: OnceLock<CudaError>,
    context: Arc<CudaContext>,
}

impl PeerMembership {
    /// The version of NCCL's library.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn library() -> Result<String> {
        version().map_err(|source| Error::Cuda { device: DeviceId::Cuda(0), source })
    }

    /// The id of a new group.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn new_id(context: &Arc<CudaContext>) -> Result<[u8; ID_BYTES]> {
        let mut id = nccl::ncclUniqueId { internal: [0; ID_BYTES] };
        let mut make = || {
            let functions = load()?;
            context.bind()?;
            // SAFETY: writes one id.
            check("ncclGetUniqueId", unsafe { (functions.ncclGetUniqueId)(&mut id) })
        };
        make().map_err(|source| Error::Cuda { device: context.id, source })?;
        Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// Begins to join a group; [`connect`](PeerMembership::connect) completes it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn begin(
        context: &Arc<CudaContext>,
        place: &PeerPlace,
    ) -> Result<Arc<PeerMembership>> {
        let member = PeerMembership::try_begin(context, place);
        member.map(Arc::new).map_err(|source| Error::Cuda { device: context.id, source })
    }

    fn try_begin(context: &Arc<CudaContext>, place: &PeerPlace) -> Called<PeerMembership> {
        let functions = load()?;
        context.bind()?;
        let internal = place.id.map(|byte| c_char::from_ne_bytes([byte]));
        let mut config = nccl::ncclConfig_t {
            size: size_of::<nccl::ncclConfig_t>(),
            magic: MAGIC,
            // The version of this layout, which newer libraries accept.
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
        let mut pending = PendingExchanges::default();
        // Joining counts as the first exchange.
        pending.submit();
        Ok(PeerMembership {
            raw: Mutex::new(Some(NcclComm(raw))),
            pending: Mutex::new(pending),
            rank: place.rank,
            size: place.size,
            patience: place.patience,
            connected: AtomicBool::new(false),
            broken: OnceLock::new(),
            aborted: OnceLock::new(),
            context: context.clone(),
        })
    }

    /// Waits until all members have joined, and connects to them. After an error of NCCL this waits
    /// for the reason, as after a failed exchange.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::DeviceFailed`].
    pub(crate) fn connect(&self) -> Result<()> {
        let connected = self.try_connect().unwrap_or_else(|cause| {
            let _ = self.broken.set(cause);
            let end = Instant::now() + self.patience;
            while !self.is_over() && Instant::now() < end {
                std::thread::sleep(POLL_INTERVAL);
            }
            false
        });
        self.connected.store(connected, Ordering::SeqCst);
        // An abort sets its reason before it reads `connected`.
        match self.aborted.get().or(self.broken.get()).cloned() {
            Some(source) => Err(Error::Cuda { device: self.context.id, source }),
            None => self.context.check(),
        }
    }

    /// Whether the group is lost to this member.
    fn is_over(&self) -> bool {
        self.aborted.get().is_some() || self.context.has_failed()
    }

    /// Waits until no call continues in a thread of NCCL; false if `proceed` returns false, or
    /// after an abort.
    fn finish_call(&self, proceed: &mut dyn FnMut() -> bool) -> Called<bool> {
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
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Joins, and exchanges a byte with each other member; false after an abort or a failure of the
    /// device. NCCL connects two ranks at their first exchange, which must not be an exchange that
    /// is enqueued under locks.
    fn try_connect(&self) -> Called<bool> {
        self.context.bind()?;
        if !self.finish_call(&mut || !self.is_over())? {
            return Ok(false);
        }
        let memory = block(&self.context, 2 * self.size)?;
        let stream = RawStream::new()?;
        let others = (0..self.size).filter(|rank| *rank != self.rank);
        let message = |rank, access| {
            let half = if matches!(access, AccessKind::Write) { self.size } else { 0 };
            PeerMessage { rank, access, address: memory.address() + (half + rank) as u64, bytes: 1 }
        };
        let messages = others
            .flat_map(|rank| [message(rank, AccessKind::Read), message(rank, AccessKind::Write)]);
        let connected = self.hand_over(1, messages, &stream).and_then(|handed| {
            handed?;
            while self.progress().ended == 0 && !self.is_over() {
                self.try_poll()?;
                std::thread::sleep(POLL_INTERVAL);
            }
            Ok(!self.is_over())
        });
        if !matches!(connected, Ok(true)) {
            // This ends the kernel, so that the memory can be freed.
            self.end_communicator();
        }
        stream.synchronize()?;
        stream.destroy();
        connected
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Enqueues a send for each argument that is read and a receive for each argument that is
    /// written, all at once; `ranks` are the peers, by argument. The context is current. Does
    /// nothing after an abort. An error of NCCL suspends the device until the reason is known.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn exchange(
        &self,
        record: &LaunchRecord,
        ranks: &[usize],
        stream: &RawStream,
    ) -> Called {
        let number = lock(&self.pending).submit();
        let each = record.args.iter().zip(ranks).filter(|(arg, _)| arg.bytes > 0);
        let messages = each.map(|(arg, rank)| {
            let (access, address, bytes) = (arg.access, arg.address(), arg.bytes);
            PeerMessage { rank: *rank, access, address, bytes }
        });
        if let Err(cause) = self.hand_over(number, messages, stream)? {
            let cause = self.broken.get_or_init(|| cause).clone();
            self.context.suspend(cause, self.patience);
        }
        Ok(())
    }

    /// Enqueues exchange `number` between two events. The inner error is from NCCL, the outer one
    /// from the driver.
    fn hand_over(
        &self,
        number: u64,
        messages: impl Iterator<Item = PeerMessage>,
        stream: &RawStream,
    ) -> Called<Called> {
        let before = self.recorded(stream)?;
        if let Some(exchange) = lock(&self.pending).exchange_of(number) {
            exchange.before = Some(before);
        }
        let enqueued = self.enqueue(messages, stream);
        if let Err(cause) = enqueued.and_then(|()| self.finish_call(&mut || !self.is_over())) {
            return Ok(Err(cause));
        }
        let after = self.recorded(stream)?;
        if let Some(exchange) = lock(&self.pending).exchange_of(number) {
            exchange.after = Some(after);
        }
        Ok(Ok(()))
    }

    /// An event at the end of the stream.
    fn recorded(&self, stream: &RawStream) -> Called<Arc<CudaEvent>> {
        let spare = lock(&self.pending).spare.pop();
        let event = spare.map_or_else(|| CudaEvent::new(false).map(Arc::new), Ok)?;
        event.record(stream)?;
        Ok(event)
    }

    /// Enqueues messages all at once. The call may continue in a thread of NCCL.
    fn enqueue(&self, messages: impl Iterator<Item = PeerMessage>, stream: &RawStream) -> Called {
        let raw = lock(&self.raw);
        let Some(NcclComm(comm)) = *raw else { return Ok(()) };
        let (functions, stream) = (load()?, stream.raw().cast());
        let byte = nccl::ncclDataType_t::ncclUint8;
        // SAFETY: takes no arguments.
        check("ncclGroupStart", unsafe { (functions.ncclGroupStart)() })?;
        let enqueued = messages.into_iter().try_for_each(|message| {
            let PeerMessage { rank, access, address, bytes } = message;
            let (address, rank) = (address as *mut c_void, rank as c_int);
            // SAFETY: the bytes are inside of a live block, and ordered like the arguments of any
            // launch; the communicator lives, as its lock is held.
            unsafe {
                match access {
                    AccessKind::Read => {
                        let send = functions.ncclSend;
                        check("ncclSend", send(address, bytes, byte, rank, comm, stream))
                    }
                    AccessKind::Write => {
                        let receive = functions.ncclRecv;
                        check("ncclRecv", receive(address, bytes, byte, rank, comm, stream))
                    }
                }
            }
        });
        // SAFETY: takes no arguments. It ends the group after an error, too.
        let ended = check("ncclGroupEnd", unsafe { (functions.ncclGroupEnd)() });
        enqueued.and(ended)
    }

    /// The device's progress at the last [poll](PeerMembership::poll). All exchanges count as ended
    /// once the device has failed.
    pub(crate) fn progress(&self) -> PeerProgress {
        let pending = &mut *lock(&self.pending);
        if self.context.has_failed() {
            for PendingExchange { before, after, .. } in pending.all.drain(..) {
                pending.ended += 1;
                // Destroying an event calls the driver, which may not answer.
                pending.spare.extend(before.into_iter().chain(after));
            }
        }
        let (ended, all) = (pending.ended, &pending.all);
        let submitted = ended + all.len() as u64;
        let enqueued_exchange = |exchange: &&PendingExchange| exchange.after.is_some();
        let enqueued = ended + all.iter().take_while(enqueued_exchange).count() as u64;
        let reached = |exchange: &&PendingExchange| enqueued_exchange(exchange) && exchange.reached;
        let reached = ended + all.iter().take_while(reached).count() as u64;
        PeerProgress { submitted, enqueued, reached, ended }
    }

    /// Polls the device's progress. May wait for the device.
    pub(crate) fn poll(&self) {
        if let Err(cause) = self.try_poll() {
            self.context.fail("poll an exchange", Location::caller(), cause);
        }
    }

    fn try_poll(&self) -> Called {
        self.context.bind()?;
        while !self.context.has_failed() {
            let next = lock(&self.pending).next();
            let Some(event) = next else { break };
            if !event.is_done()? {
                break;
            }
            lock(&self.pending).advance(&event);
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

    /// Ends all exchanges. Their results are lost, so the device fails, unless the membership is
    /// not connected yet.
    pub(crate) fn abort(&self, cause: Arc<dyn StdError + Send + Sync>) {
        // First, so that a thread that waits for a result finds the failure when its wait ends.
        let cause = self.aborted.get_or_init(|| CudaError::ExchangeAborted(cause));
        if self.connected.load(Ordering::SeqCst) {
            self.context.fail("exchange", Location::caller(), cause.clone());
        }
        self.end_communicator();
    }

    /// Leaves the group. Waits until all exchanges have ended and all sent data is on its way, for
    /// as long as `proceed` returns true. Then aborts the communicator, because `ncclCommDestroy`
    /// may wait for other ranks, of which one may be lost.
    pub(crate) fn close(&self, proceed: &mut dyn FnMut() -> bool) {
        let mut finalize = || {
            match &*lock(&self.raw) {
                None => return Ok(false),
                Some(NcclComm(comm)) => {
                    let finalize = load()?.ncclCommFinalize;
                    // SAFETY: the communicator lives, as its lock is held.
                    check("ncclCommFinalize", unsafe { finalize(*comm) })?;
                }
            }
            self.finish_call(proceed)
        };
        if self.context.bind().is_ok() {
            // A failure cannot be reported; the abort ends the remaining work.
            let _ = finalize();
        }
        self.end_communicator();
    }

    /// Ends the communicator and its enqueued exchanges, if it has not ended.
    fn end_communicator(&self) {
        let raw = lock(&self.raw).take();
        if let (Some(NcclComm(comm)), Ok(functions), Ok(())) = (raw, load(), self.context.bind()) {
            // SAFETY: taken from the lock, so no other thread can use it. NCCL ends its work on the
            // device and in its threads. A failure cannot be reported.
            let _ = unsafe { (functions.ncclCommAbort)(comm) };
        }
    }
}

impl Drop for PeerMembership {
    fn drop(&mut self) {
        // Has an effect only without a `close`. Enqueued exchanges are done, or lost with the
        // device: a stream keeps the membership until an exchange is complete.
        self.end_communicator();
    }
}

impl fmt::Debug for PeerMembership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerMembership on {}", self.context.id)
    }
}

/// Bytes that are sent to another rank (`Read`) or received from it (`Write`).
struct PeerMessage {
    rank: usize,
    access: AccessKind,
    address: u64,
    bytes: usize,
}

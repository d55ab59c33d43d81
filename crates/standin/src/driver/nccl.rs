//! The functions of NCCL that the backend uses: memory of devices goes from process to process over
//! sockets of this machine.
//!
//! Communicators do not block: joining a group of ranks, ending a group of calls (two of three) and
//! finalizing continue in a thread, and meanwhile only `ncclCommGetAsyncError` and `ncclCommAbort`
//! may be called.
//!
//! An exchange is a command of its stream. It waits for other processes, which may wait for this
//! process, so a thread runs streams until the exchange is done. If a process is gone, only
//! `ncclCommAbort` ends the exchange, and the device stays healthy. The members of about every
//! second group notice the loss and report it by `ncclCommGetAsyncError`.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::{
    cudaStream_t, ncclComm, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclResult_t, ncclUniqueId,
};

use super::call::{DriverAnswer, INVALID, current, in_context, set_current, wait_for};
use super::copy::check;
use super::stream::stream;
use crate::order::{
    DeviceWork, ExchangeWork, LinkMessage, Links, StreamPoint, fails, hangs, mortal, open_group,
    rest, stalls, vanishes,
};

/// The version that `ncclGetVersion` reports, unless `MERISTEM_STANDIN_NCCL` is set.
const VERSION: c_int = 22_703;

/// The magic number of a configuration, from NCCL's header.
const MAGIC: u32 = 0xcafe_beef;

/// A member of a group.
struct NcclMember {
    state: Mutex<MemberState>,
    /// Whether it notices that another process is gone.
    notices: bool,
}

/// State of a member, which any thread may change.
#[derive(Default)]
struct MemberState {
    /// Connections, once it has joined.
    links: Option<Arc<Links>>,
    /// Number of ranks.
    ranks: usize,
    /// The end of its last exchange: exchanges are in order, on any streams.
    last: Option<StreamPoint>,
    /// Whether a call of it continues in a thread.
    in_progress: bool,
    finalized: bool,
    aborted: bool,
    error: Option<ncclResult_t>,
}

impl MemberState {
    /// The failure that calls return.
    fn failure(&self, notices: bool) -> ncclResult_t {
        let starved = self.links.as_ref().is_some_and(|links| links.is_starved());
        match self.error {
            Some(error) => error,
            None if starved && notices => ncclResult_t::ncclRemoteError,
            None => ncclResult_t::ncclSuccess,
        }
    }
}

type SharedMember = Arc<NcclMember>;

fn lock(member: &NcclMember) -> MutexGuard<'_, MemberState> {
    member.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The member of a handle; `None` for null.
///
/// # Safety
/// `comm` is null, or was made by `ncclCommInitRankConfig` and not aborted.
unsafe fn member<'a>(comm: ncclComm_t) -> Option<&'a SharedMember> {
    // SAFETY: the caller's contract.
    unsafe { comm.cast::<SharedMember>().cast_const().as_ref() }
}

/// Refuses a call while a thread is at work for the member, after it was finalized, or after it has
/// failed.
fn idle(member: &NcclMember, function: &str) -> Result<(), ncclResult_t> {
    let state = lock(member);
    if state.in_progress || state.finalized {
        eprintln!("meristem-standin: {function} on a communicator that is in progress, or final");
        return Err(ncclResult_t::ncclInvalidUsage);
    }
    match state.failure(member.notices) {
        ncclResult_t::ncclSuccess => Ok(()),
        error => Err(error),
    }
}

/// Goes on in a thread, with the context of this one; the member is in progress until it has
/// ended.
fn go_on(
    member: &SharedMember,
    work: impl FnOnce(&SharedMember) -> Result<(), ncclResult_t> + Send + 'static,
) {
    lock(member).in_progress = true;
    let (member, context) = (member.clone(), current());
    thread::spawn(move || {
        set_current(context);
        let result = work(&member);
        let mut state = lock(&member);
        state.in_progress = false;
        state.error = state.error.or(result.err());
    });
}

/// A send or a receive of the group of calls that is being made.
struct PendingCall {
    member: SharedMember,
    /// The stream, as an address.
    on: usize,
    sends: bool,
    message: LinkMessage,
}

thread_local! {
    /// Number of open groups of calls, and their calls.
    static OPEN: RefCell<(usize, Vec<PendingCall>)> = const { RefCell::new((0, Vec::new())) };
}

fn code(answer: DriverAnswer) -> ncclResult_t {
    match answer {
        Ok(()) => ncclResult_t::ncclSuccess,
        Err(CUresult::CUDA_ERROR_INVALID_VALUE) => ncclResult_t::ncclInvalidArgument,
        Err(_) => ncclResult_t::ncclUnhandledCudaError,
    }
}

/// The version of NCCL.
///
/// # Safety
/// `version` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> ncclResult_t {
    let set = std::env::var("MERISTEM_STANDIN_NCCL").ok();
    let number = set.and_then(|set| set.parse().ok()).unwrap_or(VERSION);
    // SAFETY: the caller's contract.
    code(unsafe { super::call::write(version, number) })
}

/// The description of a code.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: u32) -> *const c_char {
    match result {
        0 => c"no error".as_ptr(),
        1 => c"unhandled cuda error".as_ptr(),
        2 => c"unhandled system error".as_ptr(),
        4 => c"invalid argument".as_ptr(),
        5 => c"invalid usage".as_ptr(),
        6 => c"remote process exited or there was a network error".as_ptr(),
        7 => c"NCCL operation in progress".as_ptr(),
        _ => c"unknown result code".as_ptr(),
    }
}

/// The id of a new group: the port at which its members find each other.
///
/// # Safety
/// `id` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t {
    let Ok(port) = open_group() else { return ncclResult_t::ncclSystemError };
    let mut name = ncclUniqueId { internal: [0; 128] };
    for (to, byte) in name.internal.iter_mut().zip(port.to_le_bytes()) {
        *to = c_char::from_ne_bytes([byte]);
    }
    // SAFETY: the caller's contract.
    code(unsafe { super::call::write(id, name) })
}

/// Joins a group, in a thread that waits until all have joined.
///
/// # Safety
/// `comm` is null or may be written to; `config` is null or points to a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    ranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: the caller's contract.
    let fits = unsafe { config.as_ref() }.is_some_and(|config| {
        let size = size_of::<ncclConfig_t>();
        config.size == size && config.magic == MAGIC && config.blocking == 0
    });
    if !fits || ranks < 1 || !(0..ranks).contains(&rank) || comm.is_null() {
        return ncclResult_t::ncclInvalidArgument;
    }
    // Like NCCL, this uses the current context.
    if in_context(|_, _| Ok(())).is_err() {
        return ncclResult_t::ncclUnhandledCudaError;
    }
    let port = [id.internal[0], id.internal[1]].map(|byte| byte.to_ne_bytes()[0]);
    let state = MemberState { ranks: ranks as usize, ..MemberState::default() };
    let member = Arc::new(NcclMember { state: Mutex::new(state), notices: notices(port[0]) });
    go_on(&member, move |member| {
        let links = Links::join(u16::from_le_bytes(port), rank as usize, ranks as usize);
        let links = Arc::new(links.map_err(|_| ncclResult_t::ncclSystemError)?);
        let mut state = lock(member);
        if state.aborted {
            links.abort();
        }
        state.links = Some(links);
        Ok(())
    });
    // SAFETY: checked not to be null; the caller's contract.
    unsafe { comm.write(Box::into_raw(Box::new(member)).cast::<ncclComm>()) };
    ncclResult_t::ncclInProgress
}

/// Whether a communicator notices that another process is gone: in groups with an even port, unless
/// `MERISTEM_STANDIN_NCCL_NOTICES` is 0 or 1. `port` is the low byte of the port.
fn notices(port: u8) -> bool {
    match std::env::var("MERISTEM_STANDIN_NCCL_NOTICES").as_deref() {
        Ok("0") => false,
        Ok("1") => true,
        _ => port.is_multiple_of(2),
    }
}

/// Returns the state of a communicator: in progress, healthy, or failed.
///
/// # Safety
/// `comm` is a communicator, or null; `error` may be written to, or is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(
    comm: ncclComm_t,
    error: *mut ncclResult_t,
) -> ncclResult_t {
    // SAFETY: the caller's contract.
    let Some(member) = (unsafe { member(comm) }) else { return ncclResult_t::ncclInvalidArgument };
    let state = lock(member);
    let found = if state.in_progress {
        ncclResult_t::ncclInProgress
    } else {
        state.failure(member.notices)
    };
    drop(state);
    // SAFETY: the caller's contract.
    code(unsafe { super::call::write(error, found) })
}

/// Ends all enqueued exchanges, and leaves the group. May be called from any thread.
///
/// # Safety
/// `comm` is a communicator, or null, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    if comm.is_null() {
        return ncclResult_t::ncclInvalidArgument;
    }
    // SAFETY: the caller's contract.
    let member = unsafe { Box::from_raw(comm.cast::<SharedMember>()) };
    let mut state = lock(&member);
    state.aborted = true;
    if let Some(links) = &state.links {
        links.abort();
    }
    let last = state.last;
    drop(state);
    // Like NCCL, this waits for its kernels.
    let _ = wait_for(last.as_slice());
    ncclResult_t::ncclSuccess
}

/// Completes all enqueued exchanges, in a thread.
///
/// # Safety
/// `comm` is a communicator, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    // SAFETY: the caller's contract.
    let Some(member) = (unsafe { member(comm) }) else { return ncclResult_t::ncclInvalidArgument };
    if let Err(error) = idle(member, "ncclCommFinalize") {
        return error;
    }
    lock(member).finalized = true;
    go_on(member, |member| {
        let (links, last) = {
            let state = lock(member);
            (state.links.clone(), state.last)
        };
        wait_for(last.as_slice()).map_err(|_| ncclResult_t::ncclUnhandledCudaError)?;
        while links.as_ref().is_some_and(|links| !links.is_flushed() && !lock(member).aborted) {
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    });
    ncclResult_t::ncclInProgress
}

/// Begins a group of calls.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    OPEN.with_borrow_mut(|(depth, _)| *depth += 1);
    ncclResult_t::ncclSuccess
}

/// Ends a group of calls. The outermost end enqueues them, one batch for each communicator and
/// stream, two batches of three in a thread. Each batch counts as one group for the planted faults.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> ncclResult_t {
    static GROUPS: AtomicU64 = AtomicU64::new(0);
    let ended = OPEN.with_borrow_mut(|(depth, pending)| {
        *depth = depth.checked_sub(1)?;
        Some(if *depth == 0 { std::mem::take(pending) } else { vec![] })
    });
    let Some(mut pending) = ended else { return ncclResult_t::ncclInvalidUsage };
    let mut result = ncclResult_t::ncclSuccess;
    while let Some(first) = pending.first() {
        mortal();
        hangs();
        let (member, on) = (first.member.clone(), first.on);
        if vanishes() {
            let links = lock(&member).links.clone();
            if let Some(links) = links {
                links.vanish();
            }
        }
        if fails() {
            return ncclResult_t::ncclSystemError;
        }
        if stalls() {
            go_on(&member, |_| rest());
            return ncclResult_t::ncclInProgress;
        }
        let same = |call: &PendingCall| Arc::ptr_eq(&call.member, &member) && call.on == on;
        let (now, later) = pending.into_iter().partition(same);
        pending = later;
        let work = move |member: &SharedMember| match enqueue(member, on, now) {
            Ok(()) => Ok(()),
            answer => Err(code(answer)),
        };
        if GROUPS.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
            if let Err(error) = work(&member) {
                return error;
            }
        } else {
            go_on(&member, work);
            result = ncclResult_t::ncclInProgress;
        }
    }
    result
}

/// Enqueues the calls of one member on one stream.
fn enqueue(member: &SharedMember, on: usize, calls: Vec<PendingCall>) -> DriverAnswer {
    let (sends, receives): (Vec<PendingCall>, _) = calls.into_iter().partition(|call| call.sends);
    let messages = |calls: Vec<PendingCall>| calls.into_iter().map(|call| call.message).collect();
    let mut state = lock(member);
    let links = state.links.clone().ok_or(INVALID)?;
    let work = DeviceWork::Exchange(ExchangeWork::new(links, messages(sends), messages(receives)));
    let point = in_context(|machine, device| {
        check(machine, &work)?;
        let handle = stream(machine, device, on as cudarc::driver::sys::CUstream)?;
        machine.enqueue(handle, state.last.into_iter().collect(), work)
    })?;
    state.last = Some(point);
    drop(state);
    thread::spawn(move || {
        thread::sleep(Duration::from_micros(point.at * 997 % 3000));
        wait_for(&[point])
    });
    Ok(())
}

/// Bytes of an element.
fn size(of: ncclDataType_t) -> usize {
    match of as u32 {
        0 | 1 => 1,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => 2,
    }
}

/// A send or a receive of memory of a device.
struct TransferCall {
    address: u64,
    bytes: usize,
    peer: c_int,
    comm: ncclComm_t,
    on: cudaStream_t,
    sends: bool,
}

fn add(TransferCall { address, bytes, peer, comm, on, sends }: TransferCall) -> ncclResult_t {
    // SAFETY: null, or a member that lives: the caller's contract.
    let Some(member) = (unsafe { member(comm) }).cloned() else { return code(Err(INVALID)) };
    if let Err(error) = idle(&member, "a send or a receive") {
        return error;
    }
    let ranks = lock(&member).ranks;
    let Some(peer) = usize::try_from(peer).ok().filter(|peer| *peer < ranks) else {
        return code(Err(INVALID));
    };
    let (message, on) = (LinkMessage { address, bytes, peer }, on as usize);
    ncclGroupStart();
    OPEN.with_borrow_mut(|(_, calls)| calls.push(PendingCall { member, on, sends, message }));
    ncclGroupEnd()
}

/// Sends memory of the device to another rank.
///
/// # Safety
/// `comm` is a member of a group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: *const c_void,
    count: usize,
    of: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    on: cudaStream_t,
) -> ncclResult_t {
    add(TransferCall { address: from as u64, bytes: count * size(of), peer, comm, on, sends: true })
}

/// Receives memory of the device from another rank.
///
/// # Safety
/// `comm` is a member of a group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: *mut c_void,
    count: usize,
    of: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    on: cudaStream_t,
) -> ncclResult_t {
    add(TransferCall { address: to as u64, bytes: count * size(of), peer, comm, on, sends: false })
}

//! The functions of NCCL that the backend uses: memory of devices goes from process to process over
//! sockets of this machine.
//!
//! An exchange is a command of its stream. As it waits for other processes, which may wait for this
//! one, a thread lets streams run until it is done, some time after it was enqueued.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::{
    cudaStream_t, ncclComm, ncclComm_t, ncclDataType_t, ncclResult_t, ncclUniqueId,
};

use super::call::{Answer, INVALID, in_context, machine};
use super::copy::check;
use super::stream::stream;
use crate::order::{Exchange, Links, Message, Point, Work, open_group};

/// Version that is said to be installed, unless `MERISTEM_STANDIN_NCCL` names another.
const VERSION: c_int = 22_703;

/// A member of a group.
struct Member {
    links: Arc<Links>,
    /// The end of its last exchange: they are in order, on whatever streams.
    last: Mutex<Option<Point>>,
}

/// A send or a receive of the group of calls that is being made.
struct Pending {
    member: *const Member,
    on: cudaStream_t,
    sends: bool,
    message: Message,
}

thread_local! {
    /// How many groups of calls are open, and their calls.
    static OPEN: RefCell<(usize, Vec<Pending>)> = const { RefCell::new((0, Vec::new())) };
}

fn code(answer: Answer) -> ncclResult_t {
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

/// Words for a code.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: u32) -> *const c_char {
    match result {
        0 => c"no error".as_ptr(),
        1 => c"unhandled cuda error".as_ptr(),
        2 => c"unhandled system error".as_ptr(),
        4 => c"invalid argument".as_ptr(),
        _ => c"unknown result code".as_ptr(),
    }
}

/// A name for a new group: the port at which its members find each other.
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

/// Joins a group, and waits until all have joined.
///
/// # Safety
/// `comm` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    ranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    if ranks < 1 || !(0..ranks).contains(&rank) || comm.is_null() {
        return ncclResult_t::ncclInvalidArgument;
    }
    // As NCCL does, it uses the current context.
    if in_context(|_, _| Ok(())).is_err() {
        return ncclResult_t::ncclUnhandledCudaError;
    }
    let port = [id.internal[0], id.internal[1]].map(|byte| byte.to_ne_bytes()[0]);
    let links = Links::join(u16::from_le_bytes(port), rank as usize, ranks as usize);
    let Ok(links) = links else { return ncclResult_t::ncclSystemError };
    let member = Member { links: Arc::new(links), last: Mutex::new(None) };
    // SAFETY: checked not to be null; the caller's contract.
    unsafe { comm.write(Box::into_raw(Box::new(member)).cast::<ncclComm>()) };
    ncclResult_t::ncclSuccess
}

/// Leaves a group. Exchanges that were enqueued keep their connections.
///
/// # Safety
/// `comm` was returned by `ncclCommInitRank`, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    if comm.is_null() {
        return ncclResult_t::ncclInvalidArgument;
    }
    // SAFETY: the caller's contract.
    drop(unsafe { Box::from_raw(comm.cast::<Member>()) });
    ncclResult_t::ncclSuccess
}

/// Begins a group of calls.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    OPEN.with_borrow_mut(|(depth, _)| *depth += 1);
    ncclResult_t::ncclSuccess
}

/// Ends a group of calls and enqueues them.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> ncclResult_t {
    let ended = OPEN.with_borrow_mut(|(depth, pending)| {
        *depth = depth.checked_sub(1)?;
        Some(if *depth == 0 { std::mem::take(pending) } else { vec![] })
    });
    let Some(mut pending) = ended else { return ncclResult_t::ncclInvalidUsage };
    while let Some(first) = pending.first() {
        let (member, on) = (first.member, first.on);
        let same = |call: &Pending| call.member == member && call.on == on;
        let (now, later) = pending.into_iter().partition(same);
        // SAFETY: the caller's contract: members live until they are aborted.
        let answer = enqueue(unsafe { &*member }, on, now);
        if answer.is_err() {
            return code(answer);
        }
        pending = later;
    }
    ncclResult_t::ncclSuccess
}

/// Enqueues the calls of one member on one stream.
fn enqueue(member: &Member, on: cudaStream_t, calls: Vec<Pending>) -> Answer {
    let (sends, receives): (Vec<Pending>, _) = calls.into_iter().partition(|call| call.sends);
    let messages = |calls: Vec<Pending>| calls.into_iter().map(|call| call.message).collect();
    let (sends, receives) = (messages(sends), messages(receives));
    let work = Work::Exchange(Exchange { links: member.links.clone(), sends, receives });
    let point = in_context(|machine, device| {
        check(machine, &work)?;
        let handle = stream(machine, device, on.cast())?;
        let mut last = member.last.lock().unwrap_or_else(PoisonError::into_inner);
        let point = machine.enqueue(handle, last.into_iter().collect(), work)?;
        *last = Some(point);
        Ok(point)
    })?;
    thread::spawn(move || {
        thread::sleep(Duration::from_micros(point.at * 997 % 3000));
        machine(|machine| machine.wait(&[point]))
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
struct Call {
    address: u64,
    bytes: usize,
    peer: c_int,
    comm: ncclComm_t,
    on: cudaStream_t,
    sends: bool,
}

fn add(Call { address, bytes, peer, comm, on, sends }: Call) -> ncclResult_t {
    let member = comm.cast::<Member>().cast_const();
    // SAFETY: null, or a member that lives: the caller's contract.
    let ranks = unsafe { member.as_ref() }.map_or(0, |member| member.links.size());
    let Some(peer) = usize::try_from(peer).ok().filter(|peer| *peer < ranks) else {
        return code(Err(INVALID));
    };
    let message = Message { address, bytes, peer };
    ncclGroupStart();
    OPEN.with_borrow_mut(|(_, calls)| calls.push(Pending { member, on, sends, message }));
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
    add(Call { address: from as u64, bytes: count * size(of), peer, comm, on, sends: true })
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
    add(Call { address: to as u64, bytes: count * size(of), peer, comm, on, sends: false })
}

//! Accesses of kernels to unmapped memory: a signal becomes a fault of the device.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};
use std::{mem, ptr};

use cudarc::driver::sys::CUresult;

use super::block::{self, BlockThreads};

/// A failed check of the compiler is `SIGILL` on x86-64 and `SIGTRAP` on aarch64.
const SIGNALS: [c_int; 4] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGTRAP];

/// The previous handlers.
static OLD: OnceLock<[Old; SIGNALS.len()]> = OnceLock::new();

struct Old(libc::sigaction);

// SAFETY: plain data that is only read.
unsafe impl Send for Old {}
// SAFETY: as above.
unsafe impl Sync for Old {}

static SIGNAL: AtomicI32 = AtomicI32::new(0);
static ADDRESS: AtomicU64 = AtomicU64::new(0);

/// Address of the last access that faulted.
pub(super) fn address() -> u64 {
    ADDRESS.load(Ordering::Relaxed)
}

/// Installs the handlers, once. Under AddressSanitizer its handlers stay, which report more.
pub(super) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        if crate::memory::Asan::get().is_some() {
            return;
        }
        // SAFETY: an action without flags is valid; the handler is async-signal-safe: it stores two
        // numbers and changes where the thread continues.
        let old = SIGNALS.map(|signal| unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = handle;
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            let mut old = mem::zeroed();
            libc::sigaction(signal, &raw const action, &raw mut old);
            Old(old)
        });
        drop(OLD.set(old));
    });
}

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if !BlockThreads::is_running() {
        return pass_on(signal);
    }
    SIGNAL.store(signal, Ordering::Relaxed);
    // SAFETY: the system's data; the thread continues in `escape`, on its stack, whose contents are
    // given up.
    unsafe {
        ADDRESS.store((*info).si_addr() as u64, Ordering::Relaxed);
        go_on_at(&mut *context.cast(), escape, BlockThreads::stack_top());
    }
}

/// Restores the previous handler of a signal.
fn pass_on(signal: c_int) {
    let at = SIGNALS.iter().position(|known| *known == signal);
    let old = OLD.get().zip(at).map(|(old, at)| &old[at].0);
    // SAFETY: the previous action; the failed access is tried again under it.
    unsafe { libc::sigaction(signal, old.map_or(ptr::null(), ptr::from_ref), ptr::null_mut()) };
}

#[cfg(target_arch = "x86_64")]
fn go_on_at(context: &mut libc::ucontext_t, at: extern "C" fn() -> !, top: *mut u8) {
    let registers = &mut context.uc_mcontext.gregs;
    registers[libc::REG_RIP as usize] = at as *const () as i64;
    // As after a call: eight bytes for the return address.
    registers[libc::REG_RSP as usize] = top as i64 - 8;
}

#[cfg(target_arch = "aarch64")]
fn go_on_at(context: &mut libc::ucontext_t, at: extern "C" fn() -> !, top: *mut u8) {
    context.uc_mcontext.pc = at as *const () as u64;
    context.uc_mcontext.sp = top as u64;
}

extern "C" fn escape() -> ! {
    let (signal, address) = (SIGNAL.load(Ordering::Relaxed), address());
    match signal {
        // A general protection fault has no address, for example a misaligned vector access.
        libc::SIGSEGV if address == 0 => block::stop(
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            "an access to address 0, or a misaligned vector".into(),
        ),
        libc::SIGILL | libc::SIGTRAP => block::stop(
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            "a misaligned access, or another that the compiler's checks found".into(),
        ),
        _ => block::stop(
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            format!("an access to address {address:#x}"),
        ),
    }
}

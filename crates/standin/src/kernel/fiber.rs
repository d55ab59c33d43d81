//! Fibers: stacks that take turns on one host thread.
//!
//! The switch saves only the registers that a callee must keep: `swapcontext` would make system
//! calls each time.

use std::ffi::c_void;
use std::ptr;

use crate::memory::{Asan, Mapping};

/// Bytes of a stack.
const STACK: usize = 256 << 10;

/// Stacks begin at different distances from their ends, so that they do not share the same sets of
/// the cache. The distance is the number of the stack modulo a prime, times an odd number of lines.
const COLOUR: usize = 17 * 64;
const COLOURS: usize = 61;

/// A stack, and the state in which it was left.
#[derive(Debug)]
pub(super) struct Fiber {
    stack: Mapping,
    /// One past the highest byte in use.
    top: *mut u8,
    /// Stack pointer while another fiber runs.
    pointer: *mut u8,
    /// AddressSanitizer's memory of the stack.
    saved: *mut c_void,
}

/// The host thread, while a fiber runs.
#[derive(Debug)]
pub(super) struct HostStack {
    pointer: *mut u8,
    saved: *mut c_void,
    stack: (*const u8, usize),
}

/// A stack to switch from or to.
pub(super) struct SwitchPoint {
    pointer: *mut *mut u8,
    saved: *mut *mut c_void,
    stack: (*const u8, usize),
}

impl HostStack {
    pub(super) fn new() -> Self {
        Self { pointer: ptr::null_mut(), saved: ptr::null_mut(), stack: (ptr::null(), 0) }
    }

    pub(super) fn place(&mut self) -> SwitchPoint {
        SwitchPoint {
            pointer: &raw mut self.pointer,
            saved: &raw mut self.saved,
            stack: self.stack,
        }
    }

    /// Records the host's stack; called first on a fiber that the host switched to.
    pub(super) fn left(&mut self, stack: (*const u8, usize)) {
        self.stack = stack;
    }
}

impl Fiber {
    /// A fiber that will call `main` when it is first switched to; `None` without memory.
    pub(super) fn new(number: usize, main: extern "C" fn() -> !) -> Option<Self> {
        let stack = Mapping::new(STACK)?;
        // SAFETY: a place in the open pages, which are more than all colours.
        let top = unsafe { stack.open().add(stack.open_bytes() - number % COLOURS * COLOUR) };
        let mut fiber = Self { stack, top, pointer: ptr::null_mut(), saved: ptr::null_mut() };
        fiber.restart(main);
        Some(fiber)
    }

    /// Resets the fiber: it will call `main` when it is next switched to.
    pub(super) fn restart(&mut self, main: extern "C" fn() -> !) {
        if let Some(asan) = Asan::get() {
            asan.unpoison(self.stack.open(), self.stack.open_bytes());
        }
        self.saved = ptr::null_mut();
        // SAFETY: the top words of the stack, which is not in use.
        self.pointer = unsafe { prepare(self.top, main) };
    }

    pub(super) fn place(&mut self) -> SwitchPoint {
        SwitchPoint {
            pointer: &raw mut self.pointer,
            saved: &raw mut self.saved,
            stack: (self.stack.open(), self.stack.open_bytes()),
        }
    }

    /// One past the highest byte in use.
    pub(super) fn top(&self) -> *mut u8 {
        self.top
    }
}

/// Switches from `from` to `to`. Returns when another fiber switches back; under AddressSanitizer
/// the result is the stack that was left then.
///
/// # Safety
/// The thread runs on `from`; `to` was left before or has just been made; both stay where they are.
pub(super) unsafe fn switch(from: SwitchPoint, to: SwitchPoint) -> (*const u8, usize) {
    // SAFETY: the caller's contract.
    unsafe {
        match Asan::get() {
            None => {
                exchange(from.pointer, *to.pointer);
                (ptr::null(), 0)
            }
            Some(asan) => {
                asan.before_switch(from.saved, to.stack.0, to.stack.1);
                exchange(from.pointer, *to.pointer);
                asan.after_switch(*from.saved)
            }
        }
    }
}

/// Called first in a fiber; under AddressSanitizer the result is the stack that was left.
pub(super) fn arrived() -> (*const u8, usize) {
    // SAFETY: called once on a fresh stack, which has nothing saved.
    Asan::get().map_or((ptr::null(), 0), |asan| unsafe { asan.after_switch(ptr::null_mut()) })
}

/// Saves the registers and the stack pointer, and restores the other stack's.
///
/// # Safety
/// `to` was stored by this function for a stack, or returned by `prepare`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn exchange(from: *mut *mut u8, to: *mut u8) {
    core::arch::naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, rsi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}

/// Prepares a stack from which `exchange` returns into `main`; returns its stack pointer.
///
/// # Safety
/// `top` is the end of a stack that is not in use.
#[cfg(target_arch = "x86_64")]
unsafe fn prepare(top: *mut u8, main: extern "C" fn() -> !) -> *mut u8 {
    // Six registers, the return address, and a null return address for `main`, which leaves the
    // stack aligned as after a call. SAFETY: the caller's contract.
    unsafe {
        let words = top.cast::<usize>().sub(8);
        words.write_bytes(0, 8);
        *words.add(6) = main as *const () as usize;
        words.cast()
    }
}

/// Saves the registers and the stack pointer, and restores the other stack's.
///
/// # Safety
/// `to` was stored by this function for a stack, or returned by `prepare`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn exchange(from: *mut *mut u8, to: *mut u8) {
    core::arch::naked_asm!(
        "sub sp, sp, #160",
        "stp x19, x20, [sp, #0]",
        "stp x21, x22, [sp, #16]",
        "stp x23, x24, [sp, #32]",
        "stp x25, x26, [sp, #48]",
        "stp x27, x28, [sp, #64]",
        "stp x29, x30, [sp, #80]",
        "stp d8, d9, [sp, #96]",
        "stp d10, d11, [sp, #112]",
        "stp d12, d13, [sp, #128]",
        "stp d14, d15, [sp, #144]",
        "mov x9, sp",
        "str x9, [x0]",
        "mov sp, x1",
        "ldp x19, x20, [sp, #0]",
        "ldp x21, x22, [sp, #16]",
        "ldp x23, x24, [sp, #32]",
        "ldp x25, x26, [sp, #48]",
        "ldp x27, x28, [sp, #64]",
        "ldp x29, x30, [sp, #80]",
        "ldp d8, d9, [sp, #96]",
        "ldp d10, d11, [sp, #112]",
        "ldp d12, d13, [sp, #128]",
        "ldp d14, d15, [sp, #144]",
        "add sp, sp, #160",
        "ret",
    )
}

/// Prepares a stack from which `exchange` returns into `main`; returns its stack pointer.
///
/// # Safety
/// `top` is the end of a stack that is not in use.
#[cfg(target_arch = "aarch64")]
unsafe fn prepare(top: *mut u8, main: extern "C" fn() -> !) -> *mut u8 {
    // SAFETY: the caller's contract.
    unsafe {
        let words = top.cast::<usize>().sub(20);
        words.write_bytes(0, 20);
        // x30, the return address.
        *words.add(11) = main as *const () as usize;
        words.cast()
    }
}

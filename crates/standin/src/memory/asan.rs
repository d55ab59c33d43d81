//! AddressSanitizer's own functions, where the process has it loaded.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::OnceLock;

type AsanFunction = unsafe extern "C" fn(*const c_void, usize);
type StartSwitch = unsafe extern "C" fn(*mut *mut c_void, *const c_void, usize);
type FinishSwitch = unsafe extern "C" fn(*mut c_void, *mut *const c_void, *mut usize);

/// Functions of the sanitizer's run-time library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asan {
    poison: AsanFunction,
    unpoison: AsanFunction,
    start_switch: StartSwitch,
    finish_switch: FinishSwitch,
}

impl Asan {
    /// The library's functions, or `None` in a process without it.
    pub(crate) fn get() -> Option<&'static Self> {
        static LOADED: OnceLock<Option<Asan>> = OnceLock::new();
        LOADED.get_or_init(Self::find).as_ref()
    }

    fn find() -> Option<Self> {
        // SAFETY: sanitizer/asan_interface.h and sanitizer/common_interface_defs.h declare these
        // names with these types.
        unsafe {
            Some(Self {
                poison: std::mem::transmute::<*mut c_void, AsanFunction>(symbol(
                    c"__asan_poison_memory_region",
                )?),
                unpoison: std::mem::transmute::<*mut c_void, AsanFunction>(symbol(
                    c"__asan_unpoison_memory_region",
                )?),
                start_switch: std::mem::transmute::<*mut c_void, StartSwitch>(symbol(
                    c"__sanitizer_start_switch_fiber",
                )?),
                finish_switch: std::mem::transmute::<*mut c_void, FinishSwitch>(symbol(
                    c"__sanitizer_finish_switch_fiber",
                )?),
            })
        }
    }

    /// Makes accesses of instrumented code to these bytes errors.
    pub(crate) fn poison(&self, from: *const u8, bytes: usize) {
        // SAFETY: only the shadow of the range is written; the caller owns the range.
        unsafe { (self.poison)(from.cast(), bytes) }
    }

    /// Permits accesses to these bytes again.
    pub(crate) fn unpoison(&self, from: *const u8, bytes: usize) {
        // SAFETY: as above.
        unsafe { (self.unpoison)(from.cast(), bytes) }
    }

    /// Announces to the sanitizer a switch to the stack at `bottom`.
    ///
    /// # Safety
    /// The next switch of this thread must be to that stack, and `save` must live until the thread
    /// returns.
    pub(crate) unsafe fn before_switch(
        &self,
        save: *mut *mut c_void,
        bottom: *const u8,
        bytes: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe { (self.start_switch)(save, bottom.cast(), bytes) }
    }

    /// Announces to the sanitizer the end of the switch; returns the previous stack.
    ///
    /// # Safety
    /// The first act after a switch; `saved` is what leaving this stack stored, or null.
    pub(crate) unsafe fn after_switch(&self, saved: *mut c_void) -> (*const u8, usize) {
        let (mut bottom, mut bytes) = (ptr::null(), 0);
        // SAFETY: the caller's contract; both places are ours.
        unsafe { (self.finish_switch)(saved, &raw mut bottom, &raw mut bytes) };
        (bottom.cast(), bytes)
    }
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: looks up a name among the loaded libraries of the process.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

//! Loaded modules: shared objects that `compile` wrote, and their kernels.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::slice;

use super::compile;
use crate::ground::SHARED_MAX;
use crate::memory::Asan;

/// Bytes after dynamic shared memory that are checked.
pub(super) const GUARD_BYTES: usize = 256;

/// Bytes that a module has for dynamic shared memory; `meristem_dynamic_bytes` of the shim.
pub(super) const DYNAMIC_ROOM: usize = SHARED_MAX + GUARD_BYTES;

/// Functions that kernels call; `meristem_host` of the shim.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HostFunctions {
    pub(super) wait: extern "C" fn(c_int, *const c_char, c_int),
    pub(super) ended: extern "C" fn(),
    pub(super) fail: extern "C" fn(c_int, *const c_char, *const c_char, c_int) -> !,
    pub(super) copy: extern "C" fn(*mut u8, *const u8, usize),
    pub(super) commit: extern "C" fn(),
    pub(super) arrive: extern "C" fn(c_uint),
}

/// The running block; `meristem_block` of the shim.
#[repr(C)]
pub(super) struct BlockState {
    pub(super) host: *const HostFunctions,
    pub(super) order: *const u32,
    pub(super) started: u32,
    pub(super) count: u32,
    pub(super) live: u32,
    pub(super) waiting: u32,
    pub(super) current: u32,
    pub(super) lanes: *mut u64,
    pub(super) turn: [u8; 32],
}

/// One argument of a kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Argument {
    /// Its size.
    pub(crate) bytes: c_uint,
    /// Whether its type is a pointer.
    pub(crate) is_pointer: c_uint,
}

/// An entry of the module's table; `meristem_kernel` of the shim.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelEntry {
    name: *const c_char,
    pub(super) run: unsafe extern "C" fn(*mut *mut c_void),
    threads_max: c_uint,
    arguments: c_uint,
    argument: *const Argument,
}

/// The table that a module exports; `meristem_module` of the shim.
#[repr(C)]
pub(super) struct ModuleTable {
    kernels: c_uint,
    kernel: *const KernelEntry,
    pub(super) block: *mut BlockState,
    pub(super) thread_index: *mut [u32; 3],
    pub(super) block_index: *mut [u32; 3],
    pub(super) block_size: *mut [u32; 3],
    pub(super) grid_size: *mut [u32; 3],
    pub(super) dynamic: *mut u8,
    pub(super) shared: *mut u8,
    pub(super) shared_end: *mut u8,
}

/// A loaded module, until the value is dropped.
#[derive(Debug)]
pub(crate) struct LoadedModule {
    library: *mut c_void,
    exported: *const ModuleTable,
    /// Kept open, because the loader identifies libraries by path, and the path contains the file's
    /// number.
    _file: File,
}

// SAFETY: a module is only used under the lock of the machine.
unsafe impl Send for LoadedModule {}
// SAFETY: as above.
unsafe impl Sync for LoadedModule {}

impl LoadedModule {
    /// Loads code of `compile`; the error is the reason why it cannot be loaded.
    ///
    /// # Safety
    /// `image` points to complete code.
    pub(crate) unsafe fn load(image: *const u8) -> Result<Self, String> {
        // SAFETY: the caller's contract.
        let code = unsafe { elf(image) }.ok_or("the image is no code")?;
        // Checked before any of the code runs: code for AddressSanitizer ends other processes.
        let code = compile::unstamped(code).ok_or("the image is code of another compiler")?;
        // SAFETY: creates a file without a name.
        let file = unsafe { libc::memfd_create(c"meristem-kernels".as_ptr(), 0) };
        if file < 0 {
            return Err("memfd_create failed".into());
        }
        // SAFETY: the file was just created, and has no other owner.
        let mut file = unsafe { File::from_raw_fd(file) };
        file.write_all(&code).map_err(|error| format!("code could not be written: {error}"))?;
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(|error| error.to_string())?;
        // SAFETY: the code's constructors are the compiler's; the shim has none.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: after a failed call it is a message.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(why.to_string_lossy().into_owned());
        }
        // SAFETY: a lookup in the library just opened.
        let exported =
            unsafe { libc::dlsym(library, c"meristem_module_of_kernels".as_ptr()) }.cast();
        let module = Self { library, exported, _file: file };
        if exported.is_null() {
            return Err("the code has no table of kernels".into());
        }
        Ok(module)
    }

    /// The number of the kernel with this name.
    pub(crate) fn find(&self, name: &CStr) -> Option<usize> {
        // SAFETY: a lookup in an open library. A kernel that is not extern "C" has a mangled name
        // there, as on a device.
        if unsafe { libc::dlsym(self.library, name.as_ptr()) }.is_null() {
            return None;
        }
        // SAFETY: the shim's names are C strings.
        self.entries().iter().position(|entry| unsafe { CStr::from_ptr(entry.name) } == name)
    }

    /// The name of a kernel.
    pub(crate) fn name(&self, kernel: usize) -> String {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(self.entry(kernel).name) }.to_string_lossy().into_owned()
    }

    /// Arguments of a kernel.
    pub(crate) fn arguments(&self, kernel: usize) -> &[Argument] {
        let entry = self.entry(kernel);
        // SAFETY: the shim's table has `arguments` entries.
        unsafe { slice::from_raw_parts(entry.argument, entry.arguments as usize) }
    }

    /// Largest number of threads of a block, if the kernel has launch bounds.
    pub(crate) fn threads_max(&self, kernel: usize) -> Option<usize> {
        let threads = self.entry(kernel).threads_max as usize;
        (threads > 0).then_some(threads)
    }

    /// Bytes of static shared memory of all kernels of the module together.
    pub(crate) fn shared_bytes(&self) -> usize {
        let exported = self.exported();
        exported.shared_end as usize - exported.shared as usize
    }

    pub(super) fn exported(&self) -> &ModuleTable {
        // SAFETY: found when the module was loaded, and valid as long as it is loaded.
        unsafe { &*self.exported }
    }

    pub(super) fn entry(&self, kernel: usize) -> &KernelEntry {
        &self.entries()[kernel]
    }

    fn entries(&self) -> &[KernelEntry] {
        let exported = self.exported();
        // SAFETY: the table has the number of entries that the shim stored.
        unsafe { slice::from_raw_parts(exported.kernel, exported.kernels as usize) }
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // Other code or data will get these addresses, and must not find them poisoned.
        if let (Some(asan), false) = (Asan::get(), self.exported.is_null()) {
            asan.unpoison(self.exported().dynamic, DYNAMIC_ROOM);
        }
        // SAFETY: opened by `load`; no reference to it exists any more.
        unsafe { libc::dlclose(self.library) };
    }
}

/// The bytes of the ELF file at `image`, which ends with the table of sections.
///
/// # Safety
/// `image` points to at least four bytes, and to a complete file if these are the magic bytes of
/// ELF.
unsafe fn elf<'a>(image: *const u8) -> Option<&'a [u8]> {
    // SAFETY: the caller's contract; the header of a 64-bit file has 64 bytes.
    let header = unsafe {
        if slice::from_raw_parts(image, 4) != b"\x7fELF" {
            return None;
        }
        slice::from_raw_parts(image, 64)
    };
    let number = |at: usize, bytes: usize| {
        header[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    let end = number(0x28, 8) + number(0x3a, 2) * number(0x3c, 2);
    // SAFETY: the caller's contract.
    Some(unsafe { slice::from_raw_parts(image, end) })
}

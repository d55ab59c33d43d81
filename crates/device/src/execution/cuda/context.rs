//! An opened CUDA device: its context, its kernels, its staging memory, and its failure.

use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;

use super::compiler::Architecture;
use super::driver::{self, Called, CudaEvent, Pinned, Primary};
use super::module::KernelModule;
use crate::execution::call::KernelSource;
use crate::ground::sync::{Arc, Mutex, OnceLock, lock};
use crate::ground::{CudaError, DeviceId, Error, Result};

/// Smallest piece of staging memory in bytes. Larger pieces have this size times a power of two.
const SMALLEST_PINNED: usize = 4096;
/// Smallest allocation of staging memory in bytes: one piece, or several of the same size. Locking
/// pages takes the driver long, and a fleet needs hundreds of small pieces at once, one for the
/// table of each graph.
const PINNED_AT_ONCE: usize = 1 << 20;
/// Largest piece in bytes: larger copies go through pageable memory, which the driver copies in
/// steps.
pub(super) const LARGEST_PINNED: usize = 64 << 20;
/// Limit of the free bytes that are kept for reuse. A returned piece of [`PINNED_AT_ONCE`] bytes or
/// more that would exceed it is freed; smaller pieces are always kept.
const KEPT_MAX: usize = 256 << 20;

/// Lowest compute capability that the kernels are written for.
const CAPABILITY_NEEDED: (i32, i32) = (8, 0);

/// Interval at which a suspended device checks whether it has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A device failure: sticky, for every stream of the device.
#[derive(Debug, Clone)]
struct DeviceFailure {
    operation: &'static str,
    site: &'static Location<'static>,
    cause: Arc<CudaError>,
}

/// Free page-locked memory.
#[derive(Default)]
struct FreePinned {
    /// Free pieces by size class: 4 KiB, 8 KiB …
    classes: Vec<Vec<Pinned>>,
    /// Bytes of all free pieces.
    bytes: usize,
}

impl FreePinned {
    /// The free pieces of a size class.
    fn class(&mut self, class: usize) -> &mut Vec<Pinned> {
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, Vec::new);
        }
        &mut self.classes[class]
    }
}

/// An opened device.
pub(crate) struct CudaContext {
    pub(super) id: DeviceId,
    /// Architecture that the kernels are compiled for.
    pub(super) target: Architecture,
    /// Compiled sources, by their addresses.
    modules: Mutex<HashMap<usize, Arc<KernelModule>>>,
    pinned: Mutex<FreePinned>,
    /// A reached event with its time on the host. Times of all streams are measured from it, so
    /// that they can be compared.
    pub(super) anchor: Mutex<Option<(Arc<CudaEvent>, Instant)>>,
    failure: OnceLock<DeviceFailure>,
    /// An error without a known reason yet, and the time at which the device fails with this error.
    suspended: OnceLock<(Instant, CudaError)>,
    /// Dropped last, because the other fields are freed in this context.
    primary: Primary,
}

impl CudaContext {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::Cuda`] without a driver or such a device, or if either is too old.
    pub(crate) fn open(id: DeviceId) -> Result<Arc<CudaContext>> {
        CudaContext::try_open(id).map_err(|source| Error::Cuda { device: id, source })
    }

    fn try_open(id: DeviceId) -> Called<Arc<CudaContext>> {
        driver::load()?;
        let device = driver::device(id.index())?;
        let of = |attribute| driver::attribute(device, attribute);
        let capability = (
            of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < CAPABILITY_NEEDED {
            return Err(CudaError::DeviceTooOld { name: driver::name(device)?, capability });
        }
        let context = CudaContext {
            id,
            target: Architecture::from_capability(capability),
            modules: Mutex::default(),
            pinned: Mutex::default(),
            anchor: Mutex::default(),
            failure: OnceLock::new(),
            suspended: OnceLock::new(),
            primary: Primary::retain(device)?,
        };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// Makes this context current to the calling thread.
    pub(super) fn bind(&self) -> Called {
        self.primary.bind()
    }

    /// Blocks until the device has no work. An error is found by the next call as well.
    pub(super) fn synchronize(&self) {
        let _ = self.bind().and_then(|()| driver::synchronize_context());
    }

    /// Whether the device has failed: it runs nothing any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Marks the device as failed; only the first failure counts.
    pub(super) fn fail(
        &self,
        operation: &'static str,
        site: &'static Location<'static>,
        cause: CudaError,
    ) {
        let _ = self.failure.set(DeviceFailure { operation, site, cause: Arc::new(cause) });
    }

    /// Suspends the device: it gets no work, and no task of it completes, until
    /// [`fail`](CudaContext::fail) is called with the reason of the error. After `patience` it
    /// fails with the error itself.
    pub(super) fn suspend(&self, cause: CudaError, patience: Duration) {
        let _ = self.suspended.set((Instant::now() + patience, cause));
    }

    /// Whether the device is suspended and has not failed yet.
    pub(super) fn is_suspended(&self) -> bool {
        self.suspended.get().is_some() && !self.has_failed()
    }

    /// Waits until a suspended device has failed.
    pub(super) fn await_reason(&self) {
        let Some((end, cause)) = self.suspended.get() else { return };
        while !self.has_failed() {
            if Instant::now() >= *end {
                return self.fail("exchange", Location::caller(), cause.clone());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns an error if the device has failed.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`].
    pub(super) fn check(&self) -> Result<()> {
        match self.failure.get().cloned() {
            None => Ok(()),
            Some(DeviceFailure { operation, site, cause }) => {
                Err(Error::DeviceFailed { device: self.id, operation, site, cause })
            }
        }
    }

    /// Whether the kernels of a source are loaded.
    pub(super) fn has_module(&self, source: &'static KernelSource) -> bool {
        lock(&self.modules).contains_key(&key(source))
    }

    /// The kernels of a source, compiled and loaded at the first call.
    pub(super) fn module(&self, source: &'static KernelSource) -> Called<Arc<KernelModule>> {
        let mut modules = lock(&self.modules);
        if let Some(module) = modules.get(&key(source)) {
            return Ok(module.clone());
        }
        self.bind()?;
        let module = Arc::new(KernelModule::load(source, &self.target)?);
        modules.insert(key(source), module.clone());
        Ok(module)
    }

    /// Page-locked memory of at least `bytes` bytes, `None` if that is too much or the system has
    /// none. Bind first.
    pub(super) fn take_pinned(&self, bytes: usize) -> Option<Pinned> {
        if bytes > LARGEST_PINNED {
            return None;
        }
        let class = class_of(bytes);
        let taken = {
            let mut free = lock(&self.pinned);
            let taken = free.classes.get_mut(class).and_then(Vec::pop);
            free.bytes -= taken.as_ref().map_or(0, Pinned::size);
            taken
        };
        if taken.is_some() {
            return taken;
        }
        let size = SMALLEST_PINNED << class;
        let mut pieces = Pinned::pieces(size, (PINNED_AT_ONCE / size).max(1)).ok()?;
        let taken = pieces.pop();
        let mut free = lock(&self.pinned);
        free.bytes += pieces.len() * size;
        free.class(class).append(&mut pieces);
        taken
    }

    /// Locks memory ahead of the copies that need it: afterwards at least `count` pieces of `bytes`
    /// bytes are free, if the system has them. Bind first.
    pub(super) fn reserve_pinned(&self, bytes: usize, count: usize) {
        let taken: Vec<Pinned> = (0..count).map_while(|_| self.take_pinned(bytes)).collect();
        taken.into_iter().for_each(|pinned| self.give_pinned(pinned));
    }

    /// Takes back memory that no copy uses any more. Bind first.
    pub(super) fn give_pinned(&self, pinned: Pinned) {
        let class = class_of(pinned.size());
        let mut free = lock(&self.pinned);
        // Dropping a smaller piece would free nothing, because its allocation has other pieces.
        if pinned.size() >= PINNED_AT_ONCE && free.bytes + pinned.size() > KEPT_MAX {
            drop(free);
            return; // to the system
        }
        free.bytes += pinned.size();
        free.class(class).push(pinned);
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        // Freeing the fields acts on the current context.
        let _ = self.bind();
    }
}

impl fmt::Debug for CudaContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaContext({} for {})", self.id, self.target)
    }
}

/// Sources are statics, so an address identifies one.
fn key(source: &'static KernelSource) -> usize {
    std::ptr::from_ref(source).addr()
}

/// Size class of the smallest piece of staging memory that holds `bytes` bytes.
fn class_of(bytes: usize) -> usize {
    let pieces = bytes.div_ceil(SMALLEST_PINNED).max(1);
    pieces.next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_holds_its_bytes() {
        for (bytes, class) in [(0, 0), (1, 0), (4096, 0), (4097, 1), (8192, 1), (1 << 20, 8)] {
            assert_eq!(class_of(bytes), class, "{bytes}");
            assert!(SMALLEST_PINNED << class_of(bytes) >= bytes);
        }
    }

    #[test]
    #[ignore = "needs a GPU or the stand-in"]
    fn small_pieces_share_an_allocation() {
        let context = CudaContext::open(DeviceId::Cuda(0)).unwrap();
        let take = |count: usize, bytes: usize| -> Vec<Pinned> {
            (0..count).map(|_| context.take_pinned(bytes).unwrap()).collect()
        };
        let mut tables = take(256, 100);
        assert!(tables.iter().all(|table| table.is_beside(&tables[0])));
        let mut addresses: Vec<usize> = tables.iter().map(|t| t.address().addr()).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] == SMALLEST_PINNED));
        let next = context.take_pinned(100).unwrap();
        assert!(!next.is_beside(&tables[0]), "the 257th");
        // Bytes of one are not those of another.
        for (table, byte) in tables.iter_mut().zip(0u8..=255) {
            // SAFETY: no copy uses it.
            unsafe { table.bytes() }.fill(byte);
        }
        for (table, byte) in tables.iter_mut().zip(0u8..=255) {
            // SAFETY: no copy uses it.
            assert!(unsafe { table.bytes() }.iter().all(|found| *found == byte));
        }
        let large = take(2, PINNED_AT_ONCE);
        assert!(!large[0].is_beside(&large[1]));
        tables.into_iter().for_each(|table| context.give_pinned(table));
        let again = take(256, 100);
        let kept = again.iter().filter(|t| addresses.contains(&t.address().addr()));
        assert_eq!(kept.count(), 256, "pieces are used again");
    }
}

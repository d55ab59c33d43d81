//! Memory of a CUDA device.

use std::panic::Location;

use super::context::CudaContext;
use super::driver::{Called, OUT_OF_MEMORY, check, driver};
use crate::execution::block::{Allocator, DeviceMemory};
use crate::ground::sync::Arc;

/// Memory from the driver's plain allocator (`cuMemAlloc`). Its contents are undefined.
#[derive(Debug)]
struct DeviceBlock {
    context: Arc<CudaContext>,
    address: u64,
    size: usize,
}

/// Memory for the backend itself, outside of the pool. The context is current.
pub(super) fn block(context: &Arc<CudaContext>, size: usize) -> Called<Box<dyn DeviceMemory>> {
    let (code, address) = request(size);
    check("cuMemAlloc", code)?;
    Ok(Box::new(DeviceBlock { context: context.clone(), address, size }))
}

/// Requests memory from the driver; returns the driver's code, and the address.
fn request(size: usize) -> (u32, u64) {
    let mut address = 0;
    // SAFETY: writes one address.
    let code = unsafe { (driver().cuMemAlloc_v2)(&mut address, size.max(1)) };
    (code, address)
}

impl Allocator for Arc<CudaContext> {
    /// `None` as well if the device has failed.
    fn allocate(&self, size: usize) -> Option<Box<dyn DeviceMemory>> {
        if self.has_failed() || self.bind().is_err() {
            return None;
        }
        let (code, address) = request(size);
        if let Err(cause) = check("cuMemAlloc", code) {
            if code != OUT_OF_MEMORY {
                self.fail("allocate", Location::caller(), cause);
            }
            return None;
        }
        Some(Box::new(DeviceBlock { context: self.clone(), address, size }))
    }
}

impl DeviceMemory for DeviceBlock {
    fn size(&self) -> usize {
        self.size
    }

    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated once, and no work uses it any more: a block leaves the pool when
            // its accesses are done. A failure cannot be reported.
            let _ = unsafe { (driver().cuMemFree_v2)(self.address) };
        }
    }
}

//! Copies and fills, as values that each backend carries out.

use super::args::Args;
use super::fill::Fill;
use crate::ground::sync::{Arc, Mutex, lock};
use crate::hooks::Category;

/// Work on a command's arguments other than a kernel.
pub(crate) enum Transfer {
    /// Copies argument 0 into argument 1, 2 into 3, and so on.
    Copy,
    /// Fills every argument.
    Fill(Fill),
    /// Copies host memory into argument 0.
    Upload(HostBytes),
    /// Copies the arguments to the host.
    Download(Box<dyn Download>),
    /// Copies the device's memory at an address into each argument.
    Foreign(ForeignAddresses),
}

/// Addresses in the memory of a device that another library owns, one for each argument.
pub(crate) struct ForeignAddresses(Vec<u64>);

impl ForeignAddresses {
    /// Addresses of memory to copy from.
    ///
    /// # Safety
    /// Until the copy is done, each address has as many readable bytes as its argument, in memory
    /// of the argument's device, which nothing writes.
    pub(crate) unsafe fn new(addresses: Vec<u64>) -> Self {
        Self(addresses)
    }

    /// Address of the memory for argument `i`.
    pub(super) fn of(&self, i: usize) -> u64 {
        self.0[i]
    }

    /// Copies host memory into argument `i`.
    fn write(&self, i: usize, to: &mut [u8]) {
        if to.is_empty() {
            return;
        }
        let from: *const u8 = std::ptr::with_exposed_provenance(self.of(i) as usize);
        // SAFETY: guaranteed by the caller of `new`. The argument is memory of the pool, so the two
        // do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }
}

impl Transfer {
    /// Category of the transfer, for observers.
    pub(crate) fn category(&self) -> Category {
        match self {
            Transfer::Copy | Transfer::Foreign(_) => Category::Copy,
            Transfer::Fill(_) => Category::Fill,
            Transfer::Upload(_) => Category::CopyToDevice,
            Transfer::Download(_) => Category::CopyToHost,
        }
    }

    pub(super) fn run(self, args: &mut Args<'_>) {
        match self {
            Transfer::Copy => {
                for i in (0..args.len()).step_by(2) {
                    args.bytes_mut(i + 1).copy_from_slice(args.bytes(i));
                }
            }
            Transfer::Fill(fill) => (0..args.len()).for_each(|i| fill.write(args.bytes_mut(i))),
            Transfer::Upload(source) => source.write(args.bytes_mut(0)),
            Transfer::Download(to) => (0..args.len()).for_each(|i| to.put(i, args.bytes(i))),
            Transfer::Foreign(from) => {
                (0..args.len()).for_each(|i| from.write(i, args.bytes_mut(i)));
            }
        }
    }
}

/// A function that writes bytes.
pub(crate) type Make = Box<dyn FnOnce(&mut [u8]) + Send>;

/// The bytes of an upload: as many as its tensor has.
pub(crate) enum HostBytes {
    /// A staging buffer.
    Staged(Box<[u8]>),
    /// Shared host memory: `bytes` bytes from `start` on.
    Shared { source: Arc<dyn AsRef<[u8]> + Send + Sync>, start: usize, bytes: usize },
    /// The bytes that a function writes into a buffer of unspecified contents.
    Made(Make),
}

impl HostBytes {
    /// Writes the bytes to memory of their length.
    pub(super) fn write(self, to: &mut [u8]) {
        match self {
            HostBytes::Staged(bytes) => to.copy_from_slice(&bytes),
            HostBytes::Shared { source, start, bytes } => {
                to.copy_from_slice(&(*source).as_ref()[start..start + bytes]);
            }
            HostBytes::Made(make) => make(to),
        }
    }
}

/// Host memory that receives a download.
pub(crate) trait Download: Send {
    /// Receives the bytes of argument `i`.
    fn put(&self, i: usize, bytes: &[u8]);
}

/// Host memory of a read-back, one vector for each tensor, which the copies to the host fill.
pub(crate) type ReadBack<T> = Arc<[Mutex<Vec<T>>]>;

/// Destination of the elements of a read-back, for the tensors of one stream.
pub(crate) struct IntoReadBack<T> {
    /// Memory for all tensors of the read-back, also those of other streams.
    pub(crate) vectors: ReadBack<T>,
    /// Index in `vectors` of each argument.
    pub(crate) indices: Vec<usize>,
}

impl<T: bytemuck::Pod + Send> Download for IntoReadBack<T> {
    fn put(&self, i: usize, bytes: &[u8]) {
        // Blocks are aligned to more than any element needs, and views to their element.
        *lock(&self.vectors[self.indices[i]]) = bytemuck::cast_slice(bytes).to_vec();
    }
}

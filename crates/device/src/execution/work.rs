//! Work of a stream: a kernel, or a transfer.
//!
//! A kernel is a closure over its arguments' elements. A transfer (a copy or a fill) is a value:
//! its effect can be read off it, by this engine or by another backend's.

use super::args::{Args, Record};
use crate::ground::sync::{Arc, Mutex, lock};
use crate::hooks::{Asked, Category};
use std::panic::Location;

/// Work to run on a worker. Running it releases all memory that it refers to.
pub(crate) enum Work {
    Kernel(Box<dyn Kernel>),
    Transfer(Box<(Record, Transfer)>),
}

impl Work {
    pub(crate) fn kernel<F>(record: Record, kernel: F) -> Work
    where
        F: FnOnce(&mut Args<'_>) + Send + 'static,
    {
        Work::Kernel(Box::new(Launched { record, kernel }))
    }

    /// Name of the operation.
    pub(crate) fn operation(&self) -> &'static str {
        self.record().operation
    }

    /// Its call site.
    pub(crate) fn site(&self) -> &'static Location<'static> {
        self.record().site
    }

    /// Its call, for observers that watch runs; `None` without any.
    pub(crate) fn take_asked(&mut self) -> Option<Arc<Asked>> {
        match self {
            Work::Kernel(kernel) => kernel.record_mut().asked.take(),
            Work::Transfer(transfer) => transfer.0.asked.take(),
        }
    }

    /// Runs it. May panic: kernels are user code.
    pub(crate) fn run(self) {
        match self {
            Work::Kernel(kernel) => kernel.run(),
            Work::Transfer(transfer) => {
                let (mut record, transfer) = *transfer;
                transfer.run(&mut Args::new(&mut record));
            }
        }
    }

    fn record(&self) -> &Record {
        match self {
            Work::Kernel(kernel) => kernel.record(),
            Work::Transfer(transfer) => &transfer.0,
        }
    }
}

/// A kernel and its arguments.
pub(crate) trait Kernel: Send {
    fn record(&self) -> &Record;
    fn record_mut(&mut self) -> &mut Record;
    fn run(self: Box<Self>);
}

/// A closure and its arguments: one allocation for both.
struct Launched<F> {
    record: Record,
    kernel: F,
}

impl<F> Kernel for Launched<F>
where
    F: FnOnce(&mut Args<'_>) + Send,
{
    fn record(&self) -> &Record {
        &self.record
    }

    fn record_mut(&mut self) -> &mut Record {
        &mut self.record
    }

    fn run(self: Box<Self>) {
        let Launched { mut record, kernel } = *self;
        kernel(&mut Args::new(&mut record));
    }
}

/// A pattern of bytes to fill memory with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// The bytes of a word, in native order, repeated from the first byte on.
    Word(u32),
}

impl Fill {
    fn write(self, bytes: &mut [u8]) {
        match self {
            Fill::Zero => bytes.fill(0),
            Fill::Word(word) => {
                let word = word.to_ne_bytes();
                bytes.chunks_mut(4).for_each(|chunk| chunk.copy_from_slice(&word[..chunk.len()]));
            }
        }
    }
}

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
}

impl Transfer {
    /// Its category, as observers know it.
    pub(crate) fn category(&self) -> Category {
        match self {
            Transfer::Copy => Category::Copy,
            Transfer::Fill(_) => Category::Fill,
            Transfer::Upload(_) => Category::CopyToDevice,
            Transfer::Download(_) => Category::CopyToHost,
        }
    }

    fn run(self, args: &mut Args<'_>) {
        match self {
            Transfer::Copy => {
                for i in (0..args.len()).step_by(2) {
                    args.bytes_mut(i + 1).copy_from_slice(args.bytes(i));
                }
            }
            Transfer::Fill(fill) => (0..args.len()).for_each(|i| fill.write(args.bytes_mut(i))),
            Transfer::Upload(source) => args.bytes_mut(0).copy_from_slice(source.bytes()),
            Transfer::Download(to) => (0..args.len()).for_each(|i| to.put(i, args.bytes(i))),
        }
    }
}

/// Host memory that an upload reads: as many bytes as its tensor has.
pub(crate) enum HostBytes {
    /// A staging buffer.
    Staged(Box<[u8]>),
    /// Shared host memory: `bytes` bytes from `start` on.
    Shared { source: Arc<dyn AsRef<[u8]> + Send + Sync>, start: usize, bytes: usize },
}

impl HostBytes {
    fn bytes(&self) -> &[u8] {
        match self {
            HostBytes::Staged(bytes) => bytes,
            HostBytes::Shared { source, start, bytes } => {
                &(**source).as_ref()[*start..start + bytes]
            }
        }
    }
}

/// Host memory that receives a download.
pub(crate) trait Download: Send {
    /// Receives the bytes of argument `i`.
    fn put(&self, i: usize, bytes: &[u8]);
}

/// Results of the workers' copies.
pub(crate) type Slots<T> = Arc<[Mutex<Vec<T>>]>;

/// Destination of the elements of a read-back, for the tensors of one stream.
pub(crate) struct IntoSlots<T> {
    /// One for each tensor of the read-back.
    pub(crate) slots: Slots<T>,
    /// The slot of each argument.
    pub(crate) places: Vec<usize>,
}

impl<T: bytemuck::Pod + Send> Download for IntoSlots<T> {
    fn put(&self, i: usize, bytes: &[u8]) {
        // Blocks are aligned to more than any element needs, and views to their element.
        *lock(&self.slots[self.places[i]]) = bytemuck::cast_slice(bytes).to_vec();
    }
}

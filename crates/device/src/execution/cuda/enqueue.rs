//! Tasks as calls of the driver.

use std::ops::Range;

use smallvec::SmallVec;

use super::context::CudaContext;
use super::driver::{Called, RawStream, check, driver};
use super::graph::CudaGraph;
use super::nccl::PeerMembership;
use super::staging::StagingBuffer;
use super::task::{CudaTask, TaskAct};
use crate::execution::args::{Arg, LaunchRecord};
use crate::execution::fill::Fill;
use crate::execution::transfer::{Download, ForeignAddresses};
use crate::ground::sync::Arc;

/// Alignment of the pieces of a download in staging memory.
const PIECE_ALIGNMENT: usize = 64;

/// The resources that a task holds until it has run, and the delivery of its results.
#[derive(Default)]
pub(super) struct Completion {
    /// Staging memory that a copy reads or writes.
    pub(super) staging: Option<StagingBuffer>,
    /// A graph that runs.
    pub(super) graph: Option<Arc<CudaGraph>>,
    /// The membership whose communicator an exchange uses.
    pub(super) member: Option<Arc<PeerMembership>>,
    /// Destination of a download, and its pieces in the staging memory.
    pub(super) download: Option<(Box<dyn Download>, StagedRanges)>,
}

/// Ranges in staging memory.
type StagedRanges = SmallVec<[Range<usize>; 4]>;

impl Completion {
    /// Delivers the download, and gives the staging memory back. The task has run; the context is
    /// current.
    pub(super) fn complete(self) {
        let Some(mut staging) = self.staging else { return };
        if let Some((to, pieces)) = self.download {
            // SAFETY: the copy into it is done.
            let bytes = unsafe { staging.bytes() };
            pieces.into_iter().enumerate().for_each(|(i, piece)| to.put(i, &bytes[piece]));
        }
        staging.release();
    }
}

/// A stream of the driver, into which tasks are enqueued.
pub(super) struct Enqueue<'a> {
    pub(super) context: &'a Arc<CudaContext>,
    pub(super) stream: &'a RawStream,
}

impl Enqueue<'_> {
    /// Enqueues a task. Its resources are stored in `completion` before the device may use them, so
    /// that they are kept after an error as well.
    pub(super) fn task(
        &self,
        CudaTask { record, act }: CudaTask,
        completion: &mut Completion,
    ) -> Called {
        match act {
            TaskAct::Calls(program, bound) => bound.launch(&program, self.stream.raw(), &record),
            TaskAct::Graph(graph) => {
                let graph = completion.graph.insert(graph);
                graph.launch((self.context, self.stream), &record, &mut completion.staging)
            }
            TaskAct::Copy => self.copy(&record),
            TaskAct::Fill(fill) => record.args.iter().try_for_each(|arg| self.fill(arg, fill)),
            TaskAct::Upload(staging) => {
                self.upload(&record.args[0], completion.staging.insert(staging))
            }
            TaskAct::Exchange(member, ranks) => {
                let member = completion.member.insert(member);
                member.exchange(&record, &ranks, self.stream)
            }
            TaskAct::Download(to) => self.download(&record, to, completion),
            TaskAct::Foreign(from) => self.foreign(&record, &from),
        }
    }

    fn copy(&self, record: &LaunchRecord) -> Called {
        for pair in record.args.chunks_exact(2).filter(|pair| pair[0].bytes > 0) {
            let (from, to) = (&pair[0], &pair[1]);
            // SAFETY: both ranges lie within live blocks (the launch checked that their lengths are
            // equal), and the launch is ordered like any other.
            check("cuMemcpyDtoDAsync", unsafe {
                let (to, from, stream) = (to.address(), from.address(), self.stream.raw());
                (driver().cuMemcpyDtoDAsync_v2)(to, from, pair[0].bytes, stream)
            })?;
        }
        Ok(())
    }

    fn foreign(&self, record: &LaunchRecord, from: &ForeignAddresses) -> Called {
        let arguments = record.args.iter().enumerate();
        for (i, to) in arguments.filter(|(_, to)| to.bytes > 0) {
            // SAFETY: the range lies within a live block, and the launch is ordered like any other;
            // the other one is guaranteed by `ForeignAddresses::new`.
            check("cuMemcpyDtoDAsync", unsafe {
                let stream = self.stream.raw();
                (driver().cuMemcpyDtoDAsync_v2)(to.address(), from.of(i), to.bytes, stream)
            })?;
        }
        Ok(())
    }

    fn fill(&self, arg: &Arg, fill: Fill) -> Called {
        let word = match fill {
            Fill::Zero => 0,
            Fill::Word(word) => word,
        };
        let bytes = word.to_ne_bytes();
        if bytes == [bytes[0]; 4] {
            return self.fill_bytes(arg.address(), bytes[0], arg.bytes);
        }
        // Single bytes up to the first aligned word, whole words, single bytes after the last.
        let address = arg.address();
        let head = (address.next_multiple_of(4) - address).min(arg.bytes as u64) as usize;
        let words = (arg.bytes - head) / 4;
        let single = (0..head).chain(head + 4 * words..arg.bytes);
        single
            .into_iter()
            .try_for_each(|i| self.fill_bytes(address + i as u64, bytes[i % 4], 1))?;
        if words == 0 {
            return Ok(());
        }
        let turned = std::array::from_fn(|i| bytes[(head + i) % 4]);
        // SAFETY: the words are inside of a live block, and aligned.
        check("cuMemsetD32Async", unsafe {
            let (to, word) = (address + head as u64, u32::from_ne_bytes(turned));
            (driver().cuMemsetD32Async)(to, word, words, self.stream.raw())
        })
    }

    fn fill_bytes(&self, address: u64, byte: u8, len: usize) -> Called {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: callers pass bytes inside of a live block.
        check("cuMemsetD8Async", unsafe {
            (driver().cuMemsetD8Async)(address, byte, len, self.stream.raw())
        })
    }

    fn upload(&self, arg: &Arg, staging: &mut StagingBuffer) -> Called {
        if arg.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the argument is inside of a live block; the staging memory is at least as large,
        // and kept until the copy is done.
        check("cuMemcpyHtoDAsync", unsafe {
            let (to, from) = (arg.address(), staging.address());
            (driver().cuMemcpyHtoDAsync_v2)(to, from, arg.bytes, self.stream.raw())
        })
    }

    fn download(
        &self,
        record: &LaunchRecord,
        to: Box<dyn Download>,
        completion: &mut Completion,
    ) -> Called {
        let mut end = 0usize;
        let place = |arg: &Arg| {
            let start = end.next_multiple_of(PIECE_ALIGNMENT);
            end = start + arg.bytes;
            start..end
        };
        let pieces: StagedRanges = record.args.iter().map(place).collect();
        let staging = completion.staging.insert(StagingBuffer::new(self.context, end));
        for (arg, piece) in record.args.iter().zip(&pieces).filter(|(arg, _)| arg.bytes > 0) {
            // SAFETY: the argument is inside of a live block; the piece is inside of the staging
            // memory, which is kept until the copy is done.
            check("cuMemcpyDtoHAsync", unsafe {
                let to = staging.address().byte_add(piece.start);
                (driver().cuMemcpyDtoHAsync_v2)(to, arg.address(), arg.bytes, self.stream.raw())
            })?;
        }
        completion.download = Some((to, pieces));
        Ok(())
    }
}

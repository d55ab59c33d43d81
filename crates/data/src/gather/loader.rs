//! A thread that copies streamed samples into host memory, for uploads to a CUDA device.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use meristem_device::{HostBuffer, MappedFile};

use super::permutation::Indices;
use crate::error::{Error, Result};

/// Samples of a file: part of a permutation.
#[derive(Clone)]
pub(super) struct SampleList {
    pub(super) file: Arc<MappedFile>,
    /// Bytes of one sample.
    pub(super) sample_bytes: usize,
    /// All permutations of the device.
    pub(super) permutation: Arc<Indices>,
    /// Places of the samples in `permutation`.
    pub(super) part: Range<usize>,
}

impl SampleList {
    /// Bytes of all samples.
    pub(super) fn bytes(&self) -> usize {
        self.part.len() * self.sample_bytes
    }

    /// Copies the samples to the front of `to`, which has room for them.
    pub(super) fn copy(&self, to: &mut [u8]) {
        let stored = self.file.as_bytes();
        let indices = &self.permutation.as_slice()[self.part.clone()];
        let to = &mut to[..self.bytes()];
        for (index, to) in indices.iter().zip(to.chunks_exact_mut(self.sample_bytes)) {
            let start = *index as usize * self.sample_bytes;
            to.copy_from_slice(&stored[start..start + self.sample_bytes]);
        }
    }

    /// Whether both are the same samples.
    fn is_same(&self, other: &SampleList) -> bool {
        Arc::ptr_eq(&self.permutation, &other.permutation) && self.part == other.part
    }
}

/// Requests that may wait for the thread: more than one for each of many envs.
const JOBS_MAX: usize = 1024;

/// A filled buffer, or the reason why the thread did not fill it.
type LoadResult = std::result::Result<HostBuffer, String>;

struct Job {
    samples: SampleList,
    buffer: HostBuffer,
    to: SyncSender<LoadResult>,
}

impl Job {
    /// Fills the buffer. A panic, which only a defect can cause, is the result of this job alone.
    fn run(self) {
        let Self { samples, mut buffer, to } = self;
        let filled = catch_unwind(AssertUnwindSafe(|| samples.copy(buffer.bytes())));
        let result = filled.map(|()| buffer).map_err(|panic| {
            let (part, text) = (&samples.part, text_of(&*panic));
            format!(
                "panicked at places {part:?} of the device's permutations: {text}; please report \
                 this defect"
            )
        });
        // A batch that nobody waits for any more is dropped.
        let _ = to.send(result);
    }
}

/// Message of a panic.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// Handle of the thread, which fills buffers in the order of the requests. Dropping it ends the
/// thread.
pub(super) struct SampleLoader {
    /// `None` while it is dropped.
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// Samples that the thread copies.
pub(super) struct LoadingSamples {
    samples: SampleList,
    from: Receiver<LoadResult>,
}

impl SampleLoader {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::Loader`] if the system has no thread left.
    pub(super) fn start() -> Result<SampleLoader> {
        let (jobs, queue) = sync_channel::<Job>(JOBS_MAX);
        let work = move || queue.into_iter().for_each(Job::run);
        let thread = Builder::new().name("sample loader".to_owned()).spawn(work);
        let thread = thread.map_err(|source| Error::Loader {
            problem: format!("could not be started: {source}; free some memory or threads"),
        })?;
        Ok(SampleLoader { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Begins to copy samples into a buffer with room for them. Waits only if the queue is full.
    pub(super) fn load(&self, samples: SampleList, buffer: HostBuffer) -> LoadingSamples {
        let (to, from) = sync_channel(1);
        if let Some(jobs) = &self.jobs {
            // If the thread has ended, `LoadingSamples::wait` says so.
            let _ = jobs.send(Job { samples: samples.clone(), buffer, to });
        }
        LoadingSamples { samples, from }
    }
}

impl Drop for SampleLoader {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Panics are results of jobs.
            let _ = thread.join();
        }
    }
}

impl LoadingSamples {
    pub(super) fn is_of(&self, samples: &SampleList) -> bool {
        self.samples.is_same(samples)
    }

    /// The samples, at the front of their buffer. Waits for the thread.
    ///
    /// # Errors
    /// [`Error::Loader`] with the cause if the thread panicked.
    pub(super) fn wait(self) -> Result<HostBuffer> {
        let ended = |_| Err("ended before it was asked to".to_owned());
        self.from.recv().unwrap_or_else(ended).map_err(|problem| Error::Loader { problem })
    }
}

#[cfg(test)]
mod tests {
    use meristem_device::{Device, DeviceId, DeviceOptions};

    use super::*;

    /// A panic of the thread is an error with its cause, and does not end the thread.
    #[test]
    fn a_panic_of_the_thread_is_named() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"aabbcc").unwrap();
        let file = Arc::new(MappedFile::open(file.path()).unwrap());
        let permutation = Arc::new(Indices(vec![2, 0, 3]));
        let list = |part| SampleList {
            file: file.clone(),
            sample_bytes: 2,
            permutation: permutation.clone(),
            part,
        };
        let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
        let buffers = device.stream("uploads").host_buffers(2, 4).unwrap();
        let loader = SampleLoader::start().unwrap();
        let load = |part| loader.load(list(part), buffers.take().unwrap());
        // Sample 3 is after the end of the file.
        let [first, damaged, last] = [load(0..2), load(1..3), load(1..2)];
        assert_eq!(first.wait().unwrap().bytes(), b"ccaa");
        let error = damaged.wait().unwrap_err().to_string();
        let words =
            ["the thread that loads streamed samples panicked", "1..3", "range end index 8"];
        assert!(words.iter().all(|words| error.contains(words)), "{error}");
        assert_eq!(&last.wait().unwrap().bytes()[..2], b"aa");
    }
}

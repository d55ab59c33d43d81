//! A thread that copies streamed images into host memory, for uploads to a CUDA device.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use meristem_device::{HostBuffer, MappedFile};

use super::permutation::Indices;
use crate::error::{Error, Result};

/// Images of a file: part of a permutation.
#[derive(Clone)]
pub(super) struct ImageList {
    pub(super) file: Arc<MappedFile>,
    /// Bytes of one image.
    pub(super) image: usize,
    pub(super) permutation: Arc<Indices>,
    pub(super) part: Range<usize>,
}

impl ImageList {
    /// Bytes of all images.
    pub(super) fn bytes(&self) -> usize {
        self.part.len() * self.image
    }

    /// Copies the images to the front of `to`.
    pub(super) fn copy(&self, to: &mut [u8]) {
        let images = self.file.as_bytes();
        let samples = &self.permutation.as_slice()[self.part.clone()];
        for (sample, to) in samples.iter().zip(to.chunks_exact_mut(self.image)) {
            let start = *sample as usize * self.image;
            to.copy_from_slice(&images[start..start + self.image]);
        }
    }

    /// Whether both are the same images.
    fn is_same(&self, other: &ImageList) -> bool {
        Arc::ptr_eq(&self.permutation, &other.permutation) && self.part == other.part
    }
}

/// Requests that may wait for the thread: more than one for each of many envs.
const JOBS_MAX: usize = 1024;

struct Job {
    images: ImageList,
    buffer: HostBuffer,
    to: SyncSender<HostBuffer>,
}

/// The thread. It fills buffers in the order of the requests, and ends with its last handle.
pub(super) struct ImageLoader {
    /// `None` while it is dropped.
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// Images that the thread copies.
pub(super) struct LoadingImages {
    images: ImageList,
    from: Receiver<HostBuffer>,
}

impl ImageLoader {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::Loader`] if the system has no thread left.
    pub(super) fn start() -> Result<ImageLoader> {
        let (jobs, queue) = sync_channel::<Job>(JOBS_MAX);
        let work = move || {
            for Job { images, mut buffer, to } in queue {
                images.copy(buffer.bytes());
                // A batch that nobody waits for any more is dropped.
                let _ = to.send(buffer);
            }
        };
        let thread = Builder::new().name("image loader".to_owned()).spawn(work);
        let thread = thread.map_err(|source| Error::Loader { reason: source.to_string() })?;
        Ok(ImageLoader { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Begins to copy images into a buffer of their size. Waits only if the queue is full.
    pub(super) fn load(&self, images: ImageList, buffer: HostBuffer) -> LoadingImages {
        let (to, from) = sync_channel(1);
        if let Some(jobs) = &self.jobs {
            // If the thread has ended, `LoadingImages::wait` says so.
            let _ = jobs.send(Job { images: images.clone(), buffer, to });
        }
        LoadingImages { images, from }
    }
}

impl Drop for ImageLoader {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It panics only on a defect of this module, which `LoadingImages::wait` reports.
            let _ = thread.join();
        }
    }
}

impl LoadingImages {
    pub(super) fn is_of(&self, images: &ImageList) -> bool {
        self.images.is_same(images)
    }

    /// The images. Waits for the thread.
    ///
    /// # Errors
    /// [`Error::Loader`] if the thread has ended.
    pub(super) fn wait(self) -> Result<HostBuffer> {
        self.from.recv().map_err(|_| Error::Loader { reason: "the thread has ended".to_owned() })
    }
}

//! Staging of a streamed dataset's batches, one batch ahead of their use (D7).

use std::ops::Range;
use std::sync::Arc;

use meristem_device::MappedFile;
use meristem_device::{DType, Owner, Stream, Tensor};

use super::loader::{ImageList, ImageLoader, LoadingImages};
use super::permutation::Indices;
use crate::error::Result;

/// Two buffers of one env: the stream `uploads` fills one while the env's stream reads the other.
/// Each of these streams waits for the other on the device; the host does not wait.
///
/// ```text
/// CUDA    loader thread   file -> host buffer      batch n + 2
///         copy stream     host buffer -> slot      batch n + 1
///         env's stream    slot -> gather -> train  batch n
/// CPU     uploads stream  file -> slot             batch n + 1
///         env's stream    slot -> gather -> train  batch n
/// ```
pub(super) struct BatchStage {
    uploads: Stream,
    file: Arc<MappedFile>,
    /// Bytes of one image.
    image: usize,
    /// u8 [capacity · image], as handles on the stream `uploads` and on the env's stream.
    slots: [(Tensor, Tensor); 2],
    /// Index of the slot that was filled last.
    turn: usize,
    /// For a CUDA device.
    loader: Option<Arc<ImageLoader>>,
    /// The images of the batch after the last that was uploaded.
    loading: Option<LoadingImages>,
}

impl BatchStage {
    /// Buffers for `capacity` images of `image` bytes.
    pub(super) fn new(
        env: &Stream,
        (file, image): (&Arc<MappedFile>, usize),
        capacity: usize,
        loader: Option<Arc<ImageLoader>>,
    ) -> Result<Self> {
        let uploads = env.device().copy_stream(&format!("{} uploads", env.name()));
        let slot = || -> Result<(Tensor, Tensor)> {
            let buffer = Tensor::empty(&uploads, [capacity * image], DType::U8, Owner::Batches)?;
            let read = buffer.on(env)?;
            Ok((buffer, read))
        };
        let slots = [slot()?, slot()?];
        Ok(Self { uploads, file: file.clone(), image, slots, turn: 0, loader, loading: None })
    }

    /// Begins to copy the images at places `part` of the permutations into the slot that was not
    /// filled last, and with a loader to load those at places `next`, which the next call will ask
    /// for. Waits for the loader, and not for the device, which orders the copy after the gather
    /// that last read the slot.
    ///
    /// # Errors
    /// The errors of the upload and of the loader. After an error [`Self::filled`] returns the same
    /// slot as before.
    pub(super) fn fill(
        &mut self,
        permutation: &Arc<Indices>,
        part: Range<usize>,
        next: Option<Range<usize>>,
    ) -> Result<()> {
        let (file, image) = (&self.file, self.image);
        let list = |part| {
            let (file, permutation) = (file.clone(), permutation.clone());
            ImageList { file, image, permutation, part }
        };
        let (turn, images) = (self.turn ^ 1, list(part));
        let slot = self.slots[turn].0.view(0, [images.bytes()])?;
        if let Some(loader) = &self.loader {
            let load = |images: ImageList| -> Result<LoadingImages> {
                let buffer = self.uploads.device().host_buffer(images.bytes())?;
                Ok(loader.load(images, buffer))
            };
            let loading = match self.loading.take().filter(|loading| loading.is_of(&images)) {
                Some(loading) => loading,
                None => load(images)?,
            };
            self.uploads.upload_from("stage", &slot, loading.wait()?)?;
            self.loading = next.map(|next| load(list(next))).transpose()?;
        } else {
            self.uploads.upload("stage", &slot, move |to| images.copy(to))?;
        }
        self.turn = turn;
        Ok(())
    }

    /// The slot of the last [`Self::fill`] without an error, on the env's stream.
    pub(super) fn filled(&self) -> &Tensor {
        &self.slots[self.turn].1
    }
}

//! Where the gather finds an env's images: resident, or staged one batch ahead of their use (D7).

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{DType, DeviceId, MappedFile, Owner, Stream, Tensor};

use super::kernel::ImageStorage;
use super::loader::{ImageList, ImageLoader, LoadingImages};
use super::permutation::Indices;
use crate::dataset::{Dataset, StoredImages};
use crate::error::Result;

/// Two buffers of one env: the stream `uploads` fills one while the env's stream reads the other.
/// On the device each stream waits for the other.
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

/// Source of an env's images.
pub(super) enum EnvImages {
    /// All images of the dataset, on the env's stream.
    Resident(Tensor),
    /// The images of two batches.
    Staged(Box<BatchStage>),
}

/// An env's source of images. The first env with streamed images on a CUDA device starts the
/// `loader` of all of them.
pub(super) fn env_images(
    dataset: &Dataset,
    stream: &Stream,
    capacity: usize,
    loader: &mut Option<Arc<ImageLoader>>,
) -> Result<(EnvImages, ImageStorage)> {
    match dataset.images() {
        StoredImages::Resident(images) => {
            let storage = if images.dtype() == DType::F32 {
                ImageStorage::Normalized
            } else {
                ImageStorage::Bytes
            };
            Ok((EnvImages::Resident(images.on(stream)?), storage))
        }
        StoredImages::Spooled(file) => {
            let loader = match (stream.device().id(), loader) {
                (DeviceId::Cpu(_), _) => None,
                (_, Some(started)) => Some(started.clone()),
                (_, none) => Some(none.insert(Arc::new(ImageLoader::start()?)).clone()),
            };
            let images = (file, dataset.image_shape().numel());
            let stage = BatchStage::new(stream, images, capacity, loader)?;
            Ok((EnvImages::Staged(Box::new(stage)), ImageStorage::Staged))
        }
    }
}

//! Sources of an env's samples: the resident dataset, or two buffers that are filled one batch
//! ahead of their use (D7).

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{DType, DeviceId, MappedFile, Owner, Stream, Tensor};

use super::kernel::{SampleStorage, Storage};
use super::loader::{ImageList, ImageLoader, LoadingImages};
use super::permutation::Indices;
use crate::dataset::{Dataset, StoredSamples};
use crate::error::Result;
use crate::shape::{CHANNELS_BLOCKED, StoredType};

/// Two buffers (slots) of one env: the stream `uploads` fills one while the env's stream reads the
/// other. On the device each stream waits for the other.
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
    /// Bytes of one sample.
    image: usize,
    /// Values of one sample.
    values: usize,
    /// [capacity · values] of the stored type, as handles on the stream `uploads` and on the env's stream.
    slots: [(Tensor, Tensor); 2],
    /// Index of the slot that was filled last.
    turn: usize,
    /// Only for a CUDA device.
    loader: Option<Arc<ImageLoader>>,
    /// The images of the batch after the last that was uploaded.
    loading: Option<LoadingImages>,
}

impl BatchStage {
    /// Buffers for `capacity` samples of a dataset whose samples are in `file`.
    pub(super) fn new(
        env: &Stream,
        (dataset, file): (&Dataset, &Arc<MappedFile>),
        capacity: usize,
        loader: Option<Arc<ImageLoader>>,
    ) -> Result<Self> {
        let (values, stored) = (dataset.shape().numel(), dataset.info().stored);
        let (image, dtype) = (values * stored.size(), stored.dtype());
        let uploads = env.device().copy_stream(&format!("{} uploads", env.name()));
        let slots = slots([env, &uploads], capacity * values, dtype)?;
        let file = file.clone();
        Ok(Self { uploads, file, image, values, slots, turn: 0, loader, loading: None })
    }

    /// Gives the buffers another capacity. `env` is the env's stream.
    pub(super) fn resize(&mut self, env: &Stream, capacity: usize) -> Result<()> {
        let dtype = self.slots[0].0.dtype();
        self.slots = slots([env, &self.uploads], capacity * self.values, dtype)?;
        self.loading = None;
        Ok(())
    }

    /// Begins to copy the images at places `part` of the permutations into the slot that was not
    /// filled last. With a loader, also begins to load the images at places `next`, for the next
    /// call. Waits for the loader, and not for the device: the device runs the copy after the
    /// gather that last read the slot.
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
        let (turn, values) = (self.turn ^ 1, part.len() * self.values);
        let (slot, images) = (self.slots[turn].0.view(0, [values])?, list(part));
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

/// Two buffers for `values` values, as handles on the stream that fills them and on the env's.
fn slots(
    [env, uploads]: [&Stream; 2],
    values: usize,
    dtype: DType,
) -> Result<[(Tensor, Tensor); 2]> {
    let slot = || -> Result<(Tensor, Tensor)> {
        let buffer = Tensor::empty(uploads, [values], dtype, Owner::Batches)?;
        let read = buffer.on(env)?;
        Ok((buffer, read))
    };
    Ok([slot()?, slot()?])
}

/// Source of an env's samples.
pub(super) enum EnvSamples {
    /// All samples of the dataset, on the env's stream.
    Resident(Tensor),
    /// The samples of two batches.
    Staged(Box<BatchStage>),
}

/// An env's source of samples. The first env with streamed samples on a CUDA device starts the
/// `loader` of all of them.
pub(super) fn env_samples(
    dataset: &Dataset,
    stream: &Stream,
    capacity: usize,
    loader: &mut Option<Arc<ImageLoader>>,
) -> Result<(EnvSamples, SampleStorage)> {
    let values = match dataset.info().stored {
        StoredType::I16 => Storage::Integers,
        StoredType::F16 => Storage::Halves,
        StoredType::F32 => Storage::Floats,
        StoredType::U8 if dataset.shape().channels <= CHANNELS_BLOCKED => Storage::Bytes,
        StoredType::U8 => Storage::ManyBytes,
    };
    match dataset.samples() {
        StoredSamples::Resident(samples) => {
            let storage = SampleStorage { values, staged: false };
            Ok((EnvSamples::Resident(samples.on(stream)?), storage))
        }
        StoredSamples::Normalized(samples) => {
            let storage = SampleStorage { values: Storage::Normalized, staged: false };
            Ok((EnvSamples::Resident(samples.on(stream)?), storage))
        }
        StoredSamples::Spooled(file) => {
            let loader = match (stream.device().id(), loader) {
                (DeviceId::Cpu(_), _) => None,
                (_, Some(started)) => Some(started.clone()),
                (_, none) => Some(none.insert(Arc::new(ImageLoader::start()?)).clone()),
            };
            let stage = BatchStage::new(stream, (dataset, file), capacity, loader)?;
            let storage = SampleStorage { values, staged: true };
            Ok((EnvSamples::Staged(Box::new(stage)), storage))
        }
    }
}

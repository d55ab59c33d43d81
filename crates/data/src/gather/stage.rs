//! Sources of an env's samples: the resident dataset, or two buffers that are filled one batch
//! ahead of their use (D7).

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{DType, DeviceId, HostBuffers, MappedFile, Owner, Stream, Tensor};

use super::kernel::{SampleStorage, StoredValues};
use super::loader::{LoadingSamples, SampleList, SampleLoader};
use super::permutation::Indices;
use crate::dataset::{Dataset, StoredSamples};
use crate::error::Result;
use crate::shape::{CHANNELS_BLOCKED, StoredType};

/// Host buffers of one env: one that the loader fills, and three for batches that the host has
/// enqueued and the device has not copied yet. With two in all the host would wait for each copy.
const HOST_BUFFERS: usize = 4;

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
    sample_bytes: usize,
    /// Number of values of one sample.
    values: usize,
    /// [capacity · values] of the stored type, as handles on the stream `uploads` and on the env's
    /// stream.
    slots: [(Tensor, Tensor); 2],
    /// Index of the slot that was filled last.
    turn: usize,
    /// Only for a CUDA device.
    host: Option<HostStage>,
}

/// Samples in host memory, which are loaded ahead of their upload.
struct HostStage {
    loader: Arc<SampleLoader>,
    /// Page-locked.
    buffers: HostBuffers,
    /// Samples that are being loaded.
    loading: Option<LoadingSamples>,
}

impl HostStage {
    /// Host buffers of `bytes` bytes for uploads on this stream.
    fn new(uploads: &Stream, loader: Arc<SampleLoader>, bytes: usize) -> Result<Self> {
        let (stream, buffers) = (uploads.name(), HOST_BUFFERS);
        tracing::debug!(stream, buffers, bytes, "locks host memory for streamed samples");
        let buffers = uploads.host_buffers(buffers, bytes)?;
        Ok(Self { loader, buffers, loading: None })
    }

    /// Begins to load samples, unless they are the samples that are being loaded.
    fn load(&mut self, list: SampleList) -> Result<()> {
        let buffer = match self.loading.take() {
            Some(loading) if loading.is_of(&list) => {
                self.loading = Some(loading);
                return Ok(());
            }
            // Samples of an epoch that ended early. Their buffer is used again, or the loader could
            // hold all of them.
            Some(stale) => stale.wait()?,
            None => self.buffers.take()?,
        };
        self.loading = Some(self.loader.load(list, buffer));
        Ok(())
    }

    /// Uploads samples that are being loaded, or loads them first, into a slot.
    fn upload(&mut self, uploads: &Stream, slot: &Tensor, list: SampleList) -> Result<()> {
        self.load(list)?;
        let loading = self.loading.take();
        let buffer = loading.map(LoadingSamples::wait).transpose()?;
        buffer.map_or(Ok(()), |buffer| Ok(uploads.upload_from("stage", slot, buffer)?))
    }
}

impl BatchStage {
    /// Buffers for `capacity` samples of a dataset whose samples are in `file`.
    pub(super) fn new(
        env: &Stream,
        (dataset, file): (&Dataset, &Arc<MappedFile>),
        capacity: usize,
        loader: Option<Arc<SampleLoader>>,
    ) -> Result<Self> {
        let (values, stored) = (dataset.shape().numel(), dataset.info().stored);
        let (sample_bytes, dtype) = (values * stored.size(), stored.dtype());
        let uploads = env.device().copy_stream(&format!("{} uploads", env.name()));
        let slots = slots([env, &uploads], capacity * values, dtype)?;
        let host = loader.map(|loader| HostStage::new(&uploads, loader, capacity * sample_bytes));
        let (file, host) = (file.clone(), host.transpose()?);
        Ok(Self { uploads, file, sample_bytes, values, slots, turn: 0, host })
    }

    /// Gives the buffers another capacity. `env` is the env's stream.
    pub(super) fn resize(&mut self, env: &Stream, capacity: usize) -> Result<()> {
        let dtype = self.slots[0].0.dtype();
        self.slots = slots([env, &self.uploads], capacity * self.values, dtype)?;
        if let Some(HostStage { loader, .. }) = self.host.take() {
            self.host = Some(HostStage::new(&self.uploads, loader, capacity * self.sample_bytes)?);
        }
        Ok(())
    }

    /// The samples at places `part` of the permutations.
    fn sample_list(&self, permutation: &Arc<Indices>, part: Range<usize>) -> SampleList {
        let (file, permutation) = (self.file.clone(), permutation.clone());
        SampleList { file, sample_bytes: self.sample_bytes, permutation, part }
    }

    /// For a CUDA device, begins to load the samples at places `part` of the permutations into host
    /// memory, for the next [`Self::fill`]. If all host buffers are in use, waits for the oldest of
    /// their copies, which counts as a synchronisation. Does nothing for a CPU device, whose
    /// workers read the file.
    ///
    /// # Errors
    /// The errors of [`HostBuffers::take`](meristem_device::HostBuffers::take) and of the loader.
    pub(super) fn load(&mut self, permutation: &Arc<Indices>, part: Range<usize>) -> Result<()> {
        let list = self.sample_list(permutation, part);
        self.host.as_mut().map_or(Ok(()), |host| host.load(list))
    }

    /// Begins to copy the samples at places `part` of the permutations into the slot that was not
    /// filled last. Waits for the loader, and not for the device, unless [`Self::load`] would: the
    /// device runs the copy after the gather that last read the slot.
    ///
    /// # Errors
    /// The errors of the upload and of [`Self::load`]. After an error [`Self::filled`] returns the
    /// same slot as before.
    pub(super) fn fill(&mut self, permutation: &Arc<Indices>, part: Range<usize>) -> Result<()> {
        let (turn, values) = (self.turn ^ 1, part.len() * self.values);
        let slot = self.slots[turn].0.view(0, [values])?;
        let list = self.sample_list(permutation, part);
        match &mut self.host {
            Some(host) => host.upload(&self.uploads, &slot, list)?,
            None => self.uploads.upload("stage", &slot, move |to| list.copy(to))?,
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
    /// The samples of two batches of a streamed dataset.
    Streamed(Box<BatchStage>),
}

/// An env's source of samples. The first env with streamed samples on a CUDA device starts the
/// `loader` of all of them.
pub(super) fn env_samples(
    dataset: &Dataset,
    stream: &Stream,
    capacity: usize,
    loader: &mut Option<Arc<SampleLoader>>,
) -> Result<(EnvSamples, SampleStorage)> {
    let values = match dataset.info().stored {
        StoredType::I16 => StoredValues::Integers,
        StoredType::F16 => StoredValues::Halves,
        StoredType::F32 => StoredValues::Floats,
        StoredType::U8 if dataset.shape().channels <= CHANNELS_BLOCKED => StoredValues::Bytes,
        StoredType::U8 => StoredValues::ManyBytes,
    };
    match dataset.samples() {
        StoredSamples::Resident(samples) => {
            let storage = SampleStorage { values, staged: false };
            Ok((EnvSamples::Resident(samples.on(stream)?), storage))
        }
        StoredSamples::Normalized(samples) => {
            let storage = SampleStorage { values: StoredValues::Normalized, staged: false };
            Ok((EnvSamples::Resident(samples.on(stream)?), storage))
        }
        StoredSamples::Streamed(file) => {
            let loader = match (stream.device().id(), loader) {
                (DeviceId::Cpu(_), _) => None,
                (_, Some(started)) => Some(started.clone()),
                (_, none) => Some(none.insert(Arc::new(SampleLoader::start()?)).clone()),
            };
            let stage = BatchStage::new(stream, (dataset, file), capacity, loader)?;
            let storage = SampleStorage { values, staged: true };
            Ok((EnvSamples::Streamed(Box::new(stage)), storage))
        }
    }
}

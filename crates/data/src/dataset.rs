//! One split of a dataset on one device.

use std::fmt;
use std::sync::Arc;

use meristem_device::MappedFile;
use meristem_device::{DType, Device, MemoryFormat, Owner, Stream, Tensor, read_back};

use crate::error::{Error, Result};
use crate::normalization::{ChannelStatistics, Normalization};
use crate::shape::CHANNELS_BLOCKED;
use crate::shape::{InputKind, SampleForm, SampleShape, StoredType};
use crate::source::{CHUNK_BYTES, DatasetFiles, DatasetInfo, Layout, Split};
use crate::spool;

/// Bytes converted to f32 at a time: a quarter of a chunk, because a value grows fourfold.
const CONVERTED_BYTES: usize = CHUNK_BYTES / 4;

/// Bytes that a checksum copies to the host at a time.
const CHECKSUM_PIECE: usize = 16 << 20;

/// Storage of a dataset's images (D1, D7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Residency {
    /// [`Residency::Resident`] if images and labels fit into `budget` bytes, else
    /// [`Residency::Streamed`].
    Auto {
        /// In bytes, for this split alone.
        budget: usize,
    },
    /// On the device, as bytes or floats.
    #[default]
    Resident,
    /// On the device, bytes as normalised f32: four times the memory, and the normalisation
    /// constants are fixed to the dataset's own. For samples of bytes with at most 4 channels; else
    /// as [`Residency::Resident`].
    ResidentF32,
    /// In a temporary, memory-mapped file of the host; batches are copied to the device ahead of
    /// their use. The file is deleted when the dataset is dropped.
    Streamed,
}

/// The samples of a dataset, as they are stored.
pub(crate) enum StoredSamples {
    /// u8 or f32, (N, C, H, W), channels last.
    Resident(Tensor),
    /// As resident, and normalised.
    Normalized(Tensor),
    /// The bytes of u8 or f32, NHWC.
    Spooled(Arc<MappedFile>),
}

/// One split of a dataset, ready for gathering. [`crate::cache::load`] returns one shared copy to
/// all callers.
pub struct Dataset {
    device: Device,
    info: DatasetInfo,
    split: Option<Split>,
    len: usize,
    samples: StoredSamples,
    /// u32 [N].
    labels: Tensor,
}

impl Dataset {
    /// A dataset of images in memory, resident on `device` as bytes. `images` are N images of
    /// `shape`, NHWC; `labels` has N entries, each below the number of `classes`. The normalisation
    /// constants are computed from `images`. Copies to the device; waits for the copies.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not match, or labels out of range; device errors,
    /// including out of memory.
    pub fn from_slices(
        device: &Device,
        shape: SampleShape,
        images: &[u8],
        labels: &[u32],
        classes: Vec<String>,
    ) -> Result<Arc<Self>> {
        let form = SampleForm { kind: InputKind::Image, shape, stored: StoredType::U8 };
        check_slices(form, images.len(), labels, &classes)?;
        Self::from_stored(device, form, images, (labels, classes))
    }

    /// A dataset of floats in memory, resident on `device`; otherwise as [`Self::from_slices`].
    ///
    /// # Errors
    /// As [`Self::from_slices`], and [`Error::Argument`] for values that are not finite.
    pub fn from_floats(
        device: &Device,
        kind: InputKind,
        shape: SampleShape,
        values: &[f32],
        labels: &[u32],
        classes: Vec<String>,
    ) -> Result<Arc<Self>> {
        let form = SampleForm { kind, shape, stored: StoredType::F32 };
        check_slices(form, values.len(), labels, &classes)?;
        if let Some(place) = values.iter().position(|value| !value.is_finite()) {
            let (sample, value) = (place / shape.numel(), place % shape.numel());
            let got = format!("{} at value {value} of sample {sample}", values[place]);
            return wrong("values", "finite numbers".into(), got, "replace it");
        }
        Self::from_stored(device, form, bytemuck::cast_slice(values), (labels, classes))
    }

    fn from_stored(
        device: &Device,
        form: SampleForm,
        bytes: &[u8],
        (labels, classes): (&[u32], Vec<String>),
    ) -> Result<Arc<Self>> {
        let SampleForm { kind, shape, stored } = form;
        let mut statistics = ChannelStatistics::new(stored, shape.channels);
        statistics.add(bytes);
        let Normalization { mean, std } = statistics.normalization();
        let stream = device.stream("dataset");
        let resident = empty_samples(&stream, shape, labels.len(), stored.dtype())?;
        copy_stored(&resident, stored, bytes)?;
        let labels_tensor = Tensor::from_slice(&stream, labels, [labels.len()], Owner::Dataset)?;
        stream.synchronize()?;
        let mut per_class = vec![0; classes.len()];
        labels.iter().for_each(|label| per_class[*label as usize] += 1);
        let SampleShape { channels, height, width } = shape;
        let info = DatasetInfo {
            name: "slices".into(),
            kind,
            stored,
            channels,
            height,
            width,
            classes,
            train_len: labels.len(),
            per_class,
            test_len: None,
            mean,
            std,
            skipped: 0,
        };
        Ok(Arc::new(Self {
            device: device.clone(),
            info,
            split: None,
            len: labels.len(),
            samples: StoredSamples::Resident(resident),
            labels: labels_tensor,
        }))
    }

    /// Decodes `split` onto `device`. Peak extra memory is a few chunks ([`CHUNK_BYTES`]); an error
    /// frees all memory (D1, D9).
    pub(crate) fn load(
        device: &Device,
        files: &DatasetFiles,
        split: Split,
        residency: Residency,
    ) -> Result<Self> {
        files.check_has(split)?;
        let stream = device.stream("dataset");
        let mut labels = Vec::with_capacity(files.layout().len(split));
        let samples = match residency {
            Residency::Streamed => {
                StoredSamples::Spooled(Arc::new(spool::write(files, split, &mut labels)?))
            }
            Residency::ResidentF32 if is_normalized_at_load(files.layout()) => {
                StoredSamples::Normalized(load_normalized(&stream, files, split, &mut labels)?)
            }
            Residency::Resident | Residency::ResidentF32 | Residency::Auto { .. } => {
                StoredSamples::Resident(load_stored(&stream, files, split, &mut labels)?)
            }
        };
        let labels_tensor = Tensor::from_slice(&stream, &labels, [labels.len()], Owner::Dataset)?;
        stream.synchronize()?;
        Ok(Self {
            device: device.clone(),
            info: files.info()?,
            split: Some(split),
            len: labels.len(),
            samples,
            labels: labels_tensor,
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Classes, sizes and normalisation constants.
    pub fn info(&self) -> &DatasetInfo {
        &self.info
    }

    /// The split; `None` for a dataset made by [`Dataset::from_slices`].
    pub fn split(&self) -> Option<Split> {
        self.split
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Shape of a sample.
    pub fn shape(&self) -> SampleShape {
        self.info.shape()
    }

    /// The normalisation constants of the training split, used for both splits.
    pub fn normalization(&self) -> Normalization {
        Normalization { mean: self.info.mean.clone(), std: self.info.std.clone() }
    }

    /// The resident samples, (N, C, H, W) u8 or f32, channels last (F1); `None` if the dataset is
    /// streamed. The tensor belongs to the stream that loaded it: use `.on(&stream)`.
    pub fn resident(&self) -> Option<&Tensor> {
        match &self.samples {
            StoredSamples::Resident(samples) | StoredSamples::Normalized(samples) => Some(samples),
            StoredSamples::Spooled(_) => None,
        }
    }

    /// Whether the samples were normalised when they were loaded.
    pub(crate) fn is_normalized(&self) -> bool {
        matches!(self.samples, StoredSamples::Normalized(_))
    }

    /// The labels, `u32 [N]`.
    pub fn labels(&self) -> &Tensor {
        &self.labels
    }

    /// CRC-32 of the stored labels and samples: equal for equal files with equal storage. Waits for
    /// the device, and copies labels and samples to the host piece by piece.
    ///
    /// # Errors
    /// A failed device.
    pub fn checksum(&self) -> Result<u32> {
        let mut crc = crc32fast::Hasher::new();
        crc.update(bytemuck::cast_slice(&self.labels.to_vec::<u32>()?));
        match &self.samples {
            StoredSamples::Spooled(file) => crc.update(file.as_bytes()),
            StoredSamples::Resident(samples) | StoredSamples::Normalized(samples) => {
                // In pieces, so that the host needs little memory.
                let (len, piece) = (samples.numel(), CHECKSUM_PIECE / samples.dtype().size());
                for start in (0..len).step_by(piece) {
                    let piece = samples.view(start, [piece.min(len - start)])?;
                    read_back(&[&piece])?.iter().for_each(|bytes| crc.update(bytes));
                }
            }
        }
        Ok(crc.finalize())
    }

    pub(crate) fn samples(&self) -> &StoredSamples {
        &self.samples
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { info, split, len, .. } = self;
        write!(f, "Dataset({} {split:?}, {len} samples on {})", info.name, self.device.id())
    }
}

/// Bytes of a split that is resident as it is stored: samples and labels.
pub(crate) fn resident_bytes(layout: &Layout, split: Split) -> usize {
    let label = size_of::<u32>();
    layout.len(split).saturating_mul(layout.sample_bytes().saturating_add(label))
}

/// Whether [`Residency::ResidentF32`] has an effect.
fn is_normalized_at_load(layout: &Layout) -> bool {
    layout.stored == StoredType::U8 && layout.shape.channels <= CHANNELS_BLOCKED
}

fn empty_samples(stream: &Stream, shape: SampleShape, n: usize, dtype: DType) -> Result<Tensor> {
    let format = MemoryFormat::ChannelsLast;
    Ok(Tensor::empty_with_format(stream, shape.batch(n), dtype, format, Owner::Dataset)?)
}

/// The first `n` samples of `samples`, which has room for every file; a bad file has no image.
fn first_samples(samples: &Tensor, shape: SampleShape, n: usize) -> Result<Tensor> {
    Ok(samples.view_with_format(0, shape.batch(n), MemoryFormat::ChannelsLast)?)
}

fn load_stored(
    stream: &Stream,
    files: &DatasetFiles,
    split: Split,
    labels: &mut Vec<u32>,
) -> Result<Tensor> {
    let (shape, stored) = (files.layout().shape, files.layout().stored);
    let samples = empty_samples(stream, shape, files.layout().len(split), stored.dtype())?;
    files.read(split, &mut |bytes, chunk_labels| {
        let start = labels.len() * shape.numel();
        let window = samples.view(start, [bytes.len() / stored.size()])?;
        copy_stored(&window, stored, bytes)?;
        // One chunk in flight, or the staging buffers would become a second copy (D1).
        stream.synchronize()?;
        labels.extend_from_slice(chunk_labels);
        Ok(())
    })?;
    first_samples(&samples, shape, labels.len())
}

fn load_normalized(
    stream: &Stream,
    files: &DatasetFiles,
    split: Split,
    labels: &mut Vec<u32>,
) -> Result<Tensor> {
    let (shape, stored) = (files.layout().shape, files.layout().stored);
    let normalization = files.facts(Split::Train)?.statistics.normalization();
    let constants = normalization.multiply_add(stored);
    let samples = empty_samples(stream, shape, files.layout().len(split), DType::F32)?;
    let mut converted = vec![];
    // Whole pixels, so that every piece begins with channel 0.
    let piece = CONVERTED_BYTES / shape.channels * shape.channels;
    files.read(split, &mut |pixels, chunk_labels| {
        let start = labels.len() * shape.numel();
        for (i, bytes) in pixels.chunks(piece).enumerate() {
            converted.clear();
            let channels = constants.iter().cycle();
            let values = bytes.iter().zip(channels);
            converted.extend(values.map(|(v, (scale, shift))| f32::from(*v) * scale + shift));
            let window = samples.view(start + i * piece, [bytes.len()])?;
            window.copy_from_slice(&converted)?;
            stream.synchronize()?;
        }
        labels.extend_from_slice(chunk_labels);
        Ok(())
    })?;
    first_samples(&samples, shape, labels.len())
}

/// Copies stored values to a tensor of their type. The bytes may have any alignment.
fn copy_stored(to: &Tensor, stored: StoredType, bytes: &[u8]) -> Result<()> {
    match stored {
        StoredType::U8 => to.copy_from_slice(bytes)?,
        StoredType::F32 => to.copy_from_slice(&bytemuck::pod_collect_to_vec::<u8, f32>(bytes))?,
    }
    Ok(())
}

fn wrong<T>(argument: &'static str, expected: String, got: String, remedy: &str) -> Result<T> {
    let operation = "Dataset::from_slices";
    Err(Error::Argument { operation, argument, expected, got, remedy: remedy.into() })
}

fn check_slices(
    SampleForm { kind, shape, stored }: SampleForm,
    values: usize,
    labels: &[u32],
    classes: &[String],
) -> Result<()> {
    let SampleShape { channels, height, width } = shape;
    let fits = match kind {
        InputKind::Vector => height == 1 && width == 1,
        InputKind::Signal => height == 1 && width > 0,
        InputKind::Image => height > 0 && width > 0,
    };
    if channels == 0 || !fits {
        let expected = format!("a channel or more, and rows and columns of a {kind}");
        return wrong("shape", expected, format!("{shape:?}"), "samples are NHWC");
    }
    let (plural, unit) = (kind.plural(), stored.plural());
    if labels.len().checked_mul(shape.numel()) != Some(values) {
        let expected = format!("{} {plural} of {channels}×{height}×{width} {unit}", labels.len());
        let remedy = "give one label for each sample";
        return wrong(plural, expected, format!("{values} {unit}"), remedy);
    }
    if let Some(i) = labels.iter().position(|label| *label as usize >= classes.len()) {
        let expected = format!("below {}, the number of classes", classes.len());
        return wrong("labels", expected, format!("{} at {i}", labels[i]), "name every class");
    }
    Ok(())
}

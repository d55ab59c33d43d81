//! One split of a dataset on one device.

use std::fmt;
use std::sync::Arc;

use half::f16;
use meristem_device::MappedFile;
use meristem_device::{DType, Device, MemoryFormat, Owner, Stream, Tensor, read_back};

use crate::error::{Error, Result};
use crate::normalization::{ChannelStatistics, Normalization};
use crate::parts::Fold;
use crate::shape::CHANNELS_BLOCKED;
use crate::shape::{InputKind, SampleForm, SampleShape, StoredType, StoredValue};
use crate::source::{CHUNK_BYTES, DatasetFiles, DatasetInfo, Layout, Split};
use crate::spool;
use crate::targets::{self, SampleTargets, StoredTargets, TargetForm, TargetKind};

/// Bytes converted to f32 at a time: a quarter of a chunk, because a value grows fourfold.
const CONVERTED_BYTES: usize = CHUNK_BYTES / 4;

/// Bytes that a checksum copies to the host at a time.
const CHECKSUM_PIECE: usize = 16 << 20;

/// Storage of a dataset's samples (D1, D7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Residency {
    /// [`Residency::Resident`] if samples and targets fit into `budget` bytes, else
    /// [`Residency::Streamed`].
    Auto {
        /// In bytes, for this split alone.
        budget: usize,
    },
    /// On the device, as bytes or floats.
    #[default]
    Resident,
    /// On the device, with bytes stored as normalised f32. This takes four times the memory, and
    /// the normalisation constants are always the dataset's own. Applies to samples of bytes with
    /// at most 4 channels; others are stored as with [`Residency::Resident`].
    ResidentF32,
    /// In a temporary, memory-mapped file of the host; batches are copied to the device ahead of
    /// their use. The file is deleted when the dataset is dropped.
    Streamed,
}

/// The samples of a dataset, as they are stored.
pub(crate) enum StoredSamples {
    /// A [`StoredType`], (N, C, H, W), channels last.
    Resident(Tensor),
    /// Normalised f32, (N, C, H, W), channels last.
    Normalized(Tensor),
    /// The bytes of a [`StoredType`], NHWC.
    Streamed(Arc<MappedFile>),
}

/// One split of a dataset, ready for gathering. [`crate::cache::load`] returns one shared copy to
/// all callers.
pub struct Dataset {
    device: Device,
    info: DatasetInfo,
    split: Option<Split>,
    len: usize,
    samples: StoredSamples,
    /// u32 [N], or f32 [N, K].
    targets: Tensor,
    /// Folds that the files list; `None` for the test split.
    folds: Option<Arc<[Fold]>>,
}

impl Dataset {
    /// A dataset of images in memory, resident on `device` as bytes. `images` are N images of
    /// `shape`, NHWC; `targets` has the targets of N samples, such as N classes; `classes` names
    /// the K classes, labels or numbers. The normalisation constants are computed from `images`,
    /// and the scale of numbers from `targets`. Copies to the device; waits for the copies.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not match, or targets out of range; device errors,
    /// including out of memory.
    pub fn from_slices<'a>(
        device: &Device,
        shape: SampleShape,
        images: &[u8],
        targets: impl Into<SampleTargets<'a>>,
        classes: Vec<String>,
    ) -> Result<Arc<Self>> {
        Self::from_values(device, InputKind::Image, shape, images, targets, classes)
    }

    /// A dataset of samples of any kind in memory, resident on `device` in the type of its values;
    /// otherwise as [`Self::from_slices`].
    ///
    /// # Errors
    /// As [`Self::from_slices`], and [`Error::Argument`] for values that are not finite.
    pub fn from_values<'a, V: StoredValue>(
        device: &Device,
        kind: InputKind,
        shape: SampleShape,
        values: &[V],
        targets: impl Into<SampleTargets<'a>>,
        classes: Vec<String>,
    ) -> Result<Arc<Self>> {
        let form = SampleForm { kind, shape, stored: V::STORED };
        let targets = targets.into();
        check_slices(form, values.len(), targets, &classes)?;
        if let Some(place) = values.iter().position(|value| !value.is_finite()) {
            let (sample, value) = (place / shape.numel(), place % shape.numel());
            let got = format!("{} at value {value} of sample {sample}", values[place]);
            return wrong("values", "finite numbers".into(), got, "replace it");
        }
        Self::from_stored(device, form, bytemuck::cast_slice(values), (targets, classes))
    }

    fn from_stored(
        device: &Device,
        form: SampleForm,
        bytes: &[u8],
        (targets, classes): (SampleTargets<'_>, Vec<String>),
    ) -> Result<Arc<Self>> {
        let SampleForm { kind, shape, stored } = form;
        let target_kind = targets.kind();
        let (targets, constants) = targets.store(TargetForm::new(target_kind, classes.len()).width);
        let len = targets.len();
        let mut statistics = ChannelStatistics::new(stored, shape.channels);
        statistics.add(bytes);
        let Normalization { mean, std } = statistics.normalization();
        let stream = device.stream("dataset");
        let resident = empty_samples(&stream, shape, len, stored.dtype())?;
        copy_stored(&resident, stored, bytes)?;
        let targets_tensor = targets.to_tensor(&stream)?;
        stream.synchronize()?;
        let mut per_class = targets::empty_counts(target_kind, classes.len());
        targets.all().count(&mut per_class);
        let SampleShape { channels, height, width } = shape;
        let info = DatasetInfo {
            name: "slices".into(),
            kind,
            stored,
            channels,
            height,
            width,
            targets: target_kind,
            classes,
            train_len: len,
            per_class,
            target_mean: constants.mean,
            target_std: constants.std,
            test_len: None,
            mean,
            std,
            skipped: 0,
            table: None,
        };
        Ok(Arc::new(Self {
            device: device.clone(),
            info,
            split: None,
            len,
            samples: StoredSamples::Resident(resident),
            targets: targets_tensor,
            folds: None,
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
        let layout = files.layout();
        let mut targets = StoredTargets::with_capacity(layout.target_form(), layout.len(split));
        let samples = match residency {
            Residency::Streamed => {
                StoredSamples::Streamed(Arc::new(spool::write(files, split, &mut targets)?))
            }
            Residency::ResidentF32 if is_normalized_at_load(layout) => {
                StoredSamples::Normalized(load_normalized(&stream, files, split, &mut targets)?)
            }
            Residency::Resident | Residency::ResidentF32 | Residency::Auto { .. } => {
                StoredSamples::Resident(load_stored(&stream, files, split, &mut targets)?)
            }
        };
        let targets_tensor = targets.to_tensor(&stream)?;
        stream.synchronize()?;
        Ok(Self {
            device: device.clone(),
            info: files.info()?,
            split: Some(split),
            len: targets.len(),
            samples,
            targets: targets_tensor,
            folds: files.folds().filter(|_| split == Split::Train).cloned(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Outputs, sizes and normalisation constants.
    pub fn info(&self) -> &DatasetInfo {
        &self.info
    }

    /// The split; `None` for a dataset from memory ([`Dataset::from_slices`],
    /// [`Dataset::from_values`]).
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

    /// The resident samples, (N, C, H, W) of the stored type, or f32 if they were normalised when
    /// they were loaded, channels last (F1); `None` if the dataset is
    /// streamed. The tensor belongs to the stream that loaded it: use `.on(&stream)`.
    pub fn resident(&self) -> Option<&Tensor> {
        match &self.samples {
            StoredSamples::Resident(samples) | StoredSamples::Normalized(samples) => Some(samples),
            StoredSamples::Streamed(_) => None,
        }
    }

    /// Whether the samples were normalised when they were loaded.
    pub(crate) fn is_normalized(&self) -> bool {
        matches!(self.samples, StoredSamples::Normalized(_))
    }

    /// The targets: classes u32 \[N\], or labels or standardised numbers f32 \[N, K\].
    pub fn targets(&self) -> &Tensor {
        &self.targets
    }

    /// Folds of a cross-validation, if the files list them for this split.
    pub fn folds(&self) -> Option<&Arc<[Fold]>> {
        self.folds.as_ref()
    }

    /// Kind of the targets.
    pub fn target_kind(&self) -> TargetKind {
        self.info.targets
    }

    pub(crate) fn target_form(&self) -> TargetForm {
        TargetForm::new(self.info.targets, self.info.classes.len())
    }

    /// CRC-32 of the stored targets and samples, of the constants of targets, of the rules of a
    /// table, and of listed folds: equal for equal values with equal storage. Waits for the device,
    /// and copies targets and samples to the host piece by piece.
    ///
    /// # Errors
    /// A failed device.
    pub fn checksum(&self) -> Result<u32> {
        let mut crc = crc32fast::Hasher::new();
        let DatasetInfo { target_mean, target_std, table, stored, .. } = &self.info;
        crc.update(bytemuck::cast_slice(target_mean));
        crc.update(bytemuck::cast_slice(target_std));
        if let Some(rules) = table {
            crc.update(serde_json::to_string(rules).unwrap_or_default().as_bytes());
        }
        for Fold { train, held_out } in self.folds.iter().flat_map(|folds| folds.iter()) {
            for list in [train, held_out] {
                crc.update(&(list.len() as u64).to_le_bytes());
                crc.update(bytemuck::cast_slice(list));
            }
        }
        read_back(&[&self.targets])?.iter().for_each(|bytes| crc.update(bytes));
        match &self.samples {
            StoredSamples::Streamed(file) => {
                let pieces = file.as_bytes().chunks(CHECKSUM_PIECE);
                pieces.for_each(|piece| crc.update(&stored.widened(piece)));
            }
            StoredSamples::Resident(samples) | StoredSamples::Normalized(samples) => {
                // In pieces, so that the host needs little memory.
                let (len, piece) = (samples.numel(), CHECKSUM_PIECE / samples.dtype().size());
                for start in (0..len).step_by(piece) {
                    let piece = samples.view(start, [piece.min(len - start)])?;
                    let bytes = read_back(&[&piece])?;
                    bytes.iter().for_each(|bytes| crc.update(&stored.widened(bytes)));
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

/// Bytes of a split that is resident as it is stored: samples and targets.
pub(crate) fn resident_bytes(layout: &Layout, split: Split) -> usize {
    let targets = layout.target_form().bytes();
    layout.len(split).saturating_mul(layout.sample_bytes().saturating_add(targets))
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
    targets: &mut StoredTargets,
) -> Result<Tensor> {
    let (shape, stored) = (files.layout().shape, files.layout().stored);
    let samples = empty_samples(stream, shape, files.layout().len(split), stored.dtype())?;
    files.read(split, &mut |bytes, chunk| {
        let start = targets.len() * shape.numel();
        let window = samples.view(start, [bytes.len() / stored.size()])?;
        copy_stored(&window, stored, bytes)?;
        // One chunk in flight, or the staging buffers would become a second copy (D1).
        stream.synchronize()?;
        targets.extend(chunk);
        Ok(())
    })?;
    first_samples(&samples, shape, targets.len())
}

fn load_normalized(
    stream: &Stream,
    files: &DatasetFiles,
    split: Split,
    targets: &mut StoredTargets,
) -> Result<Tensor> {
    let (shape, stored) = (files.layout().shape, files.layout().stored);
    let normalization = files.facts(Split::Train)?.statistics.normalization();
    let constants = normalization.multiply_add(stored);
    let samples = empty_samples(stream, shape, files.layout().len(split), DType::F32)?;
    let mut converted = vec![];
    // Whole pixels, so that every piece begins with channel 0.
    let piece = CONVERTED_BYTES / shape.channels * shape.channels;
    files.read(split, &mut |pixels, chunk| {
        let start = targets.len() * shape.numel();
        for (i, bytes) in pixels.chunks(piece).enumerate() {
            converted.clear();
            let channels = constants.iter().cycle();
            let values = bytes.iter().zip(channels);
            converted.extend(values.map(|(v, (scale, shift))| f32::from(*v) * scale + shift));
            let window = samples.view(start + i * piece, [bytes.len()])?;
            window.copy_from_slice(&converted)?;
            stream.synchronize()?;
        }
        targets.extend(chunk);
        Ok(())
    })?;
    first_samples(&samples, shape, targets.len())
}

/// Copies stored values to a tensor of their type. The bytes may have any alignment.
fn copy_stored(to: &Tensor, stored: StoredType, bytes: &[u8]) -> Result<()> {
    match stored {
        StoredType::U8 => to.copy_from_slice(bytes)?,
        StoredType::I16 => to.copy_from_slice(&bytemuck::pod_collect_to_vec::<u8, i16>(bytes))?,
        StoredType::F16 => to.copy_from_slice(&bytemuck::pod_collect_to_vec::<u8, f16>(bytes))?,
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
    targets: SampleTargets<'_>,
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
    let form = TargetForm::new(targets.kind(), classes.len());
    if form.width == 0 || !targets.values().is_multiple_of(form.width) {
        let expected = format!("{} {} for each sample, one for each name", form.width, form.kind);
        let remedy = "name every column, and give each sample a value of each";
        return wrong("targets", expected, format!("{} values", targets.values()), remedy);
    }
    let (plural, unit, samples) = (kind.plural(), stored.plural(), targets.values() / form.width);
    if samples.checked_mul(shape.numel()) != Some(values) {
        let expected = format!("{samples} {plural} of {channels}×{height}×{width} {unit}");
        let remedy = "give one label, or one row of targets, for each sample";
        return wrong(plural, expected, format!("{values} {unit}"), remedy);
    }
    check_targets(targets, classes.len())
}

fn check_targets(targets: SampleTargets<'_>, outputs: usize) -> Result<()> {
    let place = |i: usize| format!("at value {} of sample {}", i % outputs, i / outputs);
    match targets {
        SampleTargets::Classes(labels) => {
            let Some(i) = labels.iter().position(|label| *label as usize >= outputs) else {
                return Ok(());
            };
            let expected = format!("below {outputs}, the number of classes");
            wrong("labels", expected, format!("{} at {i}", labels[i]), "name every class")
        }
        SampleTargets::Labels(labels) => {
            let Some(i) = labels.iter().position(|label| !(0.0..=1.0).contains(label)) else {
                return Ok(());
            };
            let got = format!("{} {}", labels[i], place(i));
            let remedy = "give numbers as `SampleTargets::Numbers`";
            wrong("targets", "labels from 0 to 1".into(), got, remedy)
        }
        SampleTargets::Numbers(numbers) => {
            let is_finite = |number: &f64| (*number as f32).is_finite();
            let Some(i) = numbers.iter().position(|number| !is_finite(number)) else {
                return Ok(());
            };
            let got = format!("{} {}", numbers[i], place(i));
            wrong("targets", "finite numbers of at most 3.4e38".into(), got, "replace it")
        }
    }
}

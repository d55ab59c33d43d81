//! One split of a dataset on one device.

use std::fmt;
use std::sync::Arc;

use meristem_device::MappedFile;
use meristem_device::{DType, Device, MemoryFormat, Owner, Stream, Tensor, read_back};

use crate::error::{Error, Result};
use crate::normalization::{ByteHistogram, Normalization};
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
    /// On the device, as bytes.
    #[default]
    Resident,
    /// On the device, as normalised f32: four times the memory, and the normalisation constants are
    /// fixed to the dataset's own.
    ResidentF32,
    /// In a temporary, memory-mapped file of the host; batches are copied to the device ahead of
    /// their use. The file is deleted when the dataset is dropped.
    Streamed,
}

/// Shape of a dataset's images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageShape {
    /// From 1 to 4.
    pub channels: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl ImageShape {
    /// Number of values in one image.
    pub fn numel(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// The shape of n images in the user's axis order (F1).
    pub(crate) fn batch(&self, n: usize) -> [usize; 4] {
        [n, self.channels, self.height, self.width]
    }
}

/// The images of a dataset, as they are stored.
pub(crate) enum StoredImages {
    /// u8 or f32, (N, C, H, W), channels last.
    Resident(Tensor),
    /// u8, NHWC.
    Spooled(Arc<MappedFile>),
}

/// One split of a dataset, ready for gathering. [`crate::cache::load`] returns one shared copy to
/// all callers.
pub struct Dataset {
    device: Device,
    info: DatasetInfo,
    split: Option<Split>,
    len: usize,
    images: StoredImages,
    /// u32 [N].
    labels: Tensor,
}

impl Dataset {
    /// A dataset from arrays in memory, resident on `device` as bytes. `images` are N images of
    /// `shape`, NHWC; `labels` has N entries, each below the number of `classes`. The normalisation
    /// constants are computed from `images`. Copies to the device; waits for the copies.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not match, labels out of range, or more than 4
    /// channels; device errors, including out of memory.
    pub fn from_slices(
        device: &Device,
        shape: ImageShape,
        images: &[u8],
        labels: &[u32],
        classes: Vec<String>,
    ) -> Result<Arc<Self>> {
        check_slices(shape, images, labels, &classes)?;
        let mut histogram = ByteHistogram::new(shape.channels);
        histogram.add(images);
        let Normalization { mean, std } = histogram.normalization();
        let stream = device.stream("dataset");
        let resident = empty_images(&stream, shape, labels.len(), DType::U8)?;
        resident.copy_from_slice(images)?;
        let labels_tensor = Tensor::from_slice(&stream, labels, [labels.len()], Owner::Dataset)?;
        stream.synchronize()?;
        let ImageShape { channels, height, width } = shape;
        let info = DatasetInfo {
            name: "slices".into(),
            channels,
            height,
            width,
            classes,
            train_len: labels.len(),
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
            images: StoredImages::Resident(resident),
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
        let images = match residency {
            Residency::Streamed => {
                StoredImages::Spooled(Arc::new(spool::write(files, split, &mut labels)?))
            }
            Residency::ResidentF32 => {
                StoredImages::Resident(load_f32(&stream, files, split, &mut labels)?)
            }
            Residency::Resident | Residency::Auto { .. } => {
                StoredImages::Resident(load_u8(&stream, files, split, &mut labels)?)
            }
        };
        let labels_tensor = Tensor::from_slice(&stream, &labels, [labels.len()], Owner::Dataset)?;
        stream.synchronize()?;
        Ok(Self {
            device: device.clone(),
            info: files.info()?,
            split: Some(split),
            len: labels.len(),
            images,
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

    /// Shape of an image.
    pub fn image_shape(&self) -> ImageShape {
        let DatasetInfo { channels, height, width, .. } = self.info;
        ImageShape { channels, height, width }
    }

    /// The normalisation constants of the training split, used for both splits.
    pub fn normalization(&self) -> Normalization {
        Normalization { mean: self.info.mean.clone(), std: self.info.std.clone() }
    }

    /// The resident images, (N, C, H, W) u8 (or f32, normalised), channels last (F1); `None` if the
    /// dataset is streamed. The tensor belongs to the stream that loaded it: use `.on(&stream)`.
    pub fn resident_images(&self) -> Option<&Tensor> {
        match &self.images {
            StoredImages::Resident(images) => Some(images),
            StoredImages::Spooled(_) => None,
        }
    }

    /// The labels, `u32 [N]`.
    pub fn labels(&self) -> &Tensor {
        &self.labels
    }

    /// CRC-32 of the stored labels and images: equal for equal files with equal storage. Waits for
    /// the device, and copies labels and images to the host piece by piece.
    ///
    /// # Errors
    /// A failed device.
    pub fn checksum(&self) -> Result<u32> {
        let mut crc = crc32fast::Hasher::new();
        crc.update(bytemuck::cast_slice(&self.labels.to_vec::<u32>()?));
        match &self.images {
            StoredImages::Spooled(file) => crc.update(file.as_bytes()),
            StoredImages::Resident(images) => {
                // In pieces, so that the host needs little memory.
                let (len, piece) = (images.numel(), CHECKSUM_PIECE / images.dtype().size());
                for start in (0..len).step_by(piece) {
                    let piece = images.view(start, [piece.min(len - start)])?;
                    read_back(&[&piece])?.iter().for_each(|bytes| crc.update(bytes));
                }
            }
        }
        Ok(crc.finalize())
    }

    pub(crate) fn images(&self) -> &StoredImages {
        &self.images
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { info, split, len, .. } = self;
        write!(f, "Dataset({} {split:?}, {len} samples on {})", info.name, self.device.id())
    }
}

/// Bytes of a split that is resident as u8: images and labels.
pub(crate) fn resident_bytes(layout: &Layout, split: Split) -> usize {
    let label = size_of::<u32>();
    layout.len(split).saturating_mul(layout.image_bytes().saturating_add(label))
}

fn shape_of(layout: &Layout) -> ImageShape {
    let Layout { channels, height, width, .. } = *layout;
    ImageShape { channels, height, width }
}

fn empty_images(stream: &Stream, shape: ImageShape, n: usize, dtype: DType) -> Result<Tensor> {
    let format = MemoryFormat::ChannelsLast;
    Ok(Tensor::empty_with_format(stream, shape.batch(n), dtype, format, Owner::Dataset)?)
}

/// The first `n` images of `images`, which has room for every file; a bad file has no image.
fn first_images(images: &Tensor, shape: ImageShape, n: usize) -> Result<Tensor> {
    Ok(images.view_with_format(0, shape.batch(n), MemoryFormat::ChannelsLast)?)
}

fn load_u8(
    stream: &Stream,
    files: &DatasetFiles,
    split: Split,
    labels: &mut Vec<u32>,
) -> Result<Tensor> {
    let shape = shape_of(files.layout());
    let images = empty_images(stream, shape, files.layout().len(split), DType::U8)?;
    files.read(split, &mut |pixels, chunk_labels| {
        let window = images.view(labels.len() * shape.numel(), [pixels.len()])?;
        window.copy_from_slice(pixels)?;
        // One chunk in flight, or the staging buffers would become a second copy (D1).
        stream.synchronize()?;
        labels.extend_from_slice(chunk_labels);
        Ok(())
    })?;
    first_images(&images, shape, labels.len())
}

fn load_f32(
    stream: &Stream,
    files: &DatasetFiles,
    split: Split,
    labels: &mut Vec<u32>,
) -> Result<Tensor> {
    let shape = shape_of(files.layout());
    let constants = files.facts(Split::Train)?.histogram.normalization().multiply_add();
    let images = empty_images(stream, shape, files.layout().len(split), DType::F32)?;
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
            let window = images.view(start + i * piece, [bytes.len()])?;
            window.copy_from_slice(&converted)?;
            stream.synchronize()?;
        }
        labels.extend_from_slice(chunk_labels);
        Ok(())
    })?;
    first_images(&images, shape, labels.len())
}

fn check_slices(
    shape: ImageShape,
    images: &[u8],
    labels: &[u32],
    classes: &[String],
) -> Result<()> {
    let wrong = |argument, expected: String, got: String, remedy: &str| {
        let operation = "Dataset::from_slices";
        Err(Error::Argument { operation, argument, expected, got, remedy: remedy.into() })
    };
    let ImageShape { channels, height, width } = shape;
    if !(1..=4).contains(&channels) || height == 0 || width == 0 {
        let expected = "1 to 4 channels, and at least one row and column".into();
        return wrong("shape", expected, format!("{shape:?}"), "images are u8, NHWC");
    }
    if labels.len().checked_mul(shape.numel()) != Some(images.len()) {
        let expected = format!("{} images of {channels}×{height}×{width} bytes", labels.len());
        let remedy = "give one label for each image";
        return wrong("images", expected, format!("{} bytes", images.len()), remedy);
    }
    if let Some(i) = labels.iter().position(|label| *label as usize >= classes.len()) {
        let expected = format!("below {}, the number of classes", classes.len());
        return wrong("labels", expected, format!("{} at {i}", labels[i]), "name every class");
    }
    Ok(())
}

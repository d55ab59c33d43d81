//! Data for benchmarks: as many images, of the same form, as CIFAR-10's training set.

use std::sync::Arc;

use meristem::data::{Dataset, ImageShape};
use meristem::device::Device;
use meristem::device::random::{Purpose, Rng};

use crate::failure::Failure;

/// Channels, rows, columns.
pub(crate) const SHAPE: ImageShape = ImageShape { channels: 3, height: 32, width: 32 };
/// Images.
pub(crate) const IMAGES: usize = 50_000;
/// Classes.
pub(crate) const CLASSES: usize = 10;

/// Random bytes and labels, resident on `device`.
pub(crate) fn dataset(device: &Device) -> Result<Arc<Dataset>, Failure> {
    let mut random = Rng::new(0, Purpose::Test, 0, 0);
    let words = (0..IMAGES * SHAPE.numel() / 4).flat_map(|_| random.next_u32().to_le_bytes());
    let images: Vec<u8> = words.collect();
    let labels: Vec<u32> = (0..IMAGES).map(|_| random.below(CLASSES as u32)).collect();
    let classes = (0..CLASSES).map(|class| class.to_string()).collect();
    Ok(Dataset::from_slices(device, SHAPE, &images, &labels, classes)?)
}

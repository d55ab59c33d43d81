//! Random images of the shape of CIFAR-10, for benchmarks and checks.

use std::sync::Arc;

use meristem::data::{Dataset, SampleShape};
use meristem::device::Device;
use meristem::device::random::{Purpose, Rng};
use meristem::grow;

use crate::failure::Failure;

/// Channels, rows and columns.
pub(crate) const SHAPE: SampleShape = SampleShape { channels: 3, height: 32, width: 32 };
/// Size of CIFAR-10's training set.
pub(crate) const IMAGES: usize = 50_000;
/// Number of classes.
pub(crate) const CLASSES: usize = 10;

/// Shape of the images, for hosts.
pub(crate) fn image_shape() -> grow::TaskShape {
    let SampleShape { channels, height, width } = SHAPE;
    grow::TaskShape { channels, height, width, classes: CLASSES }
}

/// A dataset of random bytes with random labels, resident on `device`.
pub(crate) fn dataset(device: &Device, images: usize) -> Result<Arc<Dataset>, Failure> {
    let mut random = Rng::new(0, Purpose::Test, 0, 0);
    let mut bytes = vec![0; images * SHAPE.numel()];
    random.fill(&mut bytes);
    let labels: Vec<u32> = (0..images).map(|_| random.below(CLASSES as u32)).collect();
    let classes = (0..CLASSES).map(|class| class.to_string()).collect();
    Ok(Dataset::from_slices(device, SHAPE, &bytes, &labels, classes)?)
}

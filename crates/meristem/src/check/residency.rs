//! Checks of the resident copy and its batches: one copy, the right strides, no shared memory.

use std::sync::Arc;

use meristem::data::{
    Batch, Dataset, DatasetSpec, GatherBatches, GatherConfig, Residency, Source, Split, cache,
};
use meristem::device::{DType, Device, DeviceId, DeviceOptions, Stream};

use super::{Fault, REPORT, Verdict, ensure};
use crate::plain::megabytes;

const ENVS: usize = 4;
const BATCH: usize = 32;

/// The embedded dataset on a separate device. Dropping it removes the embedded dataset from the
/// cache of datasets.
struct Resident {
    device: Device,
    streams: Vec<Stream>,
    data: Arc<Dataset>,
}

impl Resident {
    fn load(id: DeviceId) -> Result<Self, Fault> {
        let device = Device::open(id, &DeviceOptions::default())?;
        let streams = (0..ENVS).map(|env| device.stream(&format!("env {env}"))).collect();
        let data = load(&device)?;
        Ok(Self { device, streams, data })
    }

    /// Returns a gather from the resident copy for all envs.
    fn gather(&self, shuffle: bool) -> Result<GatherBatches, Fault> {
        let devices = vec![self.device.id(); ENVS];
        let config =
            GatherConfig { shuffle, max_batches: Some(20), ..GatherConfig::new(BATCH, devices) };
        Ok(GatherBatches::new(&config, &[Arc::clone(&self.data)], &self.streams)?)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // The cache would keep the data and the device alive.
        cache::clear(|key| key.source == Source::Embedded);
    }
}

fn load(device: &Device) -> Result<Arc<Dataset>, Fault> {
    let spec = DatasetSpec::embedded();
    Ok(cache::load(device, &spec, Split::Train, Residency::Resident)?)
}

/// Checks that there is one resident copy, that it has the type `u8`, that a second request shares
/// it, and that an epoch copies only the order of samples.
pub(super) fn residency(id: DeviceId) -> Verdict {
    let resident = Resident::load(id)?;
    let images = resident.data.resident();
    let images = images.ok_or_else(|| Fault::new("the data is not resident", REPORT))?;
    let again = load(&resident.device)?;
    let shared = again.resident().map(|tensor| tensor.storage_id());
    ensure(shared == Some(images.storage_id()), || {
        Fault::new("there are two resident copies", REPORT)
    })?;
    let dtype = images.dtype();
    ensure(dtype == DType::U8, || Fault::new(format!("images are kept as {dtype}"), REPORT))?;
    let mut gather = resident.gather(true)?;
    gather_epoch(&mut gather, 1)?;
    let before = resident.device.counts();
    gather_epoch(&mut gather, 2)?;
    let spent = resident.device.counts() - before;
    let hidden = spent.copies_to_host + spent.synchronizations + spent.allocations;
    // The permutations are one copy. On a GPU each launch may also copy the addresses of a new
    // graph.
    let tables = if matches!(id, DeviceId::Cpu(_)) { 0 } else { spent.launches };
    ensure(hidden == 0 && spent.copies_to_device <= 1 + tables, || {
        Fault::new(format!("an epoch of batches made hidden operations: {spent:?}"), REPORT)
    })?;
    Ok(format!("one copy of {} as u8; an epoch copies only its order", megabytes(images.numel())))
}

fn gather_epoch(gather: &mut GatherBatches, epoch: u64) -> Result<(), Fault> {
    gather.start_epoch(epoch)?;
    while gather.next()?.is_some() {}
    Ok(())
}

/// Tolerance of a pixel. Rounding of (v/255 − mean)/std in f32 is about 1e-6; pixels at wrong
/// strides differ by more than .1.
const TOLERANCE: f32 = 1e-5;

/// Checks that batches have channels-last strides and the right pixels at these strides.
pub(super) fn format(id: DeviceId) -> Verdict {
    let resident = Resident::load(id)?;
    let batch = first_batch(&mut resident.gather(false)?)?.swap_remove(1);
    let image = resident.data.shape();
    let (c, h, w) = (image.channels, image.height, image.width);
    let (strides, expected) = (batch.inputs.strides(), vec![h * w * c, 1, w * c, c]);
    ensure(strides == expected, || {
        Fault::new(format!("strides are {strides:?}, expected {expected:?}"), REPORT)
    })?;
    // Without shuffling, env 1 has the second batch of samples.
    let bytes = resident.data.resident().map(|images| images.to_vec::<u8>()).transpose()?;
    let bytes = bytes.unwrap_or_default();
    let constants = resident.data.normalization();
    let pixels = batch.inputs.to_vec::<f32>()?;
    let mut worst = 0.0f32;
    for (i, pixel) in pixels.iter().enumerate() {
        let byte = bytes.get(BATCH * image.numel() + i).copied().unwrap_or_default();
        let channel = i % c;
        let value = (f32::from(byte) / 255.0 - constants.mean[channel]) / constants.std[channel];
        worst = worst.max((pixel - value).abs());
    }
    ensure(worst <= TOLERANCE, || {
        Fault::new(format!("a pixel is off by {worst}, more than {TOLERANCE}"), REPORT)
    })?;
    Ok(format!("NHWC, strides {strides:?}; {} pixels within {worst:.0e}", pixels.len()))
}

/// Checks that no two batches in flight share memory.
pub(super) fn aliasing(id: DeviceId) -> Verdict {
    let resident = Resident::load(id)?;
    let mut gather = resident.gather(true)?;
    let mut held = first_batch(&mut gather)?;
    held.extend(gather.next()?.unwrap_or_default());
    let tensors = held.iter().flat_map(|batch| [&batch.inputs, &batch.targets]);
    let mut ranges: Vec<(u64, u64)> = tensors
        .map(|tensor| {
            let bytes = tensor.numel() * tensor.dtype().size();
            (tensor.address(), tensor.address() + bytes as u64)
        })
        .collect();
    ranges.sort_unstable();
    let shared = ranges.windows(2).filter(|pair| pair[0].1 > pair[1].0).count();
    ensure(shared == 0 && !ranges.is_empty(), || {
        Fault::new(format!("{shared} of {} batch buffers overlap", ranges.len()), REPORT)
    })?;
    Ok(format!("{} batch buffers of {ENVS} envs in flight, none overlap", ranges.len()))
}

fn first_batch(gather: &mut GatherBatches) -> Result<Vec<Batch>, Fault> {
    gather.start_epoch(0)?;
    gather.next()?.ok_or_else(|| Fault::new("an epoch had no batches", REPORT))
}

//! Gathers of splits for evaluation, and their batches.

use std::ops::Range;
use std::sync::Arc;

use meristem_data::{Batch, Dataset, GatherBatches, GatherConfig};
use meristem_device::{Device, Stream};
use meristem_nn::LabelledBatch;

use super::open_devices::OpenDevices;
use crate::error::Result;

/// Options for serving a split for evaluation: each env gets all samples, in order.
pub(crate) struct Serving {
    /// Samples in a batch.
    pub(crate) batch: usize,
    /// Indices of the samples; all if absent.
    pub(crate) subset: Option<Arc<[u32]>>,
    /// Normalisation constants; the dataset's own if absent.
    pub(crate) normalization: Option<meristem_data::Normalization>,
}

/// Number of batches of a pass over a split.
#[derive(Clone, Copy, Default)]
pub(crate) struct PassBatches {
    /// Batches that are gathered.
    pub(crate) gathered: u64,
    /// Batches of streamed images that are copied to a device.
    pub(crate) uploaded: u64,
}

impl PassBatches {
    /// A pass over the first `batches` batches of an epoch, or over all if there are fewer.
    pub(crate) fn new(gather: &GatherBatches, batches: usize) -> PassBatches {
        let gathered = gather.len().min(batches) as u64;
        PassBatches { gathered, uploaded: gather.uploads(batches) }
    }
}

/// A split that every env sees whole, in order. It is gathered once for each device, into memory
/// that all envs read. In the training gather each env has separate samples and memory.
pub(crate) struct Served {
    /// Gathers of the devices with envs, each on a separate stream.
    gathers: Vec<GatherBatches>,
    /// Gather and stream of each env.
    envs: Vec<(usize, Stream)>,
}

impl Served {
    /// Prepares the gathers, with memory for the batches of each device. `datasets` has one for
    /// each device with envs.
    ///
    /// # Errors
    /// Device errors.
    pub(crate) fn new(
        options: Serving,
        devices: &OpenDevices,
        datasets: &[Arc<Dataset>],
    ) -> Result<Self> {
        let Serving { batch, subset, normalization } = options;
        let gather = |(dataset, device): (&Arc<Dataset>, &Device)| {
            let config = GatherConfig {
                shuffle: false,
                subset: subset.clone(),
                normalization: normalization.clone(),
                ..GatherConfig::new(batch, vec![device.id()])
            };
            let stream = device.stream("evaluated images");
            Ok(GatherBatches::new(&config, std::slice::from_ref(dataset), &[stream])?)
        };
        let gathers = datasets.iter().zip(devices.distinct()).map(gather);
        let gathers = gathers.collect::<Result<_>>()?;
        let envs = devices.device_of.iter().copied().zip(devices.streams().iter().cloned());
        Ok(Self { gathers, envs: envs.collect() })
    }

    /// Distinct batches of `envs` envs, as the sizes of the envs' parts, which are all equal.
    pub(crate) fn batches(&self, envs: usize) -> Vec<Vec<usize>> {
        let sizes = self.gathers.first().map(|gather| batch_sizes(gather, 0)).unwrap_or_default();
        sizes.into_iter().map(|size| vec![size; envs]).collect()
    }

    /// Batches of a pass, on each device.
    pub(crate) fn pass_batches(&self) -> Option<PassBatches> {
        self.gathers.first().map(|gather| PassBatches::new(gather, gather.len()))
    }

    /// Begins a pass of some envs over the split. Does not wait for the devices.
    ///
    /// # Errors
    /// Device errors.
    pub(crate) fn pass(&mut self, envs: Range<usize>) -> Result<SplitPass<'_>> {
        self.gathers.iter_mut().try_for_each(|gather| gather.start_epoch(0))?;
        Ok(SplitPass { gathers: &mut self.gathers, envs: &self.envs[envs] })
    }
}

/// A pass over a split.
pub(crate) struct SplitPass<'a> {
    gathers: &'a mut [GatherBatches],
    envs: &'a [(usize, Stream)],
}

impl SplitPass<'_> {
    /// The next batch: inputs and labels, on the stream of each env. `None` at the end. Does not
    /// wait for the devices.
    ///
    /// # Errors
    /// Device errors.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<Batch>>> {
        let mut gathered: Vec<Batch> = vec![];
        for gather in &mut *self.gathers {
            // All serve the same split and end together.
            let Some(next) = gather.next()? else { return Ok(None) };
            gathered.extend(next);
        }
        let on = |(gather, stream): &(usize, Stream)| {
            let Batch { env, inputs, targets } = &gathered[*gather];
            Ok(Batch { env: *env, inputs: inputs.on(stream)?, targets: targets.on(stream)? })
        };
        self.envs.iter().map(on).collect::<Result<_>>().map(Some)
    }
}

/// Distinct sizes of an env's batches.
pub(crate) fn batch_sizes(gather: &GatherBatches, env: usize) -> Vec<usize> {
    let order = gather.order();
    let mut sizes: Vec<usize> =
        (0..order.batches()).map(|batch| order.part(batch, env).len()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&size| size > 0);
    sizes
}

/// Distinct batches, as the sizes of the envs' parts; envs without a part are the last ones.
pub(crate) fn batches_of(gather: &GatherBatches, envs: Range<usize>) -> Vec<Vec<usize>> {
    let order = gather.order();
    let sizes = |batch| {
        let parts = envs.clone().map(|env| order.part(batch, env).len());
        parts.take_while(|&size| size > 0).collect()
    };
    let mut batches: Vec<Vec<usize>> = (0..order.batches()).map(sizes).collect();
    batches.sort_unstable();
    batches.dedup();
    batches
}

/// Inputs and labels of batches.
pub(crate) fn labelled(batches: &[Batch]) -> Vec<LabelledBatch<'_>> {
    batches.iter().map(|batch| (&batch.inputs, &batch.targets)).collect()
}

//! Configuration of a gather, and its checks.

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{Device, DeviceId, DeviceOptions, Stream};

use crate::augment::Augment;
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::normalization::Normalization;
use crate::order::{EnvOrder, EpochMode};
use crate::parts::Subset;
use crate::targets::TargetForm;

/// Options of a gather that may differ from env to env.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvGather {
    /// Samples in a full batch, at least 1.
    pub batch: usize,
    /// Seed of permutations and augmentation.
    pub seed: u64,
    /// Random augmentation of the images.
    pub augment: Augment,
}

impl EnvGather {
    pub(super) fn order(self) -> EnvOrder {
        EnvOrder { batch: self.batch, seed: self.seed }
    }
}

/// Configuration of a gather.
#[derive(Clone, Debug)]
pub struct GatherConfig {
    /// Samples of each env in a full batch, at least 1.
    pub batch_per_env: usize,
    /// The device of each env, in env order; at least one.
    pub devices: Vec<DeviceId>,
    /// Draws the order of samples of all envs as if they were on this device; `None`: as on their
    /// own devices.
    pub ordered_as: Option<DeviceId>,
    /// For each env, the rank whose random order the env has, see
    /// [`OrderConfig::ranks`](crate::order::OrderConfig::ranks); `None` for the order of the envs.
    pub order_ranks: Option<Vec<usize>>,
    /// Batch, seed and augmentation of each env in place of `batch_per_env`, `seed` and `augment`.
    /// Batches and seeds may differ from these only with [`EpochMode::Full`].
    pub own: Option<Vec<EnvGather>>,
    /// The envs served here, `None` for all; gathers of other processes serve the other envs.
    pub served: Option<Range<usize>>,
    /// The envs that get batches until [`GatherBatches::select`](crate::GatherBatches::select);
    /// `None` for all.
    pub selected: Option<Vec<usize>>,
    /// Share of the samples that an env gets in an epoch.
    pub epoch_mode: EpochMode,
    /// Whether each epoch is permuted; false serves the samples in order.
    pub shuffle: bool,
    /// Whether to leave out a last batch that is not full.
    pub drop_last: bool,
    /// Seed of permutations and augmentation.
    pub seed: u64,
    /// The samples to serve.
    pub subset: Subset,
    /// Random augmentation of the images.
    pub augment: Augment,
    /// Batch buffers of each env, at least 2. A buffer is added when a consumer holds them all.
    pub ring_depth: usize,
    /// Upper limit of batches in an epoch, at least 1; `None` for all.
    pub max_batches: Option<usize>,
    /// Normalisation constants; `None` for the constants of the dataset's training split.
    pub normalization: Option<Normalization>,
}

impl GatherConfig {
    /// The defaults: samples dealt out to the envs of a device, shuffled with seed 0, partial last
    /// batches kept, no augmentation, two buffers.
    pub fn new(batch_per_env: usize, devices: Vec<DeviceId>) -> Self {
        Self {
            batch_per_env,
            devices,
            ordered_as: None,
            order_ranks: None,
            own: None,
            served: None,
            selected: None,
            epoch_mode: EpochMode::Dealt,
            shuffle: true,
            drop_last: false,
            seed: 0,
            subset: Subset::All,
            augment: Augment::NONE,
            ring_depth: 2,
            max_batches: None,
            normalization: None,
        }
    }

    /// The devices by which the order of samples is drawn, in env order.
    pub(super) fn order_devices(&self) -> Vec<DeviceId> {
        match self.ordered_as {
            Some(device) => vec![device; self.devices.len()],
            None => self.devices.clone(),
        }
    }
}

pub(super) fn wrong<T>(
    argument: &'static str,
    expected: String,
    got: String,
    remedy: &str,
) -> Result<T> {
    Err(Error::Argument { operation: "gather", argument, expected, got, remedy: remedy.into() })
}

/// Checks that there is a dataset, and that all datasets have the same length, shape of samples and
/// form of targets, as copies of one dataset on several devices do.
pub(super) fn check_datasets(datasets: &[Arc<Dataset>]) -> Result<&[Arc<Dataset>]> {
    let Some(first) = datasets.first() else {
        return wrong("datasets", "one for each device".into(), "none".into(), "load one first");
    };
    for other in datasets {
        let about = |d: &Dataset| {
            let TargetForm { kind, width } = d.target_form();
            format!("{} samples of {:?} with {kind} ({width} a sample)", d.len(), d.shape())
        };
        let form = |d: &Dataset| (d.len(), d.shape(), d.target_form());
        if form(other) != form(first) {
            let expected = format!("{} as on {}", about(first), first.device().id());
            let got = format!("{} on {}", about(other), other.device().id());
            return wrong("datasets", expected, got, "load the same dataset on every device");
        }
    }
    Ok(datasets)
}

pub(super) fn check_config(
    config: &GatherConfig,
    datasets: &[Arc<Dataset>],
    streams: &[Stream],
) -> Result<()> {
    let GatherConfig { devices, served, ring_depth, subset, normalization, augment, .. } = config;
    let all = 0..devices.len();
    let served = served.clone().unwrap_or(all.clone());
    if served.start > served.end || served.end > all.end {
        let expected = format!("some of the {} envs", all.end);
        return wrong("served", expected, format!("{served:?}"), "leave it out to serve all envs");
    }
    if served.len() != streams.len() {
        if config.served.is_some() {
            let expected = format!("one for each of the {} served envs", served.len());
            let got = format!("{} streams", streams.len());
            return wrong("streams", expected, got, "give one stream for each served env");
        }
        let expected = format!("one for each of the {} envs", streams.len());
        let got = format!("{} devices", served.len());
        return wrong("devices", expected, got, "give as many devices as env streams");
    }
    for ((env, id), stream) in served.clone().zip(&devices[served]).zip(streams) {
        if stream.device().id() != *id {
            if let DeviceId::Cuda(_) = id {
                // Reports a device that is not available.
                Device::open(*id, &DeviceOptions::default())?;
            }
            let expected = format!("{}, where the stream of env {env} is", stream.device().id());
            return wrong(
                "devices",
                expected,
                id.to_string(),
                "open the env's stream on its device",
            );
        }
    }
    if *ring_depth < 2 {
        let remedy = "one buffer is filled while the other is used";
        return wrong("ring_depth", "at least 2".into(), ring_depth.to_string(), remedy);
    }
    let len = datasets[0].len();
    let argument = if let Subset::PerEnv(_) = subset { "parts" } else { "subset" };
    subset.distinct().iter().try_for_each(|indices| check_indices(argument, indices, len))?;
    let own = config.own.iter().flatten().map(|own| &own.augment);
    let mut all = own.chain([augment]);
    all.try_for_each(|augment| augment.check(datasets[0].info().kind, datasets[0].shape()))?;
    normalization.as_ref().map_or(Ok(()), |given| check_normalization(given, datasets))
}

/// Checks that a dataset of `len` samples has all `indices`.
pub(super) fn check_indices(argument: &'static str, indices: &[u32], len: usize) -> Result<()> {
    match indices.iter().find(|index| **index as usize >= len) {
        None => Ok(()),
        Some(index) => {
            let expected = format!("indices below {len}, the number of samples");
            wrong(argument, expected, index.to_string(), "take the indices from the served dataset")
        }
    }
}

fn check_normalization(given: &Normalization, datasets: &[Arc<Dataset>]) -> Result<()> {
    let channels = datasets[0].shape().channels;
    let Normalization { mean, std } = given;
    if mean.len() != channels || !given.is_usable() {
        let expected = format!("finite means and positive deviations of {channels} channels");
        let remedy = "leave it out for the dataset's own";
        return wrong("normalization", expected, format!("{mean:?} and {std:?}"), remedy);
    }
    let is_normalized = datasets.iter().any(|dataset| dataset.is_normalized());
    if is_normalized && *given != datasets[0].normalization() {
        let expected = "the dataset's own, with which its f32 copy was made".into();
        return wrong("normalization", expected, format!("{given:?}"), "keep the dataset as u8");
    }
    Ok(())
}

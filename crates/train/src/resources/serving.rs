//! Gathers of splits for evaluation, and the shapes of batches. The shape of a batch is the list of
//! the numbers of samples that each env has in it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use meristem_data::{Batch, Dataset, GatherBatches, GatherConfig, Subset};
use meristem_device::Stream;
use meristem_nn::{LabelledBatch, NetworkFleet};

use super::open_devices::OpenDevices;
use crate::error::Result;

/// Options for serving a split for evaluation: each env gets all samples of its part, in order.
pub(crate) struct Serving {
    /// Samples in a batch of each env, until [`Served::set_batches`].
    pub(crate) batch: usize,
    /// Samples of each env of the run.
    pub(crate) subset: Subset,
    /// Normalisation constants; the dataset's own if absent.
    pub(crate) normalization: Option<meristem_data::Normalization>,
}

/// Number of batches of a pass over a split, on one device.
#[derive(Clone, Copy, Default)]
pub(crate) struct PassBatches {
    /// Gathers.
    pub(crate) gathers: u64,
    /// Batches that they gather.
    pub(crate) gathered: u64,
    /// Batches of streamed images that are copied to the device.
    pub(crate) uploaded: u64,
    /// Different shapes of these batches ([`batch_shapes_of`]).
    pub(crate) shapes: u64,
}

impl PassBatches {
    /// A pass over the first `batches` batches of an epoch, or over all if there are fewer.
    /// `shapes` is the number of different batch shapes of an epoch ([`batch_shapes_of`]); 0 if no
    /// batch is launched for all envs together.
    pub(crate) fn new(gather: &GatherBatches, batches: usize, shapes: usize) -> PassBatches {
        let gathered = gather.len().min(batches) as u64;
        let (gathers, uploaded) = (1, gather.uploads(batches));
        PassBatches { gathers, gathered, uploaded, shapes: shapes as u64 }
    }
}

/// A split for evaluation. Every env sees the whole split, or its own part of it, in order. The
/// split is gathered once for each combination of device, part and batch size; all envs with the
/// same combination read the same memory. In the training gather each env has batches and memory of
/// its own.
pub(crate) struct Served {
    normalization: Option<meristem_data::Normalization>,
    /// The split on each device with envs.
    datasets: Vec<Arc<Dataset>>,
    /// Gathers, each on a separate stream.
    gathers: Vec<SharedGather>,
    /// The envs of the process.
    envs: Vec<ServedEnv>,
    /// Gather and stream of each selected env.
    selected: Vec<(usize, Stream)>,
}

struct ServedEnv {
    /// Samples of the env, and size of its batches.
    key: ServedKey,
    /// Number of its gather.
    gather: usize,
    stream: Stream,
}

/// Properties that all envs of a gather have in common.
#[derive(Clone)]
struct ServedKey {
    /// Device, as an index into [`OpenDevices::distinct`].
    device: usize,
    /// The samples; `None` for all.
    samples: Option<Arc<[u32]>>,
    /// Samples in a batch.
    batch: usize,
}

impl ServedKey {
    fn is_same(&self, other: &Self) -> bool {
        let same = match (&self.samples, &other.samples) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (own, other) => own.is_none() && other.is_none(),
        };
        same && (self.device, self.batch) == (other.device, other.batch)
    }
}

/// A gather for the envs with one [`ServedKey`].
struct SharedGather {
    key: ServedKey,
    gather: GatherBatches,
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
        let datasets = datasets.to_vec();
        let (gathers, envs, selected) = (vec![], vec![], vec![]);
        let mut served = Self { normalization, datasets, gathers, envs, selected };
        let placed = devices.envs().zip(&devices.device_of).zip(devices.streams());
        for ((env, &device), stream) in placed {
            let key = ServedKey { device, samples: subset.of_env(env).cloned(), batch };
            let (gather, stream) = (served.gather(&key, stream)?, stream.clone());
            served.envs.push(ServedEnv { key, gather, stream });
        }
        served.select(&(0..served.envs.len()).collect::<Vec<_>>());
        Ok(served)
    }

    /// Number of the gather for envs with this key; creates the gather if it is missing. `stream`
    /// is the stream of one of these envs.
    fn gather(&mut self, key: &ServedKey, stream: &Stream) -> Result<usize> {
        if let Some(known) = self.gathers.iter().position(|shared| shared.key.is_same(key)) {
            return Ok(known);
        }
        let of_device = stream.device();
        let config = GatherConfig {
            shuffle: false,
            subset: key.samples.clone().map_or(Subset::All, Subset::Shared),
            normalization: self.normalization.clone(),
            ..GatherConfig::new(key.batch, vec![of_device.id()])
        };
        let own = of_device.stream("evaluated images");
        let dataset = std::slice::from_ref(&self.datasets[key.device]);
        let gather = GatherBatches::new(&config, dataset, &[own])?;
        self.gathers.push(SharedGather { key: key.clone(), gather });
        Ok(self.gathers.len() - 1)
    }

    /// Sets the sizes of the batches of some envs, given by their positions among the envs of the
    /// process. If a size changes, all envs of the process are selected.
    ///
    /// # Errors
    /// Device errors.
    pub(crate) fn set_batches(
        &mut self,
        batches: impl Iterator<Item = (usize, usize)>,
    ) -> Result<()> {
        let mut is_changed = false;
        for (position, batch) in batches {
            let ServedEnv { key, stream, .. } = &self.envs[position];
            if key.batch != batch {
                let (key, stream) = (ServedKey { batch, ..key.clone() }, stream.clone());
                let gather = self.gather(&key, &stream)?;
                self.envs[position] = ServedEnv { key, gather, stream };
                is_changed = true;
            }
        }
        if is_changed {
            self.drop_unused();
            self.select(&(0..self.envs.len()).collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Drops the gathers that no env uses.
    fn drop_unused(&mut self) {
        let mut numbers = vec![None; self.gathers.len()];
        self.envs.iter().for_each(|env| numbers[env.gather] = Some(0));
        let used = numbers.iter_mut().flatten();
        used.enumerate().for_each(|(nth, number)| *number = nth);
        let mut kept = numbers.iter();
        self.gathers.retain(|_| kept.next().is_some_and(Option::is_some));
        self.envs.iter_mut().for_each(|env| env.gather = numbers[env.gather].unwrap_or(0));
    }

    /// Serves only these envs, given by their positions among the envs of the process. In a pass
    /// the selected envs are numbered from 0.
    pub(crate) fn select(&mut self, positions: &[usize]) {
        let of_env =
            |position: &usize| (self.envs[*position].gather, self.envs[*position].stream.clone());
        self.selected = positions.iter().map(of_env).collect();
    }

    /// Different shapes of the batches: the number of samples of each selected env; 0 for an env
    /// without samples in the batch.
    pub(crate) fn batch_shapes(&self) -> Vec<Vec<usize>> {
        let of_batch = |batch| {
            let size = |(gather, _): &(usize, Stream)| {
                self.gathers[*gather].gather.order().part(batch, 0).len()
            };
            self.selected.iter().map(size).collect()
        };
        let batches = self.gathers.iter().map(|shared| shared.gather.len()).max().unwrap_or(0);
        without_duplicates((0..batches).map(of_batch))
    }

    /// Batches of a pass of all envs, on the device with the most. `shapes` is the number of
    /// [`Served::batch_shapes`].
    pub(crate) fn pass_batches(&self, shapes: usize) -> PassBatches {
        let mut devices: BTreeMap<usize, PassBatches> = BTreeMap::new();
        for shared in &self.gathers {
            let own = PassBatches::new(&shared.gather, usize::MAX, shapes);
            let sum = devices.entry(shared.key.device).or_default();
            sum.gathers += own.gathers;
            sum.gathered += own.gathered;
            sum.uploaded += own.uploaded;
            sum.shapes = own.shapes;
        }
        devices.into_values().max_by_key(|pass| pass.gathered).unwrap_or_default()
    }

    /// Begins a pass of some envs over the split. Waits as [`SplitPass::next`] does.
    ///
    /// # Errors
    /// Device errors.
    pub(crate) fn pass(&mut self, envs: Range<usize>) -> Result<SplitPass<'_>> {
        let envs = &self.selected[envs];
        let mut used = vec![false; self.gathers.len()];
        envs.iter().for_each(|(gather, _)| used[*gather] = true);
        let gathers = self.gathers.iter_mut().zip(used);
        let mut gathers: Vec<_> =
            gathers.map(|(shared, used)| used.then_some(&mut shared.gather)).collect();
        gathers.iter_mut().flatten().try_for_each(|gather| gather.start_epoch(0))?;
        Ok(SplitPass { gathers, envs })
    }
}

/// A pass over a split.
pub(crate) struct SplitPass<'a> {
    /// All gathers by number; `None` for a gather that no env of the pass uses.
    gathers: Vec<Option<&'a mut GatherBatches>>,
    envs: &'a [(usize, Stream)],
}

impl SplitPass<'_> {
    /// The next batch: inputs and labels of each env that has samples left, on its stream, with the
    /// env's number in the pass. `None` at the end. Waits for a device only for a host buffer of
    /// streamed images.
    ///
    /// # Errors
    /// Device errors.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<Batch>>> {
        let mut gathered: Vec<Option<Batch>> = vec![];
        for gather in &mut self.gathers {
            let next = gather.as_mut().map(|gather| gather.next()).transpose()?.flatten();
            gathered.push(next.and_then(|mut batches| batches.pop()));
        }
        if gathered.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut batches = vec![];
        for (env, (gather, stream)) in self.envs.iter().enumerate() {
            if let Some(Batch { inputs, targets, .. }) = &gathered[*gather] {
                batches.push(Batch {
                    env,
                    inputs: inputs.on(stream)?,
                    targets: targets.on(stream)?,
                });
            }
        }
        Ok(Some(batches))
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

/// Different shapes of the batches of an epoch: the number of samples of each of `envs`; 0 for an
/// env without samples in the batch.
pub(crate) fn batch_shapes_of(gather: &GatherBatches, envs: &[usize]) -> Vec<Vec<usize>> {
    let order = gather.order();
    let sizes = |batch| envs.iter().map(|env| order.part(batch, *env).len()).collect();
    without_duplicates((0..order.batches()).map(sizes))
}

fn without_duplicates(batches: impl Iterator<Item = Vec<usize>>) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = batches.collect();
    batches.sort_unstable();
    batches.dedup();
    batches
}

/// The networks of the envs that have samples in a batch of this shape ([`batch_shapes_of`]), and
/// their numbers of samples.
pub(crate) fn present<'n>(
    networks: &'n mut NetworkFleet<'_>,
    shape: &[usize],
) -> (NetworkFleet<'n>, Vec<usize>) {
    let envs: Vec<usize> = (0..shape.len()).filter(|env| shape[*env] > 0).collect();
    (networks.select(&envs), shape.iter().copied().filter(|size| *size > 0).collect())
}

/// Inputs and labels of batches.
pub(crate) fn labelled(batches: &[Batch]) -> Vec<LabelledBatch<'_>> {
    batches.iter().map(|batch| (&batch.inputs, &batch.targets)).collect()
}

//! Batches gathered from the dataset, resident or streamed, for each env on a separate stream
//! (D2–D6, F2).

mod config;
mod gpu;
mod kernel;
mod loader;
mod permutation;
mod ring;
mod stage;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use meristem_device::{DType, Device, Expect, Launches, Stream, Tensor};

pub use self::config::{EnvGather, GatherConfig};
use self::config::{check_config, check_datasets, check_indices, wrong};
use self::gpu::GpuGather;
use self::kernel::{EpochAugment, GatherKernel, SampleStorage};
use self::permutation::{Indices, Permutation, Permutations};
use self::ring::Ring;
use self::stage::{BatchStage, EnvSamples, env_samples};
use crate::augment::Augment;
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::order::{EpochOrder, OrderConfig};
use crate::parts::Subset;
use crate::shape::InputKind;

/// One env's part of one batch. The memory belongs to the env (D3). It is reused for a later batch
/// after all handles are dropped, in stream order, so kernels in flight are safe.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Number of the env, among all envs.
    pub env: usize,
    /// f32 (N, C, H, W), channels last, on the env's stream.
    pub inputs: Tensor,
    /// Classes u32 \[N\], or labels or standardised numbers f32 \[N, K\], on the env's stream.
    pub targets: Tensor,
}

struct ServedEnv {
    stream: Stream,
    augment: Augment,
    /// Index of the env's device in [`GatherBatches::permutations`].
    device: usize,
    /// Offset of the env's permutation in the tensors of `permutations`.
    first: usize,
    kind: InputKind,
    source: EnvSamples,
    storage: SampleStorage,
    /// f32 [2 · C], the scales and shifts of the channels, if the storage needs a table of them.
    constants: Option<Tensor>,
    /// All targets of the dataset.
    targets: Tensor,
    /// All permutations of the device, on the env's stream: two sets, used in turn.
    permutations: [Tensor; 2],
    /// The words of the env's epoch in each of `permutations`.
    epochs: [Tensor; 2],
    /// The env's epoch.
    epoch: u64,
    ring: Ring,
}

/// Serves every env from one copy of the dataset per device, in the order of [`crate::order`].
/// Taking batches does not wait for a device, except for streamed samples on a CUDA device (see
/// [`GatherBatches::next`]). [`GatherBatches::new`] may wait for the compilation of kernels, and
/// each allocation may wait if the memory limit is reached.
///
/// A method's parameter `env` is the number of an env among all envs, and `index` its position
/// among the envs that are served.
pub struct GatherBatches {
    order: EpochOrder,
    kernel: Arc<GatherKernel>,
    gpu: GpuGather,
    /// Permutations of each device.
    permutations: Vec<Permutations>,
    first_env: usize,
    envs: Vec<ServedEnv>,
    /// Indices in `envs` of those that get batches.
    selected: Vec<usize>,
    /// Whether an epoch is in progress.
    is_started: bool,
    /// Index in the epoch of the batch that [`GatherBatches::next`] returns.
    next_batch: usize,
    /// Number of samples in the dataset.
    dataset_len: usize,
}

impl GatherBatches {
    /// Prepares to gather: allocates the ring of each selected env. `datasets` has one dataset for
    /// each device that the `streams` are on, `streams` one stream for each env that is served.
    ///
    /// # Errors
    /// [`Error::Argument`] names the argument that does not fit (D4); [`Error::Hole`];
    /// [`Error::Loader`] if a thread for streamed samples cannot be started; device errors,
    /// `NotCompiled` for a CUDA device in a build without it.
    pub fn new(
        config: &GatherConfig,
        datasets: &[Arc<Dataset>],
        streams: &[Stream],
    ) -> Result<Self> {
        let datasets = check_datasets(datasets)?;
        let order = EpochOrder::new(&OrderConfig {
            len: config.subset.shared_len().unwrap_or(datasets[0].len()),
            parts: config.subset.order_parts(),
            batch_per_env: config.batch_per_env,
            devices: config.order_devices(),
            ranks: config.order_ranks.clone(),
            own: config.own.as_ref().map(|own| own.iter().map(|own| own.order()).collect()),
            epoch_mode: config.epoch_mode,
            seed: config.seed,
            shuffle: config.shuffle,
            drop_last: config.drop_last,
            max_batches: config.max_batches,
        })?;
        check_config(config, datasets, streams)?;
        let first_env = config.served.as_ref().map_or(0, |served| served.start);
        let (shape, targets) = (datasets[0].shape(), datasets[0].target_form());
        let normalization = match &config.normalization {
            Some(given) => given.clone(),
            None => datasets[0].normalization(),
        };
        let constants = normalization.multiply_add(datasets[0].info().stored);
        let devices = devices_of(&order, first_env, streams)?;
        // Everything is checked before anything is allocated (V1).
        streams.iter().try_for_each(|s| dataset_on(datasets, s.device()).map(drop))?;
        streams.iter().try_for_each(|s| s.device().load_kernels(&[&gpu::SOURCE]))?;
        let permutations = devices
            .iter()
            .map(|(device, numbers)| {
                Permutations::new(device, permutations_of(numbers, &order, &config.subset), &order)
            })
            .collect::<Result<Vec<_>>>()?;
        let mut loader = None;
        let envs = streams.iter().enumerate().map(|(index, stream)| {
            let env = first_env + index;
            let dataset = dataset_on(datasets, stream.device())?;
            let device = devices.iter().position(|(device, _)| device == stream.device());
            let device = device.unwrap_or(0);
            let permutation = order.permutation_of(env);
            let sets = permutations[device].on(stream)?;
            let capacity = order.part_max(env);
            let own = config.own.as_ref().map(|own| own[env]);
            let (source, storage) = env_samples(dataset, stream, capacity, &mut loader)?;
            Ok(ServedEnv {
                stream: stream.clone(),
                augment: own.map_or(config.augment, |own| own.augment),
                device,
                first: permutations[device].start_of(permutation),
                kind: dataset.info().kind,
                source,
                storage,
                constants: gpu::constants(stream, storage, &constants)?,
                targets: dataset.targets().on(stream)?,
                epochs: permutations[device].epochs_of(permutation, &sets)?,
                permutations: sets,
                epoch: 0,
                ring: Ring::new(stream, (shape, targets), capacity, config.ring_depth),
            })
        });
        let envs = envs.collect::<Result<Vec<_>>>()?;
        let forms = (shape, targets);
        let kernel = Arc::new(GatherKernel::new(forms, &constants));
        let gpu = GpuGather::new(forms, &constants);
        let (selected, is_started, next_batch) = (vec![], false, 0);
        let dataset_len = datasets[0].len();
        let mut gather = Self {
            order,
            kernel,
            gpu,
            permutations,
            first_env,
            envs,
            selected,
            is_started,
            next_batch,
            dataset_len,
        };
        let selected = config.selected.as_ref();
        gather.select(|env| selected.is_none_or(|selected| selected.contains(&env)))?;
        Ok(gather)
    }

    /// Sets the batch size, seed and augmentation of an env, which is one of those that are served.
    /// Ends the current epoch of all envs: call [`Self::start_epoch`] before [`Self::next`].
    /// Allocates the env's buffers again if its largest batch differs, and its buffers for streamed
    /// samples if batch size or seed differs.
    ///
    /// # Errors
    /// [`Error::Argument`] for options that do not fit; out of memory.
    pub fn set(&mut self, env: usize, own: EnvGather) -> Result<()> {
        let served = &mut self.envs[env - self.first_env];
        own.augment.check(served.kind, served.ring.shape())?;
        let is_same = self.order.own(env) == own.order();
        if !is_same {
            self.order.set(env, own.order())?;
        }
        self.is_started = false;
        served.augment = own.augment;
        if is_same { Ok(()) } else { self.resize(env) }
    }

    /// Gives other samples to an env, which is one of those that are served; `indices` are the
    /// samples' indices in the dataset. Ends the current epoch of all envs: call
    /// [`Self::start_epoch`] before [`Self::next`]. Allocates the permutations of the env's device
    /// and the env's buffers for streamed samples again, and its buffers for batches if its largest
    /// batch differs.
    ///
    /// # Errors
    /// [`Error::Argument`] for an index that the dataset does not have, and with
    /// [`EpochMode::Dealt`](crate::order::EpochMode::Dealt), where envs share samples; out of
    /// memory.
    pub fn set_samples(&mut self, env: usize, indices: &Arc<[u32]>) -> Result<()> {
        check_indices("parts", indices, self.dataset_len)?;
        let mut order = self.order.clone();
        order.set_len(env, indices.len())?;
        self.is_started = false;
        let device = self.envs[env - self.first_env].device;
        let permutations = &mut self.permutations[device];
        permutations.set(order.permutation_of(env), indices, &order)?;
        self.order = order;
        for (number, served) in (self.first_env..).zip(&mut self.envs) {
            if served.device == device {
                let permutation = self.order.permutation_of(number);
                let sets = permutations.on(&served.stream)?;
                served.first = permutations.start_of(permutation);
                served.epochs = permutations.epochs_of(permutation, &sets)?;
                served.permutations = sets;
            }
        }
        self.resize(env)
    }

    /// Allocates the buffers of the env with number `env` for batches of its size.
    fn resize(&mut self, env: usize) -> Result<()> {
        let served = &mut self.envs[env - self.first_env];
        let capacity = self.order.part_max(env);
        if let EnvSamples::Streamed(stage) = &mut served.source {
            stage.resize(&served.stream, capacity)?;
        }
        served.ring.resize(capacity)
    }

    /// Gives batches only to the envs that `is_selected` selects by number. The selection changes
    /// no env's samples. Ends the current epoch: call [`Self::start_epoch`] before [`Self::next`].
    /// Allocates the rings of envs that were not selected before, and frees the rings of envs that
    /// are no longer selected.
    ///
    /// # Errors
    /// Out of memory.
    pub fn select(&mut self, is_selected: impl Fn(usize) -> bool) -> Result<()> {
        self.is_started = false;
        self.selected.clear();
        let mut is_drawn = vec![false; self.order.permutations()];
        for (index, served) in self.envs.iter_mut().enumerate() {
            let env = self.first_env + index;
            if is_selected(env) {
                self.selected.push(index);
                is_drawn[self.order.permutation_of(env)] = true;
            } else {
                served.ring.free();
            }
        }
        self.permutations.iter_mut().for_each(|permutations| permutations.select(&is_drawn));
        self.selected.iter().try_for_each(|index| self.envs[*index].ring.allocate())
    }

    /// Batches in an epoch.
    pub fn len(&self) -> usize {
        self.order.batches()
    }

    /// Whether an epoch has no batch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Order of the samples; positions count within an env's subset, if there is one.
    pub fn order(&self) -> &EpochOrder {
        &self.order
    }

    /// Number of batch buffers added because a consumer held all buffers of an env.
    pub fn ring_growth(&self) -> usize {
        self.envs.iter().map(|env| env.ring.grown()).sum()
    }

    /// Number of batches of each env that are copied to the env's device while the first `batches`
    /// batches of an epoch are taken. Resident samples are not copied. With streamed samples the
    /// next batch is copied ahead, so the number is one more than `batches`, at most [`Self::len`].
    pub fn uploads(&self, batches: usize) -> u64 {
        let streamed = self.envs.iter().any(|env| matches!(env.source, EnvSamples::Streamed(_)));
        if streamed { self.len().min(batches.saturating_add(1)) as u64 } else { 0 }
    }

    /// Begins any epoch, at any time. Copies to each device its permutations, and with streamed
    /// samples the first batch of each env, which are all loaded before any second batch; these
    /// copies count in [`Device::counts`]. Does not wait for the device; see [`Self::next`] for
    /// streamed samples on a CUDA device.
    ///
    /// # Errors
    /// Device errors, and [`Error::Loader`] for streamed samples on a CUDA device.
    pub fn start_epoch(&mut self, epoch: u64) -> Result<()> {
        self.start_epochs(|_| epoch)
    }

    /// Like [`Self::start_epoch`], with an epoch for each env: `epoch` returns it for the number of
    /// the env. Envs that share a permutation all get the epoch of the last of these envs.
    ///
    /// # Errors
    /// As [`Self::start_epoch`].
    pub fn start_epochs(&mut self, epoch: impl Fn(usize) -> u64) -> Result<()> {
        self.is_started = false;
        let mut epoch_of_permutation = vec![0; self.order.permutations()];
        for &index in &self.selected {
            let env = self.first_env + index;
            epoch_of_permutation[self.order.permutation_of(env)] = epoch(env);
        }
        for &index in &self.selected {
            let permutation = self.order.permutation_of(self.first_env + index);
            self.envs[index].epoch = epoch_of_permutation[permutation];
        }
        for permutations in &mut self.permutations {
            permutations.start(&self.order, &epoch_of_permutation)?;
        }
        // The loader gets the first batches of all envs before the second batch of any.
        for nth in 0..self.selected.len() {
            self.load(self.selected[nth], 0)?;
        }
        for nth in 0..self.selected.len() {
            self.stage(self.selected[nth], 0)?;
        }
        (self.is_started, self.next_batch) = (true, 0);
        Ok(())
    }

    /// The next batch of each env that is selected, in env order; `None` at the end of the epoch.
    /// Envs without samples in the batch are left out, so the list may be empty. They are the last
    /// ones, unless envs have different subsets or batch sizes; then they may be any envs.
    ///
    /// Enqueues the gathers, and with streamed samples a copy of the batch after this one for each
    /// env, which counts in [`Device::counts`]. Does not wait for the device, with one exception:
    /// for streamed samples on a CUDA device it waits for the thread that reads them from their
    /// file, and for an earlier copy of an env whose host buffers are all on their way, at most
    /// once for each copy. Such a wait counts as a synchronisation.
    ///
    /// # Errors
    /// [`Error::EpochNotStarted`] if no epoch is in progress: before [`Self::start_epoch`], after
    /// [`Self::set`], [`Self::set_samples`] or [`Self::select`], and after an error. Device errors
    /// and [`Error::Loader`], which end the epoch: some envs may be a batch ahead of others then.
    #[expect(clippy::should_implement_trait, reason = "fallible: an Iterator would hide that")]
    pub fn next(&mut self) -> Result<Option<Vec<Batch>>> {
        if !self.is_started {
            return Err(Error::EpochNotStarted);
        }
        self.next_of_epoch().inspect_err(|_| self.is_started = false)
    }

    fn next_of_epoch(&mut self) -> Result<Option<Vec<Batch>>> {
        if self.next_batch == self.order.batches() {
            return Ok(None);
        }
        let mut batches = Vec::with_capacity(self.selected.len());
        let mut sample_indices = Vec::with_capacity(self.selected.len());
        for &index in &self.selected {
            let part = self.places(index, self.next_batch);
            if part.is_empty() {
                continue;
            }
            let ServedEnv { ring, permutations, device, .. } = &mut self.envs[index];
            let (inputs, targets) = ring.take(part.len())?;
            let permutation = &permutations[self.permutations[*device].turn()];
            sample_indices.push(permutation.view(part.start, [part.len()])?);
            batches.push(Batch { env: self.first_env + index, inputs, targets });
        }
        let mut launches = Launches::default();
        for (batch, indices) in batches.iter().zip(&sample_indices) {
            let env = &self.envs[batch.env - self.first_env];
            self.gather(env, batch, indices, &mut launches)?;
        }
        launches.run()?;
        for batch in &batches {
            self.stage(batch.env - self.first_env, self.next_batch + 1)?;
        }
        self.next_batch += 1;
        Ok(Some(batches))
    }

    /// Adds the gather of an env's batch to `launches`, which run the gathers of all envs.
    fn gather<'a>(
        &'a self,
        served: &'a ServedEnv,
        Batch { env, inputs, targets }: &'a Batch,
        sample_indices: &'a Tensor,
        launches: &mut Launches<'a>,
    ) -> Result<()> {
        debug_assert!(
            self.is_a_batch(env - self.first_env, inputs, targets),
            "gather: {inputs:?}, {targets:?}"
        );
        let stored = match &served.source {
            EnvSamples::Resident(samples) => samples,
            EnvSamples::Streamed(stage) => stage.filled(),
        };
        let all_targets = &served.targets;
        let epoch_words = &served.epochs[self.permutations[served.device].turn()];
        let (kernel, storage) = (self.kernel.clone(), served.storage);
        let seed = self.order.own(*env).seed;
        let epoch_augment = EpochAugment { augment: served.augment, seed, epoch: served.epoch };
        let tensors = [stored, all_targets, sample_indices, inputs, targets, epoch_words];
        let lens = tensors.map(Tensor::numel);
        let launch = served.stream.launch("gather").read(stored).read(all_targets);
        let launch = launch.read(sample_indices).write(inputs).write(targets).read(epoch_words);
        let launch = match &served.constants {
            Some(constants) => launch.read(constants),
            None => launch,
        };
        let launch = launch.gpu(|| self.gpu.program(storage, epoch_augment, lens));
        Ok(launch.add(launches, move |args| kernel.run(args, storage, epoch_augment))?)
    }

    /// Range in the tensor of the device's permutations that the env at `index` gets in `batch`.
    fn places(&self, index: usize, batch: usize) -> Range<usize> {
        let part = self.order.part(batch, self.first_env + index);
        let first = self.envs[index].first;
        first + part.start..first + part.end
    }

    /// Whether the tensors have the shapes and types that [`Batch`] promises (V1).
    fn is_a_batch(&self, index: usize, inputs: &Tensor, targets: &Tensor) -> bool {
        let expect = || Expect::stream(&self.envs[index].stream);
        let part = self.order.part(self.next_batch, self.first_env + index).len();
        let dims = self.envs[index].ring.shape().batch(part);
        let inputs = expect()
            .dtype(DType::F32)
            .shape(dims)
            .channels_last()
            .check("gather", "inputs", inputs);
        let form = self.kernel.targets;
        let expected = expect().dtype(form.dtype()).shape(form.batch(part).dims().to_vec());
        let targets = expected.check("gather", "targets", targets);
        inputs.and(targets).is_ok()
    }

    /// Begins to copy `batch` of the env at `index` to the device, and to load the next one into
    /// host memory, if its samples are streamed and the batches exist.
    fn stage(&mut self, index: usize, batch: usize) -> Result<()> {
        if let Some((stage, permutation, part)) = self.streamed(index, batch) {
            stage.fill(permutation, part)?;
        }
        self.load(index, batch + 1)
    }

    /// Begins to load `batch` of the env at `index` into host memory, if its samples are streamed
    /// to a CUDA device and the batch exists.
    fn load(&mut self, index: usize, batch: usize) -> Result<()> {
        let streamed = self.streamed(index, batch);
        streamed.map_or(Ok(()), |(stage, permutation, part)| stage.load(permutation, part))
    }

    /// Buffers for streamed samples of the env at `index`, with the permutations and the places of
    /// a batch; `None` if its samples are resident, or it has no part of the batch.
    fn streamed(
        &mut self,
        index: usize,
        batch: usize,
    ) -> Option<(&mut BatchStage, &Arc<Indices>, Range<usize>)> {
        let part = (batch < self.order.batches()).then(|| self.places(index, batch))?;
        let ServedEnv { source, device, .. } = &mut self.envs[index];
        match source {
            EnvSamples::Streamed(stage) if !part.is_empty() => {
                Some((stage, self.permutations[*device].indices(), part))
            }
            _ => None,
        }
    }
}

impl fmt::Debug for GatherBatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { order, is_started, next_batch, .. } = self;
        f.debug_struct("GatherBatches")
            .field("order", order)
            .field("is_started", is_started)
            .field("next_batch", next_batch)
            .finish_non_exhaustive()
    }
}

/// The opened devices of the streams, with the numbers of the permutations that their envs need.
fn devices_of(
    order: &EpochOrder,
    first_env: usize,
    streams: &[Stream],
) -> Result<Vec<(Device, Vec<usize>)>> {
    let mut devices: Vec<(Device, Vec<usize>)> = vec![];
    for (env, stream) in (first_env..).zip(streams) {
        let (device, number) = (stream.device(), order.permutation_of(env));
        match devices.iter_mut().find(|(known, _)| known.id() == device.id()) {
            None => devices.push((device.clone(), vec![number])),
            Some((known, numbers)) if known == device => {
                if !numbers.contains(&number) {
                    numbers.push(number);
                }
            }
            Some(_) => {
                let expected = format!("on one opening of {}", device.id());
                let got = format!("env {env} on another");
                return wrong("streams", expected, got, "open each device once");
            }
        }
    }
    Ok(devices)
}

/// The permutations with these numbers, each with the samples of its first env.
fn permutations_of(numbers: &[usize], order: &EpochOrder, subset: &Subset) -> Vec<Permutation> {
    let permutation = |&number| {
        let env = (0..order.envs()).find(|env| order.permutation_of(*env) == number);
        Permutation { number, subset: subset.of_env(env.unwrap_or(0)).cloned() }
    };
    numbers.iter().map(permutation).collect()
}

fn dataset_on<'a>(datasets: &'a [Arc<Dataset>], device: &Device) -> Result<&'a Arc<Dataset>> {
    match datasets.iter().find(|dataset| dataset.device() == device) {
        Some(dataset) => Ok(dataset),
        None => {
            let ids: Vec<String> =
                datasets.iter().map(|dataset| dataset.device().id().to_string()).collect();
            let expected = format!("one on {} (the same opening of it)", device.id());
            wrong(
                "datasets",
                expected,
                ids.join(", "),
                "load the dataset on every device of an env",
            )
        }
    }
}

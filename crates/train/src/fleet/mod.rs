//! What the envs of a run share: devices, streams, the resident data, and the gather that serves them.

pub(crate) mod replicas;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use meristem_data::{
    Batch, Dataset, DatasetSpec, GatherBatches, GatherConfig, Residency, Split, cache, order,
};
use meristem_device::{
    Counts, Device, DeviceId, DeviceOptions, HotScope, Policy, Span, Stream, Tensor, Trace,
    read_back_f64,
};
use meristem_nn::{LabelledBatch, Metrics};

use crate::config::TrainConfig;
use crate::devices::Devices;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::fleet::replicas::Replicas;
use crate::processes::world::World;
use crate::setup::Setup;

/// The envs of this process: their devices, each opened once, and one stream per env (S1).
#[derive(Clone)]
pub(crate) struct Machine {
    /// The device of each env of the run.
    ids: Vec<DeviceId>,
    /// The envs of this process.
    envs: Range<usize>,
    /// Their distinct devices, in the order of their first env, and the policy's if it is none of them.
    devices: Vec<Device>,
    /// Of each of them: index into `devices`.
    device_of: Vec<usize>,
    /// Of each of them.
    streams: Vec<Stream>,
    /// The policy's device: index into `devices`.
    policy: usize,
    /// Whether memory is capped, so that an allocation may have to wait for some.
    capped: bool,
    trace: Option<Trace>,
}

impl Machine {
    /// Opens the devices of this process' envs, and that of the policy. `placed` has all envs of the run.
    ///
    /// # Errors
    /// A device that is not there, or not part of this build.
    pub(crate) fn open(
        placed: &Devices,
        envs: Range<usize>,
        options: &DeviceOptions,
    ) -> Result<Self> {
        let mut devices: Vec<Device> = vec![];
        let mut open = |id: DeviceId| {
            let known = devices.iter().position(|device| device.id() == id);
            Ok(match known {
                Some(index) => index,
                None => {
                    devices.push(Device::open(id, options)?);
                    devices.len() - 1
                }
            })
        };
        let ids = &placed.of_envs;
        let device_of = ids[envs.clone()].iter().map(|id| open(*id)).collect::<Result<Vec<_>>>()?;
        let policy = open(placed.policy)?;
        let stream = |(env, &at): (usize, &usize)| devices[at].stream(&format!("env {env}"));
        let streams = envs.clone().zip(&device_of).map(stream).collect();
        let (ids, trace, capped) =
            (ids.clone(), options.trace.clone(), options.memory_limit.is_some());
        Ok(Self { ids, envs, devices, device_of, streams, policy, capped, trace })
    }

    /// The envs of this process.
    pub(crate) fn envs(&self) -> Range<usize> {
        self.envs.clone()
    }

    /// Each of them with its stream.
    pub(crate) fn places(&self) -> impl Iterator<Item = (usize, &Stream)> {
        self.envs().zip(&self.streams)
    }

    /// The policy's device.
    pub(crate) fn policy_device(&self) -> &Device {
        &self.devices[self.policy]
    }

    /// The distinct devices of envs and policy.
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Names of the devices of all envs of the run, in the order of their first env.
    pub(crate) fn device_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.ids.iter().map(DeviceId::to_string).collect();
        names.dedup();
        names
    }

    /// Begins a span of the calling thread in the trace, if there is one; it ends when it is dropped.
    pub(crate) fn span<N: Into<Cow<'static, str>>>(
        &self,
        name: impl FnOnce() -> N,
    ) -> Option<Span> {
        self.trace.as_ref().map(|trace| trace.span(name()))
    }

    /// The streams, one per env of this process.
    pub(crate) fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// A split, resident on each device that has envs.
    pub(crate) fn load(
        &self,
        spec: &DatasetSpec,
        split: Split,
        residency: Residency,
    ) -> Result<Vec<Arc<Dataset>>> {
        let load = |device| Ok(cache::load(device, spec, split, residency)?);
        let with_envs = self.device_of.iter().max().map_or(0, |last| last + 1);
        self.devices[..with_envs].iter().map(load).collect()
    }

    /// Opens a scope on each device for this thread, with what `permitted` says of so many envs. Where memory is
    /// capped, an allocation may also wait for memory that others still use.
    #[track_caller]
    pub(crate) fn hot_scopes(
        &self,
        name: &'static str,
        policy: Policy,
        permitted: impl Fn(u64) -> Counts,
    ) -> Vec<HotScope> {
        let mut scopes = vec![];
        for (index, device) in self.devices.iter().enumerate() {
            let envs = self.device_of.iter().filter(|&&at| at == index).count();
            let mut permitted = permitted(envs as u64);
            if self.capped {
                permitted.synchronizations += permitted.allocations;
            }
            scopes.push(device.hot_scope(name, policy).permit(permitted));
        }
        scopes
    }

    /// The metrics of this process' envs or replicas (`tensors` in their order): one copy and one wait per device (H1).
    pub(crate) fn read_metrics(&self, tensors: &[&Tensor]) -> Result<Vec<Metrics>> {
        let mut metrics = vec![Metrics::default(); tensors.len()];
        for device in &self.devices {
            let envs: Vec<usize> =
                (0..tensors.len()).filter(|&env| tensors[env].device() == device).collect();
            let of_device: Vec<&Tensor> = envs.iter().map(|&env| tensors[env]).collect();
            for (&env, raw) in envs.iter().zip(read_back_f64(&of_device)?) {
                metrics[env] = Metrics::parse(&raw);
            }
        }
        Ok(metrics)
    }
}

/// How a split is served for evaluation: to each env all of it, in order.
pub(crate) struct Serving {
    /// Samples in a batch.
    pub(crate) batch: usize,
    /// Which samples; all when absent.
    pub(crate) subset: Option<Arc<[u32]>>,
    /// Constants; the dataset's own when absent.
    pub(crate) normalization: Option<meristem_data::Normalization>,
}

impl Serving {
    /// A gather for each env, on its own stream and into its own memory (D3): unlike the training
    /// gather, which deals the samples out, each of these serves every sample.
    pub(crate) fn gathers(
        &self,
        machine: &Machine,
        datasets: &[Arc<Dataset>],
    ) -> Result<Vec<GatherBatches>> {
        let gather = |(env, stream): (usize, &Stream)| {
            let config = GatherConfig {
                shuffle: false,
                subset: self.subset.clone(),
                normalization: self.normalization.clone(),
                ..GatherConfig::new(self.batch, vec![stream.device().id()])
            };
            let dataset = datasets[machine.device_of[env]].clone();
            Ok(GatherBatches::new(&config, &[dataset], std::slice::from_ref(stream))?)
        };
        machine.streams.iter().enumerate().map(gather).collect()
    }
}

/// The data of a run, ready to be served to the envs of this process.
pub(crate) struct Fleet {
    /// Devices and streams.
    pub(crate) machine: Machine,
    /// What is served: the training set, which the control split is a part of, and the test set.
    pub(crate) datasets: Vec<Arc<Dataset>>,
    /// Deals each epoch's training samples out to all envs of the run; where one host is on several ranks, what the
    /// leader gets.
    pub(crate) train: GatherBatches,
    /// The ranks that the one host is on, if there are several.
    pub(crate) replicas: Option<Replicas>,
    /// Per env: all of the control split; nobody has one when it is empty.
    pub(crate) control: Vec<GatherBatches>,
    /// Per env: all of the test split.
    pub(crate) test: Vec<GatherBatches>,
    /// Per env: the sizes that its training batches have.
    pub(crate) batch_sizes: Vec<Vec<usize>>,
    /// Samples trained on.
    pub(crate) train_samples: usize,
    /// Samples held out for the controller.
    pub(crate) control_samples: usize,
    /// Samples of the test split.
    pub(crate) test_samples: usize,
}

impl Fleet {
    /// Splits the training set, and prepares the gathers of all three parts.
    ///
    /// # Errors
    /// Too few samples for one batch of every env, or for a control split; device errors.
    pub(crate) fn new(
        machine: Machine,
        setup: &Setup,
        [train, test]: [Vec<Arc<Dataset>>; 2],
        world: &mut World,
    ) -> Result<Self> {
        let config = &setup.config;
        let len = train.first().map_or(0, |dataset| dataset.len());
        let (kept, held_out) = order::split_by_seed(len, config.control_share(), config.seed)?;
        check_sizes(config, kept.len(), held_out.len())?;
        let (train_samples, control_samples) = (kept.len(), held_out.len());
        // With several replicas there is one env, and to the gather each of them is one.
        let replicas = config.replicas();
        let devices = machine.ids.repeat(replicas);
        let served = if replicas > 1 { world.rank()..world.rank() + 1 } else { machine.envs() };
        let gather = GatherConfig {
            shuffle: config.shuffle.0,
            seed: config.seed,
            subset: (control_samples > 0).then(|| kept.into()),
            augment: setup.augment(),
            max_batches: config.max_batches.count(),
            served: Some(served.clone()),
            ..GatherConfig::new(config.batch / replicas, devices)
        };
        let replicas = match replicas {
            1 => None,
            ranks => {
                let members = world.members(ranks, &config.comm_options())?;
                Some(Replicas::new(config, &machine, &gather, &train, members)?)
            }
        };
        let gather = GatherBatches::new(&gather, &train, &machine.streams)?;
        let serving = |subset| Serving { batch: config.batch, subset, normalization: None };
        let control = match control_samples {
            0 => vec![],
            _ => serving(Some(held_out.into())).gathers(&machine, &train)?,
        };
        let datasets = train.first().into_iter().chain(test.first()).cloned().collect();
        let test_samples = test.first().map_or(0, |dataset| dataset.len());
        let test = serving(None).gathers(&machine, &test)?;
        let batch_sizes = served.map(|env| batch_sizes(&gather, env)).collect();
        Ok(Self {
            machine,
            datasets,
            train: gather,
            replicas,
            control,
            test,
            batch_sizes,
            train_samples,
            control_samples,
            test_samples,
        })
    }
}

/// The distinct sizes of an env's batches.
pub(crate) fn batch_sizes(gather: &GatherBatches, env: usize) -> Vec<usize> {
    let order = gather.order();
    let mut sizes: Vec<usize> =
        (0..order.batches()).map(|batch| order.part(batch, env).len()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&size| size > 0);
    sizes
}

/// Every env must have something to learn from in every step.
fn check_sizes(config: &TrainConfig, train: usize, control: usize) -> Result<()> {
    for (key, got) in [("envs", config.envs), ("ranks", config.replicas())] {
        if train < got {
            let expected = format!("at most {train}, the number of training samples");
            return Err(Error::value(key, got, expected));
        }
    }
    if config.control_share() > 0.0 && control == 0 {
        let expected = format!("a share that is at least one of the {train} training samples");
        return Err(Error::value("control-split", config.control_share(), expected));
    }
    Ok(())
}

/// The networks of some envs, to run as one.
pub(crate) fn networks(envs: &mut [Env]) -> meristem_nn::Fleet<'_> {
    meristem_nn::Fleet::of(envs.iter_mut().map(|env| &mut env.network))
}

/// Inputs and labels of batches.
pub(crate) fn labelled(batches: &[Batch]) -> Vec<LabelledBatch<'_>> {
    batches.iter().map(|batch| (&batch.inputs, &batch.targets)).collect()
}

/// Serves one epoch of one gather.
///
/// # Errors
/// Those of the gather and of `each`.
pub(crate) fn for_each_batch(
    gather: &mut GatherBatches,
    mut each: impl FnMut(&Batch) -> Result<()>,
) -> Result<()> {
    while let Some(batches) = gather.next()? {
        batches.iter().try_for_each(&mut each)?;
    }
    Ok(())
}

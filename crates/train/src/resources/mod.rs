//! Resources of a run: devices, resident data, and the gathers that serve data to the envs.
//!
//! - here: all resources of a process;
//! - `open_devices`: devices and streams;
//! - `parts`: the samples of each env;
//! - `serving`: splits for evaluation;
//! - `replicas`: one host on several ranks.

mod open_devices;
mod parts;
mod replicas;
mod serving;

use std::sync::Arc;

use meristem_data::order::{EpochMode, EpochOrder};
use meristem_data::parts::Parts;
use meristem_data::{
    Dataset, DatasetFiles, EnvGather, GatherBatches, GatherConfig, Residency, Split,
};

pub(crate) use self::open_devices::{OpenDevices, ScopedDevice};
pub(crate) use self::parts::split_samples;
pub(crate) use self::replicas::{Epoch, Replicas, SharedEpoch};
pub(crate) use self::serving::{PassBatches, Served, Serving, SplitPass, labelled, present};
use self::serving::{batch_shapes_of, batch_sizes};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::own_loss::ProgramLoss;
use crate::processes::World;
use crate::record::summary::{OwnLossTotals, PartSummary};
use crate::settings::Scheduler;
use crate::setup::Setup;
use crate::task::Task;

/// Epoch whose first batches recompute the running statistics in every step. The batches are always
/// the same, so that images and augmentation cause no differences between steps.
pub(crate) const STATISTICS_EPOCH: u64 = 0;

/// Splits of the dataset on each device with envs.
pub(crate) struct Splits {
    train: Vec<Arc<Dataset>>,
    /// Empty if there is no test split.
    test: Vec<Arc<Dataset>>,
}

impl Splits {
    /// Loads the splits in `files`.
    ///
    /// # Errors
    /// Unreadable files, out of memory.
    pub(crate) fn load(
        devices: &OpenDevices,
        files: &Arc<DatasetFiles>,
        residency: Residency,
    ) -> Result<Self> {
        let train = devices.load(files, Split::Train, residency)?;
        let has_test = files.has(Split::Test);
        let test = has_test.then(|| devices.load(files, Split::Test, residency)).transpose()?;
        Ok(Self { train, test: test.unwrap_or_default() })
    }

    /// Completes a task with the values that depend on the targets, see [`Task::measure`]. If the
    /// program computes the loss, its loss of guessing is measured in batches of `batch` samples.
    ///
    /// # Errors
    /// A device failure, a failure of the program's loss.
    pub(crate) fn measure(
        &self,
        task: &mut Task,
        loss: Option<&mut ProgramLoss>,
        batch: usize,
    ) -> Result<()> {
        let test = self.test.first().map(Arc::as_ref);
        let Some(train) = self.train.first() else { return Ok(()) };
        task.measure(train, test)?;
        if let Some(loss) = loss {
            task.guessing = loss.guessing(train, batch)?;
        }
        Ok(())
    }
}

/// Data and devices of this process's envs.
pub(crate) struct Resources {
    /// Devices and streams.
    pub(crate) devices: OpenDevices,
    /// Training split, including the control split, and test split, on the first device.
    pub(crate) datasets: Vec<Arc<Dataset>>,
    /// Gather that serves each epoch's training samples to the envs of this process; with replicas,
    /// the leader's gather.
    pub(crate) train: GatherBatches,
    /// Ranks that train one host, if there are several.
    pub(crate) replicas: Option<Replicas>,
    /// The control split, if there is one.
    pub(crate) control: Option<Served>,
    /// The test split, if there is one.
    pub(crate) test: Option<Served>,
    /// The loss of the program, if it computes one.
    pub(crate) loss: Option<ProgramLoss>,
    /// Distinct sizes of each env's training batches.
    pub(crate) batch_sizes: Vec<Vec<usize>>,
    /// Different shapes of the training batches ([`batch_shapes_of`]).
    pub(crate) train_batch_shapes: Vec<Vec<usize>>,
    /// Different shapes of the batches of the control split.
    pub(crate) control_batch_shapes: Vec<Vec<usize>>,
    /// Minimum and maximum number of training images of an env in a step.
    pub(crate) images_per_step: [usize; 2],
    /// Parts of all envs of the run; empty if all envs have the same samples.
    pub(crate) parts: Vec<PartSummary>,
    /// The samples of all envs of the run.
    samples: Parts,
    /// Samples that env 0 trains on.
    pub(crate) train_samples: usize,
    /// Samples in the control split of env 0.
    pub(crate) control_samples: usize,
    /// Samples in the test split, if there is one.
    pub(crate) test_samples: Option<usize>,
}

impl Resources {
    /// Splits the training set and prepares the gathers of all splits.
    ///
    /// # Errors
    /// Fewer samples than envs, or an empty control split; device errors.
    pub(crate) fn new(
        devices: OpenDevices,
        setup: &Setup,
        Splits { train, test }: Splits,
        world: &mut World,
    ) -> Result<Self> {
        let config = &setup.config;
        let samples = parts::draw(setup, &train[0])?;
        let first = &samples.envs()[0];
        let (train_samples, control_samples) = (first.train.len(), first.held_out.len());
        check_sizes(setup, train_samples, control_samples)?;
        // With several replicas there is one env, and the gather treats each replica as an env.
        let replicas = config.replicas();
        let served = if replicas > 1 { world.rank()..world.rank() + 1 } else { devices.envs() };
        let gather = GatherConfig {
            subset: samples.train(),
            served: Some(served.clone()),
            selected: config.places.map(|_| first_envs(config)),
            ..training_gather(setup, &devices)
        };
        let replicas = match replicas {
            1 => None,
            ranks => {
                let members = world.members(ranks, &config.comm_options())?;
                Some(Replicas::new(config, &devices, &gather, &train, members)?)
            }
        };
        let gather = GatherBatches::new(&gather, &train, devices.streams())?;
        check_shares(setup, gather.order())?;
        check_local_steps(config, gather.order())?;
        let serve = |subset, split: &[Arc<Dataset>]| {
            let normalization = Some(setup.interface.normalization.clone());
            let options = Serving { batch: config.batch, subset, normalization };
            Served::new(options, &devices, split)
        };
        let control = (control_samples > 0).then(|| serve(samples.held_out(), &train));
        let control = control.transpose()?;
        let datasets = train.first().into_iter().chain(test.first()).cloned().collect();
        let classes = setup.task.classes.as_deref();
        let of_test = test.first().map(|test| split_samples(classes, test)).transpose()?;
        let test_samples = of_test.as_ref().map(|(_, samples)| *samples);
        let test = of_test.map(|(subset, _)| serve(subset, &test)).transpose()?;
        let images_per_step = images_per_step(gather.order(), config.replicas());
        let mut resources = Self {
            devices,
            datasets,
            train: gather,
            replicas,
            control,
            test,
            loss: None,
            batch_sizes: vec![],
            train_batch_shapes: vec![],
            control_batch_shapes: vec![],
            images_per_step,
            parts: parts::summaries(setup, &samples),
            samples,
            train_samples,
            control_samples,
            test_samples,
        };
        // With replicas the training gather serves ranks, the others the one env.
        let envs = resources.devices.envs().collect::<Vec<_>>();
        resources.size_evaluation(setup, &envs)?;
        resources.list_batch_shapes(&served.collect::<Vec<_>>());
        Ok(resources)
    }

    /// Takes the cost of the program's loss since the last call.
    pub(crate) fn take_loss_cost(&mut self) -> OwnLossTotals {
        self.loss.as_mut().map(|loss| std::mem::take(&mut loss.cost)).unwrap_or_default()
    }

    /// Serves only these envs of the process from the next epoch on, in increasing order. Replicas
    /// always train their one env.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn select(&mut self, setup: &Setup, envs: &[usize]) -> Result<()> {
        if self.replicas.is_some() {
            return Ok(());
        }
        // The settings of a member may have changed.
        for &env in envs {
            self.train.set(env, setup.gather(env))?;
            self.draw_again(setup, env)?;
        }
        self.train.select(|env| envs.binary_search(&env).is_ok())?;
        self.serve_evaluation(setup, envs)?;
        self.list_batch_shapes(envs);
        Ok(())
    }

    /// Draws the training samples of envs whose settings may have changed, so that the number of
    /// their batches is known before they are served.
    ///
    /// # Errors
    /// A share without a sample; out of memory.
    pub(crate) fn draw_samples(&mut self, setup: &Setup, envs: &[usize]) -> Result<()> {
        if self.replicas.is_some() {
            return Ok(());
        }
        envs.iter().try_for_each(|env| self.draw_again(setup, *env))
    }

    /// Draws the training samples of an env again if its settings now ask for other samples.
    fn draw_again(&mut self, setup: &Setup, env: usize) -> Result<()> {
        let draw = setup.member(env).config.sample_draw();
        if self.samples.draw_again(env, &draw).map_err(parts::as_setting)? {
            self.train.set_samples(env, &self.samples.envs()[env].train)?;
            self.parts = parts::summaries(setup, &self.samples);
        }
        Ok(())
    }

    /// Number of samples that env 0 would train on with the settings of `env`. From this number the
    /// heuristic computes the maximum number of parameters of `env`.
    pub(crate) fn train_samples_of(&self, setup: &Setup, env: usize) -> usize {
        self.samples.train_len(&setup.member(env).config.sample_draw())
    }

    /// Serves the control and the test split only to these envs of the process, in increasing
    /// order.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn serve_evaluation(&mut self, setup: &Setup, envs: &[usize]) -> Result<()> {
        self.size_evaluation(setup, envs)?;
        let first = self.devices.envs().start;
        let positions: Vec<usize> = envs.iter().map(|env| env - first).collect();
        for served in self.control.iter_mut().chain(&mut self.test) {
            served.select(&positions);
        }
        Ok(())
    }

    /// Sets the size of the evaluation batches of these envs to the setting `batch` of each.
    fn size_evaluation(&mut self, setup: &Setup, envs: &[usize]) -> Result<()> {
        let first = self.devices.envs().start;
        let batch = |env: &usize| (env - first, setup.member(*env).config.batch);
        for served in self.control.iter_mut().chain(&mut self.test) {
            served.set_batches(envs.iter().map(batch))?;
        }
        Ok(())
    }

    /// Lists the batch sizes and batch shapes of the envs that are served.
    fn list_batch_shapes(&mut self, served: &[usize]) {
        self.train_batch_shapes = batch_shapes_of(&self.train, served);
        self.batch_sizes = served.iter().map(|env| batch_sizes(&self.train, *env)).collect();
        self.control_batch_shapes =
            self.control.as_ref().map_or_else(Vec::new, Served::batch_shapes);
    }
}

/// The envs of the members that begin with the run, in increasing order.
pub(crate) fn first_envs(config: &TrainConfig) -> Vec<usize> {
    let (members, places) = (config.members_len(), config.places());
    (0..config.envs).filter(|env| env % members < places).collect()
}

/// Gather of the whole training set for all envs of a run, or for all replicas of its one env.
fn training_gather(setup: &Setup, devices: &OpenDevices) -> GatherConfig {
    let config = &setup.config;
    let replicas = config.replicas();
    let EnvGather { batch, seed, augment } = setup.gather(0);
    let own = || (0..config.envs).map(|env| setup.gather(env)).collect();
    GatherConfig {
        // The replicas share the samples of the one env.
        epoch_mode: if replicas > 1 { EpochMode::Dealt } else { config.epoch },
        shuffle: config.shuffle.0,
        seed,
        own: config.members.as_ref().filter(|_| replicas == 1).map(|_| own()),
        order_ranks: config.env_numbers.as_ref().map(|numbers| numbers.all().to_vec()),
        augment,
        max_batches: config.max_batches.count(),
        normalization: Some(setup.interface.normalization.clone()),
        // Replicas have the order of the env's device.
        ordered_as: devices.ids.first().copied().filter(|_| replicas > 1),
        ..GatherConfig::new(batch / replicas, devices.of_parts(replicas))
    }
}

/// Minimum and maximum number of images of an env in a step. `replicas` consecutive envs of the
/// order are the replicas of one env.
fn images_per_step(order: &EpochOrder, replicas: usize) -> [usize; 2] {
    let samples: Vec<usize> = (0..order.envs()).map(|env| order.samples_of(env)).collect();
    let of_envs = samples.chunks(replicas).map(|replicas| replicas.iter().sum());
    of_envs.fold([usize::MAX, 0], |[least, most], samples| [least.min(samples), most.max(samples)])
}

/// Checks that every env has at least one sample in every epoch, where envs have different parts.
fn check_shares(setup: &Setup, order: &EpochOrder) -> Result<()> {
    if !parts::has_parts(setup) {
        return Ok(());
    }
    match (0..order.envs()).find(|env| order.samples_of(*env) == 0) {
        None => Ok(()),
        Some(env) => {
            let expected = format!("full, or fewer envs: dealt leaves no sample for env {env}");
            Err(Error::value("epoch", setup.config.epoch, expected))
        }
    }
}

/// Checks that a round of local steps is not longer than an epoch.
fn check_local_steps(config: &TrainConfig, order: &EpochOrder) -> Result<()> {
    let batches = order.batches();
    match config.exchange.local_steps {
        Some(steps) if steps.get() as usize > batches => {
            let expected = format!(
                "at most {batches} local steps, the batches of an epoch, at whose end the ranks \
                 always exchange"
            );
            Err(Error::value("exchange", config.exchange, expected))
        }
        _ => Ok(()),
    }
}

/// Checks that every env or rank has at least one sample in every epoch.
fn check_sizes(setup: &Setup, train: usize, control: usize) -> Result<()> {
    let config = &setup.config;
    if train == 0 {
        let expected = "a share that leaves a training sample";
        return Err(Error::value("control-split", config.control_share(), expected));
    }
    let dealt = config.epoch == EpochMode::Dealt && !parts::has_parts(setup);
    let sharing = if dealt { config.envs } else { 1 };
    for (key, got) in [("envs", sharing), ("ranks", config.replicas())] {
        if train < got {
            let expected = format!("at most {train}, the number of training samples");
            return Err(Error::value(key, got, expected));
        }
    }
    // Folds that a dataset lists may hold out nothing; controllers and schedulers need scores.
    let judges = config.is_controlled() || config.scheduler != Scheduler::None;
    let needs_control = config.folds.is_none() || judges;
    if config.control_share() > 0.0 && control == 0 && needs_control {
        let expected = format!("a share that gives at least one of the {train} training samples");
        return Err(Error::value("control-split", config.control_share(), expected));
    }
    Ok(())
}

//! A whole run: from a configuration to a folder with weights and a summary.

pub(crate) mod episode;
pub(crate) mod files;
pub(crate) mod resume;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use meristem_data::{Split, cache};
use meristem_grow::BlueprintSet;
use meristem_nn::safetensors;

use crate::checkpoint::writer::Keeper;
use crate::checkpoint::{EnvState, EnvTensors, Identity, Position, Store, checksum};
use crate::config::TrainConfig;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::fleet::replicas::Replicas;
use crate::fleet::{Fleet, Machine};
use crate::processes::world::{Plan, World};
use crate::record::events::{Event, RunStarted};
use crate::record::observer::{Journal, Observer};
use crate::record::run_folder::{RunFolder, write_whole};
use crate::record::summary::{
    DatasetSummary, EnvSummary, MemorySummary, RoundSummary, SUMMARY_VERSION, Status, Summary,
};
use crate::record::trace::RunTrace;
use crate::run::episode::{Episode, Start, Totals, Trained};
use crate::run::files::{Begin, Begun, Place};
use crate::setup::controllers::AnyController;
use crate::setup::weights;
use crate::setup::{Names, Setup, residency};
use crate::step::measure;

/// Trains a fleet as `config` says, growing from the standard blueprints. Blocks until it is done.
///
/// # Errors
/// Anything that is wrong with the request is found before the run's folder is filled, and leaves none
/// behind. A run that fails later leaves its folder readable, with the reason in `summary.json`.
pub fn run(config: &TrainConfig, observer: &mut dyn Observer) -> Result<Summary> {
    run_with(config, BlueprintSet::standard(), observer)
}

/// As [`run`], growing from `blueprints`.
///
/// # Errors
/// As [`run`].
pub fn run_with(
    config: &TrainConfig,
    blueprints: BlueprintSet,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let started = Instant::now();
    let mut world = World::join(config.comm, config.comm_options().deadline)?;
    observer.joined(world.rank());
    let result = (|| {
        let (config, names) = Names::of_new(&world.settle(config)?)?;
        let source = names.spec.source;
        let mut place = Place::default();
        let prepared = place
            .make(&config, &world)
            .and_then(|()| Run::prepare(&config, names, blueprints, (&place, &mut world)));
        let agreed = world.agree(prepared).and_then(|run| run.agree_on(&mut world).map(|()| run));
        let result = match agreed {
            Ok(run) => run.finish(&mut world, Begin::New(started), (observer, place)),
            Err(error) => {
                place.discard();
                Err(error)
            }
        };
        // The cache would keep the data, and with it the device, beyond this run.
        cache::clear(|key| key.source == source);
        result
    })();
    world.leave(result)
}

/// As [`run`] with the standard blueprints, on devices that are open and whose data is loaded; both stay so. Over
/// ranks of threads, if any.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_on(
    machine: &Machine,
    config: &TrainConfig,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let started = Instant::now();
    let (config, names) = Names::of_new(config)?;
    let (mut world, mut place) = (World::alone(), Place::default());
    let (machine, blueprints) = (machine.clone(), BlueprintSet::standard());
    let prepared = place
        .make(&config, &world)
        .and_then(|()| Run::on(machine, &config, names, blueprints, (&place, &mut world)));
    match prepared {
        Ok(run) => run.finish(&mut world, Begin::New(started), (observer, place)),
        Err(error) => {
            place.discard();
            Err(error)
        }
    }
}

/// A run that can start.
pub(crate) struct Run {
    pub(crate) setup: Setup,
    pub(crate) fleet: Fleet,
    pub(crate) controller: AnyController,
    pub(crate) totals: Totals,
    /// Also of what ended so far.
    pub(crate) keeper: Keeper,
    /// Whether this process has done a step.
    warm: bool,
}

impl Run {
    pub(crate) fn prepare(
        config: &TrainConfig,
        names: Names,
        blueprints: BlueprintSet,
        (place, world): (&Place, &mut World),
    ) -> Result<Self> {
        let trace = place.trace.as_ref().map(RunTrace::trace);
        let envs = world.part(config.envs);
        let machine = Machine::open(&names.devices, envs, &config.device_options(trace))?;
        let prepared = Self::on(machine, config, names, blueprints, (place, world));
        prepared.map_err(|error| match config.device_memory {
            Some(limit) if error.is_out_of_memory() => {
                let expected = format!("enough for data and envs as a round begins: {error}");
                Error::value("device-memory", limit, expected)
            }
            _ => error,
        })
    }

    /// As [`Run::prepare`], on devices that are open.
    pub(crate) fn on(
        machine: Machine,
        config: &TrainConfig,
        names: Names,
        blueprints: BlueprintSet,
        (place, world): (&Place, &mut World),
    ) -> Result<Self> {
        let _span = machine.span(|| "prepare");
        let residency = residency(config);
        let train = machine.load(&names.spec, Split::Train, residency)?;
        let test = machine.load(&names.spec, Split::Test, residency)?;
        let info = cache::files(&names.spec)?.info()?;
        let setup = Setup::new(config, names, info, Arc::new(blueprints))?;
        setup.try_weights(&machine.streams()[0])?;
        let fleet = Fleet::new(machine, &setup, [train, test], world)?;
        let stream = fleet.machine.policy_device().stream("policy");
        let controller = AnyController::new(&setup, &stream, world)?;
        if setup.config.device_memory.is_some() {
            try_envs(&setup, &fleet)?;
        }
        let identity = Identity {
            config: config.identity(),
            dataset: dataset_summary(&setup, &fleet),
            instruction_set: setup.isa.to_string(),
        };
        let store = place.folder.as_ref().map(|folder| Store::new(folder.checkpoints()));
        let keeper = Keeper { store, identity, rounds: vec![], envs: vec![] };
        Ok(Self { setup, fleet, controller, totals: Totals::default(), keeper, warm: false })
    }

    /// Whether all processes are about to do the same.
    pub(crate) fn agree_on(&self, world: &mut World) -> Result<()> {
        world.agree_on(|| {
            let config = self.setup.config.in_common();
            let identity = Identity { config, ..self.keeper.identity.clone() };
            Ok(Plan { identity, inputs: self.inputs()? })
        })
    }

    /// What it goes by besides its settings, with what tells one from another. Waits for the device.
    fn inputs(&self) -> Result<Vec<(String, String)>> {
        let version = ("version", env!("CARGO_PKG_VERSION").to_string());
        let data = ["training data", "test data"].into_iter().zip(&self.fleet.datasets);
        let data = data.map(|(name, data)| Ok((name, format!("{:08x}", data.checksum()?))));
        let data: Vec<(&str, String)> = data.collect::<Result<_>>()?;
        let files = self.setup.files().into_iter().map(|(name, state)| (name, checksum(state)));
        let all = std::iter::once(version).chain(data).chain(files);
        Ok(all.map(|(name, what)| (name.to_string(), what)).collect())
    }

    /// Its devices.
    #[cfg(test)]
    pub(crate) fn devices(&self) -> &[meristem_device::Device] {
        self.fleet.machine.devices()
    }

    /// Runs all rounds, or those that are left, and writes what is left of them, whatever happens. The summary is that
    /// of the first rank, on all.
    pub(crate) fn finish(
        mut self,
        world: &mut World,
        begin: Begin,
        (observer, place): (&mut dyn Observer, Place),
    ) -> Result<Summary> {
        let span = self.fleet.machine.span(|| "run");
        let Place { folder, trace } = place;
        let folder = folder.as_ref();
        let Begun { writer, next, envs } = world.agree(begin.open(folder))?;
        let mut journal = Journal::new(writer, observer, world.size() > 1);
        match next {
            Position { round: 0, step: 0 } => journal.announce(self.run_started()),
            // The file has it already; who watches has not.
            _ => journal.tell(&self.run_started()),
        }
        let result = self.rounds(folder, (world, &mut journal), next, envs);
        if result.is_err() {
            // Others may be in the next epoch, and wait for gradients.
            self.fleet.replicas.iter_mut().for_each(Replicas::leave);
        }
        let result = world.agree(result);
        drop(span);
        let outcome = match &result {
            Ok(status) => (*status, None),
            Err(error) => (Status::Failed, Some(error.to_string())),
        };
        let own = MemorySummary::of(self.fleet.machine.devices());
        // Where ranks do not hear of each other any more, each knows its own.
        let all = world.collect(own.clone()).unwrap_or_default();
        let memory = all.into_iter().reduce(MemorySummary::with).unwrap_or(own);
        let closed = world.tell(|| self.close(folder, journal, (outcome, memory), trace));
        // The first thing that went wrong is what to report.
        result?;
        closed
    }

    /// Writes what there is to say of a run that has ended: the last event, the trace, the summary.
    fn close(
        self,
        folder: Option<&RunFolder>,
        mut journal: Journal<'_>,
        ((status, error), memory): ((Status, Option<String>), MemorySummary),
        trace: Option<RunTrace>,
    ) -> Result<Summary> {
        let seconds = journal.seconds();
        journal.announce(Event::RunEnded {
            status: status.name().into(),
            error: error.clone(),
            steps: self.totals.steps,
            images: self.totals.images,
            wall_seconds: seconds,
        });
        let closed = journal.close();
        let traced = trace.map(RunTrace::finish).transpose();
        let dropped = closed.as_ref().map_or(0, |dropped| *dropped);
        let path = folder.map_or(Path::new(""), RunFolder::path);
        let mut summary = self.summary(path, (status, error), seconds, (dropped, memory));
        summary.trace = traced.as_ref().ok().cloned().flatten();
        let written = folder.map_or(Ok(()), |folder| folder.write_summary(&summary));
        closed?;
        traced?;
        written?;
        Ok(summary)
    }

    fn rounds(
        &mut self,
        folder: Option<&RunFolder>,
        (world, journal): (&mut World, &mut Journal<'_>),
        next: Position,
        mut envs: Vec<(EnvState, EnvTensors)>,
    ) -> Result<Status> {
        let rounds = self.setup.config.rounds;
        for round in next.round..rounds {
            let start = match std::mem::take(&mut envs) {
                saved if saved.is_empty() => Start::Fresh,
                saved => Start::At(next.step, saved),
            };
            let trained = self.round(folder, (world, journal), round, start)?;
            let last = round + 1 == rounds && trained.steps == self.setup.config.steps;
            if trained.interrupted && !last {
                folder.map_or(Ok(()), |folder| self.export(folder))?;
                return Ok(Status::Interrupted);
            }
        }
        if let Some(folder) = folder {
            self.controller.save_policy(&folder.policy())?;
            self.export(folder)?;
        }
        Ok(Status::Completed)
    }

    /// One round: an episode, its report, its weights, and a checkpoint if another round follows.
    fn round(
        &mut self,
        folder: Option<&RunFolder>,
        (world, journal): (&mut World, &mut Journal<'_>),
        round: usize,
        start: Start,
    ) -> Result<Trained> {
        let mut episode = Episode {
            setup: &self.setup,
            world,
            fleet: &mut self.fleet,
            controller: &mut self.controller,
            journal,
            totals: &mut self.totals,
            spent: Totals::default(),
            round,
            keeper: &self.keeper,
            warm: &mut self.warm,
        };
        let mut trained = episode.train(start)?;
        let _report = self.fleet.machine.span(|| "report and save");
        let own = measure::report(&mut self.fleet, &self.setup, &mut trained.envs)?;
        self.keeper.envs = world.of_envs(own)?.concat();
        self.keeper.envs.iter().for_each(|env| journal.announce(episode_ended(env, round)));
        self.save(folder, world, &trained.envs)?;
        self.keeper.rounds.push(round_summary(&self.keeper.envs, round, &trained));
        let config = &self.setup.config;
        if trained.steps == config.steps && round + 1 < config.rounds {
            let next = Position { round: round + 1, step: 0 };
            journal.announce(Event::CheckpointWritten { round: next.round, step: next.step });
            let state = (self.totals, self.controller.get().save()?);
            self.keeper.write(next, vec![], state, (world, journal))?;
        }
        Ok(trained)
    }

    /// Writes the weights of all envs as they are. Waits for the devices.
    fn save(&self, folder: Option<&RunFolder>, world: &mut World, envs: &[Env]) -> Result<()> {
        for (place, Env { index, network, host, .. }) in envs.iter().enumerate() {
            let name = PathBuf::from(measure::weights_name(*index));
            let own = || weights::to_bytes(&name, network, host, &self.setup.info);
            let all = world.bytes_of_envs(own)?;
            let Some(folder) = folder else { continue };
            for (rank, bytes) in all.iter().enumerate() {
                let name = measure::weights_name(rank * envs.len() + place);
                safetensors::write(&folder.weights().join(name), bytes)?;
            }
        }
        Ok(())
    }

    /// Copies the best env's weights to where they were asked for: best by control accuracy, the first one
    /// without a control split (the test split is not there to choose by).
    fn export(&self, folder: &RunFolder) -> Result<()> {
        let Some(target) = &self.setup.config.export else { return Ok(()) };
        let envs = &self.keeper.envs;
        let accuracy = |env: &EnvSummary| env.control_accuracy.unwrap_or(0.0);
        let better = |a: &usize, b: &usize| {
            accuracy(&envs[*a]).total_cmp(&accuracy(&envs[*b])).then(b.cmp(a))
        };
        let best = (0..envs.len()).max_by(better).unwrap_or(0);
        let path = folder.weights().join(measure::weights_name(best));
        let bytes = std::fs::read(&path).map_err(|source| Error::RunFolder {
            action: "read",
            path,
            source,
        })?;
        write_whole(target, &bytes)
    }

    fn run_started(&self) -> Event {
        let Self { setup, fleet, .. } = self;
        let config = &setup.config;
        Event::RunStarted(RunStarted {
            version: env!("CARGO_PKG_VERSION").into(),
            dataset: setup.info.name.clone(),
            train_samples: fleet.train_samples,
            control_samples: fleet.control_samples,
            test_samples: fleet.test_samples,
            host: setup.host.to_string(),
            host_parameters: setup.host.parameters(&setup.image),
            envs: config.envs,
            rounds: config.rounds,
            steps: config.steps,
            batches: fleet.train.len(),
            controller: config.controller.to_string(),
            instruction_set: setup.isa.to_string(),
            devices: fleet.machine.device_names(),
            threads: self.threads(),
            ranks: config.ranks(),
            exchange: config.exchange.to_string(),
            seed: config.seed,
        })
    }

    fn threads(&self) -> usize {
        self.fleet.machine.devices().first().map_or(0, |device| device.threads())
    }

    fn summary(
        self,
        run_dir: &Path,
        (status, error): (Status, Option<String>),
        wall_seconds: f64,
        (events_dropped, memory): (u64, MemorySummary),
    ) -> Summary {
        let Totals { steps, training_steps, images, step_seconds, hot, validation, rollbacks } =
            self.totals;
        let threads = self.threads();
        let Self { setup, fleet, .. } = &self;
        let rate = images as f64 / step_seconds;
        Summary {
            version: SUMMARY_VERSION,
            program_version: env!("CARGO_PKG_VERSION").into(),
            status,
            error,
            run_dir: PathBuf::from(run_dir),
            host: setup.host.to_string(),
            controller: setup.config.controller.to_string(),
            seed: setup.config.seed,
            dataset: dataset_summary(setup, fleet),
            instruction_set: setup.isa.to_string(),
            threads,
            ranks: setup.config.ranks(),
            exchange: setup.config.exchange.to_string(),
            rounds: self.keeper.rounds.len(),
            steps,
            training_steps,
            images,
            images_per_s: if rate.is_finite() { rate } else { 0.0 },
            wall_seconds,
            step_seconds,
            memory,
            hot_path: hot.per_step(),
            validation,
            rollbacks,
            events_dropped,
            trace: None,
            envs: self.keeper.envs,
            round_results: self.keeper.rounds,
        }
    }
}

/// Makes all envs as a round begins with them, and lets go of them: memory that does not suffice for that is found
/// before a run begins.
fn try_envs(setup: &Setup, fleet: &Fleet) -> Result<()> {
    let mut envs = vec![];
    for ((index, stream), sizes) in fleet.machine.places().zip(&fleet.batch_sizes) {
        let mut env = Env::new(setup, index, stream, (setup.config.seed, 1))?;
        sizes.iter().try_for_each(|&size| env.network.prepare_training(size))?;
        envs.push(env);
    }
    Ok(())
}

fn dataset_summary(setup: &Setup, fleet: &Fleet) -> DatasetSummary {
    let info = &setup.info;
    DatasetSummary {
        name: info.name.clone(),
        train_samples: fleet.train_samples,
        control_samples: fleet.control_samples,
        test_samples: fleet.test_samples,
        skipped: info.skipped,
        image: [info.channels, info.height, info.width],
        classes: info.classes.clone(),
        mean: info.mean.clone(),
        std: info.std.clone(),
    }
}

fn episode_ended(env: &EnvSummary, round: usize) -> Event {
    Event::EpisodeEnded {
        env: env.env,
        round,
        control_accuracy: env.control_accuracy,
        test_accuracy: env.test_accuracy,
        test_loss: env.test_loss,
        host_parameters: env.host_parameters,
        grown_parameters: env.grown_parameters,
    }
}

fn round_summary(envs: &[EnvSummary], round: usize, trained: &Trained) -> RoundSummary {
    RoundSummary {
        round,
        steps: trained.steps,
        policy: trained.policy.clone(),
        control_accuracy: envs.iter().map(|env| env.control_accuracy).collect(),
        test_accuracy: envs.iter().map(|env| env.test_accuracy).collect(),
        parameters: envs.iter().map(|env| env.parameters).collect(),
    }
}

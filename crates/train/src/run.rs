//! A whole run: from a configuration to a folder with weights and a summary.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use meristem_data::{Split, cache};
use meristem_grow::BlueprintSet;

use crate::checkpoint::{
    Checkpoint, EnvState, EnvTensors, EventsPosition, Identity, Position, Store,
};
use crate::config::{Layer, TrainConfig};
use crate::config_file;
use crate::controllers::AnyController;
use crate::env::Env;
use crate::episode::{Episode, Start, Totals, Trained};
use crate::error::{Error, Result};
use crate::evaluate;
use crate::event_writer::EventWriter;
use crate::events::{Event, RunStarted};
use crate::fleet::{Fleet, Machine};
use crate::keeper::Keeper;
use crate::observer::{Journal, Observer};
use crate::output::{check_folder, check_output};
use crate::run_folder::{RunFolder, write_whole};
use crate::settings::HotScopePolicy;
use crate::setup::{Names, Setup, residency};
use crate::summary::{
    DatasetSummary, EnvSummary, MemorySummary, RoundSummary, SUMMARY_VERSION, Status, Summary,
};
use crate::trace::RunTrace;
use crate::weights;

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
    let (config, names) = Names::of_new(config)?;
    config.export.as_deref().map_or(Ok(()), |path| check_output("export", path))?;
    let folder = RunFolder::create(config.run_dir.as_deref(), &config.run_name())?;
    let trace = match RunTrace::open(config.trace.as_deref()) {
        Ok(trace) => trace,
        Err(error) => {
            folder.discard();
            return Err(error);
        }
    };
    let source = names.spec.source;
    let prepare =
        |folder: &RunFolder| Run::prepare(&config, names, blueprints, (folder, trace.as_ref()));
    let prepared = prepare_in(folder, &config, prepare);
    let result = RunTrace::unless_refused(trace, prepared).and_then(|((run, folder), trace)| {
        run.finish(&folder, Begin::New(started), (observer, trace))
    });
    // The cache would keep the data, and with it the device, beyond this run.
    cache::clear(|key| key.source == source);
    result
}

/// As [`run`] with the standard blueprints, on devices that are open and whose data is loaded; both stay so.
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
    let folder = RunFolder::create(config.run_dir.as_deref(), &config.run_name())?;
    let (machine, blueprints) = (machine.clone(), BlueprintSet::standard());
    let prepare = |folder: &RunFolder| Run::on(machine, &config, names, blueprints, folder);
    let (run, folder) = prepare_in(folder, &config, prepare)?;
    run.finish(&folder, Begin::New(started), (observer, None))
}

/// Prepares a run in its new folder; the folder goes if that fails.
fn prepare_in(
    folder: RunFolder,
    config: &TrainConfig,
    prepare: impl FnOnce(&RunFolder) -> Result<Run>,
) -> Result<(Run, RunFolder)> {
    match folder.write_config(&config.resolved_toml()).and_then(|()| prepare(&folder)) {
        Ok(run) => Ok((run, folder)),
        Err(error) => {
            folder.discard();
            Err(error)
        }
    }
}

/// Settings that a run may go on with instead of its own: no result depends on them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResumeOptions {
    /// Worker threads of each device.
    pub threads: Option<usize>,
    /// File for a trace of what is left.
    pub trace: Option<PathBuf>,
    /// What hot scopes do (V2).
    pub hot_scope: Option<HotScopePolicy>,
}

/// Goes on with the run in `folder` from its newest checkpoint, or from its start if it has none: weights,
/// events (their times aside) and summary end as if it had never stopped. A run that is complete is not touched: its summary is returned. Blocks until it is done.
///
/// # Errors
/// [`Error::Resume`]: no run's folder, or another process writes there. [`Error::Checkpoint`]: the newest
/// checkpoint is damaged, or of another run. [`Error::CheckpointVersion`]. As [`run`] otherwise. Nothing is overwritten
/// before the checkpoint was found to fit.
pub fn resume(
    folder: &Path,
    options: &ResumeOptions,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    resume_with(folder, options, BlueprintSet::standard(), observer)
}

/// As [`resume`], growing from `blueprints`, which must be those of the run.
///
/// # Errors
/// As [`resume`].
pub fn resume_with(
    path: &Path,
    options: &ResumeOptions,
    blueprints: BlueprintSet,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let started = Instant::now();
    let folder = RunFolder::open(path)?;
    if let Some(summary) = folder.read_summary()?.filter(|s| s.status == Status::Completed) {
        return Ok(summary);
    }
    let settings = config_file::read(&folder.config())?;
    folder.check_config(&TrainConfig::resolve(settings.clone(), Layer::default())?)?;
    let (threads, trace) = (options.threads, options.trace.clone().map(Some));
    let (run_dir, hot_scope) = (Some(Some(path.into())), options.hot_scope);
    let flags = Layer { run_dir, threads, trace, hot_scope, ..Layer::default() };
    let config = TrainConfig::resolve(settings, flags)?;
    let saved = Store::new(folder.checkpoints()).newest()?;
    let (config, names) = match &saved {
        // Its policy is in there.
        Some(_) => (config.clone(), Names::resolve(&config)?),
        None => {
            folder.check_no_checkpoint_is_lost()?;
            Names::of_new(&config).map_err(|error| anew(path, &error))?
        }
    };
    // A file that is there already is its own: it was stopped.
    config.export.as_deref().map_or(Ok(()), |path| check_folder("export", path))?;
    let trace = RunTrace::open(config.trace.as_deref())?;
    let source = names.spec.source;
    let prepare = || {
        let mut run = Run::prepare(&config, names, blueprints, (&folder, trace.as_ref()))?;
        let begin = match saved {
            Some((file, checkpoint)) => Begin::From(run.restore(&file, checkpoint)?),
            None => Begin::New(started),
        };
        Ok((run, begin))
    };
    let prepared = prepare();
    let result = RunTrace::unless_refused(trace, prepared)
        .and_then(|((run, begin), trace)| run.finish(&folder, begin, (observer, trace)));
    cache::clear(|key| key.source == source);
    result
}

/// What is said of a run that cannot even be begun again.
fn anew(path: &Path, error: &Error) -> Error {
    let problem = format!("it has no checkpoint yet and would start anew, but {error}");
    Error::Resume { path: path.into(), problem }
}

/// How a run begins.
pub(crate) enum Begin {
    /// At its start.
    New(Instant),
    /// In the middle.
    From(Middle),
}

/// Where a run goes on.
pub(crate) struct Middle {
    next: Position,
    envs: Vec<(EnvState, EnvTensors)>,
    events: EventsPosition,
}

/// A run that can start.
pub(crate) struct Run {
    setup: Setup,
    fleet: Fleet,
    controller: AnyController,
    totals: Totals,
    /// Also of what ended so far.
    keeper: Keeper,
    /// Whether this process has done a step.
    warm: bool,
}

impl Run {
    pub(crate) fn prepare(
        config: &TrainConfig,
        names: Names,
        blueprints: BlueprintSet,
        (folder, trace): (&RunFolder, Option<&RunTrace>),
    ) -> Result<Self> {
        let machine = Machine::open(&names.devices, config.threads, trace.map(RunTrace::trace))?;
        Self::on(machine, config, names, blueprints, folder)
    }

    /// As [`Run::prepare`], on devices that are open.
    pub(crate) fn on(
        machine: Machine,
        config: &TrainConfig,
        names: Names,
        blueprints: BlueprintSet,
        folder: &RunFolder,
    ) -> Result<Self> {
        let _span = machine.span(|| "prepare");
        let residency = residency(config);
        let train = machine.load(&names.spec, Split::Train, residency)?;
        let test = machine.load(&names.spec, Split::Test, residency)?;
        let info = cache::files(&names.spec)?.info()?;
        let setup = Setup::new(config, names, info, Arc::new(blueprints))?;
        setup.try_weights(&machine.streams()[0])?;
        let fleet = Fleet::new(machine, &setup, [train, test])?;
        let controller = AnyController::new(&setup, &fleet.machine.devices()[0].stream("policy"))?;
        let identity = Identity {
            config: config.identity(),
            dataset: dataset_summary(&setup, &fleet),
            instruction_set: setup.isa.to_string(),
        };
        let store = Store::new(folder.checkpoints());
        let keeper = Keeper { store, identity, rounds: vec![], envs: vec![] };
        Ok(Self { setup, fleet, controller, totals: Totals::default(), keeper, warm: false })
    }

    /// Takes over what a checkpoint holds, if it is one of this run.
    fn restore(&mut self, file: &Path, checkpoint: Checkpoint) -> Result<Middle> {
        let Checkpoint { progress, envs, controller } = checkpoint;
        let unfit = |problem| Error::Checkpoint { path: file.into(), problem };
        self.keeper.identity.check(file, &progress.identity)?;
        let in_a_round = progress.next.step > 0;
        if in_a_round && envs.len() != self.setup.config.envs {
            return Err(unfit(format!("it has {} envs", envs.len())));
        }
        self.controller.get().restore(&controller).map_err(|error| unfit(error.to_string()))?;
        self.totals = progress.totals;
        (self.keeper.rounds, self.keeper.envs) = (progress.rounds, progress.last_envs);
        let envs = progress.envs.into_iter().zip(envs).collect();
        Ok(Middle { next: progress.next, envs, events: progress.events })
    }

    /// Its devices.
    #[cfg(test)]
    pub(crate) fn devices(&self) -> &[meristem_device::Device] {
        self.fleet.machine.devices()
    }

    /// Runs all rounds, or those that are left, and writes what is left of them, whatever happens.
    pub(crate) fn finish(
        mut self,
        folder: &RunFolder,
        begin: Begin,
        (observer, trace): (&mut dyn Observer, Option<RunTrace>),
    ) -> Result<Summary> {
        let span = self.fleet.machine.span(|| "run");
        let (writer, next, envs) = match begin {
            Begin::New(started) => {
                let writer = EventWriter::create(&folder.events(), started)?;
                (writer, Position { round: 0, step: 0 }, vec![])
            }
            Begin::From(Middle { next, envs, events }) => {
                (EventWriter::resume(&folder.events(), events)?, next, envs)
            }
        };
        folder.remove_summary()?;
        let mut journal = Journal::new(writer, observer);
        match next {
            Position { round: 0, step: 0 } => journal.emit(self.run_started()),
            // The file has it already; who watches has not.
            _ => journal.tell(&self.run_started()),
        }
        let result = self.rounds(folder, &mut journal, next, envs);
        let status = match &result {
            Ok(status) => *status,
            Err(_) => Status::Failed,
        };
        let error = result.as_ref().err().map(ToString::to_string);
        let seconds = journal.seconds();
        journal.emit_waiting(Event::RunEnded {
            status: status.name().into(),
            error: error.clone(),
            steps: self.totals.steps,
            images: self.totals.images,
            wall_seconds: seconds,
        });
        let closed = journal.close();
        drop(span);
        let traced = trace.map(RunTrace::finish).transpose();
        let dropped = closed.as_ref().map_or(0, |dropped| *dropped);
        let mut summary = self.summary(folder.path(), (status, error), seconds, dropped);
        summary.trace = traced.as_ref().ok().cloned().flatten();
        let written = folder.write_summary(&summary);
        // The first thing that went wrong is what to report.
        result?;
        closed?;
        traced?;
        written?;
        Ok(summary)
    }

    fn rounds(
        &mut self,
        folder: &RunFolder,
        journal: &mut Journal<'_>,
        next: Position,
        mut envs: Vec<(EnvState, EnvTensors)>,
    ) -> Result<Status> {
        let rounds = self.setup.config.rounds;
        for round in next.round..rounds {
            let start = match std::mem::take(&mut envs) {
                saved if saved.is_empty() => Start::Fresh,
                saved => Start::At(next.step, saved),
            };
            let trained = self.round(folder, journal, round, start)?;
            let last = round + 1 == rounds && trained.steps == self.setup.config.steps;
            if trained.interrupted && !last {
                self.export(folder)?;
                return Ok(Status::Interrupted);
            }
        }
        self.controller.save_policy(&folder.policy())?;
        self.export(folder)?;
        Ok(Status::Completed)
    }

    /// One round: an episode, its report, its weights, and a checkpoint if another round follows.
    fn round(
        &mut self,
        folder: &RunFolder,
        journal: &mut Journal<'_>,
        round: usize,
        start: Start,
    ) -> Result<Trained> {
        let mut episode = Episode {
            setup: &self.setup,
            fleet: &mut self.fleet,
            controller: self.controller.get(),
            journal,
            totals: &mut self.totals,
            round,
            keeper: &self.keeper,
            warm: &mut self.warm,
        };
        let mut trained = episode.train(start)?;
        let _report = self.fleet.machine.span(|| "report and save");
        self.keeper.envs = evaluate::report(&mut self.fleet, &self.setup, &mut trained.envs)?;
        self.keeper.envs.iter().for_each(|env| journal.emit(episode_ended(env, round)));
        self.save(folder, &trained.envs)?;
        self.keeper.rounds.push(round_summary(&self.keeper.envs, round, &trained));
        let config = &self.setup.config;
        if trained.steps == config.steps && round + 1 < config.rounds {
            let next = Position { round: round + 1, step: 0 };
            journal.emit_waiting(Event::CheckpointWritten { round: next.round, step: next.step });
            let state = (self.totals, self.controller.get().save()?);
            self.keeper.write(next, vec![], state, journal)?;
        }
        Ok(trained)
    }

    /// Writes the envs' weights as they are. Waits for the devices.
    fn save(&self, folder: &RunFolder, envs: &[Env]) -> Result<()> {
        for env in envs {
            let path = folder.weights().join(evaluate::weights_name(env.index));
            weights::save(&path, &env.network, &env.host, &self.setup.info)?;
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
        let path = folder.weights().join(evaluate::weights_name(best));
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
            threads: self.threads(),
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
        events_dropped: u64,
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
            rounds: self.keeper.rounds.len(),
            steps,
            training_steps,
            images,
            images_per_s: if rate.is_finite() { rate } else { 0.0 },
            wall_seconds,
            step_seconds,
            memory: MemorySummary::of(fleet.machine.devices()),
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

//! A whole run: from a configuration to a folder with weights and a summary.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use meristem_control::{Controller, Heuristic, HeuristicConfig, NoController};
use meristem_data::{Split, cache};
use meristem_grow::BlueprintSet;

use crate::config::TrainConfig;
use crate::env::Env;
use crate::episode::{Episode, Totals};
use crate::error::{Error, Result};
use crate::evaluate;
use crate::event_writer::EventWriter;
use crate::events::{Event, RunStarted};
use crate::fleet::{Fleet, Machine};
use crate::observer::{Journal, Observer};
use crate::run_folder::{RunFolder, write_whole};
use crate::settings::ControllerKind;
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
    let names = Names::resolve(config)?;
    check_export(config.export.as_deref())?;
    let trace = RunTrace::open(config.trace.as_deref())?;
    let folder = RunFolder::create(config.run_dir.as_deref(), &config.run_name())?;
    let source = names.spec.source;
    let prepared = folder
        .write_config(&config.resolved_toml())
        .and_then(|()| Run::prepare(config, names, blueprints, trace.as_ref()));
    let result = match prepared {
        Ok(run) => run.finish(&folder, started, (observer, trace)),
        Err(error) => {
            folder.discard();
            Err(error)
        }
    };
    // The cache would keep the data, and with it the device, beyond this run.
    cache::clear(|key| key.source == source);
    result
}

/// Finds out before the training, not after it, that the weights could not be written.
fn check_export(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match parent.is_none_or(Path::is_dir) && !path.is_dir() {
        true => Ok(()),
        false => Err(Error::value("export", path.display(), "a file in a folder that exists")),
    }
}

/// A run that can start.
pub(crate) struct Run {
    setup: Setup,
    fleet: Fleet,
    controller: Box<dyn Controller>,
    totals: Totals,
    rounds: Vec<RoundSummary>,
    /// Of the last round.
    envs: Vec<EnvSummary>,
}

impl Run {
    pub(crate) fn prepare(
        config: &TrainConfig,
        names: Names,
        blueprints: BlueprintSet,
        trace: Option<&RunTrace>,
    ) -> Result<Self> {
        let machine = Machine::open(&names.devices, config.threads, trace.map(RunTrace::trace))?;
        let _span = machine.span(|| "prepare");
        let residency = residency(config);
        let train = machine.load(&names.spec, Split::Train, residency)?;
        let test = machine.load(&names.spec, Split::Test, residency)?;
        let info = cache::files(&names.spec)?.info()?;
        let setup = Setup::new(config, names, info, Arc::new(blueprints))?;
        setup.try_weights(&machine.streams()[0])?;
        let fleet = Fleet::new(machine, &setup, [train, test])?;
        let controller: Box<dyn Controller> = match config.controller {
            ControllerKind::None => Box::new(NoController),
            ControllerKind::Heuristic => Box::new(Heuristic::new(heuristic(config))),
        };
        let totals = Totals::default();
        Ok(Self { setup, fleet, controller, totals, rounds: vec![], envs: vec![] })
    }

    /// Its devices.
    #[cfg(test)]
    pub(crate) fn devices(&self) -> &[meristem_device::Device] {
        self.fleet.machine.devices()
    }

    /// Runs all rounds and writes what is left of them, whatever happens.
    pub(crate) fn finish(
        mut self,
        folder: &RunFolder,
        started: Instant,
        (observer, trace): (&mut dyn Observer, Option<RunTrace>),
    ) -> Result<Summary> {
        let span = self.fleet.machine.span(|| "run");
        let mut journal = Journal::new(EventWriter::create(&folder.events())?, observer);
        journal.emit(self.run_started());
        let result = self.rounds(folder, &mut journal);
        let status = match &result {
            Ok(status) => *status,
            Err(_) => Status::Failed,
        };
        let error = result.as_ref().err().map(ToString::to_string);
        journal.emit_waiting(Event::RunEnded {
            status: status.name().into(),
            error: error.clone(),
            steps: self.totals.steps,
            images: self.totals.images,
            wall_seconds: started.elapsed().as_secs_f64(),
        });
        let closed = journal.close();
        drop(span);
        let traced = trace.map(RunTrace::finish).transpose();
        let dropped = closed.as_ref().map_or(0, |dropped| *dropped);
        let mut summary = self.summary(folder.path(), (status, error), started, dropped);
        summary.trace = traced.as_ref().ok().cloned().flatten();
        let written = folder.write_summary(&summary);
        // The first thing that went wrong is what to report.
        result?;
        closed?;
        traced?;
        written?;
        Ok(summary)
    }

    fn rounds(&mut self, folder: &RunFolder, journal: &mut Journal<'_>) -> Result<Status> {
        let mut status = Status::Completed;
        for round in 0..self.setup.config.rounds {
            let mut episode = Episode {
                setup: &self.setup,
                fleet: &mut self.fleet,
                controller: &mut *self.controller,
                journal,
                totals: &mut self.totals,
                round,
            };
            let mut trained = episode.train()?;
            if let Some(error) = trained.refused {
                self.save(folder, &trained.envs)?;
                return Err(error);
            }
            let _report = self.fleet.machine.span(|| "report and save");
            self.envs = evaluate::report(&mut self.fleet, &self.setup, &mut trained.envs)?;
            self.envs.iter().for_each(|env| journal.emit(episode_ended(env, round)));
            self.save(folder, &trained.envs)?;
            self.rounds.push(round_summary(&self.envs, round, trained.steps));
            if trained.interrupted {
                status = Status::Interrupted;
                break;
            }
        }
        self.export(folder)?;
        Ok(status)
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
        let accuracy = |env: &EnvSummary| env.control_accuracy.unwrap_or(0.0);
        let better = |a: &usize, b: &usize| {
            accuracy(&self.envs[*a]).total_cmp(&accuracy(&self.envs[*b])).then(b.cmp(a))
        };
        let best = (0..self.envs.len()).max_by(better).unwrap_or(0);
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
            controller: self.controller.name().into(),
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
        started: Instant,
        events_dropped: u64,
    ) -> Summary {
        let Totals { steps, training_steps, images, step_seconds, hot, validation } = self.totals;
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
            controller: self.controller.name().into(),
            seed: setup.config.seed,
            dataset: dataset_summary(setup, fleet),
            instruction_set: setup.isa.to_string(),
            threads,
            rounds: self.rounds.len(),
            steps,
            training_steps,
            images,
            images_per_s: if rate.is_finite() { rate } else { 0.0 },
            wall_seconds: started.elapsed().as_secs_f64(),
            step_seconds,
            memory: MemorySummary::of(fleet.machine.devices()),
            hot_path: hot.per_step(),
            validation,
            events_dropped,
            trace: None,
            envs: self.envs,
            round_results: self.rounds,
        }
    }
}

/// The rules of the heuristic that are settings.
fn heuristic(config: &TrainConfig) -> HeuristicConfig {
    let usual = HeuristicConfig::default();
    HeuristicConfig {
        plateau_steps: config.plateau_steps,
        plateau_gain_pp: config.plateau_gain as f32,
        tempo: config.tempo,
        // Where the gate asks for less, so does the heuristic.
        min_contribution_pp: usual.min_contribution_pp.min(config.min_contribution as f32),
        ..usual
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

fn round_summary(envs: &[EnvSummary], round: usize, steps: usize) -> RoundSummary {
    RoundSummary {
        round,
        steps,
        control_accuracy: envs.iter().map(|env| env.control_accuracy).collect(),
        test_accuracy: envs.iter().map(|env| env.test_accuracy).collect(),
        parameters: envs.iter().map(|env| env.parameters).collect(),
    }
}

//! A prepared run: all its rounds, and its results.

mod closing;
mod restored;

use meristem_data::cache;
use meristem_device::{Device, DeviceId, mpi_takes_cuda_memory};
use meristem_nn::ROUNDING;

use self::closing::{RunOutcome, Views};
use super::begin::{Begin, Begun};
use super::episode::{EndedEpisode, Episode, Start};
use super::files::RunFiles;
use super::results::{dataset_summary, episode_ended, in_sweep, round_summary, run_started};
use super::weights_files::{export_best, write_weights};
use super::{memory, notices};
use crate::checkpoint::{Checkpoints, Current, Identity, RunInputs, Store};
use crate::config::{TrainConfig, check_loss, check_searcher};
use crate::env::SavedEnv;
use crate::error::{Error, Result};
use crate::external::{Custom, External, Searcher};
use crate::input_file::checksum;
use crate::own_loss::ProgramLoss;
use crate::position::StepPosition;
use crate::processes::World;
use crate::record::events::Event;
use crate::record::journal::{Journal, JournalRank};
use crate::record::observer::{HostMemoryReason, Notice, Observer};
use crate::record::run_folder::{POLICY, RunFolder};
use crate::record::summary::{EnvSummary, MemorySummary, Status, Stretch, Summary};
use crate::record::tensorboard::LiveBoard;
use crate::record::totals::Totals;
use crate::record::trace::RunTrace;
use crate::resources::{OpenDevices, Replicas, Resources, Splits};
use crate::settings::{CommKind, Sampler};
use crate::setup::controllers::AnyController;
use crate::setup::{ResolvedNames, Setup, residency};
use crate::step::report;
use crate::sweep::{EndReason, Sweep};

/// A run that is ready to start.
pub(crate) struct PreparedRun {
    setup: Setup,
    resources: Resources,
    controller: AnyController,
    totals: Totals,
    sweep: Sweep,
    /// Results of the envs whose members have ended in this round.
    ended_envs: Vec<EnvSummary>,
    searcher: Option<Box<dyn Searcher>>,
    /// The store of the checkpoints, and the parts that all checkpoints of an episode share, such
    /// as the results of earlier rounds.
    checkpoints: Checkpoints,
    /// Whether this process has completed a step.
    warm: bool,
}

impl PreparedRun {
    /// Opens the devices, loads the data and creates the controller, and finds every error that can
    /// be found without training.
    ///
    /// # Errors
    /// Data, weights or a controller that do not fit; out of memory; a device failure.
    pub(crate) fn prepare(
        config: &TrainConfig,
        names: ResolvedNames,
        custom: Custom,
        files: &RunFiles,
        world: &mut World,
    ) -> Result<Self> {
        let trace = files.trace.as_ref().map(RunTrace::trace);
        let envs = world.part(config.envs);
        let devices = OpenDevices::open(&names.devices, envs, &config.device_options(trace))?;
        let prepared = Self::on(devices, config, names, custom, files, world);
        prepared.map_err(|error| match config.device_memory {
            Some(limit) if error.is_out_of_memory() => {
                let fewer = match config.members_len() {
                    1 => "",
                    _ => "; with --places fewer members are in memory at a time",
                };
                let expected = format!(
                    "enough for the data and the envs at the start of a round{fewer}: {error}"
                );
                Error::value("device-memory", limit, expected)
            }
            _ => error,
        })
    }

    /// Like [`PreparedRun::prepare`], on open devices.
    pub(crate) fn on(
        devices: OpenDevices,
        config: &TrainConfig,
        names: ResolvedNames,
        custom: Custom,
        files: &RunFiles,
        world: &mut World,
    ) -> Result<Self> {
        match (&custom.searcher, config.sampler) {
            (Some(_), _) => check_searcher(config)?,
            (None, Sampler::External) => {
                let expected = "random or sobol; with external a program chooses the settings of \
                                members: meristem.optuna in Python, a Searcher in Rust";
                return Err(Error::value("sampler", config.sampler, expected));
            }
            (None, _) => {}
        }
        check_loss(config, custom.loss.is_some())?;
        let _span = devices.span(|| "prepare");
        let dataset_files = cache::files(&names.spec)?;
        let splits = Splits::load(&devices, &dataset_files, residency(config))?;
        let info = dataset_files.info()?;
        let mut setup = Setup::new(config, names, info)?;
        let mut loss = custom.loss.map(|function| ProgramLoss::new(function, setup.task.kind));
        splits.measure(&mut setup.task, loss.as_mut(), config.batch)?;
        setup.try_weights(&devices.streams()[0])?;
        let mut resources = Resources::new(devices, &setup, splits, world)?;
        resources.loss = loss;
        let (samples, devices) = (resources.train_samples, resources.devices.of_policies());
        let controller = AnyController::new(&setup, samples, &devices, custom.controller, world)?;
        memory::check_parameters(&setup, &resources)?;
        if setup.config.device_memory.is_some() {
            memory::try_envs(&setup, &resources)?;
        }
        let identity = Identity {
            config: config.identity(),
            dataset: dataset_summary(&setup, &resources)?,
            instruction_set: setup.isa.to_string(),
            files: setup.files.clone(),
        };
        let store = files.folder.as_ref().map(|folder| Store::new(folder.directory()));
        let store = store.transpose()?;
        let computed = vec![Stretch::new(StepPosition { round: 0, step: 0 }, config)];
        let (extended, rounds, envs) = (vec![], vec![], vec![]);
        let checkpoints = Checkpoints { store, identity, computed, extended, rounds, envs };
        let sweep = Sweep::new(&setup.config);
        let (totals, warm) = (Totals::default(), false);
        let (ended_envs, searcher) = (vec![], custom.searcher);
        Ok(Self {
            setup,
            resources,
            controller,
            totals,
            sweep,
            ended_envs,
            searcher,
            checkpoints,
            warm,
        })
    }

    /// Checks that all processes have equal settings, data and files.
    ///
    /// # Errors
    /// [`Error::OfRank`] names the first rank that differs, and the difference.
    pub(super) fn check_same(&self, world: &mut World) -> Result<()> {
        if world.size() == 1 {
            return Ok(());
        }
        let config = self.setup.config.in_common();
        let mut identity = Identity { config, ..self.checkpoints.identity.clone() };
        // Compared below with the other checksums, which have names.
        identity.dataset.checksums.clear();
        identity.files.clear();
        let own = RunInputs { identity, checksums: self.checksums() };
        RunInputs::check_same(&world.all_gather(Ok(own))?)
    }

    /// Checksums of all inputs other than settings, by name.
    fn checksums(&self) -> Vec<(String, String)> {
        let build = [
            ("version", env!("CARGO_PKG_VERSION").to_string()),
            ("kernels' rounding", ROUNDING.to_string()),
        ];
        let data = &self.checkpoints.identity.dataset.checksums;
        let data = ["training data", "test data"].into_iter().zip(data.iter().cloned());
        let policy = self.setup.policy.iter();
        let policy = policy.map(|policy| ("policy to start from", checksum(&policy.weights)));
        let named = build.into_iter().chain(data).chain(policy);
        let named = named.map(|(name, checksum)| (name.to_string(), checksum));
        let files = self.setup.files.iter();
        let files =
            files.map(|file| (format!("file of --{}", file.setting), file.checksum.clone()));
        named.chain(files).collect()
    }

    /// Devices of the run.
    #[cfg(test)]
    pub(crate) fn devices(&self) -> &[meristem_device::Device] {
        self.resources.devices.distinct()
    }

    /// Checks that each pattern of parameter groups in the settings of a new run matches a
    /// parameter.
    ///
    /// # Errors
    /// As [`Setup::check_param_groups`].
    pub(super) fn check_new(&self) -> Result<()> {
        self.setup.check_param_groups()
    }

    /// Runs the remaining rounds, then writes the results, even after a failure. Returns rank 0's
    /// summary on all processes.
    pub(crate) fn finish(
        mut self,
        world: &mut World,
        begin: Begin,
        observer: &mut dyn Observer,
        files: RunFiles,
    ) -> Result<Summary> {
        let span = self.resources.devices.span(|| "run");
        let RunFiles { folder, trace } = files;
        let folder = folder.as_ref();
        let begun = begin.open(folder).and_then(|begun| {
            let live = folder.filter(|_| self.setup.config.tensorboard);
            Ok((begun, live.map(|folder| LiveBoard::start(folder.directory())).transpose()?))
        });
        let (Begun { writer, next, envs, extended, ended }, board) = world.agree(begun)?;
        if let Some(folder) = folder {
            observer.notice(&Notice::FolderOpened(folder.path()));
        }
        let reports = world.rank() == 0 && next == StepPosition { round: 0, step: 0 };
        if let Some(weights) = self.setup.other_normalization.as_ref().filter(|_| reports) {
            let run = &self.setup.interface.normalization;
            observer.notice(&Notice::OtherNormalization { weights, run });
        }
        if world.rank() == 0 {
            notices::idle_settings(&self.setup, observer);
            notices::rare_class(&self.setup, observer);
            notices::no_room(&self.setup, &self.resources, observer)?;
            let is_gpu = |device: &Device| matches!(device.id(), DeviceId::Cuda(_));
            let has_gpu = self.resources.devices.distinct().iter().any(is_gpu);
            let reason = if world.size() > 1 && self.setup.config.comm == CommKind::Mpi {
                // Otherwise the library gets addresses of the GPUs' memory.
                (mpi_takes_cuda_memory() != Some(true)).then_some(HostMemoryReason::Mpi)
            } else {
                let are_apart = self.resources.devices.are_ranks_apart();
                are_apart.then_some(HostMemoryReason::Threads)
            };
            if let Some(reason) = reason.filter(|_| has_gpu) {
                let ranks = self.setup.config.ranks();
                observer.notice(&Notice::ThroughHostMemory { ranks, reason });
            }
        }
        let mut writer = writer;
        let score = self.setup.task.score.kind();
        writer.iter_mut().for_each(|writer| writer.set_score(score));
        let rank = JournalRank { is_first: world.is_first(), has_others: world.size() > 1 };
        let mut journal = Journal::new(writer, observer, rank);
        match next {
            StepPosition { round: 0, step: 0 } => {
                journal.announce(run_started(&self.setup, &self.resources))
            }
            // The file has this event already, the observer does not.
            _ => journal.notify(&run_started(&self.setup, &self.resources)),
        }
        extended.into_iter().for_each(|extended| journal.announce(Event::RunExtended(extended)));
        if !ended.is_empty() {
            let (round, step) = (next.round, next.step.saturating_sub(1));
            let (reason, left) = (EndReason::Planned.into(), self.sweep.left());
            journal.announce(Event::MembersEnded { members: ended, round, step, reason, left });
        }
        let result = self.rounds(folder, world, &mut journal, next, envs);
        let result =
            result.map_err(|error| memory::out_of_memory(&self.setup, &self.resources, error));
        if result.is_err() {
            // Other ranks may be in the next epoch, waiting for gradients.
            self.resources.replicas.iter_mut().for_each(Replicas::leave);
        }
        let result = world.agree(result);
        drop(span);
        let (status, error) = match &result {
            Ok(status) => (*status, None),
            Err(error) => (Status::Failed, Some(error.to_string())),
        };
        let own = MemorySummary::from_devices(self.resources.devices.distinct());
        // If another rank cannot be reached, the summary has the memory of this rank only.
        let all = world.gather(own.clone()).unwrap_or_default();
        let memory = all.into_iter().reduce(MemorySummary::with).unwrap_or(own);
        let outcome = RunOutcome { status, error, memory };
        let closed =
            world.broadcast(|| self.close(folder, journal, outcome, Views { trace, board }));
        // Report the first error.
        result?;
        closed
    }

    /// Runs the rounds from `next` on, and writes the policy and the export. If `next` is within a
    /// round, the round continues with the saved `envs`.
    fn rounds(
        &mut self,
        folder: Option<&RunFolder>,
        world: &mut World,
        journal: &mut Journal<'_>,
        next: StepPosition,
        mut envs: Vec<SavedEnv>,
    ) -> Result<Status> {
        let rounds = self.setup.config.rounds;
        for round in next.round..rounds {
            let start = match next {
                StepPosition { round: of, step: 1.. } if of == round => {
                    Start::At(next.step, std::mem::take(&mut envs))
                }
                _ => Start::Fresh,
            };
            let ended = self.round(folder, world, journal, round, start)?;
            let last = round + 1 == rounds && ended.complete;
            let stops = self.controller.external().is_some_and(External::stops_after_round);
            if (ended.interrupted || stops) && !last {
                folder.map_or(Ok(()), |folder| self.export(folder))?;
                return Ok(Status::Interrupted);
            }
        }
        if let Some(folder) = folder {
            let policy = self.controller.policy_bytes()?;
            policy.map_or(Ok(()), |bytes| folder.write(POLICY, &bytes))?;
            self.export(folder)?;
        }
        Ok(Status::Completed)
    }

    /// One round: an episode, its report and weights, and a checkpoint if another round follows.
    fn round(
        &mut self,
        folder: Option<&RunFolder>,
        world: &mut World,
        journal: &mut Journal<'_>,
        round: usize,
        start: Start,
    ) -> Result<EndedEpisode> {
        let mut episode = Episode {
            setup: &mut self.setup,
            resources: &mut self.resources,
            controller: &mut self.controller,
            journal,
            warm: &mut self.warm,
            world,
            totals: &mut self.totals,
            sweep: &mut self.sweep,
            ended_envs: &mut self.ended_envs,
            searcher: self.searcher.as_mut(),
            folder,
            round,
            checkpoints: &mut self.checkpoints,
        };
        let mut ended = episode.train(start)?;
        let _report = self.resources.devices.span(|| "report and save");
        let own = report::report(&mut self.resources, &self.setup, &mut ended.population)?;
        self.totals.own_loss.merge(&self.resources.take_loss_cost());
        let of_member = |env| in_sweep(&self.sweep, &self.setup.config, env);
        let own = own.into_iter().map(of_member).chain(std::mem::take(&mut self.ended_envs));
        self.checkpoints.envs = world.gather_envs(own.collect::<Vec<EnvSummary>>())?.concat();
        self.checkpoints.envs.sort_by_key(|env| env.env);
        self.checkpoints.envs.iter().for_each(|env| journal.announce(episode_ended(env, round)));
        write_weights(&self.setup.interface, folder, world, &ended.population.envs)?;
        self.checkpoints.rounds.push(round_summary(&self.checkpoints.envs, round, &ended));
        let config = &self.setup.config;
        if ended.complete && round + 1 < config.rounds {
            // Every round begins with all members.
            self.sweep = Sweep::new(config);
            let next = StepPosition { round: round + 1, step: 0 };
            journal.announce(Event::CheckpointWritten { round: next.round, step: next.step });
            let (totals, controller) = (self.totals, self.controller.get().save()?);
            let sweep = self.sweep.clone();
            let (envs, ended_envs) = (vec![], vec![]);
            let current = Current { next, envs, ended_envs, totals, controller, sweep };
            self.checkpoints.write(current, world, journal)?;
        }
        Ok(ended)
    }

    /// Exports the best env's weights, if requested.
    fn export(&self, folder: &RunFolder) -> Result<()> {
        let target = self.setup.config.export.as_deref();
        target.map_or(Ok(()), |target| export_best(target, &self.checkpoints.envs, folder))
    }
}

//! Study: controllers compared on the same fresh hosts.
//!
//! For each seed and contender there is one run ([`crate::run`]) of one episode, without learning.
//! A contender that learns ([`Contender::Learner`]) has another run before it, on other hosts. All
//! contenders of a seed have the same initial hosts, the same split and the same order of samples,
//! so that differences between contenders are paired. Results do not depend on the number of
//! threads, and only those of [`Contender::Static`] depend on other contenders. The unit of the
//! statistics is the seed, because the envs of a run share data and are not independent.

pub(crate) mod cell;
mod contender;
mod report;

use std::path::PathBuf;

use meristem_control::RewardMode;
use meristem_data::cache;
use meristem_device::random::{Purpose, Rng};

use self::cell::Cells;
pub use self::contender::{Contender, EqualBudget};
use self::report::ContenderRuns;
pub use self::report::{ContenderReport, STUDY_VERSION, Study, StudyEnv, StudyRun};
use crate::config::{ConfigLayer, FIRST_STUDY_SEED, TrainConfig};
use crate::error::{Error, Result};
use crate::hosts::read_host;
use crate::processes::World;
use crate::record::observer::Observer;
use crate::record::run_folder::{POLICY, write_json};
use crate::record::summary::{Status, Summary};
use crate::settings::{ControllerKind, ExchangeKind, PolicyStart, Switch, TaskKind};
use crate::setup::{Hosts, OtherInputs, ResolvedNames};

/// Maximum number of seeds of a study.
pub(crate) const SEEDS_MAX: usize = 10_000;

/// Settings that a study gives to its runs, so that members cannot have them.
const OF_THE_STUDY: [&str; 2] = ["seed", "controller"];

/// File of the results in the folder of a study.
const REPORT: &str = "study.json";

/// Settings of a study.
#[derive(Clone, Debug)]
pub struct StudyConfig {
    /// Distinct contenders; the others are compared with the first.
    pub contenders: Vec<Contender>,
    /// Number of seeds, which count up from the seed in the settings.
    pub seeds: usize,
    /// Settings of every run, except controller and seed. `rounds`, `ranks` and `exchange` are for
    /// the runs in which contenders learn; a compared run has one round and one rank.
    pub settings: TrainConfig,
    /// Folder for the runs and `study.json`. It must not exist, unless it is empty or belongs to an
    /// earlier study with the same settings, which then continues.
    pub folder: PathBuf,
}

impl StudyConfig {
    /// Combines settings as [`TrainConfig::resolve`] does. Settings of single runs (name, folder,
    /// export, trace, log, checkpoints, controller and its policy) are ignored.
    ///
    /// # Errors
    /// A value outside its range, no contenders or a repeated one, no seeds or too many.
    pub fn resolve(
        file: ConfigLayer,
        flags: ConfigLayer,
        contenders: Vec<Contender>,
        seeds: usize,
        folder: PathBuf,
    ) -> Result<Self> {
        let settings = resolve(file, flags)?;
        let config = Self { contenders, seeds, settings, folder };
        config.validate()?;
        Ok(config)
    }

    fn validate(&self) -> Result<()> {
        if !(1..=SEEDS_MAX).contains(&self.seeds) {
            return Err(Error::value("seeds", self.seeds, format!("1 to {SEEDS_MAX}")));
        }
        if self.settings.comm.is_processes() {
            let expected = "threads, because a study runs in one process";
            return Err(Error::value("comm", self.settings.comm, expected));
        }
        if self.contenders.is_empty() {
            return Err(Error::value("controllers", "none", "at least one"));
        }
        let members = self.settings.members.iter().flat_map(|members| members.all());
        let mut keys = members.flat_map(|member| member.settings()).map(|(key, _)| key);
        if let Some(key) = keys.find(|key| OF_THE_STUDY.contains(key)) {
            let expected = "members without it: every run has the seed and controller of the study";
            return Err(Error::value("members", key, expected));
        }
        for (index, contender) in self.contenders.iter().enumerate() {
            self.check_contender(contender, &self.contenders[..index])?;
        }
        cell::check_folder(&self.folder, REPORT)
    }

    /// Checks that a contender is new, and that the contenders it refers to come before it.
    fn check_contender(&self, contender: &Contender, earlier: &[Contender]) -> Result<()> {
        if earlier.contains(contender) {
            let expected = "each controller once";
            return Err(Error::value("controllers", format!("{contender} twice"), expected));
        }
        if let Contender::Controller(controller) = contender {
            // Checked before the first run, because this contender's run may be the last.
            let controller = controller.clone();
            TrainConfig { controller, ..self.settings.clone() }.check_paths()?;
        }
        let Contender::Static(other, equal) = contender else { return Ok(()) };
        if self.settings.init.is_some() {
            let expected = "no --init, because a fixed network begins with new weights";
            return Err(Error::value("controllers", contender, expected));
        }
        let mut needed = vec![(**other).clone()];
        if *equal == EqualBudget::Compute {
            needed.push(Contender::Static(other.clone(), EqualBudget::Parameters));
        }
        match needed.iter().find(|needed| !earlier.contains(needed)) {
            None => Ok(()),
            Some(needed) => {
                let expected = format!("{needed} before it, which it is compared with");
                Err(Error::value("controllers", contender, expected))
            }
        }
    }

    fn seeds(&self) -> Vec<u64> {
        (0..self.seeds as u64).map(|n| self.settings.seed.saturating_add(n)).collect()
    }

    /// Settings of the run in which a contender learns before its comparison, with another seed and
    /// therefore on other hosts.
    fn training(&self, contender: &Contender, seed: u64, folder: PathBuf) -> Result<TrainConfig> {
        let mut config = compared_run(&self.settings, ControllerKind::None, seed, folder)?;
        config.controller = ControllerKind::Ppo;
        // TOML has signed integers, and so one bit less.
        config.seed = Rng::new(seed, Purpose::Init, u64::MAX, u64::MAX).next_u64() >> 1;
        config.rounds = self.settings.rounds;
        config.ranks = self.settings.ranks;
        config.exchange = self.settings.exchange;
        if let Contender::Learner(Some(mode)) = contender {
            config.reward.mode = *mode;
        }
        config.twin = Some(Switch(config.reward.mode == RewardMode::Shaped));
        config.validate()?;
        Ok(config)
    }
}

/// Combines settings as [`TrainConfig::resolve`] does, without those of single runs.
///
/// # Errors
/// A value outside its range.
pub(crate) fn resolve(file: ConfigLayer, flags: ConfigLayer) -> Result<TrainConfig> {
    let seed = flags.seed.or(file.seed).unwrap_or(FIRST_STUDY_SEED);
    let flags = ConfigLayer {
        seed: Some(seed),
        name: Some(None),
        run_dir: Some(None),
        export: Some(None),
        trace: Some(None),
        policy: Some(None),
        controller: Some(ControllerKind::Ppo),
        log_batches: Some(false),
        checkpoint_every: Some(0),
        ..flags
    };
    TrainConfig::resolve(file, flags)
}

/// Settings of a run that is compared with others: one round of `settings` without learning.
///
/// # Errors
/// Settings that do not fit together.
pub(crate) fn compared_run(
    settings: &TrainConfig,
    controller: ControllerKind,
    seed: u64,
    folder: PathBuf,
) -> Result<TrainConfig> {
    let settings = settings.clone();
    let from_file = matches!(controller, ControllerKind::Policy(_) | ControllerKind::Greedy(_));
    let config = TrainConfig {
        // A policy from a file has its own width and form.
        policy_hidden: settings.policy_hidden.filter(|_| !from_file),
        policy_form: settings.policy_form.filter(|_| !from_file),
        controller,
        // A policy that learns in a comparison is a new one.
        policy: Some(PolicyStart::New),
        seed,
        rounds: 1,
        // Ranks are only for learning.
        ranks: None,
        exchange: ExchangeKind::default(),
        run_dir: Some(folder),
        // A twin would repeat the contender `none`, which is the bare host.
        twin: Some(Switch(false)),
        // Split also without a controller, so that all contenders train on the same images.
        control_split: Some(settings.control_share()),
        ..settings
    };
    config.validate()?;
    Ok(config)
}

/// Number of steps, at least 1, in which training a fixed network costs as many operations as
/// growing it did. `grown` are the operations of growing the network, `fixed` those of training it
/// for `steps` steps.
pub(crate) fn equal_compute_steps(steps: usize, grown: f64, fixed: f64) -> usize {
    // NaN is cast to 0 steps, which becomes 1.
    ((steps as f64 * grown / fixed).round() as usize).max(1)
}

/// A run that is about to start, or that is complete already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned<'a> {
    /// Number of the pair of contender and seed, from 1.
    pub number: usize,
    /// Total number of such pairs.
    pub of: usize,
    /// Name of the contender.
    pub name: &'a str,
    /// Seed of the comparison.
    pub seed: u64,
    /// Whether this is the run in which the contender learns, before its comparison.
    pub learns: bool,
}

/// Receives the events of a study, and may request a stop.
pub trait StudyObserver: Observer {
    /// Reports, before the first run, that a contender's policy was trained with some of the seeds,
    /// that is, on their hosts and images.
    fn seeds_are_known(&mut self, _contender: &Contender, _seeds: &[u64]) {}

    /// Reports that a run is about to start or to go on; its events follow.
    fn run_begins(&mut self, _planned: &Planned<'_>) {}

    /// Reports that a run is complete already, because an earlier call of the study finished it.
    fn run_is_complete(&mut self, _planned: &Planned<'_>) {}
}

impl StudyObserver for crate::record::observer::Silent {}

/// Runs a study, or continues it in its folder: complete runs stay as they are. Blocks until it is
/// done. If the observer requests a stop, it ends at the next step boundary with the completed
/// runs.
///
/// # Errors
/// Errors in the request, such as a policy or a script that does not fit, are found before the
/// first run starts. [`Error::Resume`] names a setting that differs from the setting of a run in
/// the folder. A run that fails ends the study.
pub fn compare(config: &StudyConfig, observer: &mut dyn StudyObserver) -> Result<Study> {
    World::check_alone("one process, without mpirun")?;
    config.validate()?;
    let last = config.seeds().last().copied().unwrap_or_default();
    compared_run(&config.settings, ControllerKind::None, last, PathBuf::new())?;
    let names = ResolvedNames::resolve(&config.settings, OtherInputs::default(), Hosts::Fresh)?;
    let source = names.spec.source;
    let result = Contest::open(config, names).and_then(|contest| contest.run(observer));
    // Otherwise the cache would keep the data, and with it the device, beyond this study.
    cache::clear(|key| key.source == source);
    result
}

/// Complete runs of each contender.
type Runs = Vec<Vec<StudyRun>>;

/// A study that is ready to start.
struct Contest<'a> {
    config: &'a StudyConfig,
    cells: Cells,
    /// For each contender, the seeds of this study that its policy was trained with.
    known_seeds: Vec<Vec<u64>>,
}

impl<'a> Contest<'a> {
    /// Loads the data, and creates once every controller that does not learn, to check it.
    fn open(config: &'a StudyConfig, names: ResolvedNames) -> Result<Self> {
        let settings = &config.settings;
        let cells = Cells::open(settings, &names)?;
        let (seeds, mut known_seeds) = (config.seeds(), vec![]);
        for contender in &config.contenders {
            let Contender::Controller(controller) = contender else {
                known_seeds.push(vec![]);
                continue;
            };
            let run = compared_run(settings, controller.clone(), settings.seed, PathBuf::new())?;
            let learned = cells.check_controller(&run)?;
            known_seeds.push(seeds.iter().copied().filter(|s| learned.contains(s)).collect());
        }
        Ok(Self { config, cells, known_seeds })
    }

    /// Runs seed by seed, so that a stopped study has about the same seeds of all contenders.
    fn run(&self, observer: &mut dyn StudyObserver) -> Result<Study> {
        let Self { config, .. } = self;
        for (contender, known) in config.contenders.iter().zip(&self.known_seeds) {
            if !known.is_empty() {
                observer.seeds_are_known(contender, known);
            }
        }
        let contenders = config.contenders.len();
        let mut runs: Runs = vec![vec![]; contenders];
        let (mut status, mut task, mut dataset) = (Status::Completed, TaskKind::Classify, None);
        let of = config.seeds * contenders;
        let seeds = config.seeds();
        let pairs = seeds.iter().flat_map(|seed| (0..contenders).map(move |index| (*seed, index)));
        for (number, (seed, index)) in pairs.enumerate() {
            let contender = &config.contenders[index];
            let name = &contender.to_string();
            let planned = Planned { number: number + 1, of, name, seed, learns: false };
            let ran = self.run_contender(contender, &planned, &runs, observer)?;
            let Some((summary, run)) = ran else {
                status = Status::Interrupted;
                break;
            };
            runs[index].push(run);
            (task, dataset) = (summary.task, Some(summary.dataset));
        }
        let settings = &config.settings;
        let known = config.contenders.iter().cloned().zip(self.known_seeds.clone());
        let ran = known.zip(runs).map(|((contender, known_seeds), runs)| ContenderRuns {
            contender,
            known_seeds,
            runs,
        });
        let study = Study {
            v: STUDY_VERSION,
            program_version: env!("CARGO_PKG_VERSION").into(),
            status,
            task,
            dataset,
            host: read_host(&settings.host)?.to_string(),
            envs: settings.envs,
            steps: settings.steps,
            rounds: settings.rounds,
            seeds,
            contenders: report::reports(ran.collect()),
        };
        if config.folder.is_dir() {
            write_json(&config.folder.join(REPORT), &study, task.score())?;
        }
        Ok(study)
    }

    /// Position of a contender in the list.
    fn place(&self, contender: &Contender) -> usize {
        let mut contenders = self.config.contenders.iter();
        contenders.position(|other| other == contender).unwrap_or_default()
    }

    /// Run folder of a contender with a seed.
    fn folder(&self, contender: &Contender, seed: u64) -> PathBuf {
        let name = format!("{}-{}", self.place(contender) + 1, contender.folder_name());
        self.config.folder.join(format!("{}{seed}", cell::SEED)).join(name)
    }

    /// Settings of the run that trains the network that the contender `grown` ended with, from the
    /// beginning. `runs` are the complete runs of all contenders.
    fn fixed(
        &self,
        (grown, equal): (&Contender, EqualBudget),
        seed: u64,
        runs: &Runs,
    ) -> Result<TrainConfig> {
        let contender = Contender::Static(Box::new(grown.clone()), equal);
        let run = compared_run(
            &self.config.settings,
            ControllerKind::None,
            seed,
            self.folder(&contender, seed),
        )?;
        let mut run = TrainConfig { start_topology: Some(self.folder(grown, seed)), ..run };
        if equal == EqualBudget::Compute {
            // The run with equal steps gives the cost of a step of the fixed network.
            let same_steps = Contender::Static(Box::new(grown.clone()), EqualBudget::Parameters);
            let flops = |contender: &Contender| {
                let run = runs[self.place(contender)].iter().find(|run| run.seed == seed);
                run.map_or(f64::NAN, |run| run.flops)
            };
            run.steps = equal_compute_steps(run.steps, flops(grown), flops(&same_steps));
            run.validate()?;
        }
        Ok(run)
    }

    /// Runs one contender with one seed, after its learning run if it has one; `None` if it was
    /// stopped. `runs` are the complete runs of all contenders.
    fn run_contender(
        &self,
        contender: &Contender,
        planned: &Planned<'_>,
        runs: &Runs,
        observer: &mut dyn StudyObserver,
    ) -> Result<Option<(Summary, StudyRun)>> {
        let seed = planned.seed;
        let folder = self.folder(contender, seed);
        let mut training = vec![];
        let run = match contender {
            Contender::Controller(controller) => {
                compared_run(&self.config.settings, controller.clone(), seed, folder)?
            }
            Contender::Static(grown, equal) => self.fixed((grown, *equal), seed, runs)?,
            Contender::Learner(_) => {
                let mut learning = folder.clone().into_os_string();
                learning.push("-learning");
                let learning = PathBuf::from(learning);
                let run = self.config.training(contender, seed, learning.clone())?;
                let planned = Planned { learns: true, ..planned.clone() };
                let Some(summary) = self.run_one(&planned, &run, observer)? else {
                    return Ok(None);
                };
                training = summary.round_results;
                compared_run(
                    &self.config.settings,
                    ControllerKind::Policy(learning.join(POLICY)),
                    seed,
                    folder,
                )?
            }
        };
        let summary = self.run_one(planned, &run, observer)?;
        Ok(summary.map(|summary| {
            let run = StudyRun::new(&summary, training);
            (summary, run)
        }))
    }

    /// Starts or resumes a run, or reads its summary if it is complete; `None` if it was stopped.
    fn run_one(
        &self,
        planned: &Planned<'_>,
        run: &TrainConfig,
        observer: &mut dyn StudyObserver,
    ) -> Result<Option<Summary>> {
        if let Some(summary) = self.cells.read(run, observer)? {
            observer.run_is_complete(planned);
            return Ok(Some(summary));
        }
        if observer.stop_requested() {
            return Ok(None);
        }
        observer.run_begins(planned);
        self.cells.finish(run, observer)
    }
}

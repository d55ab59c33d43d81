//! The request of a bench, checked, with the settings of every run.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use meristem_device::random::{Purpose, Rng};

use super::method::{self, METHODS, Method, Way};
use super::report::{GROWTH_TABLE_VERSION, GrowthTable, SeedReport};
use super::suite::{self, BenchTask, COMMON, RATES, Suite};
use crate::config::declare::SettingScope;
use crate::config::{ConfigLayer, FIRST_STUDY_SEED, TrainConfig, all};
use crate::error::{Error, Result};
use crate::hosts::read_host;
use crate::record::run_folder::write_whole;
use crate::record::summary::Status;
use crate::settings::{ControllerKind, one_of};
use crate::study::cell::SEED;
use crate::study::{SEEDS_MAX, compared_run, equal_compute_steps, resolve};

/// First seed on which learning rates are chosen. The seeds of the table begin at
/// [`FIRST_STUDY_SEED`], so no seed is used for both.
const FIRST_TUNING_SEED: u64 = 500;

/// Settings that the bench decides, besides the settings of single runs.
const DECIDED: [&str; 10] = [
    "dataset",
    "host",
    "lr",
    "module_lr",
    "param_groups",
    "seed",
    "rounds",
    "init",
    "start_topology",
    "preset",
];

/// Learning rates to choose from with an optimiser other than SGD, as factors of its default rate.
const RATE_FACTORS: [f32; 4] = [0.3, 1.0, 3.0, 10.0];

/// Maximum number of learning rates to choose from.
const RATES_MAX: usize = 64;

/// Steps from the germination of a module of the script to the germination of the next one, in an
/// episode of 60 steps. The number scales with the length of the episode.
const SCRIPT_INTERVAL_STEPS: usize = 11;

/// Number of first steps in which a random order germinates all modules, in an episode of 30 steps.
/// The number scales with the length of the episode. The remaining steps suffice for a module to
/// become permanent.
const GERMINATION_STEPS: usize = 17;

/// Request of a bench.
#[derive(Clone, Debug, Default)]
pub struct GrowthBench {
    /// Name of the suite: `quick`, `small` or `full`.
    pub suite: String,
    /// Tasks of the suite to run; empty for all.
    pub tasks: Vec<String>,
    /// Methods to compare, with those that they need; empty for all.
    pub methods: Vec<String>,
    /// Number of seeds of the table; `None` for the suite's number.
    pub seeds: Option<usize>,
    /// Number of seeds on which learning rates are chosen; `None` for the suite's number.
    pub tuning_seeds: Option<usize>,
    /// Learning rates to choose from; empty for four that depend on the optimiser. With a single
    /// one nothing is chosen.
    pub rates: Vec<f32>,
    /// Settings of all runs that override those of the suite, such as the optimiser or the number
    /// of threads.
    pub settings: ConfigLayer,
    /// Folder for runs and results: missing, empty, or of an earlier bench of the suite, which
    /// then continues.
    pub folder: PathBuf,
}

/// A checked request.
pub(super) struct Plan<'a> {
    pub(super) suite: &'static Suite,
    pub(super) tasks: Vec<TaskPlan>,
    pub(super) methods: Vec<&'static Method>,
    seeds: usize,
    tuning_seeds: usize,
    /// Keys of the request's settings.
    given: Vec<&'static str>,
    pub(super) folder: &'a Path,
}

/// A task with the settings of its runs.
pub(super) struct TaskPlan {
    pub(super) task: &'static BenchTask,
    /// Settings without method, rate and seed.
    pub(super) settings: TrainConfig,
    pub(super) rates: Vec<f32>,
    folder: PathBuf,
}

impl<'a> Plan<'a> {
    /// Checks a request.
    ///
    /// # Errors
    /// [`Error::Value`]: an unknown name, a number outside its range, a setting that the bench
    /// decides.
    pub(super) fn new(request: &'a GrowthBench) -> Result<Self> {
        let suite = suite::named(&request.suite)?;
        let seeds = request.seeds.unwrap_or(suite.seeds);
        if !(1..=SEEDS_MAX).contains(&seeds) {
            return Err(Error::value("seeds", seeds, format!("1 to {SEEDS_MAX}")));
        }
        let tuning_seeds = request.tuning_seeds.unwrap_or(suite.tuning_seeds);
        // More tuning seeds would overlap with the seeds of the table.
        let most = (FIRST_STUDY_SEED - FIRST_TUNING_SEED) as usize;
        if !(1..=most).contains(&tuning_seeds) {
            return Err(Error::value("tuning_seeds", tuning_seeds, format!("1 to {most}")));
        }
        check_rates(&request.rates)?;
        check_names("tasks", &request.tasks, suite.tasks)?;
        let chosen =
            |name: &&&str| request.tasks.is_empty() || request.tasks.iter().any(|t| t == **name);
        let names = suite.tasks.iter().filter(chosen);
        let tasks: Vec<&BenchTask> = names.filter_map(|name| suite::task(name)).collect();
        check_settings(&request.settings, &tasks)?;
        let tasks = tasks.into_iter().map(|task| TaskPlan::new(task, suite, request));
        let tasks = tasks.collect::<Result<_>>()?;
        let given = request.settings.given();
        let plan = Self {
            suite,
            tasks,
            methods: methods(&request.methods)?,
            seeds,
            tuning_seeds,
            given,
            folder: &request.folder,
        };
        plan.check_runs()?;
        Ok(plan)
    }

    /// Resolves the settings of a run for each task, method and rate, unless the run needs another
    /// run or a script.
    fn check_runs(&self) -> Result<()> {
        for task in &self.tasks {
            for method in &self.methods {
                for rate in &task.rates {
                    task.controlled(method, *rate, 0, PathBuf::new())?;
                }
            }
        }
        Ok(())
    }

    /// Seeds of the table.
    pub(super) fn seeds(&self) -> Vec<u64> {
        (0..self.seeds as u64).map(|n| FIRST_STUDY_SEED + n).collect()
    }

    /// Seeds on which learning rates are chosen.
    pub(super) fn tuning_seeds(&self) -> Vec<u64> {
        (0..self.tuning_seeds as u64).map(|n| FIRST_TUNING_SEED + n).collect()
    }

    /// Number of runs of a method on a task.
    pub(super) fn runs_of(&self, task: &TaskPlan) -> usize {
        self.seeds + if task.is_tuned() { task.rates.len() * self.tuning_seeds } else { 0 }
    }

    /// Number of all runs.
    pub(super) fn runs(&self) -> usize {
        self.tasks.iter().map(|task| self.methods.len() * self.runs_of(task)).sum()
    }

    /// The table before the first run.
    pub(super) fn empty_table(&self) -> GrowthTable {
        let value = |key: &&'static str| {
            let resolved = serde_json::to_value(&self.tasks.first()?.settings).ok()?;
            // Results do not depend on the others, such as the number of threads.
            let is_result = all()
                .iter()
                .any(|setting| setting.key == *key && setting.scope == SettingScope::Result);
            is_result.then(|| (key.to_string(), resolved[key].clone()))
        };
        GrowthTable {
            v: GROWTH_TABLE_VERSION,
            program_version: env!("CARGO_PKG_VERSION").into(),
            status: Status::Interrupted,
            suite: self.suite.name.into(),
            settings: self.given.iter().filter_map(value).collect::<BTreeMap<_, _>>(),
            tuning_seeds: self.tuning_seeds(),
            seeds: self.seeds(),
            tasks: vec![],
        }
    }

    /// An error of the folder.
    pub(super) fn folder_error(&self, action: &'static str, source: io::Error) -> Error {
        Error::RunFolder { action, path: self.folder.into(), source }
    }
}

impl TaskPlan {
    fn new(task: &'static BenchTask, suite: &Suite, request: &GrowthBench) -> Result<Self> {
        let mut own = ConfigLayer { envs: Some(1), ..ConfigLayer::default() };
        for (key, text) in COMMON.iter().chain(task.settings).chain(suite.settings) {
            own.set(key, text).map_err(|error| Error::value(key, text, error))?;
        }
        let mut over = request.settings.clone();
        if !task.has_files {
            over.data_root = None;
        } else if over.data_root.is_none() {
            let expected = format!("the folder of {}, or --tasks without it", task.name);
            return Err(Error::value("data-root", "none", expected));
        }
        let settings = resolve(own, over)?;
        let rates = match settings.optimizer {
            _ if !request.rates.is_empty() => request.rates.clone(),
            sgd if sgd.is_sgd() => RATES.to_vec(),
            other => {
                let usual = other.defaults().lr.unwrap_or_default();
                RATE_FACTORS.map(|factor| factor * usual).to_vec()
            }
        };
        Ok(Self { task, settings, rates, folder: request.folder.join(task.name) })
    }

    /// Whether there are rates to choose from.
    pub(super) fn is_tuned(&self) -> bool {
        self.rates.len() > 1
    }

    /// Folder of all runs with a seed.
    fn seed_folder(&self, seed: u64) -> PathBuf {
        self.folder.join(format!("{SEED}{seed}"))
    }

    fn run_folder(&self, method: &str, rate: f32, seed: u64) -> PathBuf {
        self.seed_folder(seed).join(format!("{method}-lr{rate}"))
    }

    /// Settings of the task with those of a method and its learning rate.
    fn with(&self, method: &Method, rate: f32) -> Result<TrainConfig> {
        let mut layer = ConfigLayer { lr: Some(Some(rate)), ..ConfigLayer::default() };
        let host = (method.way == Way::Large).then(|| ("host", self.task.large.to_string()));
        let own = method.settings.iter().map(|(key, text)| (*key, (*text).to_string()));
        for (key, text) in host.into_iter().chain(own) {
            layer.set(key, &text).map_err(|error| Error::value(key, &text, error))?;
        }
        let mut settings = self.settings.clone();
        settings.apply(layer);
        Ok(settings)
    }

    /// Settings of a run that needs no other run and no script; `None` for other methods.
    pub(super) fn controlled(
        &self,
        method: &Method,
        rate: f32,
        seed: u64,
        folder: PathBuf,
    ) -> Result<Option<TrainConfig>> {
        let controller = match method.way {
            Way::Controlled(name) => {
                let parsed = name.parse::<ControllerKind>();
                parsed.map_err(|error| Error::value("controller", name, error))?
            }
            Way::Large => ControllerKind::None,
            Way::Scripted | Way::Reordered(_) | Way::Fixed(_) | Way::EqualCompute { .. } => {
                return Ok(None);
            }
        };
        compared_run(&self.with(method, rate)?, controller, seed, folder).map(Some)
    }

    /// Settings of a run. `needed` gives the rate and the results of another method's run with this
    /// seed; the runs of [`Way::needs`] are complete.
    ///
    /// # Errors
    /// [`Error::Value`]: settings that do not fit together, or no result of a needed run; a script
    /// that cannot be written.
    pub(super) fn run<'r>(
        &self,
        method: &Method,
        rate: f32,
        seed: u64,
        needed: &dyn Fn(&str) -> Option<(f32, &'r SeedReport)>,
    ) -> Result<TrainConfig> {
        let folder = self.run_folder(method.name, rate, seed);
        if let Some(run) = self.controlled(method, rate, seed, folder.clone())? {
            return Ok(run);
        }
        let settings = self.with(method, rate)?;
        let missing = |name: &str| {
            Error::value("methods", method.name, format!("a complete run of {name} before it"))
        };
        let of = |name: &'static str| needed(name).ok_or_else(|| missing(name));
        let scripted = |text: String| {
            let path = self.seed_folder(seed).join(format!("{}.script", method.name));
            write_script(&path, &text)?;
            compared_run(&settings, ControllerKind::Fixed(path), seed, folder.clone())
        };
        let fixed = |lr: f32, grown: &str| -> Result<TrainConfig> {
            let run = compared_run(&settings, ControllerKind::None, seed, folder.clone())?;
            let start = self.run_folder(grown, lr, seed);
            Ok(TrainConfig { start_topology: Some(start), ..run })
        };
        match method.way {
            Way::Reordered(grown) => scripted(self.reordered(seed, of(grown)?.1)),
            Way::Fixed(grown) => fixed(of(grown)?.0, grown),
            Way::EqualCompute { grown, fixed: same_steps } => {
                let (lr, grown_run) = of(grown)?;
                let mut run = fixed(lr, grown)?;
                run.steps = equal_compute_steps(run.steps, grown_run.macs, of(same_steps)?.1.macs);
                run.validate()?;
                Ok(run)
            }
            Way::Scripted | Way::Controlled(_) | Way::Large => scripted(self.script()?),
        }
    }

    /// Script that fills all slots, from the classifier to the input.
    fn script(&self) -> Result<String> {
        let slots = self.settings.slots();
        let slots = read_host(&self.settings.host)?
            .select_slots(slots.iter().map(String::as_str))
            .map_err(|error| Error::value("slots", slots.join(","), error))?;
        let line = |(nth, slot): (usize, &meristem_grow::SlotName)| {
            let step = nth * SCRIPT_INTERVAL_STEPS * self.settings.steps / 60;
            germinate(step, None, &format!("{slot} {}", self.task.blueprint))
        };
        Ok(slots.iter().rev().enumerate().map(line).collect())
    }

    /// Script with the modules of a run, in a random order at random steps, for each env.
    fn reordered(&self, seed: u64, grown: &SeedReport) -> String {
        let last = (self.settings.steps * GERMINATION_STEPS / 30).max(1) as u32;
        let mut text = String::new();
        for (env, modules) in grown.modules.iter().enumerate() {
            let mut random = Rng::new(seed, Purpose::Controller, env as u64, u64::MAX);
            let mut modules = modules.clone();
            random.shuffle(&mut modules);
            let mut steps: Vec<u32> = modules.iter().map(|_| random.below(last)).collect();
            steps.sort_unstable();
            let lines = steps.iter().zip(&modules);
            text.extend(lines.map(|(step, module)| germinate(*step as usize, Some(env), module)));
        }
        text
    }
}

/// A line of a script that germinates a module, such as `r0c0 conv_heavy`, and makes it permanent.
fn germinate(step: usize, env: Option<usize>, module: &str) -> String {
    let (slot, blueprint) = module.split_once(' ').unwrap_or((module, ""));
    let env = env.map_or(String::new(), |env| format!("\"env\": {env}, "));
    format!(
        "{{\"step\": {step}, {env}\"op\": \"GERMINATE\", \"slot\": \"{slot}\", \
         \"blueprint\": \"{blueprint}\", \"tempo\": \"fast\", \"then\": \"FOSSILIZE\"}}\n"
    )
}

/// Writes a script, unless the file has this text already.
fn write_script(path: &Path, text: &str) -> Result<()> {
    if fs::read(path).is_ok_and(|bytes| bytes == text.as_bytes()) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|source| Error::RunFolder {
        action: "create",
        path: folder.into(),
        source,
    })?;
    write_whole(path, text.as_bytes())
}

/// The methods with these names and those that they need, in the order of the table.
fn methods(names: &[String]) -> Result<Vec<&'static Method>> {
    const ALL: &[Method] = &METHODS;
    check_names("methods", names, &ALL.iter().map(|method| method.name).collect::<Vec<_>>())?;
    let wanted = names.iter().filter_map(|name| method::named(name));
    let wanted = wanted.flat_map(|method| [method.name].into_iter().chain(method.way.needs()));
    let wanted: Vec<&str> = wanted.collect();
    let is_wanted = |method: &&Method| wanted.is_empty() || wanted.contains(&method.name);
    Ok(ALL.iter().filter(is_wanted).collect())
}

fn check_names(key: &str, names: &[String], known: &[&str]) -> Result<()> {
    for (place, name) in names.iter().enumerate() {
        if !known.contains(&name.as_str()) {
            return Err(Error::value(key, name, one_of(name, known)));
        }
        if names[..place].contains(name) {
            return Err(Error::value(key, format!("{name} twice"), "each name once"));
        }
    }
    Ok(())
}

fn check_rates(rates: &[f32]) -> Result<()> {
    if rates.len() > RATES_MAX {
        let expected = format!("at most {RATES_MAX} rates");
        return Err(Error::value("rates", format!("{} rates", rates.len()), expected));
    }
    // NaN is not above any rate, so a list with NaN is refused.
    let rises = rates.windows(2).all(|pair| pair[0] < pair[1]);
    if rises && rates.iter().all(|rate| *rate > 0.0 && rate.is_finite()) {
        return Ok(());
    }
    let texts: Vec<String> = rates.iter().map(f32::to_string).collect();
    Err(Error::value("rates", texts.join(","), "rates above 0 in increasing order"))
}

/// Checks that settings do not contradict the bench.
fn check_settings(settings: &ConfigLayer, tasks: &[&BenchTask]) -> Result<()> {
    for key in settings.given() {
        let of_one_run = all().iter().any(|setting| setting.key == key && setting.train_only);
        if of_one_run || DECIDED.contains(&key) {
            let expected = "a setting that the bench does not decide";
            return Err(Error::value(&key.replace('_', "-"), "a value", expected));
        }
    }
    let reads = tasks.iter().any(|task| task.has_files);
    if let Some(root) = settings.data_root.iter().flatten().next().filter(|_| !reads) {
        let expected = "none, because no task of the bench reads files";
        return Err(Error::value("data-root", root.display(), expected));
    }
    Ok(())
}

//! Bench of growth: methods × tasks, with a learning rate of its own for each method.
//!
//! For each task and method the bench chooses the learning rate on tuning seeds by the control
//! split. With this rate it then trains on the seeds of the table, whose results it reports. Tuning
//! seeds and table seeds are different, and test data decides nothing. All methods of a seed have
//! the same split and the same order of samples, and those with the same host the same initial
//! weights, so that differences are paired.
//!
//! - `suite`, `method`: the tables of tasks, suites and methods;
//! - `plan`: the request, checked, with the settings of every run;
//! - `report`, `markdown`: the results;
//! - here: the runs. Each is a cell of a study ([`crate::study`]) in its own folder, and the bench
//!   has no other state.

mod markdown;
mod method;
mod plan;
mod report;
mod suite;

use std::collections::BTreeMap;
use std::path::PathBuf;

use meristem_data::{Split, cache};
use meristem_nn::ScoreKind;

pub use self::method::{METHODS, Method};
pub use self::plan::GrowthBench;
use self::plan::{Plan, TaskPlan};
use self::report::summarise;
pub use self::report::{
    GROWTH_TABLE_VERSION, GrowthTable, MethodReport, RateReport, SeedReport, TaskReport,
};
pub use self::suite::{BenchTask, SUITES, Suite, TASKS};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::hosts::read_host;
use crate::processes::World;
use crate::record::run_folder::{write_json, write_whole};
use crate::record::summary::Status;
use crate::setup::{Hosts, OtherInputs, ResolvedNames};
use crate::study::cell::{Cells, check_folder};
use crate::study::{Planned, StudyObserver};
use crate::task::task_of;

/// File of the results in the folder of the bench.
pub(crate) const TABLE: &str = "growth.json";

/// File of the same results as a page in Markdown.
const PAGE: &str = "growth.md";

/// Runs the bench, or continues it in its folder: complete runs stay as they are. Blocks until it
/// is done. If the observer requests a stop, it ends at the next step boundary with the complete
/// runs.
///
/// The folder has a folder for each task, in it one for each seed, and in that one for each run.
/// `growth.json` and its table in Markdown are written after each seed of a table; a bench that
/// continues writes them from its first newly trained run on.
///
/// # Errors
/// Errors in the request are found before the first run: an unknown suite, task, method or setting,
/// a setting that the bench decides, no seeds or too many, a folder with something else in it.
/// [`Error::Resume`]: the folder has a bench of another suite, or a run with other settings. A run
/// whose training fails is left out of the table; any other failure ends the bench.
pub fn growth_bench(
    request: &GrowthBench,
    observer: &mut dyn StudyObserver,
) -> Result<GrowthTable> {
    World::check_alone("one process, without mpirun")?;
    let plan = Plan::new(request)?;
    check_folder(&request.folder, TABLE)?;
    check_suite(&plan)?;
    for task in plan.tasks.iter().filter(|task| task.task.has_files) {
        // Found now, and not after hours of other tasks.
        let names = ResolvedNames::resolve(&task.settings, OtherInputs::default(), Hosts::Fresh)?;
        cache::files(&names.spec)?.check_has(Split::Test)?;
    }
    let mut table = plan.empty_table();
    if !plan.folder.join(TABLE).exists() {
        let created = std::fs::create_dir_all(plan.folder);
        created.map_err(|source| plan.folder_error("create", source))?;
        save(&plan, &table)?;
    }
    let mut progress = Progress { number: 0, of: plan.runs(), has_trained: false, observer };
    for task in &plan.tasks {
        let names = ResolvedNames::resolve(&task.settings, OtherInputs::default(), Hosts::Fresh)?;
        let source = names.spec.source;
        let mut report = TaskReport::new(task);
        let ran = TaskBench::open(&plan, task, &names, &mut report).and_then(|mut bench| {
            bench.run(&mut progress, &mut |own| {
                let tasks = table.tasks.iter().chain([own]).cloned().collect();
                save(&plan, &GrowthTable { tasks, ..table.clone() })
            })
        });
        // Otherwise the cache would keep the data of one task during the next.
        cache::clear(|key| key.source == source);
        let stopped = ran?;
        table.tasks.push(report);
        if stopped {
            save(&plan, &table)?;
            return Ok(table);
        }
    }
    table.status = Status::Completed;
    save(&plan, &table)?;
    Ok(table)
}

/// Checks that the folder has no bench of another suite.
fn check_suite(plan: &Plan<'_>) -> Result<()> {
    let path = plan.folder.join(TABLE);
    let Ok(text) = std::fs::read(&path) else { return Ok(()) };
    let problem = match serde_json::from_slice::<GrowthTable>(&text) {
        Ok(table) if table.suite == plan.suite.name => return Ok(()),
        Ok(table) => format!(
            "it has the suite {}, but {} was requested; give another folder",
            table.suite, plan.suite.name
        ),
        Err(error) => format!("its {TABLE} cannot be read: {error}; give another folder"),
    };
    Err(Error::Resume { path: plan.folder.into(), problem })
}

fn save(plan: &Plan<'_>, table: &GrowthTable) -> Result<()> {
    // The keys of scores do not depend on their kind, which differs from task to task.
    write_json(&plan.folder.join(TABLE), table, ScoreKind::Accuracy)?;
    write_whole(&plan.folder.join(PAGE), table.markdown().as_bytes())
}

/// Position in all runs of a bench.
struct Progress<'a> {
    /// Number of runs so far, including runs that were skipped.
    number: usize,
    /// Number of all runs.
    of: usize,
    /// Whether a run has been trained, not only read.
    has_trained: bool,
    observer: &'a mut dyn StudyObserver,
}

/// Result of one run.
enum Outcome {
    Completed(SeedReport),
    /// Training failed too often, or the run of another method that it needs has no result.
    Failed,
    Stopped,
}

/// The runs of one task.
struct TaskBench<'a> {
    plan: &'a Plan<'a>,
    task: &'a TaskPlan,
    cells: Cells,
    report: &'a mut TaskReport,
    /// Results by method and seed, with the method's best rate.
    best: BTreeMap<(&'static str, u64), SeedReport>,
}

impl<'a> TaskBench<'a> {
    /// Loads the data, and checks that the controllers of the methods fit the task.
    fn open(
        plan: &'a Plan<'a>,
        task: &'a TaskPlan,
        names: &ResolvedNames,
        report: &'a mut TaskReport,
    ) -> Result<Self> {
        let cells = Cells::open(&task.settings, names)?;
        report.score = task_of(cells.info().targets).score();
        report.instruction_set = names.isa.to_string();
        for method in &plan.methods {
            if let Some(run) = task.controlled(method, task.rates[0], 0, PathBuf::new())? {
                cells.check_controller(&run)?;
            }
            report.methods.push(MethodReport::new(method.name));
        }
        Ok(Self { plan, task, cells, report, best: BTreeMap::new() })
    }

    /// Chooses the rates, and trains on the seeds of the table. Returns whether it was stopped.
    /// `save` receives the report after each seed of the table, once a run was newly trained.
    fn run(
        &mut self,
        progress: &mut Progress<'_>,
        save: &mut dyn FnMut(&TaskReport) -> Result<()>,
    ) -> Result<bool> {
        let runs = self.plan.runs_of(self.task);
        let end = progress.number + self.plan.methods.len() * runs;
        for (place, method) in self.plan.methods.iter().copied().enumerate() {
            if self.tune(place, method, progress)? {
                return Ok(true);
            }
        }
        for seed in self.plan.seeds() {
            for (place, method) in self.plan.methods.iter().copied().enumerate() {
                let Some(rate) = self.report.methods[place].lr else { continue };
                match self.train(method, rate, seed, progress)? {
                    Outcome::Completed(run) => {
                        self.best.insert((method.name, seed), run.clone());
                        self.report.methods[place].runs.push(run);
                    }
                    Outcome::Failed => self.report.methods[place].diverged.push(seed),
                    Outcome::Stopped => {
                        summarise(&mut self.report.methods);
                        return Ok(true);
                    }
                }
            }
            summarise(&mut self.report.methods);
            // Before the first newly trained run, the table in the folder may have more results
            // than this one.
            if progress.has_trained {
                save(self.report)?;
            }
        }
        progress.number = end;
        Ok(false)
    }

    /// Chooses the learning rate of a method. Returns whether it was stopped.
    fn tune(
        &mut self,
        place: usize,
        method: &'static Method,
        progress: &mut Progress<'_>,
    ) -> Result<bool> {
        if !self.task.is_tuned() {
            self.report.methods[place].lr = self.task.rates.first().copied();
            return Ok(false);
        }
        let mut runs: Vec<Vec<SeedReport>> = vec![];
        for &rate in &self.task.rates {
            let mut of_rate = vec![];
            for seed in self.plan.tuning_seeds() {
                match self.train(method, rate, seed, progress)? {
                    Outcome::Completed(run) => of_rate.push(run),
                    Outcome::Failed => {}
                    Outcome::Stopped => return Ok(true),
                }
            }
            let is_whole = of_rate.len() == self.plan.tuning_seeds().len();
            let scores = of_rate.iter().map(|run| run.control_score);
            let mean = scores.sum::<f64>() / of_rate.len() as f64;
            let control_score = Some(mean).filter(|mean| is_whole && mean.is_finite());
            self.report.methods[place].tuning.push(RateReport { lr: rate, control_score });
            runs.push(of_rate);
        }
        let report = &mut self.report.methods[place];
        report.choose();
        let best = self.task.rates.iter().position(|rate| report.lr == Some(*rate));
        for run in best.into_iter().flat_map(|best| runs.swap_remove(best)) {
            self.best.insert((method.name, run.seed), run);
        }
        Ok(false)
    }

    /// Trains one run, or reads its results if it is complete.
    fn train(
        &self,
        method: &'static Method,
        rate: f32,
        seed: u64,
        progress: &mut Progress<'_>,
    ) -> Result<Outcome> {
        progress.number += 1;
        let needed = |name: &&'static str| self.best.get(&(*name, seed)).map(|run| (*name, run));
        let needs = method.way.needs();
        let needed: BTreeMap<&str, &SeedReport> = needs.iter().filter_map(needed).collect();
        if needed.len() < needs.len() {
            return Ok(Outcome::Failed);
        }
        let run = self.task.run(method, rate, seed, &|needed_name| {
            let lr = self.report.methods.iter().find(|own| own.method == needed_name)?.lr?;
            Some((lr, *needed.get(needed_name)?))
        })?;
        let name = format!("{}: {}, lr {rate}", self.task.task.name, method.name);
        let Progress { number, of, ref mut has_trained, ref mut observer } = *progress;
        let planned = Planned { number, of, name: &name, seed, learns: false };
        if let Some(summary) = self.cells.read(&run, *observer)? {
            observer.run_is_complete(&planned);
            return Ok(Outcome::Completed(SeedReport::new(&summary)));
        }
        if observer.stop_requested() {
            return Ok(Outcome::Stopped);
        }
        *has_trained = true;
        observer.run_begins(&planned);
        match self.cells.finish(&run, *observer) {
            Ok(Some(summary)) => Ok(Outcome::Completed(SeedReport::new(&summary))),
            Ok(None) => Ok(Outcome::Stopped),
            Err(Error::Diverged { .. }) => Ok(Outcome::Failed),
            Err(error) => Err(error),
        }
    }
}

impl TaskReport {
    fn new(task: &TaskPlan) -> Self {
        let host = |host: &str| read_host(host).map(|host| host.to_string()).unwrap_or_default();
        let TrainConfig { steps, envs, .. } = task.settings;
        Self {
            task: task.task.name.into(),
            host: host(&task.settings.host),
            large: host(task.task.large),
            steps,
            envs,
            score: ScoreKind::default(),
            instruction_set: String::new(),
            methods: vec![],
        }
    }
}

//! The runs in a folder, with a summary row of each.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use meristem_data::path_text;
use meristem_grow::HostSpec;
use serde::Serialize;

use crate::config::types::TaskKind;
use crate::error::{Error, Result};
use crate::record::directory::Directory;
use crate::record::events::Recorded;
use crate::record::plain_file;
use crate::record::reading::history::RunHistory;
use crate::record::reading::settings::Settings;
use crate::record::reading::tail::EventTail;
use crate::record::run_folder::{LOCK, is_unfilled};
use crate::record::summary::{self, FoldSummary, Status, Summary};

/// Levels of folders below the given one that are searched. If it has the folder of a study, the
/// study's runs are in the third level; those of a bench of growth are in the fourth.
const DEPTH_MAX: usize = 4;
/// Entries of folders that are looked at.
const ENTRIES_MAX: usize = 100_000;
/// Bytes read from the end of an unfinished run's events.
const END_BYTES: u64 = 512 << 10;

/// State of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// A process writes to it.
    Running,
    /// All rounds were completed.
    Complete,
    /// It was asked to stop; it can be resumed.
    Stopped,
    /// It ended with an error.
    Failed,
    /// Its process ended without a summary; it can be resumed.
    Killed,
}

impl RunState {
    /// Displayed name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Complete => "complete",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Killed => "killed",
        }
    }

    /// State of a run whose last event has this status; failed if a later version added it.
    pub(super) fn from_recorded(status: &Recorded<Status>) -> Self {
        status.known().map_or(Self::Failed, Self::from)
    }
}

impl From<Status> for RunState {
    fn from(status: Status) -> Self {
        match status {
            Status::Completed => Self::Complete,
            Status::Interrupted => Self::Stopped,
            Status::Failed => Self::Failed,
        }
    }
}

/// A run in one row. Means are over its envs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overview {
    /// Path of its folder.
    #[serde(serialize_with = "path_text::serialize")]
    pub run: PathBuf,
    /// Whether the path is not UTF-8, so that its text in JSON is not the path.
    #[serde(skip_serializing_if = "path_text::is_exact")]
    pub path_is_lossy: bool,
    /// State.
    pub state: RunState,
    /// Controller setting.
    pub controller: Option<String>,
    /// Host description.
    pub host: Option<String>,
    /// Name of the dataset.
    pub dataset: Option<String>,
    /// Task, known once the run has started. Absent from JSON for `classify`; with another task,
    /// keys with `accuracy` in their names have the score of the task instead.
    #[serde(skip_serializing_if = "TaskKind::is_classify")]
    pub task: TaskKind,
    /// Seed.
    pub seed: Option<u64>,
    /// Steps so far over all rounds, and in the whole run.
    pub steps: Option<[u64; 2]>,
    /// Mean control score.
    #[serde(rename = "control_accuracy")]
    pub control_score: Option<f64>,
    /// Scores of the held-out folds; known once a run with folds and without members has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folds: Option<FoldSummary>,
    /// Mean test score; known once the run has ended.
    #[serde(rename = "test_accuracy")]
    pub test_score: Option<f64>,
    /// Mean number of trained parameters of host and modules.
    pub parameters: Option<f64>,
    /// Floating-point operations of training; known once the run has ended.
    pub training_flops: Option<u64>,
    /// Seconds from the start to the newest event.
    pub wall_seconds: Option<f64>,
    /// Seconds since the run was started.
    pub age_seconds: Option<f64>,
    /// Problem of the folder, or error of a failed run.
    pub problem: Option<String>,
    /// Steps per round, and number of rounds, from the settings.
    #[serde(skip)]
    pub(super) length: Option<[u64; 2]>,
}

/// Folder that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct UnreadableFolder {
    /// The folder.
    #[serde(serialize_with = "path_text::serialize")]
    pub folder: PathBuf,
    /// Whether the path is not UTF-8, so that its text in JSON is not the path.
    #[serde(skip_serializing_if = "path_text::is_exact")]
    pub path_is_lossy: bool,
    /// The reason.
    pub problem: String,
}

impl UnreadableFolder {
    /// A folder with the reason why it cannot be read.
    pub fn new(folder: PathBuf, problem: impl Into<String>) -> Self {
        Self { path_is_lossy: path_text::is_lossy(&folder), folder, problem: problem.into() }
    }
}

/// Runs that were found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FoundRuns {
    /// Folders of runs, in order of their paths.
    pub runs: Vec<PathBuf>,
    /// Folders that could not be read, with the reason.
    pub unreadable: Vec<UnreadableFolder>,
    /// Whether the folder has more entries than are looked at.
    pub truncated: bool,
}

/// Whether a folder has files of a run.
pub(crate) fn is_run(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    let begun = folder.join("weights").is_dir() && (has("config.toml") || has(LOCK));
    begun || has("events.jsonl") || has("summary.json")
}

/// The summary of a run that ended; `None` if there is none.
///
/// # Errors
/// [`Error::Unreadable`]: it is damaged, larger than 256 MB, or of a newer version.
pub(crate) fn read_summary(folder: &Path) -> Result<Option<Summary>> {
    let path = folder.join("summary.json");
    summary::read(folder).map_err(|error| Error::Unreadable { path, problem: error.to_string() })
}

/// Checks that a folder is a run folder.
///
/// # Errors
/// [`Error::NotARun`] with the reason.
pub fn check_is_run(folder: &Path) -> Result<()> {
    let problem = match folder.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => "there is no such folder".into(),
        Err(error) => error.to_string(),
        Ok(there) if !there.is_dir() => "it is not a folder".into(),
        Ok(_) if is_run(folder) => return Ok(()),
        Ok(_) => "it has neither events.jsonl nor summary.json".into(),
    };
    Err(Error::NotARun { path: folder.into(), problem })
}

/// Finds the runs in a folder and in the folders below, four levels deep. Links to folders below
/// are not followed. If `folder` is a run, it is the only one.
///
/// # Errors
/// [`Error::Unreadable`]: `folder` itself cannot be read.
pub fn find(folder: &Path) -> Result<FoundRuns> {
    let mut found = FoundRuns::default();
    if is_run(folder) {
        found.runs.push(folder.into());
        return Ok(found);
    }
    let mut entries_left = Some(ENTRIES_MAX);
    let mut pending = vec![(folder.to_path_buf(), 0)];
    while let Some((next, depth)) = pending.pop() {
        let folders = match folders_in(&next, &mut entries_left) {
            Ok(folders) => folders,
            Err(error) if depth == 0 => {
                let problem = match error.kind() {
                    io::ErrorKind::NotFound => "there is no such folder".into(),
                    _ => error.to_string(),
                };
                return Err(Error::Unreadable { path: next, problem });
            }
            // Removed in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                found.unreadable.push(UnreadableFolder::new(next, error.to_string()));
                continue;
            }
        };
        for folder in folders {
            if is_run(&folder) {
                found.runs.push(folder);
            } else if depth + 1 < DEPTH_MAX {
                pending.push((folder, depth + 1));
            }
        }
    }
    found.truncated = entries_left.is_none();
    found.runs.sort();
    found.unreadable.sort();
    Ok(found)
}

/// Folders in a folder. `entries_left` is the number of entries that may be looked at, and `None`
/// once there were more.
fn folders_in(folder: &Path, entries_left: &mut Option<usize>) -> io::Result<Vec<PathBuf>> {
    let mut folders = vec![];
    for entry in fs::read_dir(folder)? {
        *entries_left = entries_left.and_then(|left| left.checked_sub(1));
        if entries_left.is_none() {
            break;
        }
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

impl Overview {
    /// Reads the summary of a run, or else its first and last events. Unreadable parts are absent;
    /// [`Overview::problem`] has the reason.
    pub fn read(folder: &Path) -> Self {
        let mut row = Self::of_start(folder);
        let results = read_summary(folder);
        let locked = is_in_progress(folder);
        match results {
            Ok(Some(summary)) if !(locked && summary.status != Status::Completed) => {
                row.set_results(summary);
            }
            Ok(_) => row.set_progress(folder, locked),
            Err(error) => {
                row.set_progress(folder, locked);
                row.problem = Some(error.to_string());
            }
        }
        if !folder.is_dir() {
            row.problem = Some("the folder was removed while it was read".into());
        } else if !locked && Directory::open(folder).and_then(|f| is_unfilled(&f)).unwrap_or(false)
        {
            let problem = "it was killed before it had settings: give its command once more";
            row.problem = Some(problem.into());
        }
        row
    }

    /// Settings and age of the run.
    pub(super) fn of_start(folder: &Path) -> Self {
        let (settings, problem) = match Settings::read(folder) {
            Ok(settings) => (settings, None),
            Err(error) => (Settings::default(), Some(error.to_string())),
        };
        let begun = ["config.toml", "weights", "."]
            .iter()
            .find_map(|name| folder.join(name).metadata().and_then(|there| there.modified()).ok());
        let age = begun.and_then(|time| SystemTime::now().duration_since(time).ok());
        let number = |key: &str| settings.get(key).and_then(|text| text.parse::<u64>().ok());
        let length = number("steps").zip(number("rounds")).map(|(steps, rounds)| [steps, rounds]);
        Self {
            run: folder.into(),
            path_is_lossy: path_text::is_lossy(folder),
            state: RunState::Killed,
            controller: settings.get("controller"),
            host: settings.get("host").map(host_name),
            dataset: settings.get("dataset"),
            task: TaskKind::Classify,
            seed: number("seed"),
            steps: length.map(|[steps, rounds]| [0, steps.saturating_mul(rounds)]),
            control_score: None,
            folds: None,
            test_score: None,
            parameters: None,
            training_flops: None,
            wall_seconds: None,
            age_seconds: age.map(|age| age.as_secs_f64()),
            problem,
            length,
        }
    }

    /// Results of a run that ended.
    pub(super) fn set_results(&mut self, summary: Summary) {
        let envs = &summary.envs;
        self.task = summary.task;
        self.state = RunState::from(summary.status);
        self.control_score = mean(envs.iter().filter_map(|env| env.control_score));
        self.folds = summary.folds;
        self.test_score = mean(envs.iter().filter_map(|env| env.test_score));
        self.parameters = mean(envs.iter().map(|env| env.parameters as f64));
        self.training_flops = Some(summary.training_flops);
        self.wall_seconds = Some(summary.wall_seconds);
        self.set_identity(summary.controller, summary.host, summary.dataset.name, summary.seed);
        let all = self.steps.map_or(summary.steps, |[_, all]| all.max(summary.steps));
        self.steps = Some([summary.steps, all]);
        self.problem = summary.error.or(self.problem.take());
    }

    fn set_identity(&mut self, controller: String, host: String, dataset: String, seed: u64) {
        self.controller = Some(controller);
        self.host = Some(host);
        self.dataset = Some(dataset);
        self.seed = Some(seed);
    }

    /// State and figures of a run without a summary, from the first event and the last ones.
    fn set_progress(&mut self, folder: &Path, locked: bool) {
        self.state = if locked { RunState::Running } else { RunState::Killed };
        let events = folder.join("events.jsonl");
        let mut history = RunHistory::default();
        let mut start = EventTail::new(&events);
        let read = history
            .follow(&mut start, 1)
            .and_then(|_| history.follow(&mut EventTail::near_end(&events, END_BYTES), END_BYTES));
        if let Err(error) = read {
            // A run that is being prepared has no events yet.
            let begins = locked && !events.exists();
            self.problem = self.problem.take().or((!begins).then(|| error.to_string()));
            return;
        }
        self.set_figures(&history);
        if let (Some((status, error)), false) = (history.ended, locked) {
            self.state = RunState::from_recorded(&status);
            self.problem = self.problem.take().or(error);
        }
    }

    /// Figures of the newest step.
    pub(super) fn set_figures(&mut self, history: &RunHistory) {
        if let Some(started) = history.started.clone() {
            // The first event has the length from before an extension.
            let began = [started.steps, started.rounds].map(|number| number as u64);
            let [steps, rounds] = self.length.unwrap_or(began);
            let done = history.envs.values().filter_map(|env| env.last.as_ref()).map(|step| {
                (step.round as u64).saturating_mul(steps).saturating_add(step.step as u64 + 1)
            });
            let done = done.max().unwrap_or(0);
            // With places, members that wait make the run longer, and those that end early shorter.
            let waves = started
                .places
                .map_or(1, |places| started.members.len().div_ceil(places.max(1)).max(1) as u64);
            let all = steps.saturating_mul(rounds).saturating_mul(waves);
            self.steps = Some([done, all.max(done)]);
            let [controller, host] = [started.controller.to_string(), started.host.to_string()];
            self.task = started.task;
            self.set_identity(controller, host, started.dataset, started.seed);
        }
        let last = || history.envs.values().filter_map(|env| env.last.as_ref());
        self.control_score = mean(last().filter_map(|step| step.control_score));
        self.parameters =
            mean(last().map(|step| step.host_parameters as f64 + step.grown_parameters as f64));
        self.wall_seconds = Some(history.seconds);
    }
}

/// The name of a host in settings, which may have its whole description.
fn host_name(text: String) -> String {
    text.parse::<HostSpec>().map_or(text, |host| host.name())
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Whether a process writes to the folder of a run. Takes a shared lock for an instant; a run that
/// starts there waits for its release.
pub fn is_in_progress(folder: &Path) -> bool {
    let Ok(Some(lock)) = plain_file::open(&folder.join(LOCK)) else { return false };
    matches!(File::try_lock_shared(&lock), Err(TryLockError::WouldBlock))
}

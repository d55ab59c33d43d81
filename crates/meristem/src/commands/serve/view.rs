//! Views: the contents of a URL, as parts of a page and as JSON.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::MutexGuard;

use meristem::train::reading::{
    Curve, EnvHistory, Follower, Overview, Run, RunState, UnreadableFolder,
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde_json::{Map, Value, json};

use super::address::{BYTES, Missing, Subject};
use super::library::{Library, lock};
use super::work::CancelToken;
use crate::commands::runs::compare;
use crate::page::{self, Html, Part, side_by_side};
use crate::plain::{duration, thousands};
use crate::score;

/// Characters that are not escaped in the path of a URL.
const PLAIN: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'/');
/// Maximum number of runs in a comparison.
const COMPARED_MAX: usize = 16;
/// Maximum number of rows of the list; older runs are omitted.
const ROWS_MAX: usize = 1000;

/// A page and its runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum View {
    List,
    Run(PathBuf),
    Compare(Vec<PathBuf>),
}

/// A name as part of a URL.
fn encoded(name: &Path) -> String {
    percent_encode(name.as_os_str().as_encoded_bytes(), &PLAIN).to_string()
}

impl View {
    /// The view of a subject.
    ///
    /// # Errors
    /// A run does not exist, or there are too few or too many runs.
    pub(super) fn of(
        subject: &Subject,
        library: &Library,
        cancel: &CancelToken,
    ) -> Result<Self, Missing> {
        let run = |name: &Vec<u8>| {
            let run = library.run(name, cancel);
            run.ok_or("there is no such run in the served folder".to_string())
        };
        match subject {
            Subject::List => Ok(Self::List),
            Subject::Run(name) => run(name).map(Self::Run),
            Subject::Compare(names) => {
                // Sorted without duplicates, because each run is locked while it is drawn.
                let runs: Result<BTreeSet<PathBuf>, Missing> = names.iter().map(run).collect();
                let runs: Vec<PathBuf> = runs?.into_iter().collect();
                match runs.len() {
                    2..=COMPARED_MAX => Ok(Self::Compare(runs)),
                    count => {
                        Err(format!("choose 2 to {COMPARED_MAX} runs to compare, not {count}"))
                    }
                }
            }
        }
    }

    pub(super) fn title(&self, library: &Library) -> String {
        match self {
            Self::List => "Runs".into(),
            Self::Run(run) => label(library, run),
            Self::Compare(runs) => format!("Comparison of {} runs", runs.len()),
        }
    }

    /// Parts of the page.
    ///
    /// # Errors
    /// A run is no longer there.
    pub(super) fn parts(
        &self,
        library: &Library,
        cancel: &CancelToken,
    ) -> Result<Vec<Part>, Missing> {
        match self {
            Self::List => Ok(list(library, cancel)),
            Self::Run(run) => one(library, run, cancel),
            Self::Compare(runs) => with_runs(library, runs, cancel, |all| {
                let mut names = Html::default();
                for (run, path) in all.iter().zip(runs) {
                    let mut entry = link(library, path);
                    entry.push(Html::text(&format!(" {}", run.overview.state.name())));
                    names.push(Html::element("li", "", entry));
                }
                let mut parts = vec![Part::new("names", Html::element("ol", "", names))];
                parts.extend(page::comparison(all));
                parts
            }),
        }
    }

    /// The contents as JSON.
    ///
    /// # Errors
    /// A run is no longer there.
    pub(super) fn json(&self, library: &Library, cancel: &CancelToken) -> Result<Value, Missing> {
        match self {
            Self::List => {
                let list = library.list(cancel);
                let runs = list.rows.iter().map(|row| {
                    let name = encoded(library.name(&row.run));
                    let mut value = score::row(row);
                    value["name"] = name.into();
                    value
                });
                let unreadable = &list.found.unreadable;
                Ok(json!({"runs": runs.collect::<Vec<_>>(), "unreadable": unreadable,
                    "truncated": list.found.truncated, "unread": list.unread}))
            }
            Self::Run(run) => {
                let follower = library.follow(run, cancel).map_err(|error| error.to_string())?;
                let follower = lock(&follower);
                Ok(run_json(&follower))
            }
            Self::Compare(runs) => with_runs(library, runs, cancel, compare::as_json),
        }
    }
}

fn label(library: &Library, run: &Path) -> String {
    let name = library.name(run);
    let name = if name.as_os_str().is_empty() { run } else { name };
    name.display().to_string()
}

fn link(library: &Library, run: &Path) -> Html {
    let url = library.base.to(&format!("/run/{}", encoded(library.name(run))));
    Html::anchor(&url, &label(library, run))
}

/// Reads the new events of runs, and calls `show` with all of them locked, in the given order.
fn with_runs<T>(
    library: &Library,
    runs: &[PathBuf],
    cancel: &CancelToken,
    show: impl FnOnce(&[&Run]) -> T,
) -> Result<T, Missing> {
    let followed: Result<Vec<_>, _> = runs.iter().map(|run| library.follow(run, cancel)).collect();
    let followed = followed.map_err(|error| error.to_string())?;
    let locked: Vec<MutexGuard<'_, Follower>> = followed.iter().map(|run| lock(run)).collect();
    let all: Vec<&Run> = locked.iter().map(|follower| &follower.run).collect();
    Ok(show(&all))
}

fn list(library: &Library, cancel: &CancelToken) -> Vec<Part> {
    let list = library.list(cancel);
    let mut notes = Html::default();
    let mut note = |words: String| notes.push(Html::of("p", &words));
    if list.found.runs.is_empty() {
        note("There are no runs in this folder. `meristem train` makes one.".into());
    }
    if list.rows.len() > ROWS_MAX {
        note(format!("The newest {} of {} runs.", thousands(ROWS_MAX as u64), list.rows.len()));
    }
    if list.unread > 0 {
        let unread = thousands(list.unread as u64);
        note(format!("Reading the runs: {unread} more are not in the list yet."));
    }
    if list.found.truncated {
        note("Only the first 100,000 entries were searched; serve a folder below.".into());
    }
    for UnreadableFolder { folder, problem, .. } in &list.found.unreadable {
        note(format!("Cannot read {}: {problem}", label(library, folder)));
    }
    let header = ["run", "state", "controller", "control", "test", "parameters", "steps", "age"];
    let mut rows = vec![header.map(Html::text).to_vec()];
    for row in list.rows.iter().take(ROWS_MAX) {
        if let Some(problem) = &row.problem {
            note(format!("{}: {problem}", label(library, &row.run)));
        }
        let name = library.name(&row.run);
        let choice = format!("compare {}", label(library, &row.run));
        let mut first = match name.to_str() {
            Some(name) => Html::checkbox("run", name, &choice),
            None => Html::checkbox(BYTES, &encoded(name), &choice),
        };
        first.push(link(library, &row.run));
        let text = |text: String| Html::text(&text);
        rows.push(vec![
            first,
            state(row.state),
            text(row.controller.clone().unwrap_or("–".into())),
            text(score::named(row.task.score(), row.control_score)),
            text(score::named(row.task.score(), row.test_score)),
            text(row.parameters.map_or("–".into(), |count| thousands(count.round() as u64))),
            text(row.steps.map_or("–".into(), |[done, all]| format!("{done}/{all}"))),
            text(row.age_seconds.map_or("–".into(), page::age)),
        ]);
    }
    let table = if list.rows.is_empty() {
        Html::default()
    } else {
        Html::table_of("Runs, the newest first", rows)
    };
    vec![Part::new("list", table), Part::new("notes", notes)]
}

/// A state with its name and colour.
fn state(state: RunState) -> Html {
    let class = match state {
        RunState::Running => "class=\"state running\"",
        RunState::Complete => "class=\"state complete\"",
        RunState::Stopped => "class=\"state stopped\"",
        RunState::Failed => "class=\"state failed\"",
        RunState::Killed => "class=\"state killed\"",
    };
    Html::element("span", class, Html::text(state.name()))
}

fn one(library: &Library, run: &PathBuf, cancel: &CancelToken) -> Result<Vec<Part>, Missing> {
    let follower = library.follow(run, cancel).map_err(|error| error.to_string())?;
    let follower = lock(&follower);
    let mut parts = vec![Part::new("now", now(&follower))];
    let results = page::results(&[&follower.run]);
    parts.push(Part::new("results", side_by_side("Results", &results)));
    parts.extend(page::about(&follower.run));
    Ok(parts)
}

/// State, progress and speed of a run.
fn now(follower: &Follower) -> Html {
    let Overview { state: run_state, .. } = follower.run.overview;
    let history = &follower.run.history;
    let mut line = state(run_state);
    if let Some(started) = &history.started {
        let steps = history.envs.values().filter_map(|env| env.last.as_ref());
        let step = steps.map(|step| step.step).max().map_or(0, |step| step.saturating_add(1));
        let round = history.round.saturating_add(1);
        let mut words = format!(" round {round}/{}, step {step}/{}", started.rounds, started.steps);
        if let (Some(speed), RunState::Running) = (history.images_per_s.last(), run_state) {
            words.push_str(&format!(", {} samples/s", thousands(speed as u64)));
        }
        if let Ok(time) = std::time::Duration::try_from_secs_f64(history.seconds) {
            words.push_str(&format!(", {}", duration(time)));
        }
        line.push(Html::text(&words));
    }
    let mut body = Html::element("p", "class=\"now\"", line);
    if follower.is_reading {
        let read = thousands(follower.bytes_read() / 1_000_000);
        body.push(Html::of("p", &format!("Reading its events: {read} MB so far.")));
    }
    if let Some(problem) = &follower.problem {
        body.push(Html::element("p", "class=\"problem\"", Html::text(problem)));
    }
    if let Some((_, Some(error))) = &history.ended {
        body.push(Html::element("p", "class=\"problem\"", Html::text(error)));
    }
    body
}

fn run_json(follower: &Follower) -> Value {
    let Run { overview, settings, history, skipped, .. } = &follower.run;
    let key = overview.task.score().key();
    let [control, twin] = ["control", "twin"].map(|of| format!("{of}_{key}"));
    let env = |env: &EnvHistory| {
        json!({
            &*control: points(&env.control_score),
            &*twin: points(&env.twin_score),
            "train_loss": points(&env.train_loss),
            "control_loss": points(&env.control_loss),
            "parameters": points(&env.parameters),
            "slots": env.last.as_ref().map(|step| &step.slots),
            "action": env.last.as_ref().map(|step| &step.action),
        })
    };
    let envs = history.envs.iter().map(|(number, history)| (number.to_string(), env(history)));
    json!({
        "overview": score::row(overview),
        "round": history.round,
        "reading": follower.is_reading,
        "problem": follower.problem,
        "skipped_lines": skipped.damaged + skipped.unknown + skipped.newer,
        "settings": settings.all(),
        &*control: points(&history.score),
        &*twin: points(&history.twin_score),
        "train_loss": points(&history.train_loss),
        "parameters": points(&history.parameters),
        "images_per_s": points(&history.images_per_s),
        "envs": envs.collect::<Map<_, _>>(),
        "policy": {
            "mean_return": points(&history.policy.mean_return),
            "kl": points(&history.policy.kl),
            "explained_variance": points(&history.policy.explained_variance),
        },
    })
}

fn points(curve: &Curve) -> Vec<[f64; 2]> {
    curve.points()
}

//! TensorBoard event file of a run, written from its events: as a whole, or while the run goes on.
//!
//! The file is a function of `events.jsonl`. While a run goes on, a separate thread reads the
//! events from the file and appends to the event file, so that training is not affected. A resumed
//! run replaces its event file, from the events up to its checkpoint, so that no step occurs twice.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use meristem_control::{ActionOp, HEADS, OpCounts, RoundReport, counted_ops};
use meristem_export::tensorboard::{self, SeriesValue};
use meristem_nn::ScoreKind;

use crate::error::{Error, Result};
use crate::record::directory::Directory;
use crate::record::events::{Event, Extension, RunStarted, StepCompleted};
use crate::record::reading::{EventLine, EventTail, Reached, Settings, Skipped, check_is_run};

/// Folder of the event file in the folder of a run.
pub(crate) const FOLDER: &str = "tensorboard";
/// Beginning of the names of the files that TensorBoard reads.
const BEGINNING: &str = "events.out.tfevents.";
/// End of the names of our own files.
const END: &str = ".meristem";
/// Bytes of events that are read at a time.
const PART_BYTES: u64 = 16 << 20;
/// Most characters of a member's settings in the name of a series.
const SETTINGS_MAX: usize = 80;
/// Time between two looks for new events.
const INTERVAL: Duration = Duration::from_secs(1);

/// Report of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedBoard {
    /// Path of the event file.
    pub file: PathBuf,
    /// Number of records in it, without the two that begin the file.
    pub records: u64,
    /// Lines of `events.jsonl` that were not understood.
    pub skipped: Skipped,
}

/// Writes the events of a run so far to a new event file in `folder`, which is created if it does
/// not exist.
///
/// # Errors
/// [`Error::NotARun`]; [`Error::Unreadable`]: its events cannot be read; [`Error::Value`]: the
/// folder has event files already, or no file can be created there; [`Error::RunFolder`]: a write
/// failed.
pub fn export(run: &Path, folder: &Path) -> Result<ExportedBoard> {
    check_is_run(run)?;
    let refuse = |expected: String| Err(Error::value("out", folder.display(), expected));
    let is_new = !folder.exists();
    if let Err(error) = fs::create_dir_all(folder) {
        return refuse(format!("a folder that can be created or exists ({error})"));
    }
    if !event_files(folder)?.is_empty() {
        return refuse(
            "a folder without event files; with two files steps would be doubled".into(),
        );
    }
    let name = format!("{BEGINNING}{:010}{END}", seconds_now());
    let begun = Directory::open(folder)
        .and_then(|directory| Ok((directory.create_part(name.as_ref())?, directory)));
    let written = match begun {
        Err(error) => refuse(format!("a writable folder ({error})")),
        Ok(((part, file), directory)) => {
            // The first error is reported, even if cleaning up fails.
            write_whole(run, file, &part, &name, &directory)
                .inspect_err(|_| _ = directory.remove_file(&part))
        }
    };
    // A folder with other files stays.
    written.inspect_err(|_| _ = is_new.then(|| fs::remove_dir(folder)))
}

/// Writes all events to `to`, the file `part` in a directory, and renames it to `name`.
fn write_whole(
    run: &Path,
    to: File,
    part: &str,
    name: &str,
    directory: &Directory,
) -> Result<ExportedBoard> {
    let path = directory.path().join(name);
    let mut board = Board::new(run, to, path.clone())?;
    board.copy()?;
    let Board { tail, records, .. } = board;
    directory.finish_part(part, name.as_ref()).map_err(|source| Error::RunFolder {
        action: "write",
        path: path.clone(),
        source,
    })?;
    Ok(ExportedBoard { file: path, records, skipped: tail.skipped() })
}

/// The event file of a run in progress.
#[derive(Debug)]
pub(crate) struct LiveBoard {
    path: PathBuf,
    /// Dropped to end the thread.
    ends: SyncSender<()>,
    thread: JoinHandle<Result<()>>,
}

impl LiveBoard {
    /// Creates the event file of the run in the folder `run`, in place of the file from before a
    /// resume, and starts the thread that writes it.
    ///
    /// # Errors
    /// [`Error::RunFolder`]: the file or the thread cannot be created.
    pub(crate) fn start(run: &Directory) -> Result<Self> {
        let failed = |path: &Path, source| Error::RunFolder {
            action: "write",
            path: path.to_owned(),
            source,
        };
        let in_folder = |source| failed(&run.path().join(FOLDER), source);
        let folder = run.create_below(FOLDER).map_err(in_folder)?;
        let mut older = folder.names().map_err(in_folder)?;
        older.retain(|name| name.starts_with(BEGINNING) && name.ends_with(END));
        let seconds = |name: &str| name.strip_prefix(BEGINNING)?.strip_suffix(END)?.parse().ok();
        let last: u64 = older.iter().filter_map(|name| seconds(name)).max().unwrap_or_default();
        for name in older {
            folder.remove_file(&name).map_err(|e| failed(&folder.path().join(&name), e))?;
        }
        // TensorBoard reads a new file only if its name sorts after the previous one.
        let name = format!("{BEGINNING}{:010}{END}", seconds_now().max(last + 1));
        let path = folder.path().join(&name);
        let file = folder.create_new(&name).map_err(|source| failed(&path, source))?;
        let board = Board::new(run.path(), file, path.clone())?;
        let (ends, ended) = sync_channel(0);
        let thread = std::thread::Builder::new().name("tensorboard".into());
        let thread = thread.spawn(move || follow(board, &ended));
        let thread = thread.map_err(|source| failed(&path, source))?;
        Ok(Self { path, ends, thread })
    }

    /// Writes the remaining events and closes the file. Called after all events are on the disk.
    ///
    /// # Errors
    /// [`Error::RunFolder`]: a write failed, now or earlier; [`Error::Unreadable`].
    pub(crate) fn finish(self) -> Result<()> {
        drop(self.ends);
        self.thread.join().unwrap_or_else(|_| {
            let source = std::io::Error::other("its thread panicked");
            Err(Error::RunFolder { action: "write", path: self.path, source })
        })
    }
}

/// Appends new events to the file until the run ends.
fn follow(mut board: Board, ended: &Receiver<()>) -> Result<()> {
    loop {
        let last = ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout);
        board.copy()?;
        if last {
            return Ok(());
        }
    }
}

/// Names of the event files in a folder.
fn event_files(folder: &Path) -> Result<Vec<String>> {
    let failed = |source| Error::RunFolder { action: "read", path: folder.to_owned(), source };
    let names = fs::read_dir(folder).map_err(failed)?.filter_map(|entry| {
        let name = entry.ok()?.file_name().to_string_lossy().into_owned();
        name.starts_with(BEGINNING).then_some(name)
    });
    Ok(names.collect())
}

/// Seconds since 1970.
fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// An event file that is being written.
struct Board {
    tail: EventTail,
    to: BufWriter<File>,
    /// Path of the file, for errors.
    path: PathBuf,
    records: u64,
    settings: Settings,
    place: BoardPosition,
}

impl Board {
    /// Begins the file at `path`, of the run in the folder `run`.
    fn new(run: &Path, file: File, path: PathBuf) -> Result<Self> {
        let mut to = BufWriter::new(file);
        // `config.toml` is written when the run begins.
        let began = run.join("config.toml").metadata().and_then(|there| there.modified()).ok();
        let began = began.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let began = began.unwrap_or_default().as_secs_f64();
        let place = BoardPosition { began, ..BoardPosition::default() };
        let failed = |source| Error::RunFolder { action: "write", path: path.clone(), source };
        to.write_all(&tensorboard::file_start(began)).map_err(failed)?;
        let tail = EventTail::new(&run.join("events.jsonl"));
        let settings = Settings::read(run).unwrap_or_default();
        Ok(Self { tail, to, path, records: 0, settings, place })
    }

    /// Writes the records of all events that have come since the last call.
    fn copy(&mut self) -> Result<()> {
        let Self { tail, to, path, records, settings, place } = self;
        let mut written = Ok(());
        let reached = loop {
            let reached = tail.read(PART_BYTES, &mut |line| {
                for record in place.records(&line, settings) {
                    *records += 1;
                    if written.is_ok() {
                        written = to.write_all(&record);
                    }
                }
            })?;
            if reached != Reached::Limit || written.is_err() {
                break reached;
            }
        };
        if reached == Reached::Restarted {
            let problem = "the events of the run were cut while they were read: try again".into();
            return Err(Error::Unreadable { path: path.clone(), problem });
        }
        let flushed = written.and_then(|()| to.flush());
        flushed.map_err(|source| Error::RunFolder { action: "write", path: path.clone(), source })
    }
}

/// Place in a run, and its current step.
#[derive(Default)]
struct BoardPosition {
    /// Seconds from 1970 to the start of the run.
    began: f64,
    /// Steps of a round.
    steps: usize,
    /// Settings of each member now; empty without members.
    members: Vec<String>,
    /// Kind of the scores.
    score: ScoreKind,
    /// The step whose envs are being read; `None` before the first and after the last one.
    current: Option<CurrentStep>,
}

/// A step of which at least one env was read. It ends with the first event that comes after all its
/// envs; their number is not known, because members end, or wait for a place.
struct CurrentStep {
    round: usize,
    step: usize,
    /// Seconds from 1970 to its newest event.
    time: f64,
    /// Actions of its envs by op.
    actions: OpCounts,
}

impl BoardPosition {
    /// Records of an event.
    fn records(&mut self, line: &EventLine, settings: &Settings) -> Vec<Vec<u8>> {
        let time = self.began + line.seconds;
        let ended = self.end_step(&line.event);
        ended.into_iter().chain(self.records_of(&line.event, time, settings)).collect()
    }

    /// Records of an event of the current step, or of none.
    fn records_of(&mut self, event: &Event, time: f64, settings: &Settings) -> Vec<Vec<u8>> {
        match event {
            Event::RunStarted(run) => {
                self.steps = run.steps;
                self.members = run.members.clone();
                self.score = run.task.score();
                let texts = vec![("settings".into(), SeriesValue::Text(settings_table(settings)))];
                let texts =
                    texts.into_iter().chain([("run".into(), SeriesValue::Text(described(run)))]);
                let members = (!run.members.is_empty()).then(|| self.members_table());
                let texts = texts.chain(members.map(|text| ("members".into(), text)));
                vec![tensorboard::values(time, 0, texts.collect())]
            }
            // Steps are added in the first round only, so those before a round are known.
            Event::RunExtended(Extension { steps, .. }) => {
                self.steps = *steps;
                vec![]
            }
            Event::StepCompleted(step) => {
                let at = self.steps_before(step.round) + step.step as u64 + 1;
                let mut values = of_step(step, self.score, &self.series_of(step.env));
                if self.count(step, time) {
                    values.extend(speed(step));
                }
                vec![tensorboard::values(time, at, values)]
            }
            Event::MemberBegun { member, round, step, settings } => self.member_changes(
                time,
                self.steps_before(*round) + *step as u64,
                *member,
                settings,
            ),
            Event::MemberCopied { member, round, step, settings, .. } => {
                let at = self.steps_before(*round) + *step as u64 + 1;
                self.member_changes(time, at, *member, settings)
            }
            Event::EpisodeEnded { env, round, test_score, test_loss, .. } => {
                let score = format!("test_{}", self.score.key());
                let figures = [(&*score, *test_score), ("test_loss", *test_loss)];
                let series = self.series_of(*env);
                let values = scalars(figures, |name| format!("{name}/{series}"));
                let at = self.steps_before(round + 1);
                (!values.is_empty())
                    .then(|| tensorboard::values(time, at, values))
                    .into_iter()
                    .collect()
            }
            Event::PolicyUpdated { round, report } => {
                vec![tensorboard::values(time, self.steps_before(round + 1), of_policy(report))]
            }
            _ => vec![],
        }
    }

    /// Name of the series of an env, with the settings of its member.
    fn series_of(&self, env: usize) -> String {
        let member = env.checked_rem(self.members.len()).map(|number| &self.members[number]);
        match member.filter(|settings| !settings.is_empty()) {
            None => format!("env {env}"),
            Some(settings) if settings.chars().count() > SETTINGS_MAX => {
                let settings: String = settings.chars().take(SETTINGS_MAX).collect();
                format!("env {env}: {settings}…")
            }
            Some(settings) => format!("env {env}: {settings}"),
        }
    }

    /// Takes over and records new settings of a member.
    fn member_changes(
        &mut self,
        time: f64,
        at: u64,
        member: usize,
        settings: &str,
    ) -> Vec<Vec<u8>> {
        match self.members.get_mut(member) {
            Some(known) if known != settings => *known = settings.into(),
            _ => return vec![],
        }
        let text = SeriesValue::Text(cell(settings));
        vec![tensorboard::values(time, at, vec![(format!("members/member {member}"), text)])]
    }

    /// The settings of all members as a table in Markdown.
    fn members_table(&self) -> SeriesValue {
        let members = self.members.iter().enumerate();
        let rows = members.map(|(number, own)| format!("| {number} | {} |\n", cell(own)));
        let rows = rows.collect::<String>();
        SeriesValue::Text(format!("| member | settings |\n|---|---|\n{rows}"))
    }

    /// Steps of the rounds before `round`.
    fn steps_before(&self, round: usize) -> u64 {
        round as u64 * self.steps as u64
    }

    /// Counts the action of an env. Returns whether it is the first env of its step.
    fn count(&mut self, step: &StepCompleted, time: f64) -> bool {
        let is_first = self.current.is_none();
        let StepCompleted { round, step: number, .. } = *step;
        let actions = OpCounts::default();
        let new = CurrentStep { round, step: number, time, actions };
        let current = self.current.get_or_insert(new);
        current.time = time;
        let name = step.action.split_whitespace().next().unwrap_or_default();
        if let Some(op) = ActionOp::ALL.iter().find(|op| op.name() == name) {
            current.actions[op.index()] += 1;
        }
        is_first
    }

    /// The histogram of the current step's actions, if `event` comes after the step.
    fn end_step(&mut self, event: &Event) -> Option<Vec<u8>> {
        let is_after = |current: &CurrentStep| match event {
            Event::StepCompleted(step) => (step.round, step.step) != (current.round, current.step),
            Event::CheckpointWritten { .. }
            | Event::RoundStarted { .. }
            | Event::EpisodeEnded { .. }
            | Event::PolicyUpdated { .. }
            | Event::RunEnded { .. } => true,
            _ => false,
        };
        let CurrentStep { round, step, time, actions } = self.current.take_if(|of| is_after(of))?;
        let at = self.steps_before(round) + step as u64 + 1;
        let counts = SeriesValue::Counts(counted_ops(&actions).to_vec());
        Some(tensorboard::values(time, at, vec![("actions".into(), counts)]))
    }
}

/// Values that are known and finite, under the names that `tag` makes.
fn scalars<'a>(
    figures: impl IntoIterator<Item = (&'a str, Option<f64>)>,
    tag: impl Fn(&str) -> String,
) -> Vec<(String, SeriesValue)> {
    let known = figures.into_iter().filter_map(|(name, value)| {
        Some((tag(name), SeriesValue::Scalar(value.filter(|value| value.is_finite())?)))
    });
    known.collect()
}

/// The speed of a step, which is that of all envs together.
fn speed(step: &StepCompleted) -> Vec<(String, SeriesValue)> {
    let speed = [("step_seconds", step.step_seconds), ("images_per_s", step.images_per_s)];
    scalars(speed, |name| format!("speed/{name}"))
}

/// Values of a step of an env, whose series have the name `series`.
fn of_step(step: &StepCompleted, score: ScoreKind, series: &str) -> Vec<(String, SeriesValue)> {
    let parameters = (step.host_parameters + step.grown_parameters) as f64;
    let named = ["train_", "control_", "twin_control_"].map(|of| format!("{of}{}", score.key()));
    let [train, control, twin] = named.each_ref().map(String::as_str);
    let figures = [
        ("train_loss", Some(step.train_loss)),
        (train, Some(step.train_score)),
        ("control_loss", step.control_loss),
        (control, step.control_score),
        ("host_gradient_norm", step.host_gradient_norm),
        ("parameters", Some(parameters)),
        ("reward", Some(step.reward.total())),
        ("twin_train_loss", step.twin.and_then(|twin| twin.train_loss)),
        ("twin_control_loss", step.twin.and_then(|twin| twin.control_loss)),
        (twin, step.twin.and_then(|twin| twin.control_score)),
    ];
    let mut values = scalars(figures, |name| format!("{name}/{series}"));
    for slot in &step.slots {
        let figures = [("alpha", Some(slot.alpha)), ("contribution", slot.contribution)];
        values.extend(scalars(figures, |name| format!("{name}/{series} {}", slot.slot)));
    }
    values
}

fn of_policy(report: &RoundReport) -> Vec<(String, SeriesValue)> {
    let figures = [
        ("mean_return", report.mean_return),
        ("kl", report.kl),
        ("clip_fraction", report.clip_fraction),
        ("policy_objective", report.policy_objective),
        ("value_loss", report.value_loss),
        ("gradient_norm", report.gradient_norm),
        ("explained_variance", report.explained_variance),
        ("return_scale", report.return_scale),
    ];
    let figures = figures.map(|(name, value)| (name, Some(value)));
    let mut values = scalars(figures, |name| format!("policy/{name}"));
    let entropies = HEADS.iter().zip(report.entropies).map(|(head, e)| (head.name, Some(e)));
    values.extend(scalars(entropies, |head| format!("policy_entropy/{head}")));
    values.push(("policy/actions".into(), SeriesValue::Counts(counted_ops(&report.ops).to_vec())));
    values
}

/// Text of a cell in Markdown.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

/// The settings as a table in Markdown.
fn settings_table(settings: &Settings) -> String {
    let rows =
        settings.all().into_iter().map(|(key, value)| format!("| {key} | {} |\n", cell(&value)));
    format!("| setting | value |\n|---|---|\n{}", rows.collect::<String>())
}

/// Description of a run in Markdown, with the meaning of the values in histograms of actions.
fn described(run: &RunStarted) -> String {
    let ops = ActionOp::ALL.iter().map(|op| format!("{} {}", op.index(), op.name()));
    format!(
        "{} envs of `{}` on {}, controller {}, {}, meristem {}\n\nActions in histograms: {}",
        run.envs,
        run.host,
        run.dataset,
        run.controller,
        run.instruction_set,
        run.program_version,
        ops.collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn step(env: usize, step: usize) -> Value {
        json!({"event": "step_completed", "env": env, "round": 0, "step": step,
            "train_loss": 1.0, "train_accuracy": 0.5, "control_loss": null,
            "control_accuracy": null, "host_gradient_norm": null, "host_parameters": 10,
            "grown_parameters": 5, "action": "WAIT", "step_seconds": 1.0, "images_per_s": 2.0,
            "reward": {"gain": null, "rent": 0.0, "potential": 0.0, "fossilize": 0.0, "prune": 0.0,
                "op": 0.0, "result": 0.0},
            "slots": []})
    }

    /// The steps of the records of `events` that have a tag with the beginning `tag`, in order. A
    /// record has its step in field 2.
    fn records(events: &[Value], tag: &str) -> Vec<u64> {
        let mut place = BoardPosition { steps: 4, ..BoardPosition::default() };
        let settings = Settings::default();
        let line = |event: &Value| EventLine {
            seq: 0,
            seconds: 1.0,
            event: serde_json::from_value(event.clone()).unwrap(),
        };
        let all = events.iter().flat_map(|event| place.records(&line(event), &settings));
        let has_tag = |record: &Vec<u8>| record.windows(tag.len()).any(|w| w == tag.as_bytes());
        // After 12 bytes of length and checksum: field 1 with the time, field 2 with the step.
        all.filter(has_tag).map(|record| u64::from(record[12 + 1 + 8 + 1])).collect()
    }

    /// The envs of a step need not be all: members end, or wait for a place, env 0 among them.
    #[test]
    fn a_step_ends_when_another_begins() {
        let ended = json!({"event": "members_ended", "members": [0], "round": 0, "step": 0,
            "reason": "patience", "left": 1});
        let end = json!({"event": "run_ended", "status": "completed", "error": null, "steps": 3,
            "images": 9, "wall_seconds": 1.0});
        let events = [step(0, 0), step(1, 0), ended, step(1, 1), step(1, 2), end];
        assert_eq!(records(&events, "actions"), [1, 2, 3]);
        assert_eq!(records(&events, "speed/images_per_s"), [1, 2, 3]);
        assert_eq!(records(&events, "train_loss/env 1"), [1, 2, 3]);
    }

    /// A round begins after all steps of the rounds before it, those of an extension among them.
    #[test]
    fn an_extended_round_does_not_overlap_the_next() {
        let extended =
            json!({"event": "run_extended", "round": 0, "step": 1, "steps": 6, "rounds": 2});
        let next = json!({"event": "round_started", "round": 1});
        let mut last = step(0, 0);
        last["round"] = 1.into();
        let events = [step(0, 0), extended, step(0, 5), next, last];
        assert_eq!(records(&events, "train_loss/env 0"), [1, 6, 7]);
    }
}

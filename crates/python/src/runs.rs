//! Runs: training, resuming, and reading of run folders.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use meristem_control::Controller;
use meristem_data::Split;
use meristem_device::DeviceId;
use meristem_nn::{Network, ScoreKind};
use meristem_train::eval::{EnsembleConfig, evaluate_ensemble};
use meristem_train::external::{Custom, Searcher};
use meristem_train::policy_training::{CurveLine, TrainingObserver};
use meristem_train::reading::{EventTail, Reached, Run};
use meristem_train::study::StudyObserver;
use meristem_train::{self as engine, Event, Notice, Observer, Summary};
use pyo3::exceptions::{PyUserWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::calls::detached;
use crate::columns::Tables;
use crate::controller::{Callable, Raised};
use crate::errors::Failure;
use crate::json::{scores_to_python, to_python};
use crate::loss::PyLoss;
use crate::searcher::PySearcher;
use crate::settings;

/// Minimum time between two checks for Ctrl-C, which need the GIL.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Bytes of events that are read at a time.
const PART_BYTES: u64 = 64 << 20;

/// Observer of a run for Python: checks for Ctrl-C, and calls `on_event`.
pub(crate) struct RunObserver {
    /// Time of the last check for Ctrl-C.
    checked: Instant,
    on_event: Option<Py<PyAny>>,
    /// The first exception, which ends the run at the next step boundary.
    raised: Option<PyErr>,
    /// Kind of the run's scores.
    score: ScoreKind,
}

/// Callbacks of the caller.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Hooks {
    on_event: Option<Py<PyAny>>,
    controller: Option<Py<PyAny>>,
    searcher: Option<Py<PyAny>>,
    loss: Option<Py<PyAny>>,
}

impl RunObserver {
    fn new(on_event: Option<Py<PyAny>>) -> Self {
        Self { checked: Instant::now(), on_event, raised: None, score: ScoreKind::default() }
    }

    /// Calls `on_event` with a value, unless an exception was raised before.
    fn call(&mut self, value: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>>) {
        if let (Some(on_event), None) = (&self.on_event, &self.raised) {
            let called = Python::attach(|py| on_event.call1(py, (value(py)?,)));
            self.raised = called.err();
        }
        self.check_signals();
    }

    fn check_signals(&mut self) {
        if self.checked.elapsed() >= SIGNALS_EVERY {
            let signals = Python::attach(|py| py.check_signals());
            self.raised = self.raised.take().or(signals.err());
            self.checked = Instant::now();
        }
    }
}

impl Observer for RunObserver {
    fn notice(&mut self, notice: &Notice<'_>) {
        if let (Some(warning), None) = (notice.warning(), &self.raised) {
            self.raised = Python::attach(|py| warn(py, &warning)).err();
        }
    }

    fn event(&mut self, event: &Event) {
        if let Event::RunStarted(started) = event {
            self.score = started.task.score();
        }
        let kind = self.score;
        self.call(|py| scores_to_python(py, event, kind));
    }

    fn batch_enqueued(&mut self, _env: usize, _network: &Network) -> engine::Result<()> {
        self.check_signals();
        Ok(())
    }

    fn stop_requested(&self) -> bool {
        self.raised.is_some()
    }
}

impl StudyObserver for RunObserver {}

impl TrainingObserver for RunObserver {
    fn line(&mut self, line: &CurveLine) {
        self.call(|py| to_python(py, line));
    }
}

/// Issues a warning through Python's `warnings`, which a program may print, hide or raise as an
/// exception.
pub(crate) fn warn(py: Python<'_>, text: &str) -> PyResult<()> {
    let text = CString::new(text)?;
    PyErr::warn(py, &py.get_type::<PyUserWarning>(), &text, 0)
}

/// Calls `work` with an observer that passes events to `on_event`. Afterwards raises the exception
/// of `on_event`, Ctrl-C, or the exception in `raised`.
pub(crate) fn observed<T: Send>(
    py: Python<'_>,
    on_event: Option<Py<PyAny>>,
    raised: &Raised,
    work: impl FnOnce(&mut RunObserver) -> engine::Result<T> + Send,
) -> PyResult<T> {
    let observer = Mutex::new(RunObserver::new(on_event));
    let result = detached(py, || match observer.lock() {
        Ok(mut observer) => work(&mut observer).map_err(Failure::from),
        Err(_) => Err(Failure::panic("the observer of a run is locked")),
    });
    let observer = observer.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    // The exception ended the run, even if the run then also failed.
    match observer.raised.or(raised.take()) {
        Some(raised) => Err(raised),
        None => result,
    }
}

/// Calls `work` with the controller, searcher, loss and observer of `hooks`. Returns the path of
/// the run folder.
fn with_hooks(
    py: Python<'_>,
    hooks: Hooks,
    work: impl FnOnce(Custom, &mut RunObserver) -> engine::Result<Summary> + Send,
) -> PyResult<PathBuf> {
    let Hooks { on_event, controller, searcher, loss } = hooks;
    let raised = Raised::default();
    let callable = |decide| Box::new(Callable::new(decide, raised.clone())) as Box<dyn Controller>;
    let custom = controller.map(callable).map(Custom::from).unwrap_or_default();
    let searcher = searcher.map(|object| PySearcher::new(object, raised.clone()));
    let searcher = searcher.map(|searcher| Box::new(searcher) as Box<dyn Searcher>);
    let loss = loss.map(|function| PyLoss::new(function, raised.clone()).boxed());
    let custom = Custom { searcher, loss, ..custom };
    Ok(observed(py, on_event, &raised, |observer| work(custom, observer))?.run_dir)
}

/// Trains a fleet. Returns the path of the run's folder.
#[pyfunction]
pub(crate) fn train(
    py: Python<'_>,
    config: Option<Bound<'_, PyAny>>,
    given: &Bound<'_, PyDict>,
    hooks: Hooks,
) -> PyResult<PathBuf> {
    let config = settings::resolve(config.as_ref(), given)?;
    with_hooks(py, hooks, |custom, observer| engine::run_with(&config, custom, observer))
}

/// Resumes the run in a folder. Returns the folder's path.
#[pyfunction]
pub(crate) fn resume(
    py: Python<'_>,
    run: PathBuf,
    given: &Bound<'_, PyDict>,
    hooks: Hooks,
) -> PyResult<PathBuf> {
    let options = settings::layer(given)?;
    with_hooks(py, hooks, |custom, observer| engine::resume_with(&run, &options, custom, observer))
}

/// The settings of a run, with its members drawn, as in its `config.toml`.
#[pyfunction]
pub(crate) fn resolved(
    py: Python<'_>,
    config: Option<Bound<'_, PyAny>>,
    given: &Bound<'_, PyDict>,
) -> PyResult<Py<PyAny>> {
    let text = settings::resolve(config.as_ref(), given)?.resolved_toml();
    let table: toml::Table = text.parse().unwrap_or_default();
    to_python(py, &table)
}

/// The members that the scheduler of a run with these settings ends, see [`engine::losers`].
#[pyfunction]
pub(crate) fn losers(
    config: Option<Bound<'_, PyAny>>,
    given: &Bound<'_, PyDict>,
    scores: Vec<Vec<f64>>,
    ended: Vec<usize>,
    steps: usize,
) -> PyResult<Vec<usize>> {
    Ok(engine::losers(&settings::resolve(config.as_ref(), given)?, &scores, &ended, steps))
}

/// Trains a member of a run again. Returns the new folder's path.
#[pyfunction]
pub(crate) fn replay(
    py: Python<'_>,
    run: PathBuf,
    member: usize,
    given: &Bound<'_, PyDict>,
    on_event: Option<Py<PyAny>>,
    loss: Option<Py<PyAny>>,
) -> PyResult<PathBuf> {
    let options = settings::layer(given)?;
    let config = detached(py, || engine::replay(&run, member, options))?;
    let hooks = Hooks { on_event, controller: None, searcher: None, loss };
    with_hooks(py, hooks, |custom, observer| engine::run_with(&config, custom, observer))
}

/// Overview, settings and summary of a run; the summary is `None` before the end.
#[pyfunction]
pub(crate) fn read_run(py: Python<'_>, run: PathBuf) -> PyResult<Py<PyAny>> {
    let Run { overview, settings, summary, .. } = detached(py, || Run::read(&run))?;
    let read = PyDict::new(py);
    let kind = overview.task.score();
    read.set_item("overview", scores_to_python(py, &overview, kind)?)?;
    read.set_item("settings", to_python(py, &settings)?)?;
    read.set_item("summary", scores_to_python(py, &summary, kind)?)?;
    let places = summary.as_ref().map(Summary::leaderboard).unwrap_or_default();
    read.set_item("leaderboard", to_python(py, &places)?)?;
    let over_seeds = summary.as_ref().map(Summary::over_seeds).unwrap_or_default();
    read.set_item("over_seeds", to_python(py, &over_seeds)?)?;
    Ok(read.into_any().unbind())
}

/// The leaderboard of the contents of a `summary.json`, with members that differ only by their seed
/// as one place ([`Summary::over_seeds`]).
#[pyfunction]
pub(crate) fn over_seeds(py: Python<'_>, summary: &str) -> PyResult<Py<PyAny>> {
    let read = serde_json::from_str::<Summary>(summary);
    let summary = read.map_err(|error| PyValueError::new_err(error.to_string()))?;
    to_python(py, &summary.over_seeds())
}

/// Options of an ensemble.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct GivenEnsemble {
    members: Option<Vec<usize>>,
    top: Option<usize>,
    /// Name of the split.
    split: String,
    batch: usize,
    device: String,
    threads: usize,
}

/// Evaluates the networks of a run as an ensemble.
#[pyfunction]
pub(crate) fn ensemble(
    py: Python<'_>,
    run: PathBuf,
    options: GivenEnsemble,
) -> PyResult<Py<PyAny>> {
    let report = detached(py, || {
        let GivenEnsemble { members, top, split, batch, device, threads } = options;
        let is_named = |own: &Split| own.name() == split;
        let split = Split::ALL.into_iter().find(is_named).unwrap_or(Split::Test);
        let device = device.parse::<DeviceId>()?;
        let usual = EnsembleConfig::new(run);
        let config = EnsembleConfig { members, top, split, batch, device, threads, ..usual };
        Ok::<_, Failure>(evaluate_ensemble(&config)?)
    })?;
    scores_to_python(py, &report, report.score_kind)
}

/// State of every file of the runs in a folder, according to the checksums.
#[pyfunction]
pub(crate) fn verify(py: Python<'_>, folder: PathBuf) -> PyResult<Py<PyAny>> {
    let files = detached(py, || engine::verify(&folder))?;
    to_python(py, &files)
}

/// Events of a run by kind, each as a dictionary of columns.
#[pyfunction]
pub(crate) fn read_events<'py>(
    py: Python<'py>,
    run: PathBuf,
    batches: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let tables = detached(py, || {
        engine::reading::check_is_run(&run)?;
        let mut tail = EventTail::new(&run.join("events.jsonl"));
        if batches {
            tail = tail.with_batches();
        }
        let mut tables = Tables::default();
        loop {
            match tail.read(PART_BYTES, &mut |line| tables.add(&line))? {
                Reached::Limit => {}
                Reached::End => return Ok::<_, Failure>(tables),
                // The run was resumed meanwhile, which truncated its events.
                Reached::Restarted => tables = Tables::default(),
            }
        }
    })?;
    tables.into_python(py)
}

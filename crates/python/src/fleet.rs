//! A run that the Python program steps.

use std::path::PathBuf;
use std::sync::{Mutex, TryLockError};

use meristem_control::EnvView;
use meristem_train::external::{Custom, SeenEnv};
use meristem_train::session::{Point, Session};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::calls::detached;
use crate::controller::Raised;
use crate::env;
use crate::errors::{Failure, Kind};
use crate::json::to_python;
use crate::loss::PyLoss;
use crate::runs::warn;
use crate::settings;

/// A session of a run.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct FleetSession {
    /// The session, which one thread at a time may use; `None` after it was closed.
    session: Mutex<Option<Session>>,
    /// The exception of the program's loss that ended the run.
    raised: Raised,
}

#[pymethods]
impl FleetSession {
    /// Starts a run, or resumes the run in the folder `resumed`.
    #[new]
    fn new(
        py: Python<'_>,
        config: Option<Bound<'_, PyAny>>,
        given: &Bound<'_, PyDict>,
        resumed: Option<PathBuf>,
        loss: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let raised = Raised::default();
        let loss = loss.map(|function| PyLoss::new(function, raised.clone()).boxed());
        let custom = Custom { loss, ..Custom::default() };
        let session = match resumed {
            Some(folder) => {
                let options = settings::layer(given)?;
                detached(py, || Session::resume_with(folder, options, custom))
            }
            None => {
                let config = settings::resolve(config.as_ref(), given)?;
                detached(py, || Session::start_with(&config, custom))
            }
        };
        let mut session = raised.or(session)?;
        let warnings = session.take_warnings();
        let fleet = Self { session: Mutex::new(Some(session)), raised };
        // If the program turns warnings into exceptions, the run ends here and can be resumed.
        warnings.iter().try_for_each(|warning| warn(py, warning))?;
        Ok(fleet)
    }

    /// Trains a step. Ctrl-C is raised after the step.
    fn step(&self, py: Python<'_>) -> PyResult<()> {
        self.waiting(py, |session, idle| session.step(idle).map(drop).map_err(Failure::from))
    }

    /// Executes an action for each env. Returns the rewards.
    fn act(&self, py: Python<'_>, actions: &Bound<'_, PyList>) -> PyResult<Vec<f32>> {
        let parsed = self.look(|session| {
            let views: Vec<EnvView<'_>> = session.envs().iter().map(SeenEnv::view).collect();
            env::actions(actions, &views).map_err(|problem| refused(&problem))
        })?;
        self.waiting(py, |session, idle| session.act(parsed, idle).map_err(Failure::from))
    }

    /// Name of the point of the step at which the run waits.
    fn point(&self) -> PyResult<&'static str> {
        self.look(|session| {
            Ok(match session.point() {
                Point::Boundary => "boundary",
                Point::Decision => "decision",
                Point::End => "end",
            })
        })
    }

    /// The view of each env, with its round, reward and results of the last step.
    fn envs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let seen = self.look(|session| Ok(session.envs().to_vec()))?;
        let describe = |seen: &SeenEnv| {
            let env = env::to_python(py, &seen.view())?;
            env.set_item("round", seen.round)?;
            env.set_item("reward", seen.reward)?;
            env.set_item("figures", to_python(py, &seen.figures)?)?;
            Ok(env)
        };
        seen.iter().map(describe).collect()
    }

    /// Number of choices of each head of an action.
    fn head_sizes(&self) -> PyResult<Vec<usize>> {
        self.look(|session| {
            Ok(session.envs().first().map(|seen| env::head_sizes(&seen.view())).unwrap_or_default())
        })
    }

    /// Names of slots and blueprints.
    fn names(&self) -> PyResult<(Vec<String>, Vec<String>)> {
        self.look(|session| {
            let Some(seen) = session.envs().first() else { return Ok((vec![], vec![])) };
            let slots = seen.host.slots().iter().map(|slot| slot.name.to_string()).collect();
            let blueprints = seen.host.blueprints().iter().map(|b| b.name.clone()).collect();
            Ok((slots, blueprints))
        })
    }

    /// The contents of an env's weights file.
    fn weights<'py>(&self, py: Python<'py>, env: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.with(py, |session| Ok(session.weights(env)?))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Writes a checkpoint.
    fn checkpoint(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |session| Ok(session.checkpoint()?))
    }

    /// Ends the run. Returns its folder; `None` if the run was closed before.
    fn close(&self, py: Python<'_>) -> PyResult<Option<PathBuf>> {
        self.raised.or(detached(py, || {
            let session = self.lock()?.take();
            let closed = |session: Session| Ok::<_, Failure>(session.close()?.run_dir);
            session.map(closed).transpose()
        }))
    }
}

impl FleetSession {
    fn lock(&self) -> Result<std::sync::MutexGuard<'_, Option<Session>>, Failure> {
        match self.session.try_lock() {
            Ok(session) => Ok(session),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Failure::usage(
                Kind::State,
                "this fleet is in use by another thread",
                "use a fleet from one thread at a time",
            )),
        }
    }

    /// Calls `work` with the session, without the GIL.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Session) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        self.raised.or(detached(py, || work(self.lock()?.as_mut().ok_or_else(closed)?)))
    }

    /// Calls `work` with the session, with the GIL held.
    fn look<T>(&self, work: impl FnOnce(&Session) -> Result<T, Failure>) -> PyResult<T> {
        crate::calls::check_process()?;
        Ok(work(self.lock()?.as_ref().ok_or_else(closed)?)?)
    }

    /// Like [`Self::with`], for long work: checks for Ctrl-C, and raises it after the work, so that
    /// the fleet can still be used.
    fn waiting<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Session, &mut dyn FnMut()) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        let pressed = Mutex::new(None);
        let result = self.with(py, |session| {
            work(session, &mut || {
                let signals = Python::attach(|py| py.check_signals());
                if let (Err(error), Ok(mut pressed)) = (signals, pressed.lock()) {
                    *pressed = Some(error);
                }
            })
        });
        match pressed.into_inner() {
            Ok(Some(pressed)) => Err(pressed),
            _ => result,
        }
    }
}

fn refused(problem: &str) -> Failure {
    let remedy = "an action is None, a dictionary as in a script (docs/control.md), or one choice \
                  per head";
    Failure::usage(Kind::Controller, problem, remedy)
}

fn closed() -> Failure {
    Failure::usage(Kind::State, "this fleet is closed", "make another one")
}

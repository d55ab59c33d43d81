//! A Python function as the controller of a run.

use std::sync::{Arc, Mutex, PoisonError};

use meristem_control::{Action, Controller, EnvView, Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::env;

/// The exception that ended a run, to be raised in the caller.
#[derive(Clone, Default)]
pub(crate) struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// Takes the exception.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The result of a run, or the exception that ended it.
    pub(crate) fn or<T>(&self, result: PyResult<T>) -> PyResult<T> {
        result.map_err(|error| self.take().unwrap_or(error))
    }

    /// Stores an exception.
    pub(crate) fn set(&self, error: PyErr) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

/// Controller that calls a Python function with a list of envs and receives a list of actions.
pub(crate) struct Callable {
    decide: Py<PyAny>,
    raised: Raised,
}

impl Callable {
    /// Creates a controller that calls `decide` and stores an exception in `raised`.
    pub(crate) fn new(decide: Py<PyAny>, raised: Raised) -> Self {
        Self { decide, raised }
    }

    fn ask(&self, py: Python<'_>, views: &[EnvView<'_>]) -> PyResult<Result<Vec<Action>, String>> {
        let envs = views.iter().map(|view| env::to_python(py, view));
        let envs = PyList::new(py, envs.collect::<PyResult<Vec<_>>>()?)?;
        let answers = self.decide.bind(py).call1((envs,))?;
        let answers = answers.cast::<PyList>().map_err(PyErr::from)?;
        Ok(env::actions(answers, views))
    }
}

impl Controller for Callable {
    fn name(&self) -> &str {
        "external"
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        let answer = Python::attach(|py| self.ask(py, views));
        let problem = match answer {
            Ok(Ok(actions)) => return Ok(actions),
            Ok(Err(problem)) => problem,
            Err(error) => {
                let problem = error.to_string();
                self.raised.set(error);
                problem
            }
        };
        Err(Error::External { problem })
    }
}

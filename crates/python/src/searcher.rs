//! A Python object as the searcher of a run.

use meristem_train::external::Searcher;
use meristem_train::settings::Member;
use meristem_train::{EndReason, Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::controller::Raised;
use crate::settings;

/// Searcher that calls the methods of a Python object and stores an exception in `raised`.
pub(crate) struct PySearcher {
    object: Py<PyAny>,
    raised: Raised,
}

impl PySearcher {
    pub(crate) fn new(object: Py<PyAny>, raised: Raised) -> Self {
        Self { object, raised }
    }

    /// Calls the object while the thread has the GIL.
    fn call<T>(&self, work: impl for<'py> FnOnce(&Bound<'py, PyAny>) -> PyResult<T>) -> Result<T> {
        Python::attach(|py| work(self.object.bind(py))).map_err(|error| {
            let problem = error.to_string();
            self.raised.set(error);
            Error::Searcher { problem }
        })
    }
}

impl Searcher for PySearcher {
    fn suggest(&mut self, member: usize) -> Result<Member> {
        self.call(|object| {
            let settings = object.call_method1("suggest", (member,))?;
            settings::member(settings.cast::<PyDict>().map_err(PyErr::from)?)
        })
    }

    fn report(&mut self, member: usize, steps: usize, score: Option<f64>) -> Result<bool> {
        self.call(|object| object.call_method1("report", (member, steps, score))?.extract())
    }

    fn complete(&mut self, member: usize, ended: Option<EndReason>) -> Result<()> {
        self.call(|object| {
            let ended = ended.map(EndReason::name);
            object.call_method1("complete", (member, ended)).map(|_| ())
        })
    }
}

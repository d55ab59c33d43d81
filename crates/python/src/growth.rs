//! The benchmark of growth.

use std::path::PathBuf;

use meristem_train::growth_bench::{self as bench, GrowthBench};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::controller::Raised;
use crate::json::to_python;
use crate::runs::observed;
use crate::settings;

/// Request of a benchmark, from a dictionary of Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Request {
    suite: String,
    /// Names of tasks; empty for all tasks of the suite.
    tasks: Vec<String>,
    /// Names of methods; empty for all methods.
    methods: Vec<String>,
    seeds: Option<usize>,
    tuning_seeds: Option<usize>,
    /// Learning rates to choose from; empty for the default rates.
    rates: Vec<f32>,
}

/// Runs the benchmark. Returns the contents of `growth.json`.
#[pyfunction]
pub(crate) fn growth_bench(
    py: Python<'_>,
    folder: PathBuf,
    request: Request,
    given: &Bound<'_, PyDict>,
    on_event: Option<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let Request { suite, tasks, methods, seeds, tuning_seeds, rates } = request;
    let settings = settings::layer(given)?;
    let request =
        GrowthBench { suite, tasks, methods, seeds, tuning_seeds, rates, settings, folder };
    let table = observed(py, on_event, &Raised::default(), |observer| {
        bench::growth_bench(&request, observer)
    })?;
    to_python(py, &table)
}

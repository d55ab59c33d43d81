//! The bench of growth.

use std::path::PathBuf;

use meristem_train::growth_bench::{self as bench, GrowthBench};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::controller::Raised;
use crate::json::to_python;
use crate::runs::observed;
use crate::settings;

/// The request, a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Request {
    suite: String,
    /// Empty for all of the suite.
    tasks: Vec<String>,
    /// Empty for all.
    methods: Vec<String>,
    seeds: Option<usize>,
    tuning_seeds: Option<usize>,
    /// Empty for the usual ones.
    rates: Vec<f32>,
}

/// Runs the bench. Returns the contents of `growth.json`.
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

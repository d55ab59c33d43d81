//! Training of a policy.

use std::path::{Path, PathBuf};

use meristem_train::policy_training::{self as training, PolicyTraining};
use pyo3::prelude::*;

use crate::controller::Raised;
use crate::errors::Failure;
use crate::json::to_python;
use crate::runs::observed;

/// Trains a policy. `request` is the contents of a request as JSON. Returns the lines of the
/// curves.
#[pyfunction]
pub(crate) fn train_policy(
    py: Python<'_>,
    folder: PathBuf,
    request: &str,
    on_line: Option<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let request = PolicyTraining::parse(Path::new("request.json"), request);
    let request = request.map_err(Failure::from)?;
    let trained = observed(py, on_line, &Raised::default(), |observer| {
        training::train_policy(&request, &folder, observer)
    })?;
    to_python(py, &trained.lines)
}

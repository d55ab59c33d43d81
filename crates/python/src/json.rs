//! Values of the engine as Python objects.

use meristem_nn::ScoreKind;
use meristem_train::name_scores;
use pyo3::prelude::*;
use serde::Serialize;

use crate::errors::Failure;

/// Converts a value to a Python object, with the keys of its JSON.
pub(crate) fn to_python(py: Python<'_>, value: &impl Serialize) -> PyResult<Py<PyAny>> {
    scores_to_python(py, value, ScoreKind::Accuracy)
}

/// Converts a value, whose scores are of `kind`, to a Python object, with the keys of its JSON.
pub(crate) fn scores_to_python(
    py: Python<'_>,
    value: &impl Serialize,
    kind: ScoreKind,
) -> PyResult<Py<PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| Failure::panic(&error.to_string()))?;
    let text = name_scores(text, kind);
    Ok(py.import("json")?.call_method1("loads", (text,))?.unbind())
}

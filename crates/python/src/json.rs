//! Values of the engine as Python objects.

use pyo3::prelude::*;
use serde::Serialize;

use crate::errors::Failure;

/// Converts a value to a Python object, with the keys of its JSON.
pub(crate) fn to_python(py: Python<'_>, value: &impl Serialize) -> PyResult<Py<PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| Failure::panic(&error.to_string()))?;
    Ok(py.import("json")?.call_method1("loads", (text,))?.unbind())
}

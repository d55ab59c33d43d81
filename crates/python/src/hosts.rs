//! Hosts without weights.

use meristem_grow::{HostSpec, TaskShape};
use pyo3::prelude::*;

use crate::calls::detached;
use crate::errors::Failure;
use crate::json::to_python;

/// Sizes of the layers of a host for images of `input` (channels, rows, columns).
#[pyfunction]
pub(crate) fn host_summary(
    py: Python<'_>,
    text: &str,
    input: [usize; 3],
    classes: usize,
) -> PyResult<Py<PyAny>> {
    let [channels, height, width] = input;
    let image = TaskShape { channels, height, width, classes };
    let summary = detached(py, || {
        let host = text.parse::<HostSpec>();
        let summary =
            host.and_then(|host| host.summary(&image)).map_err(meristem_grow::Error::from);
        Ok::<_, Failure>(summary.map_err(meristem_train::Error::from)?)
    })?;
    to_python(py, &summary)
}

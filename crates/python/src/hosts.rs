//! Hosts without weights.

use meristem_export::drawing::{DrawnSlot, svg, topology};
use meristem_grow::{Stage, TaskShape};
use meristem_train::read_host;
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
        let summary = read_host(text)?.summary(&image).map_err(meristem_grow::Error::from);
        Ok::<_, Failure>(summary.map_err(meristem_train::Error::from)?)
    })?;
    to_python(py, &summary)
}

/// The shortest text that names the same host: the name of a preset, or a complete description.
#[pyfunction]
pub(crate) fn host_text(py: Python<'_>, text: &str) -> PyResult<String> {
    detached(py, || Ok::<_, Failure>(read_host(text)?.text()))
}

/// The complete description of the host that a text names: a preset, a file or a description.
#[pyfunction]
pub(crate) fn host_description(py: Python<'_>, text: &str) -> PyResult<String> {
    detached(py, || Ok::<_, Failure>(read_host(text)?.description().to_owned()))
}

/// The drawing of a host as SVG, with slots as (name, stage, text).
#[pyfunction]
pub(crate) fn host_svg(
    py: Python<'_>,
    text: &str,
    slots: Vec<(String, String, String)>,
) -> PyResult<String> {
    let drawn = |(slot, stage, text): (String, String, String)| DrawnSlot {
        slot,
        stage: Stage::ALL.into_iter().find(|known| known.to_string() == stage),
        text,
    };
    let slots: Vec<DrawnSlot> = slots.into_iter().map(drawn).collect();
    detached(py, || Ok::<_, Failure>(svg(&topology(&read_host(text)?, &slots))))
}

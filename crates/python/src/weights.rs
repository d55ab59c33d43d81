//! Contents of weights files.

use std::collections::BTreeMap;
use std::path::Path;

use meristem_grow::HostSpec;
use meristem_nn::safetensors::{self, Metadata};
use meristem_nn::{HostData, HostTensor, StateDict};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::calls::detached;
use crate::dlpack::Array;
use crate::errors::{Failure, Kind};

/// Tensors by name, metadata, and the prefix that was removed from all names.
type Contents<'py> = (Bound<'py, PyDict>, Metadata, Option<String>);

/// Parses the contents of a weights file. Errors refer to the file as `name`.
#[pyfunction]
pub(crate) fn decode_weights<'py>(
    py: Python<'py>,
    name: &str,
    contents: &[u8],
) -> PyResult<Contents<'py>> {
    let (state, metadata, prefix) = detached(py, || {
        let read = safetensors::from_bytes(Path::new(name), contents);
        let (mut state, mut metadata) = read.map_err(meristem_train::Error::from)?;
        // Checksum and version apply to the file; new ones are written with the tensors.
        safetensors::strip(&mut metadata);
        let prefix = state.unwrap_names();
        Ok::<_, Failure>((state, metadata, prefix))
    })?;
    let tensors = PyDict::new(py);
    for (name, HostTensor { shape, data }) in state.0 {
        let array = match data {
            HostData::F32(elements) => Array::shaped(elements, &shape),
            HostData::I64(elements) => Array::shaped(elements, &shape),
            HostData::U8(elements) => Array::shaped(elements, &shape),
        };
        tensors.set_item(name, array)?;
    }
    Ok((tensors, metadata, prefix))
}

/// Layers and slots of the host with this description, as JSON, for weights files without them.
#[pyfunction]
pub(crate) fn host_json(py: Python<'_>, text: &str) -> PyResult<String> {
    detached(py, || {
        let host = text.parse::<HostSpec>().map_err(meristem_grow::Error::from);
        let json = host.and_then(|host| meristem_grow::host_json(&host));
        Ok::<_, Failure>(json.map_err(meristem_train::Error::from)?)
    })
}

/// A tensor from Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct GivenTensor {
    /// Element type by numpy's name.
    dtype: String,
    shape: Vec<usize>,
    /// Elements in row-major order, little-endian.
    contents: Vec<u8>,
}

/// Encodes the contents of a weights file.
#[pyfunction]
pub(crate) fn encode_weights<'py>(
    py: Python<'py>,
    tensors: BTreeMap<String, GivenTensor>,
    metadata: Metadata,
) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = detached(py, || {
        let mut state = StateDict::default();
        for (name, GivenTensor { dtype, shape, contents }) in tensors {
            let data = match dtype.as_str() {
                "float32" => HostData::F32(elements(&contents, f32::from_le_bytes)),
                "int64" => HostData::I64(elements(&contents, i64::from_le_bytes)),
                "uint8" => HostData::U8(contents),
                other => {
                    let message =
                        format!("`tensors`: {name} is {other}, expected float32, int64 or uint8");
                    let remedy = "convert it: `x.astype(numpy.float32)`";
                    return Err(Failure::usage(Kind::Weights, message, remedy));
                }
            };
            state.insert(name, HostTensor { shape, data });
        }
        let bytes = safetensors::to_bytes(Path::new("weights"), &state, &metadata);
        Ok(bytes.map_err(meristem_train::Error::from)?)
    })?;
    Ok(PyBytes::new(py, &bytes))
}

/// Converts bytes to elements of `N` bytes.
fn elements<T, const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|chunk| decode(*chunk)).collect()
}

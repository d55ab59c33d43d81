//! The DLPack protocol: arrays of other libraries use the engine's memory without a copy, and the
//! engine borrows their memory. The host waits for the engine's work on memory before the memory is
//! lent, so that on a CUDA device any stream of a consumer may read it. Before the engine copies
//! memory of another library on a CUDA device, it gives `__dlpack__` its stream; that library makes
//! the stream wait for its own work.
//!
//! A capsule keeps the memory alive until its consumer calls the deleter, so an array may outlive
//! its source. <https://dmlc.github.io/dlpack/latest/>

mod abi;
mod borrowed;
mod foreign;

use std::any::Any;
use std::sync::Arc;

use meristem_device::{DType, DeviceId, LentDeviceTensor, LentTensor, MemoryFormat, Tensor};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use self::abi::{DataType, Exported};
pub(crate) use self::borrowed::Borrowed;
pub(crate) use self::foreign::Foreign;

/// Device of arrays in host memory: the CPU (`kDLCPU`), number 0.
pub(crate) const CPU: (i32, i32) = (1, 0);
/// Kind of CUDA devices (`kDLCUDA`).
const CUDA: i32 = 2;

/// Kind and number of a device.
fn device_of(id: DeviceId) -> (i32, i32) {
    match id {
        DeviceId::Cpu(_) => CPU,
        DeviceId::Cuda(_) => (CUDA, id.index() as i32),
    }
}

/// Memory and its owner.
#[derive(Clone)]
struct Memory {
    address: usize,
    bytes: usize,
    /// Owner of the memory, which keeps it alive.
    _keeper: Arc<dyn Any + Send + Sync>,
}

/// An array in host memory, or in memory of a CUDA device for a loss that asks for it.
/// `numpy.from_dlpack` and others take it without a copy.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct Array {
    memory: Memory,
    shape: Vec<i64>,
    /// In elements.
    strides: Vec<i64>,
    dtype: DataType,
    /// Kind and number of the device.
    device: (i32, i32),
}

/// Element types of [`Array`].
pub(crate) trait Number: Copy + Send + Sync + 'static {
    const DTYPE: DataType;
}

impl Number for f32 {
    const DTYPE: DataType = DataType::float(32);
}
/// Class labels, which fit into i32. Few libraries support unsigned integers.
impl Number for u32 {
    const DTYPE: DataType = DataType::int(32);
}
impl Number for f64 {
    const DTYPE: DataType = DataType::float(64);
}
impl Number for i32 {
    const DTYPE: DataType = DataType::int(32);
}
impl Number for i64 {
    const DTYPE: DataType = DataType::int(64);
}
impl Number for i8 {
    const DTYPE: DataType = DataType::int(8);
}
impl Number for u8 {
    const DTYPE: DataType = DataType::uint(8);
}
impl Number for bool {
    const DTYPE: DataType = DataType::BOOL;
}

impl Array {
    /// A row of elements.
    pub(crate) fn of<T: Number>(elements: Vec<T>) -> Self {
        let len = elements.len();
        Self::shaped(elements, &[len])
    }

    /// Elements in row-major order. Their number must be the product of `shape`.
    pub(crate) fn shaped<T: Number>(elements: Vec<T>, shape: &[usize]) -> Self {
        Self::shared(Arc::new(elements), shape)
    }

    /// Like [`Self::shaped`], of elements that have other owners. A write to the array
    /// changes them.
    pub(crate) fn shared<T: Number>(elements: Arc<Vec<T>>, shape: &[usize]) -> Self {
        assert_eq!(elements.len(), shape.iter().product::<usize>(), "{shape:?}");
        let bytes = size_of_val(&elements[..]);
        let address = elements.as_ptr().expose_provenance();
        let memory = Memory { address, bytes, _keeper: elements };
        let (shape, strides) = (signed(shape), row_major(shape));
        Self { memory, shape, strides, dtype: T::DTYPE, device: CPU }
    }

    /// Creates an array with the memory of a tensor. The memory must not be reused while the tensor
    /// is shared, which the owner of the tensor must check. Waits for the enqueued work on the
    /// tensor.
    ///
    /// # Errors
    /// The errors of [`Tensor::lend`]: among others, the tensor is not on the CPU, or its stream
    /// has failed.
    pub(crate) fn lent(tensor: &Tensor) -> meristem_device::Result<Self> {
        let lent: LentTensor = tensor.lend()?;
        let (address, bytes) = (lent.address(), lent.bytes());
        Ok(Self::of_tensor(tensor, Memory { address, bytes, _keeper: Arc::new(lent) }))
    }

    /// As [`Self::lent`], on any device.
    ///
    /// # Errors
    /// The errors of [`Tensor::lend_on_device`], such as a failed device.
    pub(crate) fn lent_on_device(tensor: &Tensor) -> meristem_device::Result<Self> {
        if let DeviceId::Cpu(_) = tensor.device().id() {
            return Self::lent(tensor);
        }
        let lent: LentDeviceTensor = tensor.lend_on_device()?;
        let bytes = tensor.numel() * tensor.dtype().size();
        let memory = Memory { address: lent.address() as usize, bytes, _keeper: Arc::new(lent) };
        Ok(Self::of_tensor(tensor, memory))
    }

    /// An array with the memory of a tensor.
    fn of_tensor(tensor: &Tensor, memory: Memory) -> Self {
        let dims = tensor.dims();
        let strides = match (tensor.format(), dims) {
            (MemoryFormat::ChannelsLast, &[_, c, h, w]) => signed(&[h * w * c, 1, w * c, c]),
            _ => row_major(dims),
        };
        let dtype = match tensor.dtype() {
            DType::F32 => DataType::float(32),
            DType::F64 => DataType::float(64),
            DType::BF16 => DataType::BF16,
            DType::F16 => DataType::float(16),
            DType::U8 => DataType::uint(8),
            DType::I16 => DataType::int(16),
            // Labels and counts fit into i32. Few libraries support unsigned integers.
            DType::U32 => DataType::int(32),
            DType::I64 => DataType::int(64),
        };
        let device = device_of(tensor.device().id());
        Self { memory, shape: signed(dims), strides, dtype, device }
    }

    fn copied(&self) -> Self {
        let bytes = abi::copied(&self.memory);
        let memory = Memory {
            address: bytes.as_ptr().expose_provenance(),
            bytes: bytes.len() * 8,
            _keeper: Arc::new(bytes),
        };
        let (shape, strides) = (self.shape.clone(), self.strides.clone());
        Self { memory, shape, strides, dtype: self.dtype, device: self.device }
    }
}

/// Keyword arguments of `__dlpack__`.
#[derive(Default)]
struct DlpackArguments {
    stream: Option<i64>,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
}

impl DlpackArguments {
    fn of(given: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut asked = Self::default();
        for (key, value) in given.iter() {
            match key.extract::<String>()?.as_str() {
                "stream" => asked.stream = value.extract()?,
                "max_version" => asked.max_version = value.extract()?,
                "dl_device" => asked.dl_device = value.extract()?,
                "copy" => asked.copy = value.extract()?,
                other => {
                    let message = format!("__dlpack__() got an unexpected argument `{other}`");
                    return Err(PyTypeError::new_err(message));
                }
            }
        }
        Ok(asked)
    }
}

#[pymethods]
impl Array {
    /// A capsule with the memory, as the array API standard describes.
    #[pyo3(signature = (**asked))]
    fn __dlpack__(&self, py: Python<'_>, asked: Option<&Bound<'_, PyDict>>) -> PyResult<Py<PyAny>> {
        let asked = asked.map_or(Ok(DlpackArguments::default()), DlpackArguments::of)?;
        let DlpackArguments { stream, max_version, dl_device, copy } = asked;
        let on_cpu = self.device == CPU;
        if on_cpu && stream.is_some() {
            return Err(PyBufferError::new_err("stream: got one, expected None for a CPU array"));
        }
        // The host has waited for all work on the memory, so no stream has to.
        if stream.is_some_and(|stream| stream == 0 || stream < -1) {
            let message = format!("stream: got {stream:?}, expected -1, 1, 2 or a stream of CUDA");
            return Err(PyBufferError::new_err(message));
        }
        if let Some(other) = dl_device.filter(|device| *device != self.device) {
            let message = format!("dl_device: got {other:?}, expected {:?}", self.device);
            return Err(PyBufferError::new_err(message));
        }
        let copy = copy.unwrap_or(false);
        if copy && !on_cpu {
            let message = "copy: got True, expected None or False for an array on a CUDA device";
            return Err(PyBufferError::new_err(message));
        }
        let array = if copy { self.copied() } else { self.clone_ref() };
        let exported = Exported { array, copied: copy };
        abi::capsule(py, exported, max_version.is_some_and(|(major, _)| major >= 1))
    }

    /// Returns a numpy array of this memory, or a copy if `dtype` or `copy` requires one.
    ///
    /// Without this method `numpy.asarray` would create an array of one object.
    #[pyo3(signature = (dtype=None, *, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let numpy = slf.py().import("numpy")?;
        let array = numpy.call_method1("from_dlpack", (slf,))?;
        let asked = PyDict::new(slf.py());
        asked.set_item("dtype", dtype)?;
        asked.set_item("copy", copy)?;
        numpy.call_method("array", (array,), Some(&asked))
    }

    /// Kind and number of the device: (1, 0) for the CPU, (2, n) for CUDA device n.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device
    }

    /// Sizes of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> String {
        self.dtype.name()
    }

    fn __repr__(&self) -> String {
        format!("Array(shape={:?}, dtype={})", self.shape, self.dtype.name())
    }
}

impl Array {
    fn clone_ref(&self) -> Self {
        let (memory, dtype, device) = (self.memory.clone(), self.dtype, self.device);
        Self { memory, shape: self.shape.clone(), strides: self.strides.clone(), dtype, device }
    }
}

fn signed(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|dim| *dim as i64).collect()
}

/// Strides in elements of a row-major array.
fn row_major(shape: &[usize]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis] as i64;
    }
    strides
}

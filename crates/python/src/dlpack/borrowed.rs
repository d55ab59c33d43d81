//! Memory of other libraries' arrays, borrowed by the DLPack protocol for the duration of a call.

#![expect(unsafe_code, reason = "a capsule is a pointer to a structure of C")]

use std::ffi::c_void;

use half::bf16;
use meristem_device::{DType, Element, LentTensor, MemoryFormat, Owner, Shape, Stream, Tensor};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::abi::{DataType, DlTensor, Managed, ManagedVersioned, NAME, NAME_VERSIONED, VERSION};
use super::{CUDA, row_major};
use crate::errors::{Failure, Kind};

/// Flag: the memory is read-only.
const READ_ONLY: u64 = 1;
/// Device types with host-addressable memory: `kDLCPU`, and `kDLCUDAHost` (page-locked).
const HOST: [i32; 2] = [1, 3];
/// Names of consumed capsules.
const TAKEN: &std::ffi::CStr = c"used_dltensor";
const TAKEN_VERSIONED: &std::ffi::CStr = c"used_dltensor_versioned";

const LAYOUT: &str = "give a contiguous copy: `numpy.ascontiguousarray(x)`, `x.contiguous()`";

/// Memory of a writable array in host memory, contiguous or channels last.
pub(crate) struct Borrowed {
    /// Keeps the memory alive; its drop calls the deleter.
    _managed: Taken,
    address: usize,
    shape: Vec<usize>,
    format: MemoryFormat,
    dtype: DType,
}

/// The structure of a consumed capsule; dropping it calls the deleter.
pub(super) enum Taken {
    Unversioned(*mut Managed),
    Versioned(*mut ManagedVersioned),
}

// SAFETY: this value owns the structure, and DLPack permits a deleter to run on any thread.
unsafe impl Send for Taken {}
// SAFETY: after `Borrowed::of` or `Foreign::of` the structure is read only by `drop`, which has the
// only reference.
unsafe impl Sync for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: the producer created structure and deleter. Only the consumer calls the deleter
        // of a consumed capsule, and calls it once, here.
        unsafe {
            match *self {
                Self::Unversioned(managed) => {
                    if let Some(delete) = (*managed).deleter {
                        delete(managed);
                    }
                }
                Self::Versioned(managed) => {
                    if let Some(delete) = (*managed).deleter {
                        delete(managed);
                    }
                }
            }
        }
    }
}

/// Error for an unsuitable tensor; nothing was read or written.
fn unfit(expected: &str, got: impl std::fmt::Display, remedy: &str) -> Failure {
    let message = format!("`tensor`: got {got}, expected {expected}");
    Failure::usage(Kind::Argument, message, remedy)
}

impl Borrowed {
    /// Borrows the memory of an object with `__dlpack__`.
    ///
    /// # Errors
    /// The object has no `__dlpack__`, or its array is not in host memory, is read-only, has
    /// another element type than float32, float64 or bfloat16, is neither contiguous nor channels
    /// last, has more than four dimensions, or is not aligned to its elements.
    pub(crate) fn of(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        check_device(given)?;
        let capsule = capsule_of(given, None)?;
        let (managed, tensor, flags) = take(&capsule)?;
        Ok(Self::described(managed, tensor, flags)?)
    }

    fn described(managed: Taken, tensor: *const DlTensor, flags: u64) -> Result<Self, Failure> {
        // SAFETY: `take` read the pointer from the structure that `managed` keeps.
        let tensor = unsafe { &*tensor };
        if flags & READ_ONLY != 0 {
            let remedy = "give a copy: `x.copy()`; sums are written in place";
            return Err(unfit("a writable array", "a read-only array", remedy));
        }
        let dtype = match tensor.dtype {
            known if known == DataType::float(32) => DType::F32,
            known if known == DataType::float(64) => DType::F64,
            DataType::BF16 => DType::BF16,
            other => {
                let remedy = "convert it: `x.astype(numpy.float32)`, `x.float()`";
                return Err(unfit("float32, float64 or bfloat16", other.name(), remedy));
            }
        };
        let axes = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
        if axes > meristem_device::MAX_DIMS {
            let got = format!("{} dimensions", tensor.ndim);
            return Err(unfit("at most four dimensions", got, "give a view: `x.reshape(-1)`"));
        }
        // SAFETY: in DLPack the pointer has `ndim` extents; none are read if `ndim` is 0.
        let extents = unsafe { list(tensor.shape, axes) };
        let shape: Vec<usize> = extents.iter().map(|extent| *extent as usize).collect();
        let strides = if tensor.strides.is_null() {
            row_major(&shape)
        } else {
            // SAFETY: in DLPack a pointer that is not null has `ndim` strides.
            unsafe { list(tensor.strides, axes) }.to_vec()
        };
        let format = format_of(&shape, &strides).ok_or_else(|| {
            let got = format!("shape {shape:?} with strides {strides:?} (in elements)");
            unfit("a contiguous or channels-last array", got, LAYOUT)
        })?;
        let address = tensor.data.expose_provenance() + tensor.byte_offset as usize;
        if !address.is_multiple_of(dtype.size()) {
            let got = format!("{} bytes", address % dtype.size());
            return Err(unfit("memory aligned to its elements", got, LAYOUT));
        }
        Ok(Self { _managed: managed, address, shape, format, dtype })
    }

    /// Copies the elements into a new tensor of a stream.
    ///
    /// # Errors
    /// The errors of [`Tensor::from_slice`].
    pub(crate) fn upload(&self, stream: &Stream) -> meristem_device::Result<Tensor> {
        let len = self.shape.iter().product();
        let flat = match self.dtype {
            DType::F64 => self.flat::<f64>(stream, len)?,
            DType::BF16 => self.flat::<bf16>(stream, len)?,
            _ => self.flat::<f32>(stream, len)?,
        };
        flat.view_with_format(0, Shape::from(&self.shape), self.format)
    }

    fn flat<T: Element>(&self, stream: &Stream, len: usize) -> meristem_device::Result<Tensor> {
        // SAFETY: `upload` chose the type by `dtype`.
        let elements = unsafe { self.elements::<T>() };
        Tensor::from_slice(stream, elements, [len], Owner::Collectives)
    }

    /// The elements of a contiguous float32 array, in row-major order; `None` for any other.
    pub(crate) fn numbers(&self) -> Option<&[f32]> {
        let fits = self.dtype == DType::F32 && self.format == MemoryFormat::Contiguous;
        // SAFETY: the type was compared.
        fits.then(|| unsafe { self.elements() })
    }

    /// The elements in the order of the memory.
    ///
    /// # Safety
    /// `T` is the type of `dtype`.
    unsafe fn elements<T: Element>(&self) -> &[T] {
        match self.shape.iter().product() {
            0 => &[],
            // SAFETY: the structure keeps that many elements of this type alive at the address,
            // which is aligned, and any bits are a float. As for any library, the caller must not
            // write the array during the call.
            len => unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.address), len)
            },
        }
    }

    /// Overwrites the elements with the elements of a tensor of the same layout.
    pub(crate) fn overwrite(&self, with: &LentTensor) {
        let (len, from) = (self.shape.iter().product::<usize>(), with.tensor());
        assert_eq!((from.dtype(), from.numel(), from.format()), (self.dtype, len, self.format));
        if len == 0 {
            return;
        }
        let from: *const u8 = std::ptr::with_exposed_provenance(with.address());
        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: `with` keeps that number of bytes alive without concurrent writes, and the array
        // has the same number. A tensor's memory is from the pool, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, with.bytes()) };
    }
}

/// The `len` numbers at a pointer.
///
/// # Safety
/// The pointer has `len` valid elements, which live as long as the result.
pub(super) unsafe fn list<'a>(start: *const i64, len: usize) -> &'a [i64] {
    match len {
        0 => &[],
        // SAFETY: guaranteed by the caller.
        len => unsafe { std::slice::from_raw_parts(start, len) },
    }
}

/// Memory format of an array with these strides; `None` if sums do not support it. The stride of a
/// dimension of extent 1 is ignored.
pub(super) fn format_of(shape: &[usize], strides: &[i64]) -> Option<MemoryFormat> {
    let fits = |expected: &[i64]| {
        let axes = shape.iter().zip(strides).zip(expected);
        shape.contains(&0) || axes.into_iter().all(|((n, got), stride)| *n == 1 || got == stride)
    };
    if fits(&row_major(shape)) {
        return Some(MemoryFormat::Contiguous);
    }
    let &[_, c, h, w] = shape else { return None };
    let channels_last = [h * w * c, 1, w * c, c].map(|stride| stride as i64);
    fits(&channels_last).then_some(MemoryFormat::ChannelsLast)
}

/// Checks that the array is in host memory. This comes before the request for a capsule, which on
/// other devices may need a stream.
fn check_device(given: &Bound<'_, PyAny>) -> PyResult<()> {
    let device = device_of_array(given)?;
    if HOST.contains(&device.0) {
        return Ok(());
    }
    Err(unfit("an array in host memory", place(device), "copy it first: `x.cpu()`").into())
}

/// Kind and number of the device of an array.
pub(super) fn device_of_array(given: &Bound<'_, PyAny>) -> PyResult<(i32, i32)> {
    let remedy = "give a numpy array, a PyTorch tensor, or another object with `__dlpack__`";
    let class = given.get_type().qualname()?;
    let expected = "an array with DLPack support";
    let device = given.call_method0("__dlpack_device__");
    device.map_err(|_| unfit(expected, format!("a `{class}`"), remedy))?.extract()
}

/// Text for an array by the kind and number of its device.
pub(super) fn place((kind, number): (i32, i32)) -> String {
    let kind = match kind {
        kind if HOST.contains(&kind) => return "one in host memory".into(),
        CUDA => "a CUDA device".to_owned(),
        kind => format!("a device of kind {kind}"),
    };
    format!("one on {kind} (number {number})")
}

/// Requests the capsule of an array, of protocol version 1 if its library supports it. The library
/// makes `stream`, a stream of CUDA, wait for its work on the array.
pub(super) fn capsule_of<'py>(
    given: &Bound<'py, PyAny>,
    stream: Option<u64>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = given.py();
    let asked = PyDict::new(py);
    if let Some(stream) = stream {
        asked.set_item("stream", stream)?;
    }
    let older = asked.copy()?;
    asked.set_item("max_version", (VERSION.major, VERSION.minor))?;
    let versioned = given.call_method("__dlpack__", (), Some(&asked));
    let capsule = match versioned {
        // An older protocol version, without the argument.
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            given.call_method("__dlpack__", (), Some(&older))
        }
        other => other,
    };
    capsule.map_err(|error| {
        let class = given.get_type().qualname().map_or_else(|_| String::new(), |c| c.to_string());
        let got = format!("a `{class}` whose `__dlpack__` failed ({error})");
        unfit("an array with DLPack support", got, "give `x.detach()` or a copy").into()
    })
}

/// Consumes a capsule. Returns its structure, tensor and flags.
pub(super) fn take(capsule: &Bound<'_, PyAny>) -> Result<(Taken, *const DlTensor, u64), Failure> {
    let object = capsule.as_ptr();
    // SAFETY: `object` is alive and this thread holds the GIL. A valid capsule of one of the two
    // names has the structure of that name, and renaming the capsule transfers its ownership.
    unsafe {
        if ffi::PyCapsule_IsValid(object, NAME_VERSIONED.as_ptr()) == 1 {
            let managed: *mut c_void = ffi::PyCapsule_GetPointer(object, NAME_VERSIONED.as_ptr());
            let managed: *mut ManagedVersioned = managed.cast();
            ffi::PyCapsule_SetName(object, TAKEN_VERSIONED.as_ptr());
            let taken = Taken::Versioned(managed);
            let major = (*managed).version.major;
            if major != VERSION.major {
                let expected = format!("version {} of DLPack", VERSION.major);
                return Err(unfit(&expected, format!("version {major}"), "update meristem"));
            }
            return Ok((taken, &raw const (*managed).tensor, (*managed).flags));
        }
        if ffi::PyCapsule_IsValid(object, NAME.as_ptr()) == 1 {
            let managed: *mut c_void = ffi::PyCapsule_GetPointer(object, NAME.as_ptr());
            let managed: *mut Managed = managed.cast();
            ffi::PyCapsule_SetName(object, TAKEN.as_ptr());
            return Ok((Taken::Unversioned(managed), &raw const (*managed).tensor, 0));
        }
    }
    let remedy = "give a numpy array, or a PyTorch tensor";
    Err(unfit("a capsule of DLPack from `__dlpack__`", "another object", remedy))
}

//! Memory of other libraries' arrays on the device of a run, which is copied into tensors.

#![expect(unsafe_code, reason = "memory of other libraries has no type")]

use meristem_device::{MemoryFormat, Stream, Tensor};
use pyo3::prelude::*;

use super::abi::DataType;
use super::borrowed::{Taken, capsule_of, device_of_array, format_of, list, place, take};
use super::{CPU, CUDA, device_of, row_major};
use crate::errors::{Failure, Kind};

/// Floats in row-major order, on the device of a stream.
pub(crate) struct Foreign {
    /// Keeps the memory alive; its drop calls the deleter.
    _managed: Taken,
    address: u64,
    shape: Vec<usize>,
}

/// Error for an unsuitable array of a loss; nothing was read.
fn refused(name: &str, got: String, expected: &str, remedy: &str) -> Failure {
    let message = format!("loss: `{name}`: got {got}, expected {expected}");
    Failure::usage(Kind::Argument, message, remedy)
}

impl Foreign {
    /// Borrows an array with `__dlpack__` on the device of `stream`, which waits for the work of
    /// the array's library. `name` is for errors.
    ///
    /// # Errors
    /// The object has no `__dlpack__`, or its array is on another device, has another shape or
    /// element type than float32, or is not contiguous.
    pub(crate) fn of(
        given: &Bound<'_, PyAny>,
        name: &str,
        shape: &[usize],
        stream: &Stream,
    ) -> PyResult<Self> {
        let wanted = device_of(stream.device().id());
        let device = device_of_array(given)?;
        // `kDLCUDAHost`, page-locked memory, is host memory.
        let fits = device == wanted || wanted == CPU && [CPU.0, 3].contains(&device.0);
        if !fits {
            let remedy = "compute it from the arrays that the function gets, on their device";
            return Err(refused(name, place(device), &place(wanted), remedy).into());
        }
        let handle = stream.cuda_handle().filter(|_| wanted.0 == CUDA);
        let capsule = capsule_of(given, handle)?;
        let (managed, tensor, _) = take(&capsule)?;
        // SAFETY: `take` read the pointer from the structure that `managed` keeps.
        let tensor = unsafe { &*tensor };
        if tensor.dtype != DataType::float(32) {
            let remedy = "convert it: `x.float()`, `x.astype(numpy.float32)`";
            return Err(refused(name, tensor.dtype.name(), "float32", remedy).into());
        }
        let axes = usize::try_from(tensor.ndim).unwrap_or_default();
        // SAFETY: in DLPack the pointer has `ndim` extents; none are read if `ndim` is 0.
        let extents = unsafe { list(tensor.shape, axes) };
        let got: Vec<usize> = extents.iter().map(|extent| *extent as usize).collect();
        let strides = if tensor.strides.is_null() {
            row_major(&got)
        } else {
            // SAFETY: in DLPack a pointer that is not null has `ndim` strides.
            unsafe { list(tensor.strides, axes) }.to_vec()
        };
        let contiguous = format_of(&got, &strides) == Some(MemoryFormat::Contiguous);
        if got != shape || !contiguous {
            let got = format!("shape {got:?} with strides {strides:?} (in elements)");
            let expected = format!("a contiguous array of shape {shape:?}");
            return Err(refused(name, got, &expected, "give `x.contiguous()` of that shape").into());
        }
        let address = tensor.data.expose_provenance() as u64 + tensor.byte_offset;
        Ok(Self { _managed: managed, address, shape: got })
    }

    /// Copies arrays into f32 tensors of a stream. Waits for the copies.
    ///
    /// # Errors
    /// The errors of [`Stream::copy_foreign`], such as a failed stream.
    ///
    /// # Panics
    /// If an array and its tensor differ in the number of elements.
    pub(crate) fn copy(stream: &Stream, pieces: &[(&Self, &Tensor)]) -> Result<(), Failure> {
        let as_long =
            |(from, to): &(&Self, &Tensor)| from.shape.iter().product::<usize>() == to.numel();
        assert!(pieces.iter().all(as_long), "as many elements, which `of` has checked");
        let pieces: Vec<(u64, &Tensor)> =
            pieces.iter().map(|(from, to)| (from.address, *to)).collect();
        // SAFETY: the structures keep as many floats alive at their addresses, on the device of the
        // stream. Their library has made the stream wait for its work.
        unsafe { stream.copy_foreign("own_loss", &pieces) }.map_err(Failure::from)
    }
}

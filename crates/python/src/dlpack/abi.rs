//! The C structures of DLPack and their capsules.

#![expect(unsafe_code, reason = "a capsule is a pointer to a structure of C")]

use std::ffi::{CStr, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use super::{Array, Memory};

/// Version of the exported structures.
pub(super) const VERSION: Version = Version { major: 1, minor: 0 };
/// Flag: the memory was copied for the consumer.
const IS_COPIED: u64 = 2;

pub(super) const NAME: &CStr = c"dltensor";
pub(super) const NAME_VERSIONED: &CStr = c"dltensor_versioned";

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DataType {
    pub(crate) const BOOL: Self = Self::new(6, 8);
    pub(crate) const BF16: Self = Self::new(4, 16);

    const fn new(code: u8, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    pub(crate) const fn int(bits: u8) -> Self {
        Self::new(0, bits)
    }

    pub(crate) const fn uint(bits: u8) -> Self {
        Self::new(1, bits)
    }

    pub(crate) const fn float(bits: u8) -> Self {
        Self::new(2, bits)
    }

    /// Name as in numpy.
    pub(crate) fn name(self) -> String {
        let kind = match self.code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            6 => return "bool".into(),
            code => return format!("of code {code} with {} bits", self.bits),
        };
        format!("{kind}{}", self.bits)
    }
}

/// `DLTensor`.
#[repr(C)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    device_kind: i32,
    device_number: i32,
    pub(super) ndim: i32,
    pub(super) dtype: DataType,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
pub(super) struct Managed {
    pub(super) tensor: DlTensor,
    context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(super) struct ManagedVersioned {
    pub(super) version: Version,
    context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    pub(super) flags: u64,
    pub(super) tensor: DlTensor,
}

/// An exported array, owned by its capsule.
pub(super) struct Exported {
    pub(super) array: Array,
    /// Whether the memory was copied for the consumer.
    pub(super) copied: bool,
}

impl Exported {
    /// Returns a structure with pointers into `self`, which must not move.
    fn tensor(&mut self) -> DlTensor {
        let Array { memory, shape, strides, dtype, device } = &mut self.array;
        DlTensor {
            data: std::ptr::with_exposed_provenance_mut(memory.address),
            device_kind: device.0,
            device_number: device.1,
            ndim: shape.len() as i32,
            dtype: *dtype,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

/// Copies memory into words, so that any element type is aligned.
pub(super) fn copied(memory: &Memory) -> Vec<u64> {
    let mut words = vec![0_u64; memory.bytes.div_ceil(8)];
    let from: *const u8 = std::ptr::with_exposed_provenance(memory.address);
    // SAFETY: `memory` keeps `bytes` bytes at the address alive, and the words have at least
    // `bytes` bytes.
    unsafe { std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast(), memory.bytes) };
    words
}

/// Creates the capsule of an array.
pub(super) fn capsule(py: Python<'_>, exported: Exported, versioned: bool) -> PyResult<Py<PyAny>> {
    let flags = if exported.copied { IS_COPIED } else { 0 };
    let context = Box::into_raw(Box::new(exported));
    // SAFETY: `context` is the box of the previous line, without other references.
    let tensor = unsafe { (*context).tensor() };
    let context: *mut c_void = context.cast();
    let capsule = if versioned {
        let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
        let managed = ManagedVersioned { version: VERSION, context, deleter, flags, tensor };
        let managed: *mut c_void = Box::into_raw(Box::new(managed)).cast();
        // SAFETY: the pointer is not null, the name lives for ever, and this thread holds the GIL.
        unsafe { ffi::PyCapsule_New(managed, NAME_VERSIONED.as_ptr(), Some(drop_versioned)) }
    } else {
        let managed = Managed { tensor, context, deleter: Some(delete) };
        let managed: *mut c_void = Box::into_raw(Box::new(managed)).cast();
        // SAFETY: as above.
        unsafe { ffi::PyCapsule_New(managed, NAME.as_ptr(), Some(drop_unversioned)) }
    };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind)
}

/// Deleter: frees an exported array. May run on any thread, with or without the GIL.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: a consumer calls this once, with the pointer of `capsule`.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: `context` is the box that `capsule` created.
    drop(unsafe { Box::from_raw(managed.context.cast::<Exported>()) });
}

/// As [`delete`].
unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as in `delete`.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: as in `delete`.
    drop(unsafe { Box::from_raw(managed.context.cast::<Exported>()) });
}

/// Destructor of a capsule: frees the array unless a consumer has taken it, which renames the
/// capsule.
unsafe extern "C" fn drop_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule of `capsule`, whose pointer is a `Managed`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// As [`drop_unversioned`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_unversioned`, with a `ManagedVersioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME_VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, NAME_VERSIONED.as_ptr()).cast());
        }
    }
}

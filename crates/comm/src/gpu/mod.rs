//! The kernels of this crate on a CUDA device: for every launch the calls that carry it out, with
//! the bits of the processor.
//!
//! Nothing here depends on the `cuda` feature: calls are plain values, and a build without it only
//! never runs them. Operands are [`Piece`]s: parts of the launch's arguments.

mod feedback;
mod lists;
mod select;
mod sum;

use crate::number::{Number, with_number};
use bytemuck::{Pod, Zeroable};
use meristem_device::{DType, Header, Kernel, Source, Tensor};

pub(crate) use meristem_device::{Call, Piece};

pub(crate) use feedback::{advance, clear, drain, nothing};
pub(crate) use lists::{Compaction, Merge, common, divide_up, mark, merge, scatter, take, unmark};
pub(crate) use select::{Elements, InTables, Listed, PIECES_MAX, Tables};
pub(crate) use select::{candidates_len, from_list, select};
pub(crate) use sum::{Ranks, copies, sum};

static HEADERS: [Header; 1] = [Header { name: c"comm.cuh", text: include_str!("comm.cuh") }];

/// All kernels of this crate.
pub(crate) static SOURCES: [&Source; 4] =
    [&feedback::SOURCE, &lists::SOURCE, &select::SOURCE, &sum::SOURCE];

/// A file of kernels.
macro_rules! source {
    ($file:literal) => {
        meristem_device::Source {
            name: concat!("crates/comm/src/gpu/", $file),
            text: include_str!($file),
            headers: &$crate::gpu::HEADERS,
        }
    };
}
use source;

/// A kernel for each type of number, named after it: `T` stands for the type among its operands.
macro_rules! typed {
    ($entry:literal, $values:ty, [$($usage:ident $element:ident),* $(,)?]) => {
        $crate::gpu::Typed([
            typed!(@one $entry, "_f32", f32, $values, [$($usage $element),*]),
            typed!(@one $entry, "_f64", f64, $values, [$($usage $element),*]),
            typed!(@one $entry, "_bf16", half::bf16, $values, [$($usage $element),*]),
        ])
    };
    (
        @one $entry:literal, $suffix:literal, $number:ty, $values:ty,
        [$($usage:ident $element:ident),*]
    ) => {
        meristem_device::Kernel {
            source: &SOURCE,
            entry: concat!($entry, $suffix),
            operands: {
                #[allow(dead_code, reason = "not every kernel has an operand of the type")]
                type T = $number;
                &[$(meristem_device::Operand::$usage::<$element>()),*]
            },
            values: size_of::<$values>(),
        }
    };
}
use typed;

/// Kernels for f32, f64 and bf16.
struct Typed([Kernel; 3]);

impl Typed {
    /// The kernel for a type of number.
    fn of(&'static self, dtype: DType) -> &'static Kernel {
        match dtype {
            DType::F64 => &self.0[1],
            DType::BF16 => &self.0[2],
            _ => &self.0[0],
        }
    }
}

/// An operand that is absent.
const ABSENT: Piece = Piece { argument: 0, start: 0, len: 0 };

/// All elements of an argument.
pub(crate) fn whole(argument: usize, tensor: &Tensor) -> Piece {
    Piece { argument, start: 0, len: tensor.numel() }
}

/// Elements of an argument, of the given type.
pub(crate) fn part(argument: usize, dtype: DType, start: usize, len: usize) -> Piece {
    Piece { argument, start: start * dtype.size(), len }
}

/// Bits of a number of a type, as kernels read them.
fn bits_of(dtype: DType, value: f64) -> u64 {
    fn bits<T: Number>(value: f64) -> u64 {
        let number = T::from_f64(value);
        let mut bits = [0; 8];
        let bytes = bytemuck::bytes_of(&number);
        bits[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(bits)
    }
    with_number!(dtype, T => bits::<T>(value), 0)
}

/// `Divide` of comm.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Divide {
    reciprocal: u64,
    by: u32,
    exact: u32,
}

impl Divide {
    fn new(dtype: DType, divisor: Option<usize>) -> Divide {
        let by = divisor.unwrap_or(0);
        let exact = by.is_power_of_two();
        let reciprocal = if exact { bits_of(dtype, 1.0 / by as f64) } else { 0 };
        Divide { reciprocal, by: by as u32, exact: exact.into() }
    }
}

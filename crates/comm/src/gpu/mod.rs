//! The kernels of this crate on a CUDA device: the calls of every launch. The results have the same
//! bits as on the CPU.
//!
//! The module does not depend on the `cuda` feature: calls are plain values, which a build without
//! it never runs. Operands are [`Piece`]s, parts of the launch's arguments.

mod copy;
mod feedback;
mod indices;
mod int8;
mod lists;
mod select;
mod sum;
mod threshold;

use bytemuck::{Pod, Zeroable};
pub(crate) use meristem_device::{Call, Piece};
use meristem_device::{DType, Kernel, KernelHeader, KernelSource, Tensor};

pub(crate) use self::copy::copies;
pub(crate) use self::feedback::{advance, clear, drain, fill_minus_zero};
pub(crate) use self::indices::{Compaction, common, divide_up, mark, unmark};
pub(crate) use self::int8::{decode, encode};
pub(crate) use self::lists::{Merge, merge, scatter, take};
pub(crate) use self::select::{Elements, ListSelection, candidates_len, from_list, select};
pub(crate) use self::sum::{RankPieces, sum};
pub(crate) use self::threshold::{PIECES_MAX, SelectionTables, TableArguments};
use crate::number::{SumElement, with_number};

/// Headers of the sources for one element type; `$element` is its `element.cuh`.
macro_rules! headers {
    ($element:literal) => {{
        const fn header(name: &'static std::ffi::CStr, text: &'static str) -> KernelHeader {
            KernelHeader { name, text }
        }
        [
            header(c"comm.cuh", include_str!("comm.cuh")),
            header(c"number.cuh", include_str!("number.cuh")),
            header(c"select.cuh", include_str!("select.cuh")),
            header(c"element.cuh", include_str!($element)),
        ]
    }};
}

static HEADERS: PerType<[KernelHeader; 4]> = PerType([
    headers!("element/f32.cuh"),
    headers!("element/f64.cuh"),
    headers!("element/bf16.cuh"),
]);

/// All kernels for elements of a type.
pub(crate) fn sources(dtype: DType) -> [&'static KernelSource; 8] {
    let [advance, list, pick, add] =
        [&feedback::SOURCE, &lists::SOURCE, &select::SOURCE, &sum::SOURCE]
            .map(|source| source.get(dtype));
    [advance, list, pick, add, &indices::SOURCE, &threshold::SOURCE, &int8::SOURCE, &copy::SOURCE]
}

/// One value each for f32, f64 and bf16.
struct PerType<T>([T; 3]);

impl<T> PerType<T> {
    /// The value for an element type.
    fn get(&self, dtype: DType) -> &T {
        match dtype {
            DType::F64 => &self.0[1],
            DType::BF16 => &self.0[2],
            _ => &self.0[0],
        }
    }
}

/// A kernel for each element type.
type Typed = PerType<Kernel>;

/// A kernel source. Without an index it does not depend on the element type, and gets the headers
/// for f32; with an index it is for the element type at this index of a [`PerType`].
macro_rules! source {
    ($file:literal) => {
        $crate::gpu::source!($file, 0)
    };
    ($file:literal, $of:literal) => {
        meristem_device::KernelSource {
            name: concat!("crates/comm/src/gpu/", $file),
            text: include_str!($file),
            headers: &$crate::gpu::HEADERS.0[$of],
        }
    };
}
use source;

/// A kernel source that is compiled for each element type.
macro_rules! source_per_type {
    ($file:literal) => {
        $crate::gpu::PerType([
            $crate::gpu::source!($file, 0),
            $crate::gpu::source!($file, 1),
            $crate::gpu::source!($file, 2),
        ])
    };
}
use source_per_type;

/// A kernel for each element type; `T` stands for the type among its operands.
macro_rules! typed {
    ($entry:literal, $values:ty, [$($usage:ident $element:ident),* $(,)?]) => {
        $crate::gpu::PerType([
            typed!(@one $entry, 0, f32, $values, [$($usage $element),*]),
            typed!(@one $entry, 1, f64, $values, [$($usage $element),*]),
            typed!(@one $entry, 2, half::bf16, $values, [$($usage $element),*]),
        ])
    };
    (
        @one $entry:literal, $of:literal, $number:ty, $values:ty,
        [$($usage:ident $element:ident),*]
    ) => {
        meristem_device::Kernel {
            source: &SOURCE.0[$of],
            entry: $entry,
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

/// An absent operand.
const ABSENT: Piece = Piece { argument: 0, start: 0, len: 0 };

/// A list among the arguments of a launch.
#[derive(Clone, Copy)]
pub(crate) struct ListPieces {
    pub(crate) indices: Piece,
    pub(crate) values: Piece,
}

impl ListPieces {
    /// An absent list.
    const ABSENT: ListPieces = ListPieces { indices: ABSENT, values: ABSENT };
}

/// All elements of an argument.
pub(crate) fn whole(argument: usize, tensor: &Tensor) -> Piece {
    Piece { argument, start: 0, len: tensor.numel() }
}

/// A part of an argument with elements of type `dtype`.
pub(crate) fn part(argument: usize, dtype: DType, start: usize, len: usize) -> Piece {
    Piece { argument, start: start * dtype.size(), len }
}

/// Bits of a number in an element type, as kernels read them.
fn bits_of(dtype: DType, value: f64) -> u64 {
    fn bits<T: SumElement>(value: f64) -> u64 {
        let number = T::from_f64(value);
        let mut bits = [0; 8];
        let bytes = bytemuck::bytes_of(&number);
        bits[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(bits)
    }
    with_number!(dtype, T => bits::<T>(value), 0)
}

/// The struct `Divide` of comm.cuh.
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

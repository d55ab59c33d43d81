//! Calls for [`ops::rows`](crate::ops::rows).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::{
    Emission, READ, READ_VALUES, VALUE_HEADERS, WRITE, WRITE_VALUES, by_values, emitted, kernel,
    plain, read, value_kernels, value_sources, write,
};
use crate::kernels::rows::{ColumnRange, Matrices};
use crate::ops::rows::{Lookup, RowsOp};
use crate::precision::ValueType;

pub(super) static SOURCE: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "rows.cu");

const READ_INDICES: Operand = Operand::read::<u32>();

static EMBED: [Kernel; 2] =
    value_kernels!(Divisor, SOURCE, "embed", [READ_INDICES, READ, WRITE_VALUES]);
static EMBED_GRADIENT: [Kernel; 2] =
    value_kernels!(Divisor, SOURCE, "embed_gradient", [READ_INDICES, READ_VALUES, WRITE]);
static COPY_INDICES: [Kernel; 2] =
    value_kernels!((), SOURCE, "copy_indices", [READ_INDICES, Operand::write::<u32>()]);
static PUT: [Kernel; 2] =
    value_kernels!(ColumnValues, SOURCE, "put_columns", [READ_VALUES, WRITE_VALUES]);
static TAKE: [Kernel; 2] =
    value_kernels!(ColumnValues, SOURCE, "take_columns", [READ_VALUES, WRITE_VALUES]);

static TRANSPOSE: [Kernel; 2] =
    value_kernels!(MatrixValues, SOURCE, "transpose", [READ_VALUES, WRITE_VALUES]);

/// Threads of a block that adds to a row of a table.
const THREADS: u32 = 128;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ColumnValues {
    width: u32,
    first: u32,
    count: Divisor,
    accumulate: u32,
}

fn at(of: ColumnRange, accumulate: bool) -> ColumnValues {
    let (width, first, count) = (of.width as u32, of.first as u32, Divisor::new(of.count));
    ColumnValues { width, first, count, accumulate: accumulate.into() }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MatrixValues {
    rows: Divisor,
    columns: Divisor,
    accumulate: u32,
}

pub(super) fn emit(op: &RowsOp, values: ValueType) -> Emission {
    let by = |kernels| by_values(kernels, values);
    match *op {
        RowsOp::Embed(Lookup { indices, size, .. }) => {
            let operands = [read(0), read(1), write(0)];
            smallvec![emitted(
                Call::each(by(&EMBED), indices * size),
                &operands,
                Divisor::new(size)
            )]
        }
        RowsOp::EmbedGradient(Lookup { entries, size, .. }) => {
            let call = Call::new(by(&EMBED_GRADIENT), entries as u32, THREADS);
            smallvec![emitted(call, &[read(0), read(1), write(0)], Divisor::new(size))]
        }
        RowsOp::CopyIndices { len } => {
            smallvec![plain(Call::each(by(&COPY_INDICES), len), &[read(0), write(0)])]
        }
        RowsOp::Put { rows, at: of } => {
            let call = Call::each(by(&PUT), rows * of.count);
            smallvec![emitted(call, &[read(0), write(0)], at(of, false))]
        }
        RowsOp::Take { rows, at: of, accumulate } => {
            let call = Call::each(by(&TAKE), rows * of.count);
            smallvec![emitted(call, &[read(0), write(0)], at(of, accumulate))]
        }
        RowsOp::Transpose { of: Matrices { count, rows, columns }, accumulate } => {
            let call = Call::each(by(&TRANSPOSE), count * rows * columns);
            let [rows, columns] = [rows, columns].map(Divisor::new);
            let of = MatrixValues { rows, columns, accumulate: accumulate.into() };
            smallvec![emitted(call, &[read(0), write(0)], of)]
        }
    }
}

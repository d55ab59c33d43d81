//! Calls of `lists.cu`.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, DType, KernelSource, Piece};

use super::{ABSENT, Divide, ListPieces, PerType, Typed, source_per_type, typed};

pub(super) static SOURCE: PerType<KernelSource> = source_per_type!("lists.cu");

/// Elements per block of the kernel that writes a dense sum.
const TILE: usize = 2048;

static SCATTER: Typed = typed!("scatter", ScatterValues, [read u32, read T, write T]);
static TAKE: Typed = typed!("take", (), [read T, read u32, write T, write u32]);
static MERGE: Typed =
    typed!("merge", MergeValues, [read u32, read T, read u32, read T, write u32, write T]);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ScatterValues {
    divide: Divide,
    start: u32,
    lists: u32,
    len: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MergeValues {
    rows: u32,
    me: u32,
    first: u32,
    len: u32,
}

/// Writes the sum of lists of `len` entries into consecutive outputs. `lists` has the lists
/// one after another.
pub(crate) fn scatter(
    dtype: DType,
    lists: ListPieces,
    len: usize,
    outputs: &[Piece],
    divisor: Option<usize>,
) -> Vec<Call> {
    let (divide, mut start) = (Divide::new(dtype, divisor), 0);
    let ListPieces { indices, values } = lists;
    let lists = indices.len.checked_div(len).unwrap_or(0) as u32;
    let call = |output: &Piece| {
        let values_of = ScatterValues { divide, start, lists, len: len as u32, unused: 0 };
        start += output.len as u32;
        let blocks = output.len.div_ceil(TILE) as u32;
        Call::new(SCATTER.get(dtype), blocks, 256)
            .with_pieces([indices, values, *output])
            .values(values_of)
    };
    outputs.iter().map(call).collect()
}

/// Copies the elements at `indices`, and the indices to `copies`, if given.
pub(crate) fn take(
    dtype: DType,
    elements: Piece,
    indices: Piece,
    values: Piece,
    copies: Option<Piece>,
) -> Call {
    let call = Call::each(TAKE.get(dtype), indices.len);
    call.with_pieces([elements, indices, values, copies.unwrap_or(ABSENT)])
}

/// Rows of equal length to merge.
pub(crate) struct Merge {
    /// Indices and values of this rank's row, which is stored elsewhere.
    pub(crate) own: ListPieces,
    /// Index of this rank's row.
    pub(crate) me: usize,
    /// Indices and values of the other rows, one row after another.
    pub(crate) others: ListPieces,
    /// Index of the first of the other rows.
    pub(crate) first: usize,
    /// Number of rows.
    pub(crate) rows: usize,
}

/// Merges rows into a list with holes, whose length is the sum of the rows' lengths. Values with
/// the same index are added, in the order of the rows.
pub(crate) fn merge(dtype: DType, rows: &Merge, to: ListPieces) -> Call {
    let len = rows.own.indices.len;
    let values = MergeValues {
        rows: rows.rows as u32,
        me: rows.me as u32,
        first: rows.first as u32,
        len: len as u32,
    };
    let pieces = [rows.own, rows.others, to].map(|list| [list.indices, list.values]).concat();
    Call::each(MERGE.get(dtype), rows.rows * len).with_pieces(pieces).values(values)
}

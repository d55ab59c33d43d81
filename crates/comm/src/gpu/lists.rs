//! Calls of `lists.cu`.

use super::select::InTables;
use super::{ABSENT, Divide, Typed, source, typed};
use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, DType, Kernel, Operand, Piece, Source};

pub(super) static SOURCE: Source = source!("lists.cu");

/// Elements of a block that makes a sum dense.
const TILE: usize = 2048;
/// Entries of a block that takes holes out.
const HOLES: usize = 8 * 1024;

const READ: Operand = Operand::read::<u32>();
const WRITE: Operand = Operand::write::<u32>();

static SCATTER: Typed = typed!("scatter", ScatterValues, [read u32, read T, write T]);
static TAKE: Typed = typed!("take", (), [read T, read u32, write T, write u32]);
static MERGE: Typed =
    typed!("merge", MergeValues, [read u32, read T, read u32, read T, write u32, write T]);
static COMMON: Kernel = kernel("common", &[READ, READ, WRITE]);
static MARK: Kernel = kernel("mark", &[READ, READ, WRITE]);
static UNMARK: Kernel = kernel("unmark", &[READ, READ, WRITE]);
static COUNT_PRESENT: Kernel = kernel("count_present", &[READ, Operand::write::<i64>()]);
static WRITE_PRESENT: Kernel =
    kernel("write_present", &[READ, Operand::read::<i64>(), READ, WRITE]);
static DIVIDE_UP: Kernel = kernel("divide_up", &[READ, READ, WRITE]);

const fn kernel(entry: &'static str, operands: &'static [Operand]) -> Kernel {
    Kernel { source: &SOURCE, entry, operands, values: 0 }
}

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

/// Writes the sum of lists of `len` entries into the outputs, one after the other.
pub(crate) fn scatter(
    dtype: DType,
    [indices, values]: [Piece; 2],
    len: usize,
    outputs: &[Piece],
    divisor: Option<usize>,
) -> Vec<Call> {
    let (divide, mut start) = (Divide::new(dtype, divisor), 0);
    let lists = indices.len.checked_div(len).unwrap_or(0) as u32;
    let call = |output: &Piece| {
        let values_of = ScatterValues { divide, start, lists, len: len as u32, unused: 0 };
        start += output.len as u32;
        let blocks = output.len.div_ceil(TILE) as u32;
        Call::new(SCATTER.of(dtype), blocks, 256).of([indices, values, *output]).values(values_of)
    };
    outputs.iter().map(call).collect()
}

/// Copies the elements at some indices, and the indices unless they are there already.
pub(crate) fn take(
    dtype: DType,
    [elements, indices]: [Piece; 2],
    values: Piece,
    copies: Option<Piece>,
) -> Call {
    let call = Call::each(TAKE.of(dtype), indices.len);
    call.of([elements, indices, values, copies.unwrap_or(ABSENT)])
}

/// Rows of equal length that are merged.
pub(crate) struct Merge {
    /// Indices and values of the row that lies apart.
    pub(crate) own: [Piece; 2],
    /// Its number.
    pub(crate) me: usize,
    /// Indices and values of the others, one after the other.
    pub(crate) others: [Piece; 2],
    /// Number of the first of them.
    pub(crate) first: usize,
    /// Number of rows.
    pub(crate) rows: usize,
}

/// Merges rows into a list with holes, as long as all of them together; where several have an index
/// their values are added, in order.
pub(crate) fn merge(dtype: DType, of: &Merge, to: [Piece; 2]) -> Call {
    let len = of.own[0].len;
    let values = MergeValues {
        rows: of.rows as u32,
        me: of.me as u32,
        first: of.first as u32,
        len: len as u32,
    };
    let pieces = [of.own, of.others, to].concat();
    Call::each(MERGE.of(dtype), of.rows * len).of(pieces).values(values)
}

/// Sets a bit for each entry of a list whose index is in `kept`.
pub(crate) fn mark(list: Piece, kept: Piece, mask: Piece) -> Call {
    Call::each(&MARK, list.len).of([list, kept, mask])
}

/// A list that is written without some of its entries.
pub(crate) struct Compaction {
    /// The list.
    pub(crate) list: Piece,
    /// Memory for as many entries.
    pub(crate) holes: Piece,
    /// Target, padded.
    pub(crate) to: Piece,
    pub(crate) tables: InTables,
}

/// Writes the entries that are also in `kept`, which is ascending.
pub(crate) fn common(of: &Compaction, kept: Piece) -> Vec<Call> {
    with_holes(of, Call::each(&COMMON, of.list.len).of([of.list, kept, of.holes]))
}

/// Writes the entries whose bits are set.
pub(crate) fn unmark(of: &Compaction, mask: Piece) -> Vec<Call> {
    with_holes(of, Call::each(&UNMARK, of.list.len).of([of.list, mask, of.holes]))
}

/// Takes out the holes that a call leaves.
fn with_holes(of: &Compaction, call: Call) -> Vec<Call> {
    let &Compaction { list, holes, to, tables } = of;
    let holes = Piece { len: list.len, ..holes };
    let tiles = list.len.div_ceil(super::select::TILE) as u32;
    // Blocks for the padding, too.
    let blocks = list.len.max(1).div_ceil(HOLES) as u32;
    let count = Call::new(&COUNT_PRESENT, blocks, 256).of([holes, tables.tiles()]);
    let write = Call::new(&WRITE_PRESENT, blocks, 256);
    let write = write.of([holes, tables.tiles(), tables.picked(), to]);
    vec![call, count, tables.scan(1, tiles, ABSENT), write]
}

/// Redraws the bounds of regions by a result, which was the last selection of these tables.
pub(crate) fn divide_up(result: Piece, tables: InTables, bounds: Piece) -> Call {
    Call::each(&DIVIDE_UP, bounds.len).of([result, tables.picked(), bounds])
}

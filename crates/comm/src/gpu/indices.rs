//! Calls of `indices.cu`.

use meristem_device::{Call, Kernel, KernelSource, Operand, Piece};

use super::threshold::{TILE, TableArguments};
use super::{ABSENT, source};

pub(super) static SOURCE: KernelSource = source!("indices.cu");

/// Entries per block of `count_present` and `write_present`, which remove holes.
const ENTRIES_PER_BLOCK: usize = 8 * 1024;

const READ: Operand = Operand::read::<u32>();
const WRITE: Operand = Operand::write::<u32>();

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

/// Sets a bit for each entry of a list whose index is in `kept`.
pub(crate) fn mark(list: Piece, kept: Piece, mask: Piece) -> Call {
    Call::each(&MARK, list.len).with_pieces([list, kept, mask])
}

/// The removal of some entries from a list.
pub(crate) struct Compaction {
    /// The list.
    pub(crate) list: Piece,
    /// Memory for the list with holes, of the same length.
    pub(crate) holes: Piece,
    /// The resulting list, padded.
    pub(crate) to: Piece,
    pub(crate) tables: TableArguments,
}

/// Writes the entries of the list that are also in `kept`, which is in ascending order.
pub(crate) fn common(compaction: &Compaction, kept: Piece) -> Vec<Call> {
    with_holes(
        compaction,
        Call::each(&COMMON, compaction.list.len).with_pieces([
            compaction.list,
            kept,
            compaction.holes,
        ]),
    )
}

/// Writes the entries whose bits are set.
pub(crate) fn unmark(compaction: &Compaction, mask: Piece) -> Vec<Call> {
    with_holes(
        compaction,
        Call::each(&UNMARK, compaction.list.len).with_pieces([
            compaction.list,
            mask,
            compaction.holes,
        ]),
    )
}

/// Adds the calls that remove the holes left by `call`.
fn with_holes(compaction: &Compaction, call: Call) -> Vec<Call> {
    let &Compaction { list, holes, to, tables } = compaction;
    let holes = Piece { len: list.len, ..holes };
    let tiles = list.len.div_ceil(TILE) as u32;
    // Includes blocks for the padding.
    let blocks = list.len.max(1).div_ceil(ENTRIES_PER_BLOCK) as u32;
    let count = Call::new(&COUNT_PRESENT, blocks, 256).with_pieces([holes, tables.tiles]);
    let write = Call::new(&WRITE_PRESENT, blocks, 256);
    let write = write.with_pieces([holes, tables.tiles, tables.picked(), to]);
    vec![call, count, tables.scan(1, tiles, ABSENT), write]
}

/// Moves the bounds so that all regions have equally many entries of `result`. The last use of
/// `tables` must be the selection that wrote `result`.
pub(crate) fn divide_up(result: Piece, tables: TableArguments, bounds: Piece) -> Call {
    Call::each(&DIVIDE_UP, bounds.len).with_pieces([result, tables.picked(), bounds])
}

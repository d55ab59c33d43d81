//! Calls of `threshold.cu`, and the memory of selections.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, DType, DeviceId, Kernel, KernelSource, Operand, Owner, Piece, Result};
use meristem_device::{Stream, Tensor};

use super::{source, whole};

pub(super) static SOURCE: KernelSource = source!("threshold.cu");

/// Bits of a digit of a magnitude; the first digit is the most significant one.
pub(super) const DIGIT: u32 = 12;
/// Entries of a tile, which one warp handles.
pub(super) const TILE: usize = 1024;
/// Words of the struct `State` of `select.cuh`, the state of a row's selection.
const STATE: usize = 16;
/// Words of a row in the control memory: its state, and a bin for each value of a digit.
const ROW: usize = STATE + (1 << DIGIT);
/// Index of the word of `State` that counts the selected entries.
const PICKED: usize = 13;
/// Threads of a block that initialises a row or chooses its digit.
const CHOOSERS: u32 = 256;

const WORDS: Operand = Operand::write::<u32>();
const TABLE: Operand = Operand::write::<i64>();
const LIST: Operand = Operand::read::<u32>();
const THRESHOLD: Operand = Operand::read::<i64>();

static BEGIN: Kernel = kernel::<BeginValues>("begin", &[LIST, LIST, WORDS]);
static CHOOSE: Kernel = kernel::<ChooseValues>("choose", &[THRESHOLD, WORDS]);
static SCAN: Kernel = kernel::<[u32; 2]>("scan", &[TABLE, TABLE, WORDS]);

const fn kernel<V>(entry: &'static str, operands: &'static [Operand]) -> Kernel {
    Kernel { source: &SOURCE, entry, operands, values: size_of::<V>() }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BeginValues {
    /// Entries to select in each row.
    wanted: u32,
    /// Entries of the list.
    len: u32,
    rows: u32,
    unused: u32,
}

/// The struct `ChooseValues` of `threshold.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct ChooseValues {
    /// Bits of the digit.
    pub(super) bits: u32,
    /// 1 for the first digit of elements, after which candidates may be collected.
    pub(super) first: u32,
    /// 1 for the last digit.
    pub(super) last: u32,
    /// 1 if the threshold of an earlier selection may be used.
    pub(super) known: u32,
    /// Number of candidates that fit into memory.
    pub(super) room: u32,
    pub(super) unused: u32,
}

/// Largest number of pieces of memory in a selection; each may end with a partial tile.
pub(crate) const PIECES_MAX: usize = 1024;

/// Memory of selections on a CUDA device.
pub(crate) struct SelectionTables {
    /// u32 `[rows, ROW]`: the state and the bins of each row.
    control: Tensor,
    /// i64: two numbers for each tile, see `select.cu`.
    tiles: Tensor,
}

impl SelectionTables {
    /// Memory for selections in `rows` rows of up to `len` entries; `None` on a CPU.
    ///
    /// # Errors
    /// The errors of an allocation.
    pub(crate) fn new(stream: &Stream, rows: usize, len: usize) -> Result<Option<SelectionTables>> {
        if matches!(stream.device().id(), DeviceId::Cpu(_)) {
            return Ok(None);
        }
        let zeros = |len, dtype| Tensor::zeros(stream, [len], dtype, Owner::Collectives);
        let tiles = rows * (len.div_ceil(TILE) + PIECES_MAX);
        let (control, tiles) = (zeros(rows * ROW, DType::U32)?, zeros(2 * tiles, DType::I64)?);
        Ok(Some(SelectionTables { control, tiles }))
    }

    /// The two tensors, as arguments of a launch.
    pub(crate) fn tensors(&self) -> [&Tensor; 2] {
        [&self.control, &self.tiles]
    }
}

/// The tables among the arguments of a launch.
#[derive(Clone, Copy)]
pub(crate) struct TableArguments {
    pub(super) control: Piece,
    pub(super) tiles: Piece,
}

impl TableArguments {
    /// The tables as arguments `first` and `first + 1`.
    pub(crate) fn at(first: usize, tables: &SelectionTables) -> TableArguments {
        let [control, tiles] = tables.tensors();
        TableArguments { control: whole(first, control), tiles: whole(first + 1, tiles) }
    }

    /// Number of entries kept by the last selection or compaction, in the first row.
    pub(super) fn picked(self) -> Piece {
        Piece { start: self.control.start + PICKED * size_of::<u32>(), len: 1, ..self.control }
    }

    /// Clears the bins and initialises the rows of a list; each row selects `wanted` entries.
    pub(super) fn begin(self, list: Piece, bounds: Piece, rows: usize, wanted: usize) -> Call {
        let (len, wanted) = (list.len as u32, wanted as u32);
        let values = BeginValues { wanted, len, rows: rows as u32, unused: 0 };
        let call = Call::new(&BEGIN, rows as u32, CHOOSERS);
        call.with_pieces([list, bounds, self.control]).values(values)
    }

    /// Finds the digit of the threshold in each row.
    pub(super) fn choose(self, rows: usize, threshold: Piece, values: ChooseValues) -> Call {
        let call = Call::new(&CHOOSE, rows as u32, CHOOSERS);
        call.with_pieces([threshold, self.control]).values(values)
    }

    /// Computes prefix sums of the tiles' counts, `row_tiles` in each row.
    pub(super) fn scan(self, rows: usize, row_tiles: u32, threshold: Piece) -> Call {
        let threads = row_tiles.clamp(32, 1024).next_power_of_two();
        let call = Call::new(&SCAN, rows as u32, threads);
        call.with_pieces([threshold, self.tiles, self.control]).values([row_tiles, 0])
    }
}

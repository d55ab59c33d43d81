//! Calls of `select.cu`.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, DType, KernelSource, Piece};

use super::threshold::{ChooseValues, DIGIT, TILE, TableArguments};
use super::{ABSENT, ListPieces, PerType, Typed, bits_of, source_per_type, typed};
use crate::number::{Magnitude, SumElement, with_number};

pub(super) static SOURCE: PerType<KernelSource> = source_per_type!("select.cu");

/// Warps per block; each warp works on one tile.
const WARPS: usize = 8;
const THREADS: u32 = 256;
/// Largest number of blocks that count digits. Each block clears and adds its bins, so more blocks
/// cost more.
const COUNT_BLOCKS_MAX: usize = 1024;
/// Elements per block of `visit`, unless [`COUNT_BLOCKS_MAX`] blocks have more.
const COUNT_ELEMENTS: usize = 4096;

static VISIT: Typed = typed!("visit", VisitValues, [read T, write T, write T, read i64, write u32]);
static COLLECT: Typed =
    typed!("collect", TileRange, [read T, write u32, write T, write i64, write u32]);
static REFINE: Typed = typed!("refine", Digit, [read u32, read T, read u32, read T, write u32]);
static COUNT: Typed =
    typed!("count_selected", TileRange, [read u32, read T, read u32, read T, write i64, write u32]);
static WRITE: Typed = typed!("write_selected", TileRange, [
    read u32, read T, read u32, read T, write i64, write u32, write u32, write T,
]);

/// The struct `VisitValues` of `select.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct VisitValues {
    /// Factor of momentum, as bits of an element.
    factor: u64,
    /// 1 if the threshold of an earlier selection may be used.
    known: u32,
    unused: u32,
}

/// The struct `TileRange` of `select.cu`: the elements and tiles of a call.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TileRange {
    /// Index of the first element among all elements.
    start: u32,
    /// Number of the first tile.
    tile: u32,
    /// Number of tiles of the call in one row.
    tiles: u32,
    /// Number of blocks of the call for one row.
    blocks: u32,
    /// Number of tiles of a row in the table, those of other calls included.
    row_tiles: u32,
    /// 1 for a list, whose entries have indices.
    listed: u32,
}

/// A digit of a magnitude, and the entries in which it is counted: the struct `Digit` of
/// `select.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Digit {
    range: TileRange,
    /// Bits of the magnitude below the digit.
    shift: u32,
    /// Bits of the digit.
    bits: u32,
}

/// Number of candidates to allocate. Candidates are the elements whose first digit is at least the
/// first digit of the threshold; usual gradients have fewer than 4 k of them.
pub(crate) fn candidates_len(len: usize, k: usize) -> usize {
    len.min(4 * k + len / 32 + TILE)
}

/// Elements to select from.
pub(crate) struct Elements<'a> {
    pub(crate) dtype: DType,
    /// The gradient.
    pub(crate) gradient: &'a [Piece],
    /// The residual, to which the gradient is added.
    pub(crate) residual: Option<Piece>,
    /// The velocity, which is updated by the gradient and added to the residual instead of it, and
    /// the factor of momentum.
    pub(crate) velocity: Option<(Piece, f64)>,
    /// The threshold of an earlier selection, and whether to use it. A selection that fills `picks`
    /// replaces it.
    pub(crate) threshold: Option<(Piece, bool)>,
    /// Indices and values of candidates.
    pub(crate) candidates: ListPieces,
    /// Indices and values of the selected elements.
    pub(crate) picks: ListPieces,
    pub(crate) tables: Option<TableArguments>,
}

/// Selects the largest elements. Reads all elements twice, or more often if the candidates do not
/// fit; see `select.cu`.
pub(crate) fn select(elements: &Elements<'_>) -> Vec<Call> {
    let (wanted, dtype) = (elements.picks.indices.len, elements.dtype);
    let Some(tables) = elements.tables.filter(|_| wanted > 0) else {
        return visits(elements, ABSENT);
    };
    let sources = entry_sources(elements);
    let row_tiles = sources.iter().map(|source| source.range.tiles).sum();
    let (threshold, known) = elements.threshold.unwrap_or((ABSENT, false));
    let selection = Selection { dtype, tables, sources, rows: 1, row_tiles, threshold };
    let mut calls = vec![tables.begin(ABSENT, ABSENT, 1, wanted)];
    calls.extend(visits(elements, tables.control));
    let (digits, room) = (digits(dtype), elements.candidates.indices.len as u32);
    let first = ChooseValues { first: 1, known: known.into(), room, ..digits[0].choice() };
    calls.push(selection.choose(first));
    for EntrySource { values: source, range, .. } in &selection.sources {
        let ListPieces { indices, values } = elements.candidates;
        let pieces = [*source, indices, values, tables.tiles, tables.control];
        let call = Call::new(COLLECT.get(dtype), range.blocks, THREADS);
        calls.push(call.with_pieces(pieces).values(*range));
    }
    digits[1..].iter().for_each(|digit| selection.refine(*digit, &mut calls));
    selection.compact(elements.picks, &mut calls);
    calls
}

/// A list to select the largest entries from, in one or more rows.
pub(crate) struct ListSelection {
    pub(crate) dtype: DType,
    /// Indices and values. An entry with the index `NONE` is a hole; the other indices ascend.
    pub(crate) list: ListPieces,
    /// First index of each row except the first row. The only holes of a list with bounds are its
    /// padding.
    pub(crate) bounds: Option<Piece>,
    /// Indices and values of the selected entries, row by row.
    pub(crate) to: ListPieces,
    pub(crate) tables: TableArguments,
}

/// Selects the largest entries of each row of a list; the size of `to` limits their number.
pub(crate) fn from_list(selection: &ListSelection) -> Vec<Call> {
    let ListSelection { dtype, list, bounds, to, tables } = *selection;
    let ListPieces { indices, values } = list;
    let rows = 1 + bounds.map_or(0, |bounds| bounds.len);
    let (wanted, tiles) = (to.indices.len / rows, indices.len.div_ceil(TILE) as u32);
    if wanted == 0 || tiles == 0 {
        return Vec::new();
    }
    let blocks = tiles.div_ceil(WARPS as u32);
    let range = TileRange { start: 0, tile: 0, tiles, blocks, row_tiles: tiles, listed: 1 };
    let sources = vec![EntrySource { indices, values, candidates: ListPieces::ABSENT, range }];
    let selection = Selection { dtype, tables, sources, rows, row_tiles: tiles, threshold: ABSENT };
    let bounds = bounds.unwrap_or(ABSENT);
    let mut calls = vec![tables.begin(indices, bounds, rows, wanted)];
    digits(dtype).into_iter().for_each(|digit| selection.refine(digit, &mut calls));
    selection.compact(to, &mut calls);
    calls
}

/// A selection from several pieces of memory.
struct Selection {
    dtype: DType,
    tables: TableArguments,
    sources: Vec<EntrySource>,
    rows: usize,
    /// Number of tiles of a row, in all pieces of memory.
    row_tiles: u32,
    threshold: Piece,
}

/// Entries in one piece of memory.
struct EntrySource {
    indices: Piece,
    values: Piece,
    candidates: ListPieces,
    range: TileRange,
}

impl EntrySource {
    fn pieces(&self) -> [Piece; 4] {
        [self.indices, self.values, self.candidates.indices, self.candidates.values]
    }
}

impl Selection {
    /// Finds the next digit of the threshold.
    fn refine(&self, digit: Digit, calls: &mut Vec<Call>) {
        for source in &self.sources {
            let blocks = source.range.blocks.min(COUNT_BLOCKS_MAX as u32);
            let digit = Digit { range: TileRange { blocks, ..source.range }, ..digit };
            let call = Call::new(REFINE.get(self.dtype), self.rows as u32 * blocks, THREADS);
            let pieces = source.pieces().into_iter().chain([self.tables.control]);
            calls.push(call.with_pieces(pieces).values(digit));
        }
        calls.push(self.choose(digit.choice()));
    }

    fn choose(&self, values: ChooseValues) -> Call {
        self.tables.choose(self.rows, self.threshold, values)
    }

    /// Writes the entries that reach the threshold, in order.
    fn compact(&self, to: ListPieces, calls: &mut Vec<Call>) {
        let TableArguments { control, tiles } = self.tables;
        let mut over = |kernel: &'static Typed, to: &[Piece]| {
            for source in &self.sources {
                let blocks = self.rows as u32 * source.range.blocks;
                let pieces = source.pieces().into_iter().chain([tiles, control]);
                let call = Call::new(kernel.get(self.dtype), blocks, THREADS);
                calls.push(call.with_pieces(pieces.chain(to.iter().copied())).values(source.range));
            }
        };
        over(&COUNT, &[]);
        over(&WRITE, &[to.indices, to.values]);
        let scan = self.tables.scan(self.rows, self.row_tiles, self.threshold);
        calls.insert(calls.len() - self.sources.len(), scan);
    }
}

/// The pieces of memory that hold the elements: the residual if there is one, else the gradient.
fn entry_sources(elements: &Elements<'_>) -> Vec<EntrySource> {
    let pieces = elements.residual.as_ref().map_or(elements.gradient, std::slice::from_ref);
    let row_tiles = pieces.iter().map(|piece| piece.len.div_ceil(TILE) as u32).sum();
    let (mut start, mut tile) = (0, 0);
    let source = |values: &Piece| {
        let tiles = values.len.div_ceil(TILE) as u32;
        let blocks = tiles.div_ceil(WARPS as u32);
        let range = TileRange { start, tile, tiles, blocks, row_tiles, listed: 0 };
        (start, tile) = (start + values.len as u32, tile + tiles);
        EntrySource { indices: ABSENT, values: *values, candidates: elements.candidates, range }
    };
    pieces.iter().map(source).collect()
}

/// The calls that add the gradient to the residual, and count first digits.
fn visits(elements: &Elements<'_>, control: Piece) -> Vec<Call> {
    let dtype = elements.dtype;
    let (velocity, factor) = elements.velocity.map_or((None, 0.0), |(v, factor)| (Some(v), factor));
    let (threshold, known) = elements.threshold.unwrap_or((ABSENT, false));
    let mut start = 0;
    let visit = |gradient: &Piece| {
        let part = |piece: Option<Piece>| {
            let window = |piece: Piece| Piece {
                start: piece.start + start * dtype.size(),
                len: gradient.len,
                ..piece
            };
            piece.map_or(ABSENT, window)
        };
        let pieces = [*gradient, part(elements.residual), part(velocity), threshold, control];
        start += gradient.len;
        let blocks = gradient.len.div_ceil(COUNT_ELEMENTS).min(COUNT_BLOCKS_MAX) as u32;
        let known = u32::from(known);
        let values = VisitValues { factor: bits_of(dtype, factor), known, unused: 0 };
        Call::new(VISIT.get(dtype), blocks, THREADS).with_pieces(pieces).values(values)
    };
    elements.gradient.iter().map(visit).collect()
}

/// Digits of a magnitude, from the most to the least significant.
fn digits(dtype: DType) -> Vec<Digit> {
    fn bits<T: SumElement>() -> u32 {
        <T::Magnitude as Magnitude>::BITS
    }
    let mut shift = with_number!(dtype, T => bits::<T>(), 0);
    let range = TileRange::zeroed();
    std::iter::from_fn(|| {
        let bits = shift.min(DIGIT);
        shift -= bits;
        (bits > 0).then_some(Digit { range, shift, bits })
    })
    .collect()
}

impl Digit {
    /// The parameters for choosing this digit of the threshold.
    fn choice(self) -> ChooseValues {
        let last = (self.shift == 0).into();
        ChooseValues { bits: self.bits, first: 0, last, known: 0, room: 0, unused: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_cover_a_magnitude() {
        for (dtype, all) in [
            (DType::F32, &[(19, 12), (7, 12), (0, 7)][..]),
            (DType::BF16, &[(3, 12), (0, 3)]),
            (DType::F64, &[(51, 12), (39, 12), (27, 12), (15, 12), (3, 12), (0, 3)]),
        ] {
            let found: Vec<_> =
                digits(dtype).iter().map(|digit| (digit.shift, digit.bits)).collect();
            assert_eq!(found, all);
        }
    }
}

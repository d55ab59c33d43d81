//! Sizes of products of 3 × 3 windows that kernels and their callers share (`window.cuh`).

use crate::precision::Precision;

/// Channels of a group.
pub(super) const GROUP: usize = 8;
/// Most threads of a block: each has up to 128 registers. On tensor cores all blocks have so many.
pub(super) const THREADS: usize = 128;
/// Most words of the channels that are read at a time.
pub(super) const WORDS: usize = 8;

const WARP: usize = 32;
/// Pixels of a warp on tensor cores, and groups: of sums over channels, of sums over pixels.
const WARP_PIXELS: usize = 4 * 16;
const WARP_GROUPS: [usize; 2] = [4, 2];
/// Rows of taps and channels of a warp on tensor cores that has sums over pixels.
const WARP_ROWS: usize = 5 * 16;

/// Whether these products are those of tensor cores.
pub(super) fn on_matrices(precision: Precision) -> bool {
    precision != Precision::F32
}

/// Factors of a word of shared memory.
pub(super) fn each(precision: Precision) -> usize {
    match precision {
        Precision::F32 | Precision::Tf32 => 1,
        Precision::Bf16 => 2,
    }
}

/// Words of channels that are read at a time, at most so many. On tensor cores equally many each
/// time, since those that are missing are multiplied, too.
pub(super) fn words(precision: Precision, channels: usize, most: usize) -> usize {
    let words = channels.div_ceil(each(precision));
    match on_matrices(precision) {
        true => words.div_ceil(words.div_ceil(most)),
        false => words.min(most),
    }
}

/// Channels that a block writes, in groups of 8: tiles of them, and groups of a tile. On tensor
/// cores these are 1, 2, 4 or 8.
pub(super) fn columns(precision: Precision, channels: usize) -> [usize; 2] {
    let groups = channels.div_ceil(GROUP);
    let tiles = groups.div_ceil(8);
    let groups = groups.div_ceil(tiles);
    [tiles, if on_matrices(precision) { groups.next_power_of_two() } else { groups }]
}

/// Most pixels of a tile with so many groups. On units of f32 a thread has 8 of one group.
pub(super) fn pixels_max(precision: Precision, groups: usize) -> usize {
    match on_matrices(precision) {
        true => THREADS / WARP / groups.div_ceil(WARP_GROUPS[0]) * WARP_PIXELS,
        false => THREADS / groups * 8,
    }
}

/// From row to row of columns on tensor cores: 8 banks on, or 24.
pub(super) fn row_of_columns(columns: usize) -> usize {
    if columns == GROUP { columns } else { columns + 8 }
}

/// From row to row of windows on tensor cores, for tiles of so many columns.
pub(super) fn row_of_windows(columns: usize) -> usize {
    if columns.is_multiple_of(8) { columns + 2 } else { columns + 8 }
}

/// Rows of the weights on tensor cores.
pub(super) fn rows_of_weights(words: usize) -> usize {
    (9 * words).next_multiple_of(8)
}

/// Floats of the tables of sums over channels on tensor cores.
pub(super) fn tables_of_channels(words: usize) -> usize {
    rows_of_weights(words) + THREADS / WARP * WARP_PIXELS
}

/// Floats of the tables of sums over so many pixels on tensor cores.
pub(super) fn tables_of_pixels(pixels: usize) -> usize {
    WARP_ROWS + pixels / 4
}

/// Floats of the sums over pixels that a block leaves, with so many threads, channels that are read
/// and groups that are written.
pub(super) fn sums_over_pixels(
    precision: Precision,
    [threads, chunk, groups]: [usize; 3],
) -> usize {
    match on_matrices(precision) {
        true => THREADS / WARP * groups.min(WARP_GROUPS[1]) * 9 * GROUP * chunk,
        false => 9 * GROUP * (threads + 4),
    }
}

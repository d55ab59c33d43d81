//! Sizes of products of 3 × 3 windows that kernels and their callers share (`window.cuh`).

use crate::precision::Precision;

/// Channels of a group.
pub(super) const GROUP: usize = 8;
/// Most threads of a block: each has up to 128 registers. On tensor cores every block has this
/// many.
pub(super) const THREADS: usize = 128;
/// Most words of the channels that are read at a time.
pub(super) const WORDS: usize = 8;

const WARP: usize = 32;
/// Pixels of a warp on tensor cores.
const WARP_PIXELS: usize = 4 * 16;
/// Groups of channels of a warp on tensor cores: for sums over channels, and for sums over pixels.
const WARP_GROUPS: [usize; 2] = [4, 2];
/// Rows, each a tap and a channel, of a warp that computes sums over pixels on tensor cores.
const WARP_ROWS: usize = 5 * 16;

/// Whether tensor cores compute the products.
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

/// Words of channels that are read at a time, at most `most`. On tensor cores the same number each
/// time, since missing words are multiplied, too.
pub(super) fn words(precision: Precision, channels: usize, most: usize) -> usize {
    let words = channels.div_ceil(each(precision));
    if on_matrices(precision) { words.div_ceil(words.div_ceil(most)) } else { words.min(most) }
}

/// Channels that a block writes, in groups of 8: number of tiles, and groups of a tile. On tensor
/// cores a tile has 1, 2, 4 or 8 groups. With 4 and 8 groups a warp multiplies most for each
/// element that it reads, so more than 4 groups are cut into tiles of 4 or 8: with the fewest
/// groups in all, then the fewest tiles.
pub(super) fn columns(precision: Precision, channels: usize) -> [usize; 2] {
    let groups = channels.div_ceil(GROUP);
    let in_tiles_of = |most: usize| [groups.div_ceil(most), most];
    if !on_matrices(precision) {
        let tiles = groups.div_ceil(8);
        [tiles, groups.div_ceil(tiles)]
    } else if groups <= 4 {
        in_tiles_of(groups.next_power_of_two())
    } else {
        let tiled = [8, 4].map(in_tiles_of);
        tiled.into_iter().min_by_key(|[tiles, each]| tiles * each).expect("there are two")
    }
}

/// Most pixels of a tile with `groups` groups. On units of f32 a thread has 8 pixels of one group.
pub(super) fn pixels_max(precision: Precision, groups: usize) -> usize {
    if on_matrices(precision) {
        THREADS / WARP / groups.div_ceil(WARP_GROUPS[0]) * WARP_PIXELS
    } else {
        THREADS / groups * 8
    }
}

/// Floats from row to row of columns on tensor cores, such that consecutive rows are 8 or 24 banks
/// apart.
pub(super) fn row_of_columns(columns: usize) -> usize {
    if columns == GROUP { columns } else { columns + 8 }
}

/// Floats from row to row of windows on tensor cores, for tiles of `columns` columns.
pub(super) fn row_of_windows(columns: usize) -> usize {
    if columns.is_multiple_of(8) { columns + 2 } else { columns + 8 }
}

/// Rows of the weights on tensor cores.
pub(super) fn rows_of_weights(words: usize) -> usize {
    (9 * words).next_multiple_of(8)
}

/// Floats of the tables of sums over channels on tensor cores, with planes of `plane` floats.
pub(super) fn tables_of_channels(words: usize, plane: usize) -> usize {
    rows_of_weights(words) + THREADS / WARP * WARP_PIXELS + plane
}

/// Floats of the tables of sums over `pixels` pixels on tensor cores.
pub(super) fn tables_of_pixels(pixels: usize) -> usize {
    WARP_ROWS + pixels / 4
}

/// Floats of a block's sums over pixels, for its threads, input channels and groups of output
/// channels.
pub(super) fn sums_over_pixels(
    precision: Precision,
    threads: usize,
    chunk: usize,
    groups: usize,
) -> usize {
    if on_matrices(precision) {
        THREADS / WARP * groups.min(WARP_GROUPS[1]) * 9 * GROUP * chunk
    } else {
        9 * GROUP * (threads + 4)
    }
}

/// Shared memory that tensor cores read, in floats: planes of words, then weights or the gradient,
/// then tables. It follows the buffers for copies from global memory.
#[derive(Clone, Copy, Default)]
pub(super) struct SharedWords {
    pub(super) first: usize,
    /// From word to word of the planes, and from row to row of the others.
    pub(super) plane: usize,
    pub(super) row: usize,
    /// First float of the weights or the gradient, counted from the planes.
    pub(super) weights: usize,
    /// First float of the tables, counted from the start of shared memory, as `first` is.
    pub(super) tables: usize,
}

/// Planes or rows in shared memory: their number, and floats from one to the next.
pub(super) struct Strided {
    pub(super) count: usize,
    pub(super) stride: usize,
}

impl SharedWords {
    /// Lays out `planes`, then `rows`, from float `first` on.
    pub(super) fn new(first: usize, planes: Strided, rows: Strided) -> SharedWords {
        let weights = planes.count * planes.stride;
        let tables = first + weights + rows.count * rows.stride;
        SharedWords { first, plane: planes.stride, row: rows.stride, weights, tables }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_cut_into_few_groups_that_warps_can_share() {
        let counts = [
            (1, [1, 1], [1, 1]),
            (9, [1, 2], [1, 2]),
            (24, [1, 3], [1, 4]),
            (32, [1, 4], [1, 4]),
            (33, [1, 5], [1, 8]),
            (64, [1, 8], [1, 8]),
            (72, [2, 5], [3, 4]),
            (96, [2, 6], [3, 4]),
            (100, [2, 7], [2, 8]),
            (128, [2, 8], [2, 8]),
            (136, [3, 6], [5, 4]),
        ];
        for (channels, threads, matrices) in counts {
            assert_eq!(columns(Precision::F32, channels), threads, "{channels} channels");
            for precision in [Precision::Tf32, Precision::Bf16] {
                assert_eq!(columns(precision, channels), matrices, "{channels} channels");
            }
        }
    }
}

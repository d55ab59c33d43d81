//! Tiles of a fused convolution's images, and the layout of a block's shared memory.

use bytemuck::{Pod, Zeroable};

use crate::kernels::BatchShape;
use crate::ops::gpu::divisor::Divisor;
use crate::ops::gpu::windows::{self, GROUP, THREADS, WORDS, columns};
use crate::precision::Precision;

/// As `Tile` in fused.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct FusedTile {
    images: u32,
    h: u32,
    w: u32,
    rows: u32,
    columns: u32,
    across: u32,
    down: u32,
    pitch: u32,
    plane: u32,
    pub(super) chunk: u32,
    wide: Divisor,
    high: Divisor,
}

/// Floats of dynamic shared memory: together with the static shared memory of the kernels it is
/// less than 48 KiB.
const FLOATS_MAX: usize = 11_000;
/// Channels that are read at a time for sums over pixels.
const CHUNK: usize = 8;
/// Most columns of a tile.
const WIDTH: usize = 32;
/// Tiles of a batch's pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct PixelCut {
    /// Rows and columns of an image.
    size: [usize; 2],
    pub(super) images: usize,
    h: usize,
    w: usize,
    across: usize,
    down: usize,
}

impl PixelCut {
    /// Tiles of at most `pixels` pixels (at least two rows of [`WIDTH`]), with an even number of
    /// rows, and columns that are a multiple of 4. A tile holds several images if they fit.
    fn new(of: &BatchShape, pixels: usize) -> PixelCut {
        let across = of.w.div_ceil(WIDTH);
        let w = of.w.div_ceil(across).next_multiple_of(4);
        let pairs = of.h.div_ceil(2);
        let down = pairs.div_ceil((pixels / (2 * w)).max(1));
        let h = 2 * pairs.div_ceil(down);
        let whole = across == 1 && down == 1;
        let images = if whole { (pixels / (w * h)).clamp(1, of.batch) } else { 1 };
        PixelCut { size: [of.h, of.w], images, h, w, across, down: of.h.div_ceil(h) }
    }

    /// Floats from row to row of a tile whose windows are read 4 pixels at a time: a multiple of 4.
    /// If possible, the rows that a warp reads together are in different banks (these rows are 2
    /// apart, and a warp reads 32 floats at once).
    fn pitch(&self) -> usize {
        let least = self.w + 4;
        let banks = |pitch: usize| 2 * pitch % 32;
        let apart = |pitch: &usize| [self.w, 32 - self.w].contains(&banks(*pitch)) && self.w < 32;
        (least..least + 16).step_by(4).find(apart).unwrap_or(least)
    }

    fn pixels(&self) -> usize {
        self.images * self.h * self.w
    }

    fn rows(&self) -> usize {
        self.images * self.h
    }

    /// Number of tiles of `images` images.
    pub(super) fn count(&self, images: usize) -> usize {
        images.div_ceil(self.images) * self.down * self.across
    }

    /// The tile with rows `pitch` floats apart; consecutive words of channels are `banks` banks
    /// apart.
    fn tile(&self, pitch: usize, banks: usize, chunk: usize) -> FusedTile {
        let plane = (self.images * (self.h + 2) * pitch).next_multiple_of(32) + banks;
        let n = |n: usize| n as u32;
        FusedTile {
            images: n(self.images),
            h: n(self.h),
            w: n(self.w),
            rows: n(self.size[0]),
            columns: n(self.size[1]),
            across: n(self.across),
            down: n(self.down),
            pitch: n(pitch),
            plane: n(plane),
            chunk: n(chunk),
            wide: Divisor::new(self.w),
            high: Divisor::new(self.h),
        }
    }
}

/// A cut whose tiles fit into shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    pub(super) cut: PixelCut,
    pub(super) tile: FusedTile,
    /// Floats from channel to channel of the results; for a pass with rows, floats of all rows.
    pub(super) staging: usize,
    /// First float of the weights, or of the rows.
    pub(super) weights: usize,
    /// First float of the tables of tensor cores.
    pub(super) tables: usize,
    /// Floats of planes, weights or rows, and tables together, or of the results if these are more.
    pub(super) floats: usize,
    pub(super) threads: usize,
    /// Floats from one row to the next.
    pub(super) row: usize,
    /// Floats from one pixel to the next.
    pub(super) pixel: usize,
    /// Threads that share the rows.
    pub(super) subsets: usize,
}

impl Fit {
    /// The fit of a pass that reads `read` channels of windows and writes images, with `others`
    /// floats besides: planes and weights, then the results in their place.
    pub(super) fn window(of: Precision, written: &BatchShape, read: usize, others: usize) -> Fit {
        let [_, groups] = columns(of, written.c);
        let fits = halves(windows::pixels_max(of, groups)).flat_map(|pixels| {
            [WORDS, WORDS / 2].map(|most| {
                let (cut, words) = (PixelCut::new(written, pixels), windows::words(of, read, most));
                if windows::on_matrices(of) {
                    Fit::matrix_window(cut, groups, words, windows::each(of))
                } else {
                    Fit::thread_window(cut, groups, words)
                }
            })
        });
        first_that_fits(fits, others)
    }

    /// On units of f32 a thread has 2 rows of 4 pixels and a group of channels.
    fn thread_window(cut: PixelCut, groups: usize, chunk: usize) -> Fit {
        let cols = groups * GROUP;
        let tile = cut.tile(cut.pitch(), 4, chunk);
        let staging = cut.pixels().next_multiple_of(32) + 4;
        let weights = chunk * tile.plane as usize;
        let tables = weights + chunk * (9 * cols + 4);
        let threads = (cut.pixels() / 8 * groups).next_multiple_of(32);
        let floats = tables.max(cols * staging);
        Fit { cut, tile, staging, weights, tables, floats, threads, row: 0, pixel: 0, subsets: 0 }
    }

    /// On tensor cores, with `words` words of `each` channels.
    fn matrix_window(cut: PixelCut, groups: usize, words: usize, each: usize) -> Fit {
        let cols = groups * GROUP;
        let tile = cut.tile(windows::row_of_windows(cut.w), 8, words * each);
        let staging = cut.pixels().next_multiple_of(32) + 4;
        let weights = words * tile.plane as usize;
        let tables = weights + windows::rows_of_weights(words) * windows::row_of_columns(cols);
        let floats = tables + windows::tables_of_channels(words, tile.plane as usize);
        let (floats, threads) = (floats.max(cols * staging), THREADS);
        Fit { cut, tile, staging, weights, tables, floats, threads, row: 0, pixel: 0, subsets: 0 }
    }

    /// The fit of a pass that has sums over pixels: planes of `read` channels, and rows of the
    /// channels that are written. Small, so that several blocks fit on a multiprocessor.
    pub(super) fn rows(of: Precision, written: &BatchShape, read: usize, others: usize) -> Fit {
        let [_, groups] = columns(of, written.c);
        let most = if read <= 4 { 8192 } else { 4096 } / (groups * GROUP);
        let fits = halves(most).map(|pixels| {
            let cut = PixelCut::new(written, pixels);
            if windows::on_matrices(of) {
                Fit::matrix_rows(cut, groups, read.min(CHUNK))
            } else {
                Fit::thread_rows(cut, groups, read.min(CHUNK))
            }
        });
        first_that_fits(fits, others)
    }

    fn thread_rows(cut: PixelCut, groups: usize, chunk: usize) -> Fit {
        let cols = groups * GROUP;
        // Rows are an odd number of banks apart: a warp reads several at a time.
        let tile = cut.tile(cut.w + 3, 4, chunk);
        let weights = chunk * tile.plane as usize;
        let row = cut.w * cols + 4;
        let staging = cut.rows() * row;
        let subsets = (THREADS / (chunk * groups)).min(cut.rows());
        let threads = (subsets * chunk * groups).next_multiple_of(32);
        let floats = weights + staging;
        let (tables, pixel) = (floats, cols);
        Fit { cut, tile, staging, weights, tables, floats, threads, row, pixel, subsets }
    }

    fn matrix_rows(cut: PixelCut, groups: usize, chunk: usize) -> Fit {
        let tile = cut.tile(cut.w + 2, 4, chunk);
        let weights = chunk * tile.plane as usize;
        let pixel = windows::row_of_columns(groups * GROUP);
        let (row, staging) = (cut.w * pixel, cut.pixels() * pixel);
        let tables = weights + staging;
        let floats = tables + windows::tables_of_pixels(cut.pixels());
        let (threads, subsets) = (THREADS, 0);
        Fit { cut, tile, staging, weights, tables, floats, threads, row, pixel, subsets }
    }
}

/// `most`, half of it, and so on.
fn halves(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(most), |n| Some(n / 2)).take_while(|n| *n > 0)
}

/// The first layout that leaves `others` floats free. The smallest tiles do so even for the most
/// channels of a fused convolution.
fn first_that_fits(fits: impl Iterator<Item = Fit>, others: usize) -> Fit {
    let mut last = None;
    for fit in fits {
        last = Some(fit);
        if fit.floats + others <= FLOATS_MAX {
            break;
        }
    }
    last.expect("there are sizes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fused_convolution_fits() {
        let sizes =
            [(1, 1), (2, 3), (4, 4), (7, 6), (8, 8), (16, 16), (32, 32), (33, 35), (96, 96)];
        for (h, w) in sizes {
            for read in [1, 3, 8, 12, 64, 128, 256] {
                for c in [1, 8, 16, 32, 64, 128, 256] {
                    let shape = BatchShape { batch: 128, h, w, c };
                    let others = 3 * read.max(c) + 5 * read.max(c);
                    for of in Precision::ALL {
                        for fit in [Fit::window, Fit::rows].map(|fit| fit(of, &shape, read, others))
                        {
                            let floats = fit.floats + others;
                            assert!(floats <= FLOATS_MAX, "{of}, {shape:?}, {read}: {fit:?}");
                            assert!(fit.threads <= THREADS && fit.cut.h % 2 == 0, "{fit:?}");
                        }
                    }
                }
            }
        }
        for of in Precision::ALL {
            assert!(windows::sums_over_pixels(of, THREADS, CHUNK, 8) <= FLOATS_MAX, "{of}");
        }
    }
}

//! Tiles of 3 × 3 convolutions with stride 1 (`window.cu`).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, Operand};
use smallvec::smallvec;

use super::{WINDOW, finish, most_parts};
use crate::kernels::conv::ConvShape;
use crate::kernels::{BatchShape, pad16};
use crate::ops::conv::ConvProduct;
use crate::ops::gpu::divisor::Divisor;
use crate::ops::gpu::windows::{self, GROUP, SharedWords, Strided, THREADS, WORDS, columns};
use crate::ops::gpu::{
    Emission, Emitted, READ, READ_VALUES, WRITE, WRITE_VALUES, by_precision, emitted, kernel,
    product_kernels, read, write,
};
use crate::precision::Precision;

static FORWARD: [Kernel; 3] =
    product_kernels!(WindowValues, WINDOW, "forward_3x3", [READ_VALUES, READ, READ, WRITE_VALUES]);
static STATISTICS: [Kernel; 3] = product_kernels!(
    WindowValues,
    WINDOW,
    "statistics_3x3",
    [READ_VALUES, READ, READ, WRITE_VALUES, Operand::write::<f64>()]
);
static DATA: [Kernel; 3] =
    product_kernels!(WindowValues, WINDOW, "data_3x3", [READ_VALUES, READ, WRITE_VALUES]);
static WEIGHT: [Kernel; 3] =
    product_kernels!(WindowValues, WINDOW, "weight_3x3", [READ_VALUES, READ_VALUES, WRITE, WRITE]);

/// As in window.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct WindowValues {
    batch: u32,
    read: [u32; 3],
    written: [u32; 3],
    padding: [u32; 2],
    step: u32,
    accumulate: u32,
    tile: [u32; 3],
    across: u32,
    down: u32,
    column_tiles: u32,
    column_groups: u32,
    chunk: u32,
    buffer: u32,
    pitch: u32,
    plane: u32,
    staging: u32,
    weights: u32,
    filter: u32,
    words: u32,
    word_plane: u32,
    word_row: u32,
    word_weights: u32,
    tables: u32,
    parts: u32,
    part_tiles: u32,
    subsets: u32,
    slots: u32,
    columns: Divisor,
    wide: Divisor,
    high: Divisor,
    halo: Divisor,
}

impl WindowValues {
    fn with(self, words: &SharedWords) -> WindowValues {
        WindowValues {
            words: words.first as u32,
            word_plane: words.plane as u32,
            word_row: words.row as u32,
            word_weights: words.weights as u32,
            tables: words.tables as u32,
            ..self
        }
    }
}

/// Most channels that are read at a time for sums over pixels.
const CHUNK: usize = 8;
/// Most columns of a tile.
const WIDTH: usize = 32;

/// Bytes of shared memory that a block of any GPU has without asking for more, and bytes that
/// window.cu declares in addition to the shared memory of a call.
const SHARED: usize = 48 << 10;
const DECLARED: usize = 4 << 10;

/// Whether these kernels can compute a convolution of this shape.
pub(super) fn fits(shape: &ConvShape) -> bool {
    let [ph, pw] = shape.padding;
    let dense = shape.stride == [1, 1] && !shape.is_dilated();
    shape.kernel == [3, 3] && dense && shape.groups == 1 && ph <= 2 && pw <= 2
}

/// Tiles of a batch's pixels.
#[derive(Clone, Copy)]
struct WindowTiles {
    images: usize,
    h: usize,
    w: usize,
    across: usize,
    down: usize,
}

impl WindowTiles {
    /// Tiles of at most `pixels` pixels (at least `rows` · `width`), whose rows are a multiple of
    /// `rows`, and whose columns are a multiple of 4, at most `width`. An image is cut as evenly as
    /// this permits; a tile holds several images if they fit.
    fn new(of: &BatchShape, pixels: usize, rows: usize, width: usize) -> WindowTiles {
        let across = of.w.div_ceil(width).max(1);
        let w = of.w.div_ceil(across).next_multiple_of(4);
        let steps = of.h.div_ceil(rows).max(1);
        let down = steps.div_ceil((pixels / (w * rows)).max(1));
        let h = steps.div_ceil(down) * rows;
        let whole = across == 1 && down == 1;
        let images = if whole { (pixels / (w * h)).clamp(1, of.batch.max(1)) } else { 1 };
        WindowTiles { images, h, w, across, down: of.h.div_ceil(h) }
    }

    /// The largest tiles of at most `pixels` pixels whose shared memory fits: the halos of the
    /// smallest images have several times the pixels of the images.
    fn fitting(
        of: &BatchShape,
        pixels: usize,
        rows: usize,
        width: usize,
        fits: impl Fn(&WindowTiles) -> bool,
    ) -> WindowTiles {
        let (mut pixels, least) = (pixels, rows * width);
        loop {
            let tiles = WindowTiles::new(of, pixels, rows, width);
            if pixels <= least || fits(&tiles) {
                return tiles;
            }
            pixels = (pixels / 4 * 3).max(least);
        }
    }

    /// Rows of a tile.
    fn rows(&self) -> usize {
        self.images * self.h
    }

    fn pixels(&self) -> usize {
        self.rows() * self.w
    }

    fn count(&self, batch: usize) -> usize {
        batch.div_ceil(self.images) * self.down * self.across
    }

    /// Floats from channel to channel of a tile with its halo in shared memory, for rows `pitch`
    /// floats apart.
    fn plane(&self, pitch: usize, chunk: usize) -> usize {
        apart(self.images * (self.h + 2) * pitch, chunk)
    }
}

/// A distance between rows of shared memory, at least `floats`, at which a warp copies to 8 rows of
/// 4 floats, or to 4 rows of 8 floats, without bank conflicts.
fn apart(floats: usize, rows: usize) -> usize {
    let banks = if rows > 4 { 4 } else { 8 };
    floats.saturating_sub(banks).next_multiple_of(32) + banks
}

/// A convolution as these kernels see it: the images that are read and written, and the zeros
/// around them.
struct WindowPass {
    precision: Precision,
    read: BatchShape,
    written: BatchShape,
    padding: [usize; 2],
    tiles: WindowTiles,
    step: usize,
}

impl WindowPass {
    /// Forward pass.
    fn forward(of: &ConvProduct) -> WindowPass {
        WindowPass::new(of, of.shape.input(), of.shape.output(), of.shape.padding)
    }

    /// Data gradient: a forward pass over `dy`, with the padding 2 − p that gives it the size of x.
    fn data(of: &ConvProduct) -> WindowPass {
        let padding = of.shape.padding.map(|p| 2 - p);
        WindowPass::new(of, of.shape.output(), of.shape.input(), padding)
    }

    fn new(
        of: &ConvProduct,
        read: BatchShape,
        written: BatchShape,
        padding: [usize; 2],
    ) -> WindowPass {
        let (step, precision) = (pad16(of.shape.out_c), of.precision);
        let [_, groups] = columns(precision, written.c);
        let fits = |tiles: &WindowTiles| {
            PassShared::new(precision, tiles, read.c, groups).bytes() + DECLARED <= SHARED
        };
        let most = windows::pixels_max(precision, groups);
        let tiles = WindowTiles::fitting(&written, most, 2, WIDTH, fits);
        WindowPass { precision, read, written, padding, tiles, step }
    }

    fn columns(&self) -> [usize; 2] {
        columns(self.precision, self.written.c)
    }

    fn shared(&self) -> PassShared {
        PassShared::new(self.precision, &self.tiles, self.read.c, self.columns()[1])
    }

    fn values(&self) -> WindowValues {
        let size = |of: &BatchShape| [of.h as u32, of.w as u32, of.c as u32];
        let WindowTiles { images, h, w, across, down } = self.tiles;
        let [column_tiles, column_groups] = self.columns().map(|n| n as u32);
        WindowValues {
            batch: self.written.batch as u32,
            read: size(&self.read),
            written: size(&self.written),
            padding: self.padding.map(|n| n as u32),
            step: self.step as u32,
            tile: [images, h, w].map(|n| n as u32),
            across: across as u32,
            down: down as u32,
            column_tiles,
            column_groups,
            columns: Divisor::new(column_groups as usize * GROUP),
            wide: Divisor::new(w),
            high: Divisor::new(h),
            halo: Divisor::new(h + 2),
            ..WindowValues::zeroed()
        }
    }

    /// The call over all tiles.
    fn call(&self, kernels: &'static [Kernel; 3], accumulate: bool) -> (Call, WindowValues) {
        let [column_tiles, groups] = self.columns();
        let shared = self.shared();
        let values = WindowValues {
            accumulate: accumulate.into(),
            chunk: shared.chunk as u32,
            buffer: shared.buffer as u32,
            pitch: shared.pitch as u32,
            plane: shared.plane as u32,
            staging: shared.staging as u32,
            weights: shared.weights as u32,
            filter: shared.filter as u32,
            ..self.values().with(&shared.words)
        };
        let blocks = self.tiles.count(self.written.batch) * column_tiles;
        let threads = if windows::on_matrices(self.precision) {
            THREADS
        } else {
            // A thread has 2 rows of 4 pixels and a group of channels.
            (self.tiles.pixels() / 8 * groups).next_multiple_of(32)
        };
        let kernel = by_precision(kernels, self.precision);
        let call = Call::new(kernel, blocks as u32, threads as u32);
        (call.shared(shared.bytes() as u32), values)
    }
}

/// Shared memory of a pass, in floats: of each chunk planes of images, then weights. Results take
/// their place.
struct PassShared {
    /// Channels of a chunk. On units of f32 at most [`WORDS`] in the only chunk, or half as many in
    /// each of two buffers. On tensor cores at most as many as make [`WORDS`] / 2 words (4 channels
    /// if a tile has 8 groups); the words are stored beside the chunk.
    chunk: usize,
    /// From chunk to chunk.
    buffer: usize,
    pitch: usize,
    plane: usize,
    /// From channel to channel of the results.
    staging: usize,
    /// First float of the weights, after the planes.
    weights: usize,
    /// From channel to channel of the weights.
    filter: usize,
    words: SharedWords,
    all: usize,
}

impl PassShared {
    /// For `channels` input channels and `groups` groups of output channels.
    fn new(
        precision: Precision,
        tiles: &WindowTiles,
        channels: usize,
        groups: usize,
    ) -> PassShared {
        let (matrices, cols) = (windows::on_matrices(precision), groups * GROUP);
        let (most, count) = match (matrices, channels <= WORDS) {
            (false, true) => (WORDS, 1),
            (false, false) => (WORDS / 2, 2),
            // Weights of 64 columns fit for 4 channels at a time.
            (true, _) if groups == 8 => (WORDS / 2 / windows::each(precision), 1),
            (true, _) => (WORDS / 2, 1),
        };
        let each = windows::words(precision, channels, most);
        let chunk = each * windows::each(precision);
        let pitch = if matrices { windows::row_of_windows(tiles.w) } else { tiles.w + 4 };
        let (plane, filter) = (tiles.plane(pitch, chunk), apart(9 * cols, chunk));
        let (staging, weights) = (apart(tiles.pixels(), GROUP), chunk * plane);
        let buffer = weights + chunk * filter;
        let (words, used) = if matrices {
            // A warp reads 8 pixels of 4 words, from 4 rows of weights.
            let planes = Strided { count: each, stride: tiles.plane(pitch, 4) };
            let (count, stride) = (windows::rows_of_weights(each), windows::row_of_columns(cols));
            let rows = Strided { count, stride };
            let words = SharedWords::new(buffer, planes, rows);
            (words, words.tables + windows::tables_of_channels(each, words.plane))
        } else {
            (SharedWords::default(), count * buffer)
        };
        let all = used.max(cols * staging);
        PassShared { chunk, buffer, pitch, plane, staging, weights, filter, words, all }
    }

    fn bytes(&self) -> usize {
        self.all * size_of::<f32>()
    }
}

/// The forward pass.
pub(super) fn forward(of: &ConvProduct) -> Emission {
    let (call, values) = WindowPass::forward(of).call(&FORWARD, false);
    smallvec![emitted(call, &[read(0), read(1), read(2), write(0)], values)]
}

/// Tiles whose sums the statistics are made of.
pub(super) fn statistics_tiles(of: &ConvProduct) -> usize {
    WindowPass::forward(of).tiles.count(of.shape.batch)
}

/// The forward pass, which also writes `sums` elements of sums and sums of squares to scratch.
pub(super) fn forward_with_sums(of: &ConvProduct, sums: usize) -> Emitted {
    let (call, values) = WindowPass::forward(of).call(&STATISTICS, false);
    let sums = write(3).part(0, sums);
    emitted(call, &[read(0), read(1), read(2), write(0), sums], values)
}

/// The data gradient.
pub(super) fn data_gradient(of: &ConvProduct, accumulate: bool) -> Emission {
    let (call, values) = WindowPass::data(of).call(&DATA, accumulate);
    smallvec![emitted(call, &[read(0), read(1), write(0)], values)]
}

/// Division of the weight gradient: tiles, and parts of several tiles, which a block adds up.
struct GradientCut {
    tiles: WindowTiles,
    parts: usize,
    part_tiles: usize,
}

/// Tiles so small that several blocks fit on a multiprocessor.
fn cut(of: &ConvProduct) -> GradientCut {
    let (shape, precision) = (&of.shape, of.precision);
    let [column_tiles, groups] = columns(precision, shape.out_c);
    let floats = if shape.in_c <= 4 { 4096 } else { 2048 };
    let fits = |tiles: &WindowTiles| {
        WeightShared::new(precision, tiles, shape.in_c, groups).bytes() <= SHARED
    };
    // Tensor cores take 8 pixels at a time.
    let (rows, width) = if windows::on_matrices(precision) { (2, WIDTH / 2) } else { (1, WIDTH) };
    let tiles = WindowTiles::fitting(&shape.output(), floats / (groups * GROUP), rows, width, fits);
    let count = tiles.count(shape.batch);
    let blocks = column_tiles * shape.in_c.div_ceil(CHUNK);
    let part_tiles = count.div_ceil(most_parts(shape, blocks, 128)).max(1);
    GradientCut { tiles, parts: count.div_ceil(part_tiles), part_tiles }
}

/// Shared memory of the weight gradient, in floats: planes of images, then rows of the gradient,
/// for two tiles, or for one tile and its words. The sums of all threads overwrite it at the end.
/// The bias's sums follow, in doubles.
struct WeightShared {
    chunk: usize,
    /// From tile to tile.
    buffer: usize,
    pitch: usize,
    plane: usize,
    /// From row to row of the gradient.
    staging: usize,
    /// First float of the gradient, after the planes.
    weights: usize,
    words: SharedWords,
    /// Threads that share a tile's rows, and all threads.
    subsets: usize,
    threads: usize,
    /// First double of the bias's sums, and their number.
    slots: usize,
    sums: usize,
}

impl WeightShared {
    /// For `channels` input channels and `groups` groups of output channels.
    fn new(
        precision: Precision,
        tiles: &WindowTiles,
        channels: usize,
        groups: usize,
    ) -> WeightShared {
        let (cols, chunk) = (groups * GROUP, channels.min(CHUNK));
        let matrices = windows::on_matrices(precision);
        // On units of f32 rows are an odd number of banks apart: a warp reads four at a time.
        let pitch = if matrices { tiles.w + 2 } else { tiles.w + 3 };
        let (staging, plane) = (apart(tiles.w * cols, 4), tiles.plane(pitch, chunk));
        let weights = chunk * plane;
        let buffer = weights + tiles.rows() * staging;
        let subsets = (THREADS / (chunk * groups)).min(tiles.rows());
        let (words, threads, used) = if matrices {
            // A warp reads 4 pixels of 8 channels, and 8 columns of 4 pixels.
            let planes = Strided { count: chunk, stride: tiles.plane(pitch, GROUP) };
            let rows = Strided { count: tiles.pixels(), stride: windows::row_of_columns(cols) };
            let words = SharedWords::new(buffer, planes, rows);
            (words, THREADS, words.tables + windows::tables_of_pixels(tiles.pixels()))
        } else {
            let threads = (subsets * chunk * groups).next_multiple_of(32);
            (SharedWords::default(), threads, 2 * buffer)
        };
        let floats = used.max(windows::sums_over_pixels(precision, threads, chunk, groups));
        let (slots, sums) = (floats.div_ceil(2), groups * threads);
        WeightShared {
            chunk,
            buffer,
            pitch,
            plane,
            staging,
            weights,
            words,
            subsets,
            threads,
            slots,
            sums,
        }
    }

    fn bytes(&self) -> usize {
        (self.slots + self.sums) * size_of::<f64>()
    }
}

/// Parts of the weight gradient.
pub(super) fn weight_parts(of: &ConvProduct) -> usize {
    cut(of).parts
}

/// The weight gradient.
pub(super) fn weight_gradient(of: &ConvProduct) -> Emission {
    let (shape, precision) = (&of.shape, of.precision);
    let GradientCut { tiles, parts, part_tiles } = cut(of);
    let [column_tiles, groups] = columns(precision, shape.out_c);
    let shared = WeightShared::new(precision, &tiles, shape.in_c, groups);
    let values = WindowValues {
        chunk: shared.chunk as u32,
        buffer: shared.buffer as u32,
        pitch: shared.pitch as u32,
        plane: shared.plane as u32,
        staging: shared.staging as u32,
        weights: shared.weights as u32,
        parts: parts as u32,
        part_tiles: part_tiles as u32,
        subsets: shared.subsets as u32,
        slots: shared.slots as u32,
        ..WindowPass { tiles, ..WindowPass::forward(of) }.values().with(&shared.words)
    };
    let blocks = parts * shape.in_c.div_ceil(CHUNK) * column_tiles;
    let kernel = by_precision(&WEIGHT, precision);
    let call = Call::new(kernel, blocks as u32, shared.threads as u32);
    let call = call.shared(shared.bytes() as u32);
    smallvec![emitted(call, &[read(0), read(1), write(2), write(1)], values), finish(of, parts)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIDES: [[usize; 2]; 9] =
        [[1, 1], [2, 2], [3, 3], [4, 4], [5, 4], [4, 300], [300, 1], [16, 16], [40, 40]];
    const CHANNELS: [usize; 9] = [1, 3, 5, 8, 9, 24, 64, 65, 200];

    /// Shapes with these channels, small and narrow ones among them, in batches of any size.
    fn shapes(in_c: usize, out_c: usize) -> impl Iterator<Item = ConvShape> {
        let (kernel, stride, padding) = ([3; 2], [1; 2], [1; 2]);
        SIDES.into_iter().flat_map(move |[in_h, in_w]| {
            [1, 7, 1024].map(|batch| ConvShape {
                batch,
                in_c,
                in_h,
                in_w,
                out_c,
                kernel,
                stride,
                padding,
                groups: 1,
                dilation: [1; 2],
            })
        })
    }

    #[test]
    fn no_block_asks_for_more_shared_memory_than_every_gpu_has() {
        let channels = CHANNELS.into_iter().flat_map(|a| CHANNELS.map(|b| [a, b]));
        for shape in channels.flat_map(|[in_c, out_c]| shapes(in_c, out_c)) {
            for precision in Precision::ALL {
                let of = ConvProduct { precision, ..ConvProduct::f32(shape) };
                for pass in [WindowPass::forward(&of), WindowPass::data(&of)] {
                    let bytes = pass.shared().bytes();
                    assert!(bytes + DECLARED <= SHARED, "{of:?}: {bytes} bytes");
                }
                let [_, groups] = columns(precision, shape.out_c);
                let (tiles, in_c) = (cut(&of).tiles, shape.in_c);
                let bytes = WeightShared::new(precision, &tiles, in_c, groups).bytes();
                assert!(bytes <= SHARED, "{of:?}: {bytes} bytes for the weight gradient");
            }
        }
    }
}

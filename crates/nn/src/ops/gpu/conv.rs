//! Calls for [`ops::conv`](crate::ops::conv).

mod window;

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelHeader, KernelSource, Operand};
use smallvec::smallvec;

use super::{
    CallOperand, Emission, Emitted, HEADERS, READ, READ_VALUES, VALUE_HEADERS, WRITE, WRITE_VALUES,
    by_precision, by_values, emitted, kernel, norm, product_headers, product_kernels,
    product_sources, read, value_kernels, value_sources, write,
};
use crate::kernels::conv::ConvShape;
use crate::kernels::pad16;
use crate::ops::conv::{ConvOp, ConvProduct};
use crate::precision::Precision;

/// Headers of this family.
static CONV_HEADERS: [[KernelHeader; 6]; 3] = product_headers![
    KernelHeader { name: c"conv.cuh", text: include_str!("conv/conv.cuh") },
    KernelHeader { name: c"tile.cuh", text: include_str!("conv/tile.cuh") },
    KernelHeader { ..HEADERS[0] },
    KernelHeader { ..HEADERS[3] },
    KernelHeader { ..HEADERS[4] },
];

/// Convolutions of any shape.
pub(super) static ANY: [KernelSource; 3] = product_sources!(CONV_HEADERS, "conv/any.cu");
/// One filter for each channel.
pub(super) static DEPTHWISE: [KernelSource; 3] =
    product_sources!(CONV_HEADERS, "conv/depthwise.cu");
/// 3 × 3 with stride 1.
pub(super) static WINDOW: [KernelSource; 3] = product_sources!(CONV_HEADERS, "conv/window.cu");
pub(super) static SUMS: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "conv/sums.cu");

/// x, w, bias, y.
const FORWARD_OPERANDS: [Operand; 4] = [READ_VALUES, READ, READ, WRITE_VALUES];
/// dy, w, dx.
const BACKWARD_OPERANDS: [Operand; 3] = [READ_VALUES, READ, WRITE_VALUES];
/// x, dy, sums.
const WEIGHT_OPERANDS: [Operand; 3] = [READ_VALUES, READ_VALUES, WRITE];

static FORWARD: Tiled = Tiled {
    large: product_kernels!(ConvValues, ANY, "forward_large", FORWARD_OPERANDS),
    wide: product_kernels!(ConvValues, ANY, "forward_wide", FORWARD_OPERANDS),
    narrow: product_kernels!(ConvValues, ANY, "forward_narrow", FORWARD_OPERANDS),
    small: product_kernels!(ConvValues, ANY, "forward_small", FORWARD_OPERANDS),
    narrow_rows: 128,
};
static DATA: Tiled = Tiled {
    large: product_kernels!(ConvValues, ANY, "data_large", BACKWARD_OPERANDS),
    wide: product_kernels!(ConvValues, ANY, "data_wide", BACKWARD_OPERANDS),
    narrow: product_kernels!(ConvValues, ANY, "data_narrow", BACKWARD_OPERANDS),
    small: product_kernels!(ConvValues, ANY, "data_small", BACKWARD_OPERANDS),
    narrow_rows: 128,
};
static WEIGHT: Tiled = Tiled {
    large: product_kernels!(ConvValues, ANY, "weight_large", WEIGHT_OPERANDS),
    wide: product_kernels!(ConvValues, ANY, "weight_wide", WEIGHT_OPERANDS),
    narrow: product_kernels!(ConvValues, ANY, "weight_narrow", WEIGHT_OPERANDS),
    small: product_kernels!(ConvValues, ANY, "weight_small", WEIGHT_OPERANDS),
    narrow_rows: 64,
};
static DEPTHWISE_FORWARD: [Kernel; 3] = product_kernels!(
    ConvValues,
    DEPTHWISE,
    "depthwise_forward",
    [READ_VALUES, READ, READ, WRITE_VALUES]
);
static DEPTHWISE_DATA: [Kernel; 3] =
    product_kernels!(ConvValues, DEPTHWISE, "depthwise_data", [READ_VALUES, READ, WRITE_VALUES]);
static DEPTHWISE_WEIGHT: [Kernel; 3] =
    product_kernels!(ConvValues, DEPTHWISE, "depthwise_weight", [READ_VALUES, READ_VALUES, WRITE]);
static STATISTICS_PARTS: [Kernel; 2] =
    value_kernels!(Statistics, SUMS, "statistics_parts", [READ_VALUES, Operand::write::<f64>()]);
static STATISTICS_FINISH: [Kernel; 2] =
    value_kernels!(norm::Finish, SUMS, "statistics_finish", [Operand::read::<f64>(), WRITE, WRITE]);
static WEIGHT_FINISH: [Kernel; 2] =
    value_kernels!(WeightValues, SUMS, "weight_finish", [READ, WRITE, WRITE]);

/// Blocks that keep a GPU busy, which has 100 to 150 multiprocessors.
const BUSY: usize = 256;

/// As in conv.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ConvValues {
    batch: u32,
    input: [u32; 3],
    output: [u32; 3],
    kernel: [u32; 2],
    stride: [u32; 2],
    padding: [u32; 2],
    dilation: [u32; 2],
    tap_step: [u32; 2],
    output_step: [u32; 2],
    jobs: u32,
    job_in: u32,
    job_out: u32,
    step: u32,
    accumulate: u32,
    parts: u32,
    part_pixels: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Statistics {
    pixels: u32,
    channels: u32,
    lanes: u32,
    parts: u32,
    part_pixels: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct WeightValues {
    weights: u32,
    columns: u32,
    step: u32,
    channels: u32,
    parts: u32,
}

/// Division of the output pixels into parts, each of which has its own sums.
#[derive(Clone, Copy)]
struct PixelParts {
    count: usize,
    /// Pixels of each part but the last.
    pixels: usize,
}

impl PixelParts {
    /// For a call that takes no sums over pixels.
    const NONE: PixelParts = PixelParts { count: 0, pixels: 0 };

    /// At most `most` parts of at least `least` pixels each; one part if there are fewer pixels.
    fn new(pixels: usize, least: usize, most: usize) -> PixelParts {
        let each = pixels.div_ceil(most.max(1)).max(least);
        PixelParts { count: pixels.div_ceil(each), pixels: each }
    }
}

fn conv(shape: &ConvShape, parts: PixelParts, accumulate: bool) -> ConvValues {
    let n = |[a, b]: [usize; 2]| [a as u32, b as u32];
    let (jobs, output) = (shape.jobs(), shape.output());
    let common = [0, 1].map(|axis| divisor(shape.stride[axis], shape.dilation[axis]));
    let each = |of: [usize; 2]| [0, 1].map(|axis| (of[axis] / common[axis]) as u32);
    ConvValues {
        batch: shape.batch as u32,
        input: [shape.in_h as u32, shape.in_w as u32, shape.in_c as u32],
        output: [output.h as u32, output.w as u32, output.c as u32],
        kernel: n(shape.kernel),
        stride: n(shape.stride),
        padding: n(shape.padding),
        dilation: n(shape.dilation),
        tap_step: each(shape.stride),
        output_step: each(shape.dilation),
        jobs: jobs as u32,
        job_in: shape.job_in() as u32,
        job_out: shape.job_out() as u32,
        step: pad16(shape.job_out()) as u32,
        accumulate: accumulate.into(),
        parts: parts.count as u32,
        part_pixels: parts.pixels as u32,
    }
}

/// Greatest common divisor.
fn divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { divisor(b, a % b) }
}

/// Output pixels of the batch.
fn pixels(shape: &ConvShape) -> usize {
    shape.batch * shape.output().pixels()
}

/// Parts for the weight gradient.
fn weight_parts(shape: &ConvShape) -> PixelParts {
    let [rows, cols] = [shape.taps() * shape.job_in(), shape.job_out()].map(|n| n.div_ceil(64));
    let tiles = if shape.is_depthwise() { cols } else { rows * cols * shape.jobs() };
    PixelParts::new(pixels(shape), 128, most_parts(shape, tiles, 256))
}

/// Most parts of a weight gradient, of `tiles` blocks each. A part's sums are as long as the
/// weights, and are written once and read once: they are at most a quarter of the elements that are
/// summed, unless fewer parts would occupy less than half a GPU.
fn most_parts(shape: &ConvShape, tiles: usize, limit: usize) -> usize {
    let summed = shape.input().len() + shape.output().len();
    (summed / 4 / sums_len(shape)).max(64 / tiles).clamp(1, limit)
}

/// Gradients of the weights without padding lanes.
fn weights(shape: &ConvShape) -> usize {
    shape.weight_len() / pad16(shape.job_out()) * shape.job_out()
}

/// Elements of a part's gradients of weights and bias.
fn sums_len(shape: &ConvShape) -> usize {
    weights(shape) + shape.out_c
}

/// `times` products of matrices, each with `rows` rows and `cols` columns.
struct ProductSize {
    rows: usize,
    cols: usize,
    times: usize,
}

/// Kernels of a product, by the elements that a block computes: 128 × 64, 64 × 64, a number of
/// rows × 16, and 32 × 32. The bits of a result are the same. Each is for all precisions.
struct Tiled {
    large: [Kernel; 3],
    wide: [Kernel; 3],
    narrow: [Kernel; 3],
    small: [Kernel; 3],
    narrow_rows: usize,
}

impl Tiled {
    /// The call for products: the largest tiles that are enough to keep a GPU busy and compute at
    /// most 1.5 times the elements of the small tiles, padding included.
    fn call(&'static self, precision: Precision, size: ProductSize) -> Call {
        let ProductSize { rows, cols, times } = size;
        // Threads have 8 × 8 elements of a large tile, and 4 × 4 of the others.
        let (narrow, small) = ([self.narrow_rows, 16], (&self.small, [32, 32], 16));
        let larger = if cols <= 16 {
            &[(&self.narrow, narrow, 16)][..]
        } else {
            &[(&self.large, [128, 64], 64), (&self.wide, [64, 64], 16)]
        };
        let blocks = |[h, w]: [usize; 2]| rows.div_ceil(h) * cols.div_ceil(w) * times;
        let elements = |tile: [usize; 2]| blocks(tile) * tile[0] * tile[1];
        let fits = |tile| blocks(tile) >= BUSY && 2 * elements(tile) <= 3 * elements(small.1);
        let (kernels, tile, each) =
            *larger.iter().find(|(_, tile, _)| fits(*tile)).unwrap_or(&small);
        Call::new(
            by_precision(kernels, precision),
            blocks(tile) as u32,
            (tile[0] * tile[1] / each) as u32,
        )
    }
}

pub(super) fn emit(op: &ConvOp) -> Emission {
    match op {
        ConvOp::Forward(of) if window::fits(&of.shape) => window::forward(of),
        ConvOp::Forward(of) => smallvec![forward(of)],
        ConvOp::ForwardWithStats(of) => forward_with_statistics(of),
        ConvOp::WeightGradient(of) if window::fits(&of.shape) => window::weight_gradient(of),
        ConvOp::WeightGradient(of) => weight_gradient(of),
        ConvOp::DataGradient { product, accumulate } if window::fits(&product.shape) => {
            window::data_gradient(product, *accumulate)
        }
        ConvOp::DataGradient { product, accumulate } => {
            smallvec![data_gradient(product, *accumulate)]
        }
    }
}

pub(super) fn scratch(op: &ConvOp) -> usize {
    match op {
        ConvOp::Forward(_) | ConvOp::DataGradient { .. } => 0,
        // Without images there are no parts, but the operand stays.
        ConvOp::ForwardWithStats(of) => (2 * statistics_len(of)).max(1),
        ConvOp::WeightGradient(of) => {
            let parts = if window::fits(&of.shape) {
                window::weight_parts(of)
            } else {
                weight_parts(&of.shape).count
            };
            (parts * sums_len(&of.shape)).max(1)
        }
    }
}

fn forward(of: &ConvProduct) -> Emitted {
    product(of, &[read(0), read(1), read(2), write(0)])
}

/// A convolution of any shape, over x, weights, bias and y.
pub(super) fn product(of: &ConvProduct, operands: &[CallOperand; 4]) -> Emitted {
    let shape = &of.shape;
    let size = ProductSize { rows: pixels(shape), cols: shape.job_out(), times: shape.jobs() };
    let call = if shape.is_depthwise() {
        Call::each(by_precision(&DEPTHWISE_FORWARD, of.precision), shape.output().len())
    } else {
        FORWARD.call(of.precision, size)
    };
    emitted(call, operands, conv(shape, PixelParts::NONE, false))
}

/// Parts of the output pixels, whose sums give the statistics. The parts are tiles, if the forward
/// pass sums each tile when it writes it. Otherwise there are enough parts to occupy a GPU, each of
/// a few passes of a block's threads.
fn statistics_parts(of: &ConvProduct) -> PixelParts {
    if window::fits(&of.shape) {
        PixelParts { count: window::statistics_tiles(of), pixels: 0 }
    } else {
        PixelParts::new(pixels(&of.shape), 256, 256)
    }
}

/// Sums of all parts for the statistics, in f64.
fn statistics_len(of: &ConvProduct) -> usize {
    statistics_parts(of).count * 2 * of.shape.out_c
}

fn forward_with_statistics(product: &ConvProduct) -> Emission {
    let shape = &product.shape;
    let parts = statistics_parts(product);
    let lanes = shape.out_c.next_power_of_two().min(32);
    let of = Statistics {
        pixels: pixels(shape) as u32,
        channels: shape.out_c as u32,
        lanes: lanes as u32,
        parts: parts.count as u32,
        part_pixels: parts.pixels as u32,
    };
    let sums = write(3).part(0, statistics_len(product));
    let finish = norm::Finish::new(shape.out_c, parts.count, pixels(shape), 0.0);
    let values = product.precision.value_type();
    let finish = emitted(
        finish.call(by_values(&STATISTICS_FINISH, values)),
        &[sums, write(1), write(2)],
        finish,
    );
    if window::fits(shape) {
        return smallvec![window::forward_with_sums(product, statistics_len(product)), finish];
    }
    let blocks = parts.count * shape.out_c.div_ceil(lanes);
    let call = Call::new(by_values(&STATISTICS_PARTS, values), blocks as u32, 256);
    smallvec![forward(product), emitted(call, &[write(0), sums], of), finish]
}

fn weight_gradient(product: &ConvProduct) -> Emission {
    let shape = &product.shape;
    let parts = weight_parts(shape);
    let of = conv(shape, parts, true);
    let (rows, times) = (shape.taps() * shape.job_in(), shape.jobs() * parts.count);
    let size = ProductSize { rows, cols: shape.job_out(), times };
    let call = if shape.is_depthwise() {
        let blocks = parts.count * shape.out_c.div_ceil(32);
        Call::new(by_precision(&DEPTHWISE_WEIGHT, product.precision), blocks as u32, 256)
    } else {
        WEIGHT.call(product.precision, size)
    };
    let call = emitted(call, &[read(0), read(1), write(2)], of);
    smallvec![call, finish(product, parts.count)]
}

/// Adds the parts' sums in scratch to the gradients of the parameters.
fn finish(product: &ConvProduct, parts: usize) -> Emitted {
    let shape = &product.shape;
    let finish = WeightValues {
        weights: weights(shape) as u32,
        columns: shape.job_out() as u32,
        step: pad16(shape.job_out()) as u32,
        channels: shape.out_c as u32,
        parts: parts as u32,
    };
    // Threads for each gradient: about one for each part, at most 8.
    let each = parts.next_power_of_two().clamp(1, 8);
    let kernel = by_values(&WEIGHT_FINISH, product.precision.value_type());
    let call = Call::new(kernel, sums_len(shape).div_ceil(32) as u32, 32 * each as u32);
    emitted(call, &[write(2), write(0), write(1)], finish)
}

fn data_gradient(product: &ConvProduct, accumulate: bool) -> Emitted {
    let shape = &product.shape;
    let of = conv(shape, PixelParts::NONE, accumulate);
    // As many tiles for every phase of the stride (`Phase` in any.cu) as for the first.
    let [sh, sw] = shape.stride;
    let pixels = shape.batch * shape.in_h.div_ceil(sh) * shape.in_w.div_ceil(sw);
    let size = ProductSize { rows: pixels, cols: shape.job_in(), times: shape.jobs() * sh * sw };
    let call = if shape.is_depthwise() {
        Call::each(by_precision(&DEPTHWISE_DATA, product.precision), shape.input().len())
    } else {
        DATA.call(product.precision, size)
    };
    emitted(call, &[read(0), read(1), write(0)], of)
}

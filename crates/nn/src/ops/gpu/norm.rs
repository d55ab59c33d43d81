//! Calls for [`ops::norm`](crate::ops::norm).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::{
    CallOperand, Emission, READ, READ_VALUES, VALUE_HEADERS, WRITE, WRITE_VALUES, by_values,
    emitted, kernel, read, value_kernels, value_sources, write,
};
use crate::kernels::BatchShape;
use crate::kernels::norm::Activation;
use crate::ops::norm::{BatchNorm, GroupNorm, LayerNorm, NormOp};
use crate::precision::ValueType;

pub(super) static SOURCE: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "norm.cu");
pub(super) static GROUP: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "group_norm.cu");
pub(super) static LAYER: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "layer_norm.cu");

const READ_SUMS: Operand = Operand::read::<f64>();
const WRITE_SUMS: Operand = Operand::write::<f64>();
const READ_CODES: Operand = Operand::read::<u8>();
const WRITE_CODES: Operand = Operand::write::<u8>();

static BATCH_SUMS: [Kernel; 2] =
    value_kernels!(NormTiles, SOURCE, "batch_sums", [READ_VALUES, WRITE_SUMS]);
static BATCH_MOMENTS: [Kernel; 2] =
    value_kernels!(Finish, SOURCE, "batch_moments", [READ_VALUES, READ_SUMS, WRITE, WRITE]);
static UPDATE_RUNNING: [Kernel; 2] = value_kernels!(
    Running,
    SOURCE,
    "update_running",
    [READ, READ, WRITE, WRITE, Operand::write::<i64>()]
);
static FORWARD: [Kernel; 2] = value_kernels!(
    BatchNormValues,
    SOURCE,
    "batch_forward",
    [READ_VALUES, READ, READ, READ, READ, WRITE_VALUES]
);
static FORWARD_POOLED: [Kernel; 2] = value_kernels!(
    BatchNormValues,
    SOURCE,
    "batch_forward_pooled",
    [READ_VALUES, READ, READ, READ, READ, WRITE_VALUES, WRITE_CODES]
);
static GRADIENT_SUMS: [Kernel; 2] = value_kernels!(
    BatchNormValues,
    SOURCE,
    "batch_gradient_sums",
    [READ_VALUES, READ, READ, READ, READ, READ_VALUES, WRITE_SUMS]
);
static GRADIENT_SUMS_POOLED: [Kernel; 2] = value_kernels!(
    BatchNormValues,
    SOURCE,
    "batch_gradient_sums_pooled",
    [READ_VALUES, READ, READ_VALUES, READ_CODES, WRITE_SUMS]
);
static COEFFICIENTS: [Kernel; 2] = value_kernels!(
    Finish,
    SOURCE,
    "batch_coefficients",
    [READ_SUMS, READ, READ, WRITE, WRITE, WRITE]
);
static INPUT_GRADIENT: [Kernel; 2] = value_kernels!(
    BatchNormValues,
    SOURCE,
    "batch_input_gradient",
    [READ_VALUES, READ, READ, READ, READ_VALUES, WRITE_VALUES]
);
static INPUT_GRADIENT_POOLED: [Kernel; 2] = value_kernels!(
    BatchNormValues,
    SOURCE,
    "batch_input_gradient_pooled",
    [READ_VALUES, READ, READ, READ_VALUES, READ_CODES, WRITE_VALUES]
);
static GROUP_FORWARD: [Kernel; 2] = value_kernels!(
    GroupNormValues,
    GROUP,
    "group_forward",
    [READ_VALUES, READ, READ, WRITE_VALUES, WRITE, WRITE]
);
static GROUP_GRADIENT: [Kernel; 2] = value_kernels!(
    GroupNormValues,
    GROUP,
    "group_gradient",
    [READ_VALUES, READ, READ, READ, READ_VALUES, WRITE_VALUES, WRITE_SUMS]
);
static GROUP_PARAMETERS: [Kernel; 2] =
    value_kernels!(Finish, GROUP, "group_parameters", [READ_SUMS, WRITE, WRITE]);

static LAYER_FORWARD: [Kernel; 2] = value_kernels!(
    LayerNormValues,
    LAYER,
    "layer_forward",
    [READ_VALUES, READ, READ, WRITE_VALUES, WRITE, WRITE]
);
static LAYER_GRADIENT: [Kernel; 2] = value_kernels!(
    LayerNormValues,
    LAYER,
    "layer_gradient",
    [READ_VALUES, READ, READ, READ, READ_VALUES, WRITE_VALUES]
);
static LAYER_SUMS: [Kernel; 2] = value_kernels!(
    NormTiles,
    LAYER,
    "layer_sums",
    [READ_VALUES, READ, READ, READ_VALUES, WRITE_SUMS]
);
static LAYER_PARAMETERS: [Kernel; 2] =
    value_kernels!(Finish, LAYER, "layer_parameters", [READ_SUMS, WRITE, WRITE]);

/// Threads of a block that goes through pixels.
const THREADS: usize = 256;
/// Threads of a block that adds up partial sums, and the most threads of a group norm's block.
const MANY: usize = 512;
/// Adjacent channels of a block: a warp reads at least this number of adjacent channels, or all
/// channels if there are fewer.
const COLUMNS: usize = 32;

/// Division of `[pixels][C]` among blocks.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct NormTiles {
    c: u32,
    columns: u32,
    pixels: u32,
    /// Pixels of a block.
    chunk: u32,
}

fn columns(c: usize) -> usize {
    c.next_power_of_two().min(COLUMNS)
}

impl NormTiles {
    /// At least `each` pixels for a thread, and at most `chunks` blocks to a channel. Depends on
    /// the shape alone, because the order of the sums depends on it.
    fn new(c: usize, pixels: usize, each: usize, chunks: usize) -> NormTiles {
        let rows = THREADS / columns(c);
        let chunk = pixels.div_ceil(chunks).next_multiple_of(rows).max(each * rows);
        let [c, columns, pixels, chunk] = [c, columns(c), pixels, chunk].map(|n| n as u32);
        NormTiles { c, columns, pixels, chunk }
    }

    /// For a kernel that leaves sums.
    fn summing(c: usize, pixels: usize) -> NormTiles {
        let across = c.div_ceil(columns(c));
        NormTiles::new(c, pixels, 16, (1024 / across).clamp(16, 256))
    }

    /// For a kernel that writes each pixel.
    fn mapping(c: usize, pixels: usize, each: usize) -> NormTiles {
        NormTiles::new(c, pixels, each, usize::MAX)
    }

    fn chunks(&self) -> usize {
        self.pixels.div_ceil(self.chunk) as usize
    }

    fn call(&self, kernel: &'static Kernel) -> Call {
        let across = self.c.div_ceil(self.columns) as usize;
        Call::new(kernel, (across * self.chunks()) as u32, THREADS as u32)
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BatchNormValues {
    tiles: NormTiles,
    across: Divisor,
    down: Divisor,
    h: u32,
    w: u32,
    eps: f32,
    floor: f32,
    accumulate: u32,
}

/// Windows of 2 × 2 down and across an image.
type Windows = [usize; 2];

/// The windows that are pooled.
fn pooled(shape: &BatchShape) -> Windows {
    [shape.h / 2, shape.w / 2]
}

/// All windows, including windows that an odd last row or column cuts off.
fn covering(shape: &BatchShape) -> Windows {
    [shape.h.div_ceil(2), shape.w.div_ceil(2)]
}

fn batch(of: &BatchNorm, tiles: NormTiles, windows: Windows, accumulate: bool) -> BatchNormValues {
    let BatchNorm { shape, eps, act, .. } = *of;
    let floor = if act == Activation::Relu { 0.0 } else { f32::NEG_INFINITY };
    let [h, w] = [shape.h, shape.w].map(|n| n as u32);
    let [down, across] = windows.map(Divisor::new);
    BatchNormValues { tiles, across, down, h, w, eps, floor, accumulate: accumulate.into() }
}

/// Addition of the sums `[chunks][2][C]`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Finish {
    count: f64,
    c: u32,
    columns: u32,
    chunks: u32,
    eps: f32,
}

impl Finish {
    /// For `c` channels, each with `count` values in `chunks` chunks.
    pub(super) fn new(c: usize, chunks: usize, count: usize, eps: f32) -> Finish {
        let [columns, chunks] = [columns(c), chunks].map(|n| n as u32);
        Finish { count: count as f64, c: c as u32, columns, chunks, eps }
    }

    /// The call with a block for the channels that it has side by side.
    pub(super) fn call(&self, kernel: &'static Kernel) -> Call {
        Call::new(kernel, self.c.div_ceil(self.columns), MANY as u32)
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Running {
    momentum: f32,
    rest: f32,
    unbiased: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct GroupNormValues {
    share: f64,
    c: u32,
    groups: u32,
    each: u32,
    span: u32,
    columns: u32,
    pixels: u32,
    eps: f32,
    accumulate: u32,
}

/// Values and call of a group norm's kernel.
fn group(kernel: &'static Kernel, of: &GroupNorm, accumulate: bool) -> (GroupNormValues, Call) {
    let GroupNorm { shape, groups, eps } = *of;
    let (c, pixels, each) = (shape.c, shape.pixels(), shape.c / groups);
    // Groups that are narrower than half a row of columns share a block.
    let span = each * (COLUMNS / each).min(groups).max(1);
    let span = if 2 * each < COLUMNS { span } else { each };
    let threads = (pixels * span).div_ceil(8).next_power_of_two().clamp(COLUMNS, MANY);
    let wide = span.next_power_of_two().min(threads);
    let share = 1.0 / (pixels * each) as f64;
    let blocks = shape.batch * c.div_ceil(span);
    let [c, groups, each, span, columns, pixels] =
        [c, groups, each, span, wide, pixels].map(|n| n as u32);
    let accumulate = accumulate.into();
    let values = GroupNormValues { share, c, groups, each, span, columns, pixels, eps, accumulate };
    (values, Call::new(kernel, blocks as u32, threads as u32))
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LayerNormValues {
    share: f64,
    c: u32,
    columns: u32,
    log: u32,
    rows: u32,
    eps: f32,
    accumulate: u32,
}

/// Values and call of a layer norm's kernel that goes through rows.
fn layer(kernel: &'static Kernel, of: &LayerNorm, accumulate: bool) -> (LayerNormValues, Call) {
    let (c, rows, columns) = (of.shape.c, of.rows(), columns(of.shape.c));
    let blocks = rows.div_ceil(THREADS / columns);
    let (log, share) = (columns.trailing_zeros(), 1.0 / c as f64);
    let [c, columns, rows] = [c, columns, rows].map(|n| n as u32);
    let accumulate = accumulate.into();
    let values = LayerNormValues { share, c, columns, log, rows, eps: of.eps, accumulate };
    (values, Call::new(kernel, blocks as u32, THREADS as u32))
}

/// `n` f64 at the start of scratch.
fn sums(scratch: CallOperand, n: usize) -> CallOperand {
    scratch.part(0, n)
}

pub(super) fn emit(op: &NormOp, values: ValueType) -> Emission {
    let of = |kernels| by_values(kernels, values);
    match *op {
        NormOp::Statistics(shape) => statistics(&shape, values),
        NormOp::UpdateRunning { channels, momentum, count } => {
            let unbiased = (count as f64 / (count as f64 - 1.0)) as f32;
            let running = Running { momentum, rest: 1.0 - momentum, unbiased };
            let operands = [read(0), read(1), write(0), write(1), write(2)];
            smallvec![emitted(Call::each(of(&UPDATE_RUNNING), channels), &operands, running)]
        }
        NormOp::Forward(norm) => {
            let output = norm.output();
            let (kernel, each) = if norm.pool { (&FORWARD_POOLED, 4) } else { (&FORWARD, 8) };
            let tiles = NormTiles::mapping(output.c, output.batch * output.pixels(), each);
            let all = [read(0), read(1), read(2), read(3), read(4), write(0), write(1)];
            let operands = if norm.pool { &all } else { &all[..6] };
            smallvec![emitted(
                tiles.call(of(kernel)),
                operands,
                batch(&norm, tiles, pooled(&norm.shape), false)
            )]
        }
        NormOp::GradientSums(norm) => gradient_sums(&norm, values),
        NormOp::InputGradient { norm, accumulate } => input_gradient(&norm, accumulate, values),
        NormOp::GroupForward(norm) => {
            let (numbers, call) = group(of(&GROUP_FORWARD), &norm, false);
            let operands = [read(0), read(1), read(2), write(0), write(1), write(2)];
            smallvec![emitted(call, &operands, numbers)]
        }
        NormOp::GroupGradient { norm, accumulate } => group_gradient(&norm, accumulate, values),
        NormOp::LayerForward(norm) => {
            let (numbers, call) = layer(of(&LAYER_FORWARD), &norm, false);
            let operands = [read(0), read(1), read(2), write(0), write(1), write(2)];
            smallvec![emitted(call, &operands, numbers)]
        }
        NormOp::LayerGradient { norm, accumulate } => layer_gradient(&norm, accumulate, values),
    }
}

/// Division of a batch norm's outputs among the blocks that sum its gradient.
fn gradient_tiles(norm: &BatchNorm) -> NormTiles {
    let output = norm.output();
    NormTiles::summing(output.c, output.batch * output.pixels())
}

/// Elements of the f64 sums of `chunks` chunks.
const fn sums_len(c: usize, chunks: usize) -> usize {
    2 * c * chunks
}

pub(super) fn scratch(op: &NormOp) -> usize {
    let f32s = size_of::<f64>() / size_of::<f32>();
    match *op {
        NormOp::Statistics(shape) => {
            let tiles = NormTiles::summing(shape.c, shape.batch * shape.pixels());
            f32s * sums_len(shape.c, tiles.chunks())
        }
        // There may be no output: an image of one row has none that is pooled.
        NormOp::GradientSums(norm) => {
            f32s * sums_len(norm.shape.c, gradient_tiles(&norm).chunks().max(1))
        }
        NormOp::GroupGradient { norm, .. } => f32s * sums_len(norm.shape.c, norm.shape.batch),
        NormOp::LayerGradient { norm, .. } => {
            let tiles = NormTiles::summing(norm.shape.c, norm.rows());
            f32s * sums_len(norm.shape.c, tiles.chunks())
        }
        NormOp::UpdateRunning { .. }
        | NormOp::Forward(_)
        | NormOp::InputGradient { .. }
        | NormOp::GroupForward(_)
        | NormOp::LayerForward(_) => 0,
    }
}

fn statistics(shape: &BatchShape, values: ValueType) -> Emission {
    let count = shape.batch * shape.pixels();
    let tiles = NormTiles::summing(shape.c, count);
    let finish = Finish::new(shape.c, tiles.chunks(), count, 0.0);
    let partial = sums(write(2), sums_len(shape.c, tiles.chunks()));
    smallvec![
        emitted(tiles.call(by_values(&BATCH_SUMS, values)), &[read(0), partial], tiles),
        emitted(
            finish.call(by_values(&BATCH_MOMENTS, values)),
            &[read(0), partial, write(0), write(1)],
            finish,
        ),
    ]
}

/// Sums over the outputs, and the coefficients that follow from them.
fn gradient_sums(norm: &BatchNorm, values: ValueType) -> Emission {
    let BatchNorm { shape, eps, pool, .. } = *norm;
    let [x, mean, var, gamma, beta, dy, codes] = std::array::from_fn(read);
    let [coefficients, dgamma, dbeta, scratch] = std::array::from_fn(write);
    let tiles = gradient_tiles(norm);
    let partial = sums(scratch, sums_len(shape.c, tiles.chunks()));
    let numbers = batch(norm, tiles, pooled(&shape), false);
    let (kernel, operands) = if pool {
        (&GRADIENT_SUMS_POOLED, &[x, mean, dy, codes, partial][..])
    } else {
        (&GRADIENT_SUMS, &[x, mean, var, gamma, beta, dy, partial][..])
    };
    let finish = Finish::new(shape.c, tiles.chunks(), shape.batch * shape.pixels(), eps);
    let all = [partial, var, gamma, dgamma, dbeta, coefficients];
    smallvec![
        emitted(tiles.call(by_values(kernel, values)), operands, numbers),
        emitted(finish.call(by_values(&COEFFICIENTS, values)), &all, finish),
    ]
}

fn input_gradient(norm: &BatchNorm, accumulate: bool, values: ValueType) -> Emission {
    let BatchNorm { shape, pool, .. } = *norm;
    let [x, mean, beta, coefficients, dy, codes] = std::array::from_fn(read);
    let (dx, windows) = (write(0), covering(&shape));
    let (pixels, each, kernel, operands) = if pool {
        let operands = [x, mean, coefficients, dy, codes, dx];
        (windows[0] * windows[1], 4, &INPUT_GRADIENT_POOLED, operands)
    } else {
        (shape.pixels(), 8, &INPUT_GRADIENT, [x, mean, beta, coefficients, dy, dx])
    };
    let tiles = NormTiles::mapping(shape.c, shape.batch * pixels, each);
    smallvec![emitted(
        tiles.call(by_values(kernel, values)),
        &operands,
        batch(norm, tiles, windows, accumulate)
    )]
}

/// Each sample's sums and input gradient, then the sums over samples.
fn group_gradient(norm: &GroupNorm, accumulate: bool, values: ValueType) -> Emission {
    let shape = norm.shape;
    let [x, gamma, mean, invstd, dy] = std::array::from_fn(read);
    let [dx, dgamma, dbeta, scratch] = std::array::from_fn(write);
    let partial = sums(scratch, sums_len(shape.c, shape.batch));
    let (numbers, call) = group(by_values(&GROUP_GRADIENT, values), norm, accumulate);
    let finish = Finish::new(shape.c, shape.batch, 1, 0.0);
    smallvec![
        emitted(call, &[x, gamma, mean, invstd, dy, dx, partial], numbers),
        emitted(
            finish.call(by_values(&GROUP_PARAMETERS, values)),
            &[partial, dgamma, dbeta],
            finish
        ),
    ]
}

/// The input's gradient, then the sums over pixels.
fn layer_gradient(norm: &LayerNorm, accumulate: bool, values: ValueType) -> Emission {
    let c = norm.shape.c;
    let [x, gamma, mean, invstd, dy] = std::array::from_fn(read);
    let [dx, dgamma, dbeta, scratch] = std::array::from_fn(write);
    let tiles = NormTiles::summing(c, norm.rows());
    let partial = sums(scratch, sums_len(c, tiles.chunks()));
    let finish = Finish::new(c, tiles.chunks(), 1, 0.0);
    let (numbers, call) = layer(by_values(&LAYER_GRADIENT, values), norm, accumulate);
    smallvec![
        emitted(call, &[x, gamma, mean, invstd, dy, dx], numbers),
        emitted(tiles.call(by_values(&LAYER_SUMS, values)), &[x, mean, invstd, dy, partial], tiles),
        emitted(
            finish.call(by_values(&LAYER_PARAMETERS, values)),
            &[partial, dgamma, dbeta],
            finish
        ),
    ]
}

//! Calls for [`ops::fused`](crate::ops::fused).

mod tile;

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelHeader, KernelSource, Operand};
use smallvec::smallvec;

use self::tile::{Fit, FusedTile};
use super::windows::{self, THREADS, columns};
use super::{
    CallOperand, Emission, Emitted, HEADERS, READ, READ_VALUES, WRITE, WRITE_VALUES, by_precision,
    by_values, emitted, kernel, plain, product_headers, product_kernels, product_sources, read,
    value_headers, value_kernels, value_sources, write,
};
use crate::kernels::BatchShape;
use crate::ops::fused::{ClassifierHead, FusedConv, FusedOp, InputGradient};
use crate::ops::norm::BatchNorm;
use crate::precision::{Precision, ValueType};

/// Headers of this family.
static FUSED_HEADERS: [[KernelHeader; 6]; 3] = product_headers![
    KernelHeader { name: c"fused.cuh", text: include_str!("fused/fused.cuh") },
    KernelHeader { ..HEADERS[0] },
    KernelHeader { ..HEADERS[1] },
    KernelHeader { ..HEADERS[3] },
    KernelHeader { ..HEADERS[4] },
];

/// Headers of the classifier and of sums over raw images.
static HEAD_HEADERS: [[KernelHeader; 6]; 2] = value_headers![
    KernelHeader { name: c"fused.cuh", text: include_str!("fused/fused.cuh") },
    KernelHeader { ..HEADERS[0] },
    KernelHeader { ..HEADERS[1] },
    KernelHeader { ..HEADERS[3] },
    KernelHeader { ..HEADERS[4] },
];

pub(super) static FORWARD: [KernelSource; 3] = product_sources!(FUSED_HEADERS, "fused/forward.cu");
pub(super) static BACKWARD: [KernelSource; 3] =
    product_sources!(FUSED_HEADERS, "fused/backward.cu");
pub(super) static HEAD: [KernelSource; 2] = value_sources!(HEAD_HEADERS, "fused/head.cu");

const TICKETS: Operand = Operand::write::<u32>();
const SUMS: Operand = Operand::write::<f64>();
const COUNTER: Operand = Operand::write::<i64>();

static FUSED_FORWARD: [Kernel; 3] = product_kernels!(
    ForwardValues,
    FORWARD,
    "fused_forward",
    [
        READ_VALUES,
        READ,
        READ,
        READ,
        READ,
        READ,
        WRITE_VALUES,
        WRITE,
        WRITE,
        WRITE,
        WRITE,
        COUNTER,
        TICKETS,
        SUMS
    ]
);
static FUSED_BACKWARD: [Kernel; 3] = product_kernels!(
    BackwardValues,
    BACKWARD,
    "fused_backward",
    [
        READ_VALUES,
        READ,
        READ_VALUES,
        READ,
        READ,
        READ,
        READ_VALUES,
        WRITE_VALUES,
        WRITE,
        TICKETS,
        WRITE
    ]
);
/// x, its norm, weight, raw output, mean, β, coefficients, dy; results, tickets, scratch.
const BEHIND_NORM: [Operand; 19] = [
    READ_VALUES,
    READ,
    READ,
    READ,
    READ,
    READ,
    READ_VALUES,
    READ,
    READ,
    READ,
    READ_VALUES,
    WRITE_VALUES,
    WRITE,
    WRITE,
    WRITE,
    WRITE,
    TICKETS,
    WRITE,
    SUMS,
];
static FUSED_BACKWARD_NORM: [Kernel; 3] =
    product_kernels!(BackwardValues, BACKWARD, "fused_backward_norm", BEHIND_NORM);
static FUSED_BACKWARD_POOL: [Kernel; 3] =
    product_kernels!(BackwardValues, BACKWARD, "fused_backward_pool", BEHIND_NORM);
static HEAD_FORWARD: [Kernel; 2] = value_kernels!(
    ClassifierValues,
    HEAD,
    "head_forward",
    [READ_VALUES, READ, READ, READ, READ, READ, READ, WRITE, WRITE_VALUES]
);
static HEAD_BACKWARD: [Kernel; 2] = value_kernels!(
    ClassifierValues,
    HEAD,
    "head_backward",
    [
        READ_VALUES,
        READ,
        READ,
        READ,
        READ,
        READ,
        READ,
        READ_VALUES,
        WRITE_VALUES,
        WRITE,
        WRITE,
        WRITE,
        WRITE,
        WRITE,
        TICKETS,
        SUMS,
        WRITE
    ]
);
static NORM_SUMS: [Kernel; 2] = value_kernels!(
    ClassifierValues,
    HEAD,
    "norm_sums",
    [READ_VALUES, READ, READ, READ, READ, READ_VALUES, WRITE, WRITE, WRITE, TICKETS, SUMS]
);
static BEGIN: [Kernel; 2] = value_kernels!((), HEAD, "begin", [WRITE, TICKETS]);

/// Images that a block takes one after another.
const IMAGES: usize = 4;

/// f32 of scratch that hold an f64.
const WIDE: usize = size_of::<f64>() / size_of::<f32>();

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ImageSource {
    h: u32,
    w: u32,
    c: u32,
    kind: u32,
    eps: f32,
}

impl ImageSource {
    /// Images without a norm.
    fn images(shape: &BatchShape) -> ImageSource {
        let [h, w, c] = [shape.h, shape.w, shape.c].map(|n| n as u32);
        ImageSource { h, w, c, kind: 0, eps: 0.0 }
    }

    /// Raw images before a batch norm.
    fn raw(norm: &BatchNorm) -> ImageSource {
        let kind = if norm.pool { 2 } else { 1 };
        ImageSource { kind, eps: norm.eps, ..ImageSource::images(&norm.shape) }
    }

    fn for_conv(conv: &FusedConv) -> ImageSource {
        conv.before.map_or(ImageSource::images(&conv.shape.input()), |norm| ImageSource::raw(&norm))
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ForwardValues {
    from: ImageSource,
    tile: FusedTile,
    batch: u32,
    h: u32,
    w: u32,
    out_c: u32,
    column_tiles: u32,
    column_groups: u32,
    staging: u32,
    weights: u32,
    offsets: u32,
    affine: u32,
    training: u32,
    momentum: f32,
    rest: f32,
    unbiased: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Slices {
    images: u32,
    count: u32,
    weight_rows: u32,
    weight_tiles: u32,
    weight_groups: u32,
    data_tiles: u32,
    columns: u32,
    column_groups: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BackwardValues {
    from: ImageSource,
    to: ImageSource,
    batch: u32,
    h: u32,
    w: u32,
    image_step: u32,
    pixel_step: u32,
    accumulate: u32,
    slices: Slices,
    data: FusedTile,
    data_staging: u32,
    data_weights: u32,
    data_offsets: u32,
    weight: FusedTile,
    weight_row: u32,
    weight_pixel: u32,
    weight_gradient: u32,
    weight_quads: u32,
    subsets: u32,
    affine: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ClassifierValues {
    of: ImageSource,
    batch: u32,
    classes: u32,
    pixels: u32,
    across: u32,
    columns: u32,
    class_columns: u32,
    images: u32,
    parts: u32,
    affine: u32,
    precision: u32,
}

pub(super) fn emit(op: &FusedOp, values: ValueType) -> Emission {
    match *op {
        FusedOp::Begin { gradient, tickets } => {
            let call = Call::each(by_values(&BEGIN, values), gradient.max(tickets));
            smallvec![plain(call, &[write(0), write(1)])]
        }
        FusedOp::Forward { conv, momentum } => smallvec![forward(&conv, momentum)],
        FusedOp::Backward { conv, after, uniform, data } => {
            smallvec![backward(&conv, &after, uniform, data)]
        }
        FusedOp::Sums(norm) => {
            let of = ClassifierHead { norm, classes: 0, precision: Precision::F32 };
            let (numbers, call) = head(by_values(&NORM_SUMS, values), &of);
            let [z, mean, var, gamma, beta, dy] = std::array::from_fn(read);
            let [dgamma, dbeta, coefficients, ticket] = std::array::from_fn(write);
            let reads = [z, mean, var, gamma, beta, dy];
            let writes = [dgamma, dbeta, coefficients, ticket, head_scratch(&norm, 0, 4)[0]];
            smallvec![emitted(call, &[&reads[..], &writes].concat(), numbers)]
        }
        FusedOp::Head(of) => {
            let (numbers, call) = head(by_values(&HEAD_FORWARD, values), &of);
            let reads: [CallOperand; 7] = std::array::from_fn(read);
            let operands = [&reads[..], &[write(0), write(1)]].concat();
            smallvec![emitted(call, &operands, numbers)]
        }
        FusedOp::HeadGradient(of) => {
            let (numbers, call) = head(by_values(&HEAD_BACKWARD, values), &of);
            let (reads, writes): ([CallOperand; 8], [CallOperand; 7]) =
                (std::array::from_fn(read), std::array::from_fn(write));
            let operands = [&reads[..], &writes, &head_scratch(&of.norm, of.classes, 7)].concat();
            smallvec![emitted(call, &operands, numbers)]
        }
    }
}

pub(super) fn scratch(op: &FusedOp) -> usize {
    match *op {
        FusedOp::Begin { .. } | FusedOp::Forward { momentum: None, .. } | FusedOp::Head(_) => 0,
        FusedOp::Forward { conv, momentum: Some(_) } => WIDE * forward_sums(&conv),
        FusedOp::Backward { conv, data, .. } => {
            let (sums, weights) = BackwardGrid::new(&conv, data).scratch(&conv);
            WIDE * sums + weights
        }
        FusedOp::Sums(norm) => scratch_end(&head_scratch(&norm, 0, 0)),
        FusedOp::HeadGradient(of) => scratch_end(&head_scratch(&of.norm, of.classes, 0)),
    }
}

/// f32 up to the end of the last piece of scratch.
fn scratch_end(pieces: &[CallOperand; 2]) -> usize {
    pieces[1].part.map_or(0, |(start, len)| start + len)
}

/// Tiles of the images that a forward pass writes.
fn forward_fit(conv: &FusedConv) -> Fit {
    let affine = if conv.before.is_some() { 3 * conv.shape.in_c } else { 0 };
    Fit::window(conv.precision, &conv.shape.output(), conv.shape.in_c, affine)
}

/// f64 of the sums for the statistics.
fn forward_sums(conv: &FusedConv) -> usize {
    forward_fit(conv).cut.count(conv.shape.batch) * 2 * conv.shape.out_c
}

fn forward(conv: &FusedConv, momentum: Option<f32>) -> Emitted {
    let (fit, shape) = (forward_fit(conv), conv.shape.output());
    let count = (shape.batch * shape.pixels()) as f64;
    let [column_tiles, column_groups] = columns(conv.precision, shape.c);
    let [batch, h, w, out_c] = [shape.batch, shape.h, shape.w, shape.c].map(|n| n as u32);
    let share = momentum.unwrap_or(0.0);
    let values = ForwardValues {
        from: ImageSource::for_conv(conv),
        tile: fit.tile,
        batch,
        h,
        w,
        out_c,
        column_tiles: column_tiles as u32,
        column_groups: column_groups as u32,
        staging: fit.staging as u32,
        weights: fit.weights as u32,
        offsets: fit.tables as u32,
        affine: fit.floats as u32,
        training: momentum.is_some().into(),
        momentum: share,
        rest: 1.0 - share,
        unbiased: (count / (count - 1.0)) as f32,
    };
    let affine = if conv.before.is_some() { 3 * conv.shape.in_c } else { 0 };
    let blocks = fit.cut.count(shape.batch) * column_tiles;
    let kernel = by_precision(&FUSED_FORWARD, conv.precision);
    let call = Call::new(kernel, blocks as u32, fit.threads as u32);
    let call = call.shared(4 * (fit.floats + affine) as u32);
    let reads: [CallOperand; 6] = std::array::from_fn(read);
    let writes: [CallOperand; 7] = match momentum {
        Some(_) => std::array::from_fn(write),
        // The operands that only training writes are absent.
        None => std::array::from_fn(|n| if n == 0 { write(0) } else { write(0).part(0, 0) }),
    };
    let sums = match momentum {
        Some(_) => write(7).part(0, forward_sums(conv)),
        None => write(0).part(0, 0),
    };
    emitted(call, &[&reads[..], &writes, &[sums]].concat(), values)
}

/// Slices and blocks of a backward pass.
struct BackwardGrid {
    slices: Slices,
    /// Tiles of the data's gradient, if it is wanted.
    data: Option<Fit>,
    weight: Fit,
}

impl BackwardGrid {
    fn new(conv: &FusedConv, data: InputGradient) -> BackwardGrid {
        let (shape, of) = (&conv.shape, conv.precision);
        let wanted = data != InputGradient::Unwanted;
        let affine = affine_len(conv);
        let data = wanted.then(|| Fit::window(of, &shape.input(), shape.out_c, affine));
        let weight = Fit::rows(of, &shape.output(), shape.in_c, affine);
        let [weight_tiles, weight_groups] = columns(of, shape.out_c);
        let rows = shape.in_c.div_ceil(weight.tile.chunk as usize);
        // A slice's sums are written once and read once: they are at most an eighth of the elements
        // that are summed, unless fewer slices would leave a GPU idle.
        let weights = 9 * shape.in_c * shape.out_c;
        let summed = conv.read_len() + shape.output().len();
        let most = (summed / 8 / weights).max(64 / (rows * weight_tiles)).clamp(1, 128);
        let whole = data.as_ref().map_or(1, |fit| fit.cut.images);
        let images = shape.batch.div_ceil(most).next_multiple_of(whole);
        let data_tiles = data.as_ref().map_or(0, |fit| fit.cut.count(images));
        let [tiles, groups] = columns(of, shape.in_c);
        let n = |n: usize| n as u32;
        assert!(rows * weight_tiles < conv.tickets()[1], "blocks with tickets, and the data's");
        let slices = Slices {
            images: n(images),
            count: n(shape.batch.div_ceil(images)),
            weight_rows: n(rows),
            weight_tiles: n(weight_tiles),
            weight_groups: n(weight_groups),
            data_tiles: n(data_tiles),
            columns: n(tiles),
            column_groups: n(groups),
        };
        BackwardGrid { slices, data, weight }
    }

    fn blocks(&self) -> u32 {
        let of = &self.slices;
        of.count * (of.weight_rows * of.weight_tiles + of.data_tiles * of.columns)
    }

    /// Elements of the f64 sums for the norm before, and of the f32 sums for the weights.
    fn scratch(&self, conv: &FusedConv) -> (usize, usize) {
        let [count, tiles] = [self.slices.count, self.slices.data_tiles].map(|n| n as usize);
        let sums = if conv.before.is_some() { count * tiles * 2 * conv.shape.in_c } else { 0 };
        (sums, count * 9 * conv.shape.in_c * conv.shape.out_c)
    }
}

/// Floats of the norm coefficients of a backward pass: of its input's norm and of its raw output's.
fn affine_len(conv: &FusedConv) -> usize {
    3 * conv.shape.in_c + 5 * conv.shape.out_c
}

fn backward(conv: &FusedConv, after: &BatchNorm, uniform: bool, data: InputGradient) -> Emitted {
    let grid = BackwardGrid::new(conv, data);
    let (shape, output, weight) = (&conv.shape, after.output(), &grid.weight);
    let [image_step, pixel_step] =
        if uniform { [output.c, 0] } else { [output.pixels() * output.c, output.c] };
    let affine = grid.data.as_ref().map_or(0, |fit| fit.floats).max(weight.floats);
    let values = BackwardValues {
        from: ImageSource::for_conv(conv),
        to: ImageSource::raw(after),
        batch: shape.batch as u32,
        h: shape.in_h as u32,
        w: shape.in_w as u32,
        image_step: image_step as u32,
        pixel_step: pixel_step as u32,
        accumulate: (data == InputGradient::Accumulate).into(),
        slices: grid.slices,
        data: grid.data.as_ref().map_or(FusedTile::zeroed(), |fit| fit.tile),
        data_staging: grid.data.as_ref().map_or(0, |fit| fit.staging) as u32,
        data_weights: grid.data.as_ref().map_or(0, |fit| fit.weights) as u32,
        data_offsets: grid.data.as_ref().map_or(0, |fit| fit.tables) as u32,
        weight: weight.tile,
        weight_row: weight.row as u32,
        weight_pixel: weight.pixel as u32,
        weight_gradient: weight.weights as u32,
        weight_quads: weight.tables as u32,
        subsets: weight.subsets as u32,
        affine: affine as u32,
    };
    let threads = weight.threads.max(grid.data.as_ref().map_or(0, |fit| fit.threads));
    // At the end the sums of all threads overwrite the rest of the shared memory.
    let [chunk, groups] = [weight.tile.chunk, grid.slices.weight_groups].map(|n| n as usize);
    let sums = windows::sums_over_pixels(conv.precision, threads, chunk, groups);
    let floats = (affine + affine_len(conv)).max(sums);
    let reads: [CallOperand; 11] = std::array::from_fn(read);
    let writes: [CallOperand; 6] = std::array::from_fn(write);
    let (sums, weights) = grid.scratch(conv);
    let tickets = writes[5];
    let weights = write(6).part(WIDE * sums, weights);
    let (kernel, operands) = match conv.before {
        None => {
            let all = [&reads[..1], &reads[5..], &writes[..2], &[tickets, weights]].concat();
            (&FUSED_BACKWARD, all)
        }
        Some(norm) => {
            let kernel = if norm.pool { &FUSED_BACKWARD_POOL } else { &FUSED_BACKWARD_NORM };
            (kernel, [&reads[..], &writes, &[weights, write(6).part(0, sums)]].concat())
        }
    };
    let kernel = by_precision(kernel, conv.precision);
    let call = Call::new(kernel, grid.blocks(), threads as u32).shared(4 * floats as u32);
    emitted(call, &operands, values)
}

/// Blocks that go through the output of a norm.
fn parts(norm: &BatchNorm) -> usize {
    norm.shape.batch.div_ceil(IMAGES)
}

/// Values and call of a kernel that goes through the output of a norm, in [`parts`] blocks.
fn head(kernel: &'static Kernel, of: &ClassifierHead) -> (ClassifierValues, Call) {
    let ClassifierHead { norm, classes, precision } = of;
    let (output, c) = (norm.output(), norm.shape.c);
    let values = ClassifierValues {
        of: ImageSource::raw(norm),
        batch: output.batch as u32,
        classes: *classes as u32,
        pixels: output.pixels() as u32,
        across: output.w as u32,
        columns: c.next_power_of_two().min(32) as u32,
        class_columns: classes.next_power_of_two().min(32) as u32,
        images: IMAGES as u32,
        parts: parts(norm) as u32,
        affine: (IMAGES * c) as u32,
        precision: *precision as u32,
    };
    let call = Call::new(kernel, parts(norm) as u32, THREADS as u32);
    (values, call.shared(4 * ((IMAGES + 3) * c) as u32))
}

/// The sums of the gradients of the norm and of the classifier, in the written operand `scratch`.
fn head_scratch(norm: &BatchNorm, classes: usize, scratch: usize) -> [CallOperand; 2] {
    let (parts, c) = (parts(norm), norm.shape.c);
    let sums = parts * 2 * c;
    let weights = parts * (c + 1) * classes;
    [write(scratch).part(0, sums), write(scratch).part(WIDE * sums, weights)]
}

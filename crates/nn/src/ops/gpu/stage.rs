//! Calls for [`ops::stage`](crate::ops::stage).

mod tile;

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelHeader, KernelSource, Operand};
use smallvec::smallvec;

use self::tile::{Fit, Tile};
use super::windows::{self, THREADS, columns};
use super::{
    At, Emission, Emitted, HEADERS, READ, WRITE, by_precision, emitted, kernel, plain,
    product_headers, product_kernels, product_sources, read, write,
};
use crate::kernels::ImageShape;
use crate::ops::norm::BatchNorm;
use crate::ops::stage::{Data, Head, Op, Stage};
use crate::precision::Precision;

/// Headers of this family.
static STAGE_HEADERS: [[KernelHeader; 6]; 3] = product_headers![
    KernelHeader { name: c"stage.cuh", text: include_str!("stage/stage.cuh") },
    KernelHeader { ..HEADERS[0] },
    KernelHeader { ..HEADERS[1] },
    KernelHeader { ..HEADERS[3] },
    KernelHeader { ..HEADERS[4] },
];

pub(super) static FORWARD: [KernelSource; 3] = product_sources!(STAGE_HEADERS, "stage/forward.cu");
pub(super) static BACKWARD: [KernelSource; 3] =
    product_sources!(STAGE_HEADERS, "stage/backward.cu");
pub(super) static HEAD: KernelSource =
    KernelSource { headers: &STAGE_HEADERS[0], ..super::source!("stage/head.cu") };

const TICKETS: Operand = Operand::write::<u32>();
const SUMS: Operand = Operand::write::<f64>();
const COUNTER: Operand = Operand::write::<i64>();

static STAGE_FORWARD: [Kernel; 3] = product_kernels::<ForwardValues>(
    &FORWARD,
    "stage_forward",
    &[
        READ, READ, READ, READ, READ, READ, WRITE, WRITE, WRITE, WRITE, WRITE, COUNTER, TICKETS,
        SUMS,
    ],
);
static STAGE_BACKWARD: [Kernel; 3] = product_kernels::<BackwardValues>(
    &BACKWARD,
    "stage_backward",
    &[READ, READ, READ, READ, READ, READ, READ, WRITE, WRITE, TICKETS, WRITE],
);
/// x, its norm, weight, raw output, mean, β, coefficients, dy; results, tickets, scratch.
const BEHIND_NORM: [Operand; 19] = [
    READ, READ, READ, READ, READ, READ, READ, READ, READ, READ, READ, WRITE, WRITE, WRITE, WRITE,
    WRITE, TICKETS, WRITE, SUMS,
];
static STAGE_BACKWARD_NORM: [Kernel; 3] =
    product_kernels::<BackwardValues>(&BACKWARD, "stage_backward_norm", &BEHIND_NORM);
static STAGE_BACKWARD_POOL: [Kernel; 3] =
    product_kernels::<BackwardValues>(&BACKWARD, "stage_backward_pool", &BEHIND_NORM);
static HEAD_FORWARD: Kernel = kernel::<HeadValues>(
    &HEAD,
    "head_forward",
    &[READ, READ, READ, READ, READ, READ, READ, WRITE, WRITE],
);
static HEAD_BACKWARD: Kernel = kernel::<HeadValues>(
    &HEAD,
    "head_backward",
    &[
        READ, READ, READ, READ, READ, READ, READ, READ, WRITE, WRITE, WRITE, WRITE, WRITE, WRITE,
        TICKETS, SUMS, WRITE,
    ],
);
static NORM_SUMS: Kernel = kernel::<HeadValues>(
    &HEAD,
    "norm_sums",
    &[READ, READ, READ, READ, READ, READ, WRITE, WRITE, WRITE, TICKETS, SUMS],
);
static BEGIN: Kernel = kernel::<()>(&HEAD, "begin", &[WRITE, TICKETS]);

/// Images of a block that has them one after another.
const IMAGES: usize = 4;

/// f32 of scratch that hold an f64.
const WIDE: usize = size_of::<f64>() / size_of::<f32>();

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct From {
    h: u32,
    w: u32,
    c: u32,
    kind: u32,
    eps: f32,
}

impl From {
    /// Images as they are.
    fn images(shape: &ImageShape) -> From {
        let [h, w, c] = [shape.h, shape.w, shape.c].map(|n| n as u32);
        From { h, w, c, kind: 0, eps: 0.0 }
    }

    /// Raw images before a batch norm.
    fn raw(norm: &BatchNorm) -> From {
        let kind = if norm.pool { 2 } else { 1 };
        From { kind, eps: norm.eps, ..From::images(&norm.shape) }
    }

    fn of(stage: &Stage) -> From {
        stage.before.map_or(From::images(&stage.shape.input()), |norm| From::raw(&norm))
    }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ForwardValues {
    from: From,
    tile: Tile,
    batch: u32,
    h: u32,
    w: u32,
    out_c: u32,
    column_tiles: u32,
    column_groups: u32,
    stage: u32,
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
    from: From,
    to: From,
    batch: u32,
    h: u32,
    w: u32,
    image_step: u32,
    pixel_step: u32,
    accumulate: u32,
    slices: Slices,
    data: Tile,
    data_stage: u32,
    data_weights: u32,
    data_offsets: u32,
    weight: Tile,
    weight_row: u32,
    weight_pixel: u32,
    weight_gradient: u32,
    weight_quads: u32,
    subsets: u32,
    affine: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct HeadValues {
    of: From,
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

pub(super) fn emit(op: &Op) -> Emission {
    match *op {
        Op::Begin { gradient, tickets } => {
            let call = Call::each(&BEGIN, gradient.max(tickets));
            smallvec![plain(call, &[write(0), write(1)])]
        }
        Op::Forward { stage, momentum } => smallvec![forward(&stage, momentum)],
        Op::Backward { stage, behind, uniform, data } => {
            smallvec![backward(&stage, &behind, uniform, data)]
        }
        Op::Sums(norm) => {
            let of = Head { norm, classes: 0, precision: Precision::F32 };
            let (values, call) = head(&NORM_SUMS, &of);
            let [z, mean, var, gamma, beta, dy] = std::array::from_fn(read);
            let [dgamma, dbeta, coefficients, ticket] = std::array::from_fn(write);
            let reads = [z, mean, var, gamma, beta, dy];
            let writes = [dgamma, dbeta, coefficients, ticket, head_scratch(&norm, 0, 4)[0]];
            smallvec![emitted(call, &[&reads[..], &writes].concat(), values)]
        }
        Op::Head(of) => {
            let (values, call) = head(&HEAD_FORWARD, &of);
            let reads: [At; 7] = std::array::from_fn(read);
            let operands = [&reads[..], &[write(0), write(1)]].concat();
            smallvec![emitted(call, &operands, values)]
        }
        Op::HeadGradient(of) => {
            let (values, call) = head(&HEAD_BACKWARD, &of);
            let (reads, writes): ([At; 8], [At; 7]) =
                (std::array::from_fn(read), std::array::from_fn(write));
            let operands = [&reads[..], &writes, &head_scratch(&of.norm, of.classes, 7)].concat();
            smallvec![emitted(call, &operands, values)]
        }
    }
}

pub(super) fn scratch(op: &Op) -> usize {
    match *op {
        Op::Begin { .. } | Op::Forward { momentum: None, .. } | Op::Head(_) => 0,
        Op::Forward { stage, momentum: Some(_) } => WIDE * forward_sums(&stage),
        Op::Backward { stage, data, .. } => {
            let (sums, weights) = Grid::new(&stage, data).scratch(&stage);
            WIDE * sums + weights
        }
        Op::Sums(norm) => scratch_end(&head_scratch(&norm, 0, 0)),
        Op::HeadGradient(of) => scratch_end(&head_scratch(&of.norm, of.classes, 0)),
    }
}

/// f32 up to the end of the last piece of scratch.
fn scratch_end(pieces: &[At; 2]) -> usize {
    pieces[1].part.map_or(0, |(start, len)| start + len)
}

/// Images that a stage's forward pass writes, in tiles.
fn forward_fit(stage: &Stage) -> Fit {
    let affine = if stage.before.is_some() { 3 * stage.shape.in_c } else { 0 };
    Fit::window(stage.precision, &stage.shape.output(), stage.shape.in_c, affine)
}

/// f64 of the sums for the statistics.
fn forward_sums(stage: &Stage) -> usize {
    forward_fit(stage).cut.count(stage.shape.batch) * 2 * stage.shape.out_c
}

fn forward(stage: &Stage, momentum: Option<f32>) -> Emitted {
    let (fit, shape) = (forward_fit(stage), stage.shape.output());
    let count = (shape.batch * shape.pixels()) as f64;
    let [column_tiles, column_groups] = columns(stage.precision, shape.c);
    let [batch, h, w, out_c] = [shape.batch, shape.h, shape.w, shape.c].map(|n| n as u32);
    let share = momentum.unwrap_or(0.0);
    let values = ForwardValues {
        from: From::of(stage),
        tile: fit.tile,
        batch,
        h,
        w,
        out_c,
        column_tiles: column_tiles as u32,
        column_groups: column_groups as u32,
        stage: fit.stage as u32,
        weights: fit.weights as u32,
        offsets: fit.tables as u32,
        affine: fit.floats as u32,
        training: momentum.is_some().into(),
        momentum: share,
        rest: 1.0 - share,
        unbiased: (count / (count - 1.0)) as f32,
    };
    let affine = if stage.before.is_some() { 3 * stage.shape.in_c } else { 0 };
    let blocks = fit.cut.count(shape.batch) * column_tiles;
    let kernel = by_precision(&STAGE_FORWARD, stage.precision);
    let call = Call::new(kernel, blocks as u32, fit.threads as u32);
    let call = call.shared(4 * (fit.floats + affine) as u32);
    let reads: [At; 6] = std::array::from_fn(read);
    let writes: [At; 7] = match momentum {
        Some(_) => std::array::from_fn(write),
        // What training writes is absent.
        None => std::array::from_fn(|n| if n == 0 { write(0) } else { write(0).part(0, 0) }),
    };
    let sums = match momentum {
        Some(_) => write(7).part(0, forward_sums(stage)),
        None => write(0).part(0, 0),
    };
    emitted(call, &[&reads[..], &writes, &[sums]].concat(), values)
}

/// Slices of a backward pass, and how its blocks are cut.
struct Grid {
    slices: Slices,
    /// Tiles of the data's gradient, if it is wanted.
    data: Option<Fit>,
    weight: Fit,
}

impl Grid {
    fn new(stage: &Stage, data: Data) -> Grid {
        let (shape, of) = (&stage.shape, stage.precision);
        let wanted = data != Data::Unwanted;
        let affine = affine_len(stage);
        let data = wanted.then(|| Fit::window(of, &shape.input(), shape.out_c, affine));
        let weight = Fit::rows(of, &shape.output(), shape.in_c, affine);
        let [weight_tiles, weight_groups] = columns(of, shape.out_c);
        let rows = shape.in_c.div_ceil(weight.tile.chunk as usize);
        // A slice's sums are written once and read once: they are to be an eighth of what is summed
        // at most, but there are to be blocks enough for a GPU.
        let weights = 9 * shape.in_c * shape.out_c;
        let summed = stage.read_len() + shape.output().len();
        let most = (summed / 8 / weights).max(64 / (rows * weight_tiles)).clamp(1, 128);
        let whole = data.as_ref().map_or(1, |fit| fit.cut.images);
        let images = shape.batch.div_ceil(most).next_multiple_of(whole);
        let data_tiles = data.as_ref().map_or(0, |fit| fit.cut.count(images));
        let [tiles, groups] = columns(of, shape.in_c);
        let n = |n: usize| n as u32;
        assert!(rows * weight_tiles < stage.tickets()[1], "blocks with tickets, and the data's");
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
        Grid { slices, data, weight }
    }

    fn blocks(&self) -> u32 {
        let of = &self.slices;
        of.count * (of.weight_rows * of.weight_tiles + of.data_tiles * of.columns)
    }

    /// f64 of the sums for the norm before, and f32 of those for the weights.
    fn scratch(&self, stage: &Stage) -> (usize, usize) {
        let [count, tiles] = [self.slices.count, self.slices.data_tiles].map(|n| n as usize);
        let sums = if stage.before.is_some() { count * tiles * 2 * stage.shape.in_c } else { 0 };
        (sums, count * 9 * stage.shape.in_c * stage.shape.out_c)
    }
}

/// Floats of what normalises the images that a backward pass reads, and of its raw output.
fn affine_len(stage: &Stage) -> usize {
    3 * stage.shape.in_c + 5 * stage.shape.out_c
}

fn backward(stage: &Stage, behind: &BatchNorm, uniform: bool, data: Data) -> Emitted {
    let grid = Grid::new(stage, data);
    let (shape, output, weight) = (&stage.shape, behind.output(), &grid.weight);
    let [image_step, pixel_step] =
        if uniform { [output.c, 0] } else { [output.pixels() * output.c, output.c] };
    let affine = grid.data.as_ref().map_or(0, |fit| fit.floats).max(weight.floats);
    let values = BackwardValues {
        from: From::of(stage),
        to: From::raw(behind),
        batch: shape.batch as u32,
        h: shape.in_h as u32,
        w: shape.in_w as u32,
        image_step: image_step as u32,
        pixel_step: pixel_step as u32,
        accumulate: (data == Data::Accumulate).into(),
        slices: grid.slices,
        data: grid.data.as_ref().map_or(Tile::zeroed(), |fit| fit.tile),
        data_stage: grid.data.as_ref().map_or(0, |fit| fit.stage) as u32,
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
    // At the end the sums of all threads take the place of everything else.
    let [chunk, groups] = [weight.tile.chunk, grid.slices.weight_groups].map(|n| n as usize);
    let sums = windows::sums_over_pixels(stage.precision, [threads, chunk, groups]);
    let floats = (affine + affine_len(stage)).max(sums);
    let reads: [At; 11] = std::array::from_fn(read);
    let writes: [At; 6] = std::array::from_fn(write);
    let (sums, weights) = grid.scratch(stage);
    let tickets = writes[5];
    let weights = write(6).part(WIDE * sums, weights);
    let (kernel, operands) = match stage.before {
        None => {
            let all = [&reads[..1], &reads[5..], &writes[..2], &[tickets, weights]].concat();
            (&STAGE_BACKWARD, all)
        }
        Some(norm) => {
            let kernel = if norm.pool { &STAGE_BACKWARD_POOL } else { &STAGE_BACKWARD_NORM };
            (kernel, [&reads[..], &writes, &[weights, write(6).part(0, sums)]].concat())
        }
    };
    let kernel = by_precision(kernel, stage.precision);
    let call = Call::new(kernel, grid.blocks(), threads as u32).shared(4 * floats as u32);
    emitted(call, &operands, values)
}

/// Blocks that go through images behind a norm.
fn parts(norm: &BatchNorm) -> usize {
    norm.shape.batch.div_ceil(IMAGES)
}

/// Values and call of a kernel that does.
fn head(kernel: &'static Kernel, of: &Head) -> (HeadValues, Call) {
    let Head { norm, classes, precision } = of;
    let (output, c) = (norm.output(), norm.shape.c);
    let values = HeadValues {
        of: From::raw(norm),
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

/// The sums of the norm's gradient, and those of a classifier's, in the scratch that is this write.
fn head_scratch(norm: &BatchNorm, classes: usize, scratch: usize) -> [At; 2] {
    let (parts, c) = (parts(norm), norm.shape.c);
    let sums = parts * 2 * c;
    let weights = parts * (c + 1) * classes;
    [write(scratch).part(0, sums), write(scratch).part(WIDE * sums, weights)]
}

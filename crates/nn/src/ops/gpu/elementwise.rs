//! Calls for [`ops::elementwise`](crate::ops::elementwise).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::over_pixels::{columns, over_pixels};
use super::{Emission, READ, WRITE, emitted, kernel, plain, read, source, write};
use crate::kernels::ImageShape;
use crate::ops::elementwise::{Function, Op};

pub(super) static SOURCE: KernelSource = source!("elementwise.cu");

static FILL: Kernel = kernel::<f32>(&SOURCE, "fill", &[WRITE]);
static MULTIPLY: Kernel = kernel::<f32>(&SOURCE, "multiply", &[WRITE]);
static PASS: Kernel = kernel::<Options>(&SOURCE, "pass", &[READ, WRITE]);
static FORWARD: Kernel = kernel::<Options>(&SOURCE, "forward", &[READ, WRITE]);
static GRADIENT: Kernel = kernel::<Options>(&SOURCE, "gradient", &[READ, READ, WRITE]);
static ADD: Kernel = kernel::<()>(&SOURCE, "add", &[READ, READ, WRITE]);
static SCALE: Kernel = kernel::<Channels>(&SOURCE, "scale", &[READ, READ, WRITE]);
static SCALE_GRADIENT: Kernel = kernel::<Channels>(&SOURCE, "scale_gradient", &[READ, READ, WRITE]);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Options {
    function: u32,
    accumulate: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Channels {
    pixels: Divisor,
    c: Divisor,
    columns: u32,
    factor: f32,
    accumulate: u32,
}

fn options(function: Function, accumulate: bool) -> Options {
    let function = match function {
        Function::Relu => 0,
        Function::Sigmoid => 1,
        Function::Tanh => 2,
    };
    Options { function, accumulate: accumulate.into() }
}

fn channels(shape: &ImageShape, factor: f32, accumulate: bool) -> Channels {
    let [pixels, c] = [shape.pixels(), shape.c].map(Divisor::new);
    Channels { pixels, c, columns: columns(shape), factor, accumulate: accumulate.into() }
}

pub(super) fn emit(op: &Op) -> Emission {
    let each = |kernel, len: usize| Call::each(kernel, len);
    match *op {
        Op::Fill { len, value } => smallvec![emitted(each(&FILL, len), &[write(0)], value)],
        Op::Multiply { len, factor } => {
            smallvec![emitted(each(&MULTIPLY, len), &[write(0)], factor)]
        }
        Op::Pass { len, accumulate } => {
            let options = options(Function::Relu, accumulate);
            smallvec![emitted(each(&PASS, len), &[read(0), write(0)], options)]
        }
        Op::Forward { function, len } => {
            let options = options(function, false);
            smallvec![emitted(each(&FORWARD, len), &[read(0), write(0)], options)]
        }
        Op::Gradient { function, len, accumulate } => {
            let options = options(function, accumulate);
            smallvec![emitted(each(&GRADIENT, len), &[read(0), read(1), write(0)], options)]
        }
        Op::Add { len } => smallvec![plain(each(&ADD, len), &[read(0), read(1), write(0)])],
        Op::Scale { shape, factor } => {
            let of = channels(&shape, factor, false);
            smallvec![emitted(each(&SCALE, shape.len()), &[read(0), read(1), write(0)], of)]
        }
        Op::ScaleGradient { shape, factor, accumulate: [dx, dscale] } => {
            smallvec![
                emitted(
                    each(&SCALE, shape.len()),
                    &[read(2), read(1), write(0)],
                    channels(&shape, factor, dx),
                ),
                emitted(
                    over_pixels(&SCALE_GRADIENT, &shape),
                    &[read(0), read(2), write(1)],
                    channels(&shape, factor, dscale),
                ),
            ]
        }
    }
}

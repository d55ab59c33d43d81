//! Calls for [`ops::elementwise`](crate::ops::elementwise).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::over_pixels::{columns, over_pixels};
use super::{Emission, READ, WRITE, emitted, kernel, plain, read, source, write};
use crate::kernels::BatchShape;
use crate::ops::elementwise::{ElementwiseOp, UnaryFunction};

pub(super) static SOURCE: KernelSource = source!("elementwise.cu");

static FILL: Kernel = kernel::<f32>(&SOURCE, "fill", &[WRITE]);
static MULTIPLY: Kernel = kernel::<f32>(&SOURCE, "multiply", &[WRITE]);
static PASS: Kernel = kernel::<ElementwiseValues>(&SOURCE, "pass", &[READ, WRITE]);
static FORWARD: Kernel = kernel::<ElementwiseValues>(&SOURCE, "forward", &[READ, WRITE]);
static GRADIENT: Kernel = kernel::<ElementwiseValues>(&SOURCE, "gradient", &[READ, READ, WRITE]);
static ADD: Kernel = kernel::<()>(&SOURCE, "add", &[READ, READ, WRITE]);
static PRODUCT: Kernel = kernel::<ElementwiseValues>(&SOURCE, "product", &[READ, READ, WRITE]);
static SCALE: Kernel = kernel::<ChannelValues>(&SOURCE, "scale", &[READ, READ, WRITE]);
static SCALE_GRADIENT: Kernel =
    kernel::<ChannelValues>(&SOURCE, "scale_gradient", &[READ, READ, WRITE]);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ElementwiseValues {
    function: u32,
    accumulate: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ChannelValues {
    pixels: Divisor,
    c: Divisor,
    columns: u32,
    factor: f32,
    accumulate: u32,
}

fn options(function: UnaryFunction, accumulate: bool) -> ElementwiseValues {
    let function = match function {
        UnaryFunction::Relu => 0,
        UnaryFunction::Sigmoid => 1,
        UnaryFunction::Tanh => 2,
    };
    ElementwiseValues { function, accumulate: accumulate.into() }
}

fn channels(shape: &BatchShape, factor: f32, accumulate: bool) -> ChannelValues {
    let [pixels, c] = [shape.pixels(), shape.c].map(Divisor::new);
    ChannelValues { pixels, c, columns: columns(shape), factor, accumulate: accumulate.into() }
}

pub(super) fn emit(op: &ElementwiseOp) -> Emission {
    let each = |kernel, len: usize| Call::each(kernel, len);
    match *op {
        ElementwiseOp::Fill { len, value } => {
            smallvec![emitted(each(&FILL, len), &[write(0)], value)]
        }
        ElementwiseOp::Multiply { len, factor } => {
            smallvec![emitted(each(&MULTIPLY, len), &[write(0)], factor)]
        }
        ElementwiseOp::Pass { len, accumulate } => {
            let options = options(UnaryFunction::Relu, accumulate);
            smallvec![emitted(each(&PASS, len), &[read(0), write(0)], options)]
        }
        ElementwiseOp::Forward { function, len } => {
            let options = options(function, false);
            smallvec![emitted(each(&FORWARD, len), &[read(0), write(0)], options)]
        }
        ElementwiseOp::Gradient { function, len, accumulate } => {
            let options = options(function, accumulate);
            smallvec![emitted(each(&GRADIENT, len), &[read(0), read(1), write(0)], options)]
        }
        ElementwiseOp::Add { len } => {
            smallvec![plain(each(&ADD, len), &[read(0), read(1), write(0)])]
        }
        ElementwiseOp::Product { len, accumulate } => {
            let options = options(UnaryFunction::Relu, accumulate);
            smallvec![emitted(each(&PRODUCT, len), &[read(0), read(1), write(0)], options)]
        }
        ElementwiseOp::Scale { shape, factor } => {
            let of = channels(&shape, factor, false);
            smallvec![emitted(each(&SCALE, shape.len()), &[read(0), read(1), write(0)], of)]
        }
        ElementwiseOp::ScaleGradient { shape, factor, accumulate: [dx, dscale] } => {
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

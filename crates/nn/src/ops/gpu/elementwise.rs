//! Calls for [`ops::elementwise`](crate::ops::elementwise).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::over_pixels::{columns, over_pixels};
use super::{
    CallOperand, Emission, Emitted, READ, READ_VALUES, VALUE_HEADERS, WRITE, WRITE_VALUES,
    by_values, emitted, kernel, plain, read, value_kernels, value_sources, write,
};
use crate::kernels::BatchShape;
use crate::ops::elementwise::{ElementwiseOp, UnaryFunction};
use crate::precision::ValueType;

pub(super) static SOURCE: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "elementwise.cu");
/// Conversions, for values that are not f32.
pub(super) static CONVERT: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "convert.cu");

static FILL: [Kernel; 2] = value_kernels!(f32, SOURCE, "fill", [WRITE]);
static MULTIPLY: [Kernel; 2] = value_kernels!(f32, SOURCE, "multiply", [WRITE]);
static PASS: [Kernel; 2] =
    value_kernels!(ElementwiseValues, SOURCE, "pass", [READ_VALUES, WRITE_VALUES]);
static FORWARD: [Kernel; 2] =
    value_kernels!(ElementwiseValues, SOURCE, "forward", [READ_VALUES, WRITE_VALUES]);
static GRADIENT: [Kernel; 2] =
    value_kernels!(ElementwiseValues, SOURCE, "gradient", [READ_VALUES, READ_VALUES, WRITE_VALUES]);
static FUNCTION: [Kernel; 2] =
    value_kernels!(FunctionValues, SOURCE, "function", [READ_VALUES, WRITE_VALUES]);
static FUNCTION_GRADIENT: [Kernel; 2] = value_kernels!(
    FunctionValues,
    SOURCE,
    "function_gradient",
    [READ_VALUES, READ_VALUES, WRITE_VALUES]
);
static NARROW: [Kernel; 2] = value_kernels!((), CONVERT, "narrow", [READ, WRITE_VALUES]);
static WIDEN: [Kernel; 2] = value_kernels!((), CONVERT, "widen", [READ_VALUES, WRITE]);
static ADD: [Kernel; 2] =
    value_kernels!((), SOURCE, "add", [READ_VALUES, READ_VALUES, WRITE_VALUES]);
static PRODUCT: [Kernel; 2] =
    value_kernels!(ElementwiseValues, SOURCE, "product", [READ_VALUES, READ_VALUES, WRITE_VALUES]);
static SCALE: [Kernel; 2] =
    value_kernels!(ChannelValues, SOURCE, "scale", [READ_VALUES, READ_VALUES, WRITE_VALUES]);
static SCALE_GRADIENT: [Kernel; 2] = value_kernels!(
    ChannelValues,
    SOURCE,
    "scale_gradient",
    [READ_VALUES, READ_VALUES, WRITE_VALUES]
);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ElementwiseValues {
    function: u32,
    accumulate: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct FunctionValues {
    function: u32,
    accumulate: u32,
    slope: f32,
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

/// Options of a kernel without a function.
fn accumulating(accumulate: bool) -> ElementwiseValues {
    ElementwiseValues { function: 0, accumulate: accumulate.into() }
}

/// Kernels of a function and of its gradient.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernels {
    /// `forward` and `gradient`.
    Basic,
    /// `function` and `function_gradient`.
    Further,
}

/// The kernels of a function, and its number in them.
fn number(function: UnaryFunction) -> (Kernels, u32) {
    match function {
        UnaryFunction::Relu => (Kernels::Basic, 0),
        UnaryFunction::Sigmoid => (Kernels::Basic, 1),
        UnaryFunction::Tanh => (Kernels::Basic, 2),
        UnaryFunction::LeakyRelu { .. } => (Kernels::Further, 3),
        UnaryFunction::Elu => (Kernels::Further, 4),
        UnaryFunction::Gelu => (Kernels::Further, 5),
        UnaryFunction::GeluTanh => (Kernels::Further, 6),
        UnaryFunction::Silu => (Kernels::Further, 7),
        UnaryFunction::Softplus => (Kernels::Further, 8),
        UnaryFunction::HardSwish => (Kernels::Further, 9),
    }
}

/// A call of one of two kernels over `len` elements, [`Kernels::Basic`] or [`Kernels::Further`].
fn unary(
    [basic, further]: [&'static Kernel; 2],
    operands: &[CallOperand],
    function: UnaryFunction,
    len: usize,
    accumulate: bool,
) -> Emitted {
    let (kernels, function_number) = number(function);
    let slope = if let UnaryFunction::LeakyRelu { slope } = function { slope } else { 0.0 };
    let (function, accumulate) = (function_number, accumulate.into());
    match kernels {
        Kernels::Basic => {
            emitted(Call::each(basic, len), operands, ElementwiseValues { function, accumulate })
        }
        Kernels::Further => {
            let values = FunctionValues { function, accumulate, slope };
            emitted(Call::each(further, len), operands, values)
        }
    }
}

fn channels(shape: &BatchShape, factor: f32, accumulate: bool) -> ChannelValues {
    let [pixels, c] = [shape.pixels(), shape.c].map(Divisor::new);
    ChannelValues { pixels, c, columns: columns(shape), factor, accumulate: accumulate.into() }
}

pub(super) fn emit(op: &ElementwiseOp, values: ValueType) -> Emission {
    let by = |kernels| by_values(kernels, values);
    let each = |kernels, len: usize| Call::each(by(kernels), len);
    match *op {
        ElementwiseOp::Fill { len, value } => {
            smallvec![emitted(each(&FILL, len), &[write(0)], value)]
        }
        ElementwiseOp::Multiply { len, factor } => {
            smallvec![emitted(each(&MULTIPLY, len), &[write(0)], factor)]
        }
        ElementwiseOp::Pass { len, accumulate } => {
            let options = accumulating(accumulate);
            smallvec![emitted(each(&PASS, len), &[read(0), write(0)], options)]
        }
        ElementwiseOp::Narrow { len } => {
            smallvec![plain(each(&NARROW, len), &[read(0), write(0)])]
        }
        ElementwiseOp::Widen { len } => {
            smallvec![plain(each(&WIDEN, len), &[read(0), write(0)])]
        }
        ElementwiseOp::Forward { function, len } => {
            let kernels = [by(&FORWARD), by(&FUNCTION)];
            smallvec![unary(kernels, &[read(0), write(0)], function, len, false)]
        }
        ElementwiseOp::Gradient { function, len, accumulate } => {
            let (kernels, operands) =
                ([by(&GRADIENT), by(&FUNCTION_GRADIENT)], [read(0), read(1), write(0)]);
            smallvec![unary(kernels, &operands, function, len, accumulate)]
        }
        ElementwiseOp::Add { len } => {
            smallvec![plain(each(&ADD, len), &[read(0), read(1), write(0)])]
        }
        ElementwiseOp::Product { len, accumulate } => {
            let options = accumulating(accumulate);
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
                    over_pixels(by(&SCALE_GRADIENT), &shape),
                    &[read(0), read(2), write(1)],
                    channels(&shape, factor, dscale),
                ),
            ]
        }
    }
}

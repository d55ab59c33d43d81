//! Calls for [`ops::pool`](crate::ops::pool).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::over_pixels::{columns, over_pixels};
use super::{
    Emission, READ_VALUES, VALUE_HEADERS, WRITE_VALUES, by_values, emitted, kernel, plain, read,
    value_kernels, value_sources, write,
};
use crate::kernels::BatchShape;
use crate::kernels::pool::{PoolGeometry, PoolShape};
use crate::ops::PoolOp;
use crate::precision::ValueType;

pub(super) static SOURCE: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "pool.cu");

const READ_BYTES: Operand = Operand::read::<u8>();
const WRITE_BYTES: Operand = Operand::write::<u8>();

static MAX: [Kernel; 2] =
    value_kernels!(PoolValues, SOURCE, "max_forward", [READ_VALUES, WRITE_VALUES, WRITE_BYTES]);
static MAX_GRADIENT: [Kernel; 2] =
    value_kernels!(PoolValues, SOURCE, "max_gradient", [READ_VALUES, READ_BYTES, WRITE_VALUES]);
/// Windows of any shape; positions are bytes, or words.
static WINDOW_MAX: [[Kernel; 2]; 2] = [
    value_kernels!(WindowValues, SOURCE, "window_max", [READ_VALUES, WRITE_VALUES, WRITE_BYTES]),
    value_kernels!(
        WindowValues,
        SOURCE,
        "window_max_wide",
        [READ_VALUES, WRITE_VALUES, Operand::write::<u32>()]
    ),
];
static WINDOW_MAX_GRADIENT: [[Kernel; 2]; 2] = [
    value_kernels!(
        WindowValues,
        SOURCE,
        "window_max_gradient",
        [READ_VALUES, READ_BYTES, WRITE_VALUES]
    ),
    value_kernels!(
        WindowValues,
        SOURCE,
        "window_max_gradient_wide",
        [READ_VALUES, Operand::read::<u32>(), WRITE_VALUES]
    ),
];
static WINDOW_AVERAGE: [Kernel; 2] =
    value_kernels!(WindowValues, SOURCE, "window_average", [READ_VALUES, WRITE_VALUES]);
static WINDOW_AVERAGE_GRADIENT: [Kernel; 2] =
    value_kernels!(WindowValues, SOURCE, "window_average_gradient", [READ_VALUES, WRITE_VALUES]);
static NORM_CODES: [Kernel; 2] =
    value_kernels!((), SOURCE, "norm_codes", [READ_VALUES, READ_BYTES, WRITE_BYTES]);
static AVERAGE: [Kernel; 2] =
    value_kernels!(Average, SOURCE, "average_forward", [READ_VALUES, WRITE_VALUES]);
static AVERAGE_GRADIENT: [Kernel; 2] =
    value_kernels!(Average, SOURCE, "average_gradient", [READ_VALUES, WRITE_VALUES]);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct PoolValues {
    h: Divisor,
    w: Divisor,
    c: Divisor,
    out_h: Divisor,
    out_w: Divisor,
    stride: Divisor,
    kernel: u32,
    accumulate: u32,
}

/// Values of square windows without padding; `None` for other windows.
fn square(of: &PoolShape, accumulate: bool) -> Option<PoolValues> {
    let (kernel, stride) = (of.window.kernel[0], of.window.stride[0]);
    if of.is_wide() || of.window != PoolGeometry::square(kernel, stride) {
        return None;
    }
    let (input, output) = (of.input, of.output());
    let [h, w, c, out_h, out_w, stride] =
        [input.h, input.w, input.c, output.h, output.w, stride].map(Divisor::new);
    let (kernel, accumulate) = (kernel as u32, accumulate.into());
    Some(PoolValues { h, w, c, out_h, out_w, stride, kernel, accumulate })
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct WindowValues {
    h: Divisor,
    w: Divisor,
    c: Divisor,
    out_h: Divisor,
    out_w: Divisor,
    stride: [Divisor; 2],
    kernel: [u32; 2],
    padding: [u32; 2],
    scale: f32,
    accumulate: u32,
}

fn window(of: &PoolShape, accumulate: bool) -> WindowValues {
    let (input, output) = (of.input, of.output());
    let [h, w, c, out_h, out_w] = [input.h, input.w, input.c, output.h, output.w].map(Divisor::new);
    let stride = of.window.stride.map(Divisor::new);
    let [kernel, padding] = [of.window.kernel, of.window.padding].map(|of| of.map(|n| n as u32));
    let (scale, accumulate) = (of.scale(), accumulate.into());
    WindowValues { h, w, c, out_h, out_w, stride, kernel, padding, scale, accumulate }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Average {
    pixels: Divisor,
    c: Divisor,
    columns: u32,
    scale: f32,
    accumulate: u32,
}

fn average(of: &BatchShape, accumulate: bool) -> Average {
    let scale = 1.0 / of.pixels() as f32;
    let [pixels, c] = [of.pixels(), of.c].map(Divisor::new);
    Average { pixels, c, columns: columns(of), scale, accumulate: accumulate.into() }
}

pub(super) fn emit(op: &PoolOp, values: ValueType) -> Emission {
    let by = |kernels| by_values(kernels, values);
    match *op {
        PoolOp::Max(of) => {
            let (len, operands) = (of.output().len(), [read(0), write(0), write(1)]);
            smallvec![match square(&of, false) {
                Some(values) => emitted(Call::each(by(&MAX), len), &operands, values),
                None => {
                    let call = Call::each(by(&WINDOW_MAX[usize::from(of.is_wide())]), len);
                    emitted(call, &operands, window(&of, false))
                }
            }]
        }
        PoolOp::MaxGradient { shape: of, accumulate } => {
            let (len, operands) = (of.input.len(), [read(0), read(1), write(0)]);
            smallvec![match square(&of, accumulate) {
                Some(values) => emitted(Call::each(by(&MAX_GRADIENT), len), &operands, values),
                None => {
                    let call = Call::each(by(&WINDOW_MAX_GRADIENT[usize::from(of.is_wide())]), len);
                    emitted(call, &operands, window(&of, accumulate))
                }
            }]
        }
        PoolOp::WindowAverage(of) => {
            let call = Call::each(by(&WINDOW_AVERAGE), of.output().len());
            smallvec![emitted(call, &[read(0), write(0)], window(&of, false))]
        }
        PoolOp::WindowAverageGradient { shape: of, accumulate } => {
            let call = Call::each(by(&WINDOW_AVERAGE_GRADIENT), of.input.len());
            smallvec![emitted(call, &[read(0), write(0)], window(&of, accumulate))]
        }
        PoolOp::NormCodes { len } => {
            smallvec![plain(Call::each(by(&NORM_CODES), len), &[read(0), read(1), write(0)])]
        }
        PoolOp::Average(of) => {
            let call = over_pixels(by(&AVERAGE), &of);
            smallvec![emitted(call, &[read(0), write(0)], average(&of, false))]
        }
        PoolOp::AverageGradient { shape: of, accumulate } => {
            let call = Call::each(by(&AVERAGE_GRADIENT), of.len());
            smallvec![emitted(call, &[read(0), write(0)], average(&of, accumulate))]
        }
    }
}

//! Calls for [`ops::pool`](crate::ops::pool).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::over_pixels::{columns, over_pixels};
use super::{Emission, READ, WRITE, emitted, kernel, plain, read, source, write};
use crate::kernels::BatchShape;
use crate::kernels::pool::{PoolGeometry, PoolShape};
use crate::ops::PoolOp;

pub(super) static SOURCE: KernelSource = source!("pool.cu");

const READ_BYTES: Operand = Operand::read::<u8>();
const WRITE_BYTES: Operand = Operand::write::<u8>();

static MAX: Kernel = kernel::<PoolValues>(&SOURCE, "max_forward", &[READ, WRITE, WRITE_BYTES]);
static MAX_GRADIENT: Kernel =
    kernel::<PoolValues>(&SOURCE, "max_gradient", &[READ, READ_BYTES, WRITE]);
/// Windows of any shape; positions are bytes, or words.
static WINDOW_MAX: [Kernel; 2] = [
    kernel::<WindowValues>(&SOURCE, "window_max", &[READ, WRITE, WRITE_BYTES]),
    kernel::<WindowValues>(&SOURCE, "window_max_wide", &[READ, WRITE, Operand::write::<u32>()]),
];
static WINDOW_MAX_GRADIENT: [Kernel; 2] = [
    kernel::<WindowValues>(&SOURCE, "window_max_gradient", &[READ, READ_BYTES, WRITE]),
    kernel::<WindowValues>(
        &SOURCE,
        "window_max_gradient_wide",
        &[READ, Operand::read::<u32>(), WRITE],
    ),
];
static WINDOW_AVERAGE: Kernel = kernel::<WindowValues>(&SOURCE, "window_average", &[READ, WRITE]);
static WINDOW_AVERAGE_GRADIENT: Kernel =
    kernel::<WindowValues>(&SOURCE, "window_average_gradient", &[READ, WRITE]);
static NORM_CODES: Kernel = kernel::<()>(&SOURCE, "norm_codes", &[READ, READ_BYTES, WRITE_BYTES]);
static AVERAGE: Kernel = kernel::<Average>(&SOURCE, "average_forward", &[READ, WRITE]);
static AVERAGE_GRADIENT: Kernel = kernel::<Average>(&SOURCE, "average_gradient", &[READ, WRITE]);

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

pub(super) fn emit(op: &PoolOp) -> Emission {
    match *op {
        PoolOp::Max(of) => {
            let (len, operands) = (of.output().len(), [read(0), write(0), write(1)]);
            smallvec![match square(&of, false) {
                Some(values) => emitted(Call::each(&MAX, len), &operands, values),
                None => {
                    let call = Call::each(&WINDOW_MAX[usize::from(of.is_wide())], len);
                    emitted(call, &operands, window(&of, false))
                }
            }]
        }
        PoolOp::MaxGradient { shape: of, accumulate } => {
            let (len, operands) = (of.input.len(), [read(0), read(1), write(0)]);
            smallvec![match square(&of, accumulate) {
                Some(values) => emitted(Call::each(&MAX_GRADIENT, len), &operands, values),
                None => {
                    let call = Call::each(&WINDOW_MAX_GRADIENT[usize::from(of.is_wide())], len);
                    emitted(call, &operands, window(&of, accumulate))
                }
            }]
        }
        PoolOp::WindowAverage(of) => {
            let call = Call::each(&WINDOW_AVERAGE, of.output().len());
            smallvec![emitted(call, &[read(0), write(0)], window(&of, false))]
        }
        PoolOp::WindowAverageGradient { shape: of, accumulate } => {
            let call = Call::each(&WINDOW_AVERAGE_GRADIENT, of.input.len());
            smallvec![emitted(call, &[read(0), write(0)], window(&of, accumulate))]
        }
        PoolOp::NormCodes { len } => {
            smallvec![plain(Call::each(&NORM_CODES, len), &[read(0), read(1), write(0)])]
        }
        PoolOp::Average(of) => {
            let call = over_pixels(&AVERAGE, &of);
            smallvec![emitted(call, &[read(0), write(0)], average(&of, false))]
        }
        PoolOp::AverageGradient { shape: of, accumulate } => {
            let call = Call::each(&AVERAGE_GRADIENT, of.len());
            smallvec![emitted(call, &[read(0), write(0)], average(&of, accumulate))]
        }
    }
}

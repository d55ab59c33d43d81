//! Calls for [`ops::pool`](crate::ops::pool).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::over_pixels::{columns, over_pixels};
use super::{Emission, READ, WRITE, emitted, kernel, plain, read, source, write};
use crate::kernels::BatchShape;
use crate::kernels::pool::PoolShape;
use crate::ops::PoolOp;

pub(super) static SOURCE: KernelSource = source!("pool.cu");

const READ_BYTES: Operand = Operand::read::<u8>();
const WRITE_BYTES: Operand = Operand::write::<u8>();

static MAX: Kernel = kernel::<PoolValues>(&SOURCE, "max_forward", &[READ, WRITE, WRITE_BYTES]);
static MAX_GRADIENT: Kernel =
    kernel::<PoolValues>(&SOURCE, "max_gradient", &[READ, READ_BYTES, WRITE]);
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

fn shape(of: &PoolShape, accumulate: bool) -> PoolValues {
    let (input, output) = (of.input, of.output());
    let [h, w, c, out_h, out_w, stride] =
        [input.h, input.w, input.c, output.h, output.w, of.stride].map(Divisor::new);
    let (kernel, accumulate) = (of.kernel as u32, accumulate.into());
    PoolValues { h, w, c, out_h, out_w, stride, kernel, accumulate }
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
            let call = Call::each(&MAX, of.output().len());
            smallvec![emitted(call, &[read(0), write(0), write(1)], shape(&of, false))]
        }
        PoolOp::MaxGradient { shape: of, accumulate } => {
            let call = Call::each(&MAX_GRADIENT, of.input.len());
            smallvec![emitted(call, &[read(0), read(1), write(0)], shape(&of, accumulate))]
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

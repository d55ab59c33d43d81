//! Calls for [`ops::dropout`](crate::ops::dropout).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::{Emission, READ, WRITE, emitted, kernel, plain, read, source, write};
use crate::ops::DropoutOp;

pub(super) static SOURCE: KernelSource = source!("dropout.cu");

const NUMBERS: Operand = Operand::read::<f64>();

static DRAW: Kernel = kernel::<DrawValues>(
    &SOURCE,
    "draw_mask",
    &[NUMBERS, Operand::read::<i64>(), Operand::write::<u8>()],
);
static APPLY: Kernel =
    kernel::<ApplyValues>(&SOURCE, "apply_mask", &[READ, Operand::read::<u8>(), NUMBERS, WRITE]);
static COUNT: Kernel = kernel::<()>(&SOURCE, "count_batch", &[Operand::write::<i64>()]);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct DrawValues {
    /// Elements of a sample.
    each: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ApplyValues {
    accumulate: u32,
}

pub(super) fn emit(op: &DropoutOp) -> Emission {
    match *op {
        DropoutOp::Draw { samples, each } => {
            // One thread for 4 elements; the first of 64 may lie before the tensor.
            let threads = 16 * ((samples * each).div_ceil(64) + 1);
            let values = DrawValues { each: each as u32 };
            smallvec![emitted(Call::each(&DRAW, threads), &[read(0), read(1), write(0)], values)]
        }
        DropoutOp::Apply { len, accumulate } => {
            let values = ApplyValues { accumulate: accumulate.into() };
            let operands = [read(0), read(1), read(2), write(0)];
            smallvec![emitted(Call::each(&APPLY, len), &operands, values)]
        }
        DropoutOp::Count => smallvec![plain(Call::each(&COUNT, 1), &[write(0)])],
    }
}

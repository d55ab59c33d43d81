//! Calls for [`ops::dropout`](crate::ops::dropout).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::{
    Emission, READ_VALUES, VALUE_HEADERS, WRITE_VALUES, by_values, emitted, kernel, plain, read,
    value_kernels, value_sources, write,
};
use crate::ops::DropoutOp;
use crate::precision::ValueType;

pub(super) static SOURCE: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "dropout.cu");

const NUMBERS: Operand = Operand::read::<f64>();

static DRAW: [Kernel; 2] = value_kernels!(
    DrawValues,
    SOURCE,
    "draw_mask",
    [NUMBERS, Operand::read::<i64>(), Operand::write::<u8>()]
);
static APPLY: [Kernel; 2] = value_kernels!(
    ApplyValues,
    SOURCE,
    "apply_mask",
    [READ_VALUES, Operand::read::<u8>(), NUMBERS, WRITE_VALUES]
);
static COUNT: [Kernel; 2] = value_kernels!((), SOURCE, "count_batch", [Operand::write::<i64>()]);

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

pub(super) fn emit(op: &DropoutOp, values: ValueType) -> Emission {
    let by = |kernels| by_values(kernels, values);
    match *op {
        DropoutOp::Draw { samples, each } => {
            // One thread for 4 elements; the first group of 64 may begin before the tensor.
            let threads = 16 * ((samples * each).div_ceil(64) + 1);
            let numbers = DrawValues { each: each as u32 };
            smallvec![emitted(
                Call::each(by(&DRAW), threads),
                &[read(0), read(1), write(0)],
                numbers
            )]
        }
        DropoutOp::Apply { len, accumulate } => {
            let numbers = ApplyValues { accumulate: accumulate.into() };
            let operands = [read(0), read(1), read(2), write(0)];
            smallvec![emitted(Call::each(by(&APPLY), len), &operands, numbers)]
        }
        DropoutOp::Count => smallvec![plain(Call::each(by(&COUNT), 1), &[write(0)])],
    }
}

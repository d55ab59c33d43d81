//! Calls for [`ops::blend`](crate::ops::blend).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::divisor::Divisor;
use super::{
    Emission, READ, READ_VALUES, VALUE_HEADERS, WRITE, WRITE_VALUES, by_values, emitted, kernel,
    plain, read, value_kernels, value_sources, write,
};
use crate::kernels::blend::BlendMode;
use crate::ops::blend::{Blend, BlendOp};
use crate::precision::ValueType;

pub(super) static SOURCE: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "blend.cu");

static FORWARD: [Kernel; 2] = value_kernels!(
    Mix,
    SOURCE,
    "blend_forward",
    [READ_VALUES, READ_VALUES, READ_VALUES, READ_VALUES, READ, WRITE_VALUES]
);
static GRADIENT: [Kernel; 2] = value_kernels!(
    Mix,
    SOURCE,
    "blend_gradient",
    [
        READ_VALUES,
        READ_VALUES,
        READ_VALUES,
        READ_VALUES,
        READ,
        READ_VALUES,
        WRITE_VALUES,
        WRITE_VALUES,
        WRITE_VALUES
    ]
);
static GATE_GRADIENT: [Kernel; 2] = value_kernels!(
    Mix,
    SOURCE,
    "gate_gradient",
    [READ_VALUES, READ_VALUES, READ, READ_VALUES, WRITE_VALUES]
);
static TANH_MIX: [Kernel; 2] =
    value_kernels!((), SOURCE, "tanh_mix", [READ_VALUES, READ_VALUES, READ, WRITE_VALUES]);
static TANH_MIX_GRADIENT: [Kernel; 2] = value_kernels!(
    Chunks,
    SOURCE,
    "tanh_mix_gradient",
    [
        READ_VALUES,
        READ_VALUES,
        READ,
        READ_VALUES,
        WRITE_VALUES,
        WRITE_VALUES,
        Operand::write::<f64>()
    ]
);
static TANH_MIX_SCALAR: [Kernel; 2] =
    value_kernels!((), SOURCE, "tanh_mix_scalar", [Operand::read::<f64>(), READ, WRITE]);

/// Threads of a block that sums.
const THREADS: usize = 256;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Mix {
    mode: u32,
    each: Divisor,
    accumulate: u32,
}

fn mix(of: &Blend, accumulate: [bool; 4]) -> Mix {
    let mode = match of.mode {
        BlendMode::Add => 0,
        BlendMode::Multiply => 1,
        BlendMode::Gate => 2,
    };
    Mix { mode, each: Divisor::new(of.len / of.samples.max(1)), accumulate: bits(&accumulate) }
}

/// The n-th as bit n.
fn bits(of: &[bool]) -> u32 {
    of.iter().rev().fold(0, |bits, &bit| 2 * bits + u32::from(bit))
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Chunks {
    chunk: u32,
    accumulate: u32,
}

/// Elements of a block that leaves a part of a sum: at least 16 for a thread, and at most 256
/// blocks. Depends on the length alone, because the order of the sum depends on it.
fn chunk(len: usize) -> usize {
    len.div_ceil(256).next_multiple_of(THREADS).max(16 * THREADS)
}

pub(super) fn emit(op: &BlendOp, values: ValueType) -> Emission {
    let by = |kernels| by_values(kernels, values);
    match *op {
        BlendOp::Forward(of) => {
            let operands = [read(0), read(1), read(2), read(3), read(4), write(0)];
            smallvec![emitted(Call::each(by(&FORWARD), of.len), &operands, mix(&of, [false; 4]))]
        }
        BlendOp::Gradient { blend, accumulate } => {
            gradient(&blend, mix(&blend, accumulate), values)
        }
        BlendOp::TanhMix { len } => {
            let operands = [read(0), read(1), read(2), write(0)];
            smallvec![plain(Call::each(by(&TANH_MIX), len), &operands)]
        }
        BlendOp::TanhMixGradient { len, accumulate } => {
            let (chunk, [x, y, s, dout]) = (chunk(len), std::array::from_fn(read));
            let (chunks, [dx, dy, ds, scratch]) = (len.div_ceil(chunk), std::array::from_fn(write));
            let partial = scratch.part(0, chunks);
            let numbers = Chunks { chunk: chunk as u32, accumulate: bits(&accumulate) };
            let parts = Call::new(by(&TANH_MIX_GRADIENT), chunks as u32, THREADS as u32);
            let total = Call::new(by(&TANH_MIX_SCALAR), 1, THREADS as u32);
            smallvec![
                emitted(parts, &[x, y, s, dout, dx, dy, partial], numbers),
                plain(total, &[partial, s, ds]),
            ]
        }
    }
}

pub(super) fn scratch(op: &BlendOp) -> usize {
    match *op {
        BlendOp::TanhMixGradient { len, .. } => {
            len.div_ceil(chunk(len)) * size_of::<f64>() / size_of::<f32>()
        }
        BlendOp::Forward(_) | BlendOp::Gradient { .. } | BlendOp::TanhMix { .. } => 0,
    }
}

fn gradient(of: &Blend, mix: Mix, values: ValueType) -> Emission {
    let by = |kernels| by_values(kernels, values);
    let [h, m, x, gate, alpha, dy] = std::array::from_fn(read);
    let [dh, dm, dx, dgate] = std::array::from_fn(write);
    let operands = [h, m, x, gate, alpha, dy, dh, dm, dx];
    let mut calls: Emission = smallvec![emitted(Call::each(by(&GRADIENT), of.len), &operands, mix)];
    if of.mode == BlendMode::Gate {
        let call = Call::new(by(&GATE_GRADIENT), of.samples as u32, THREADS as u32);
        calls.push(emitted(call, &[h, m, alpha, dy, dgate], mix));
    }
    calls
}

//! Calls for [`ops::lstm`](crate::ops::lstm): the product with all inputs, then all steps of each
//! sequence in one block. No scratch is needed.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource};
use smallvec::smallvec;

use super::{
    Emission, READ, READ_VALUES, VALUE_HEADERS, WRITE, WRITE_VALUES, by_values, conv, emitted,
    kernel, read, value_kernels, value_sources, write,
};
use crate::kernels::lstm::LstmShape;
use crate::kernels::pad16;
use crate::ops::LstmOp;
use crate::ops::conv::ConvProduct;
use crate::precision::ValueType;

pub(super) static SOURCE: [KernelSource; 2] = value_sources!(VALUE_HEADERS, "lstm.cu");

static FORWARD: [Kernel; 2] = value_kernels!(
    LstmValues,
    SOURCE,
    "forward",
    [READ, READ, READ, READ, READ, WRITE_VALUES, WRITE, WRITE_VALUES, WRITE]
);
static BACKWARD: [Kernel; 2] = value_kernels!(
    LstmValues,
    SOURCE,
    "backward",
    [READ, READ, READ, READ, READ_VALUES, READ_VALUES, WRITE_VALUES, WRITE_VALUES]
);
static STATES_BEFORE: [Kernel; 2] =
    value_kernels!(LstmValues, SOURCE, "states_before", [READ_VALUES, READ, READ, WRITE_VALUES]);

/// Most threads of a block.
const THREADS: usize = 1024;

/// Bytes of shared memory that a block of any GPU has without asking for more.
const SHARED: usize = 48 << 10;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LstmValues {
    steps: u32,
    sequences: u32,
    hidden: u32,
    pitch: u32,
    accumulate: u32,
    keeps: u32,
}

fn shape(of: &LstmShape, accumulate: bool) -> LstmValues {
    let pitch = pad16(4 * of.hidden);
    let [steps, sequences, hidden, pitch] =
        [of.steps, of.sequences, of.hidden, pitch].map(|n| n as u32);
    let keeps = (shared(of) > 6 * of.hidden).into();
    LstmValues { steps, sequences, hidden, pitch, accumulate: accumulate.into(), keeps }
}

/// Floats of shared memory of a block: h and c, or their gradients, the gates, and the state's
/// weights if these fit.
fn shared(of: &LstmShape) -> usize {
    let (least, weights) = (6 * of.hidden, 4 * of.hidden * of.hidden);
    least + if (least + weights) * size_of::<f32>() <= SHARED { weights } else { 0 }
}

/// A call with a block for each sequence; a block has work for `work` threads.
fn by_sequence(kernel: &'static Kernel, of: &LstmShape, work: usize) -> Call {
    let threads = work.next_multiple_of(32).min(THREADS) as u32;
    let shared = shared(of) * size_of::<f32>();
    Call::new(kernel, of.sequences as u32, threads).shared(shared as u32)
}

pub(super) fn emit(op: &LstmOp, values: ValueType) -> Emission {
    let by = |kernels| by_values(kernels, values);
    match op {
        LstmOp::Forward(of) => {
            // The steps add both biases after it.
            let inputs = [read(0), read(3), read(5).part(0, 0), write(2)];
            let steps = [1, 2, 4, 5, 6].map(read);
            let operands = [&steps[..], &[write(0), write(1), write(2), write(3)]].concat();
            let forward = by_sequence(by(&FORWARD), of, 4 * of.hidden);
            let product = ConvProduct {
                precision: values.precision(),
                ..ConvProduct::f32(of.input_product())
            };
            smallvec![
                conv::product(&product, &inputs),
                emitted(forward, &operands, shape(of, false)),
            ]
        }
        LstmOp::Gradient { shape: of, accumulate } => {
            let reads = [read(0), read(1), read(2), read(3), read(4), read(5)];
            let operands = [&reads[..], &[write(0), write(1)]].concat();
            let backward = by_sequence(by(&BACKWARD), of, 32 * of.hidden);
            smallvec![emitted(backward, &operands, shape(of, *accumulate))]
        }
        LstmOp::StatesBefore(of) => {
            let call = Call::each(by(&STATES_BEFORE), of.rows() * of.hidden);
            let operands = [read(0), read(1), read(2), write(0)];
            smallvec![emitted(call, &operands, shape(of, false))]
        }
    }
}

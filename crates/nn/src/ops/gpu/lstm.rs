//! Calls for [`ops::lstm`](crate::ops::lstm): the product with all inputs, then all steps of each
//! sequence in one block. No scratch is needed.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, Source};
use smallvec::smallvec;

use super::{Emission, READ, WRITE, emitted, kernel, read, source, write};
use crate::kernels::lstm::LstmShape;
use crate::kernels::pad16;
use crate::ops::lstm::Op;

pub(super) static SOURCE: Source = source!("lstm.cu");

static INPUTS: Kernel = kernel::<Product>(&SOURCE, "inputs", &[READ, READ, READ, READ, WRITE]);
static FORWARD: Kernel =
    kernel::<Shape>(&SOURCE, "forward", &[READ, READ, READ, WRITE, WRITE, WRITE, WRITE]);
static BACKWARD: Kernel =
    kernel::<Shape>(&SOURCE, "backward", &[READ, READ, READ, READ, READ, READ, WRITE, WRITE]);
static STATES_BEFORE: Kernel =
    kernel::<Shape>(&SOURCE, "states_before", &[READ, READ, READ, WRITE]);

/// Rows and columns of a tile of the product.
const TILE: usize = 64;

/// Most threads of a block.
const THREADS: usize = 1024;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Product {
    rows: u32,
    depth: u32,
    columns: u32,
    pitch: u32,
    tiles: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Shape {
    steps: u32,
    sequences: u32,
    hidden: u32,
    pitch: u32,
    accumulate: u32,
}

fn shape(of: &LstmShape, accumulate: bool) -> Shape {
    let pitch = pad16(4 * of.hidden);
    let [steps, sequences, hidden, pitch] =
        [of.steps, of.sequences, of.hidden, pitch].map(|n| n as u32);
    Shape { steps, sequences, hidden, pitch, accumulate: accumulate.into() }
}

/// A call with a block for each sequence, which has work for so many threads.
fn by_sequence(kernel: &'static Kernel, of: &LstmShape, work: usize) -> Call {
    let threads = work.next_multiple_of(32).min(THREADS) as u32;
    let shared = 6 * of.hidden * size_of::<f32>();
    Call::new(kernel, of.sequences as u32, threads).shared(shared as u32)
}

pub(super) fn emit(op: &Op) -> Emission {
    match op {
        Op::Forward(of) => {
            let columns = 4 * of.hidden;
            let tiles = columns.div_ceil(TILE);
            let [rows, depth, columns, pitch, across] =
                [of.rows(), of.inputs, columns, pad16(columns), tiles].map(|n| n as u32);
            let product = Product { rows, depth, columns, pitch, tiles: across };
            let blocks = (of.rows().div_ceil(TILE) * tiles) as u32;
            let inputs = [read(0), read(3), read(5), read(6), write(2)];
            let steps = [read(1), read(2), read(4), write(0), write(1), write(2), write(3)];
            let forward = by_sequence(&FORWARD, of, 4 * of.hidden);
            smallvec![
                emitted(Call::new(&INPUTS, blocks, 256), &inputs, product),
                emitted(forward, &steps, shape(of, false)),
            ]
        }
        Op::Gradient { shape: of, accumulate } => {
            let reads = [read(0), read(1), read(2), read(3), read(4), read(5)];
            let operands = [&reads[..], &[write(0), write(1)]].concat();
            let backward = by_sequence(&BACKWARD, of, 32 * of.hidden);
            smallvec![emitted(backward, &operands, shape(of, *accumulate))]
        }
        Op::StatesBefore(of) => {
            let call = Call::each(&STATES_BEFORE, of.rows() * of.hidden);
            let operands = [read(0), read(1), read(2), write(0)];
            smallvec![emitted(call, &operands, shape(of, false))]
        }
    }
}

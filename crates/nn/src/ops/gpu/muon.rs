//! Calls for the matrices of Muon ([`kernels::muon`](crate::kernels::muon)): each call is for all
//! matrices of a group, [`MATRICES`] at most.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};

use super::{Emission, READ, WRITE, emitted, kernel, read, source, write};
use crate::kernels::muon::{ITERATIONS, MuonMatrix};

pub(super) static SOURCE: KernelSource = source!("muon.cu");

const NUMBERS: Operand = Operand::read::<f64>();

static BEGIN: Kernel =
    kernel::<Matrices>(&SOURCE, "muon_begin", &[READ, READ, NUMBERS, WRITE, WRITE]);
static SCALE: Kernel = kernel::<Matrices>(&SOURCE, "muon_scale", &[WRITE]);
static GRAM: Kernel = kernel::<Matrices>(&SOURCE, "muon_gram", &[WRITE]);
static POLYNOMIAL: Kernel = kernel::<Matrices>(&SOURCE, "muon_polynomial", &[WRITE]);
static PRODUCT: Kernel = kernel::<Matrices>(&SOURCE, "muon_product", &[WRITE]);
static APPLY: Kernel = kernel::<Matrices>(&SOURCE, "muon_apply", &[NUMBERS, WRITE, WRITE]);

const THREADS: u32 = 256;

/// Elements of a block that reads or writes, and rows and columns of a block that multiplies.
const CHUNK: usize = 1024;
const TILE: usize = 32;

/// Matrices of a call.
const MATRICES: usize = 64;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Matrices {
    count: u32,
    /// Which of its two memories X is in.
    parity: u32,
    start: [u32; MATRICES],
    rows: [u32; MATRICES],
    blocks: [u32; MATRICES],
    outputs: [u32; MATRICES],
    /// First element in the scratch.
    room: [u32; MATRICES],
    /// Factor of the learning rate.
    scale: [f32; MATRICES],
    /// Number of the matrix's first block in the call.
    block: [u32; MATRICES],
}

/// Elements of scratch.
pub(super) fn scratch(matrices: &[MuonMatrix]) -> usize {
    matrices.iter().map(MuonMatrix::scratch_len).sum()
}

/// The calls for matrices whose scratch starts at `first`; the group has `len` elements.
pub(super) fn emit(matrices: &[MuonMatrix], first: usize, len: usize) -> Emission {
    let mut calls = Emission::new();
    let mut room = 0;
    for some in matrices.chunks(MATRICES) {
        let mut table = Matrices { count: some.len() as u32, ..Matrices::zeroed() };
        for (i, matrix) in some.iter().enumerate() {
            table.start[i] = matrix.start as u32;
            table.rows[i] = matrix.rows as u32;
            table.blocks[i] = matrix.blocks as u32;
            table.outputs[i] = matrix.outputs as u32;
            table.scale[i] = matrix.scale();
            table.room[i] = room as u32;
            room += matrix.scratch_len();
        }
        calls.extend(of_table(some, table, (first, scratch(matrices), len)));
    }
    calls
}

/// The calls for matrices of one table; start and length of the scratch, and of the group.
fn of_table(
    some: &[MuonMatrix],
    table: Matrices,
    (first, room, len): (usize, usize, usize),
) -> Emission {
    let (room, momentum) = (write(3).part(first, room), write(1).part(0, len));
    let blocked = |parity, blocks| blocked(some, &table, parity, blocks);
    let mut calls = Emission::new();
    let (begin, blocks) = blocked(0, elements);
    let operands = [read(0), read(1), read(2), momentum, room];
    calls.push(emitted(Call::new(&BEGIN, blocks, THREADS), &operands, begin));
    let (scale, blocks) = blocked(0, |_| 1);
    calls.push(emitted(Call::new(&SCALE, blocks, THREADS), &[room], scale));
    for parity in (0..ITERATIONS as u32).map(|n| n % 2) {
        let (table, blocks) = blocked(parity, square);
        calls.push(emitted(Call::new(&GRAM, blocks, THREADS), &[room], table));
        calls.push(emitted(Call::new(&POLYNOMIAL, blocks, THREADS), &[room], table));
        let (table, blocks) = blocked(parity, tall);
        calls.push(emitted(Call::new(&PRODUCT, blocks, THREADS), &[room], table));
    }
    let (apply, blocks) = blocked(ITERATIONS as u32 % 2, elements);
    let operands = [read(2), write(0), room];
    calls.push(emitted(Call::new(&APPLY, blocks, THREADS), &operands, apply));
    calls
}

/// Blocks of a matrix in a call that goes through its elements.
fn elements([m, n]: [usize; 2]) -> usize {
    (m * n).div_ceil(CHUNK)
}

/// Blocks of a matrix's G.
fn square([_, n]: [usize; 2]) -> usize {
    n.div_ceil(TILE).pow(2)
}

/// Blocks of a matrix's next X.
fn tall([m, n]: [usize; 2]) -> usize {
    m.div_ceil(TILE) * n.div_ceil(TILE)
}

/// The table of a call with `blocks` blocks for a matrix of this height and width, and their sum.
fn blocked(
    some: &[MuonMatrix],
    table: &Matrices,
    parity: u32,
    blocks: fn([usize; 2]) -> usize,
) -> (Matrices, u32) {
    let (mut table, mut sum) = (*table, 0);
    table.parity = parity;
    for (i, matrix) in some.iter().enumerate() {
        table.block[i] = sum;
        sum += blocks(matrix.tall()) as u32;
    }
    (table, sum)
}

//! Calls for [`ops::ppo`](crate::ops::ppo): rows forward, sums over them, rows backward. Scratch
//! holds the terms of each row, `[columns][rows]` in f64.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::policy::{Heads, WORDS, by_row, table};
use super::{Emission, READ, WRITE, emitted, kernel, read, source, write};
use crate::kernels::ppo::PpoLoss;
use crate::ops::ppo::{PpoOp, PpoPass};

pub(super) static SOURCE: KernelSource = source!("ppo.cu");

const MASKS: Operand = Operand::read::<u8>();
const SUMS: Operand = Operand::read::<f64>();
const REPORT: Operand = Operand::write::<f64>();

static FORWARD: Kernel = kernel::<Objective>(
    &SOURCE,
    "rows_forward",
    &[READ, WORDS, MASKS, READ, READ, WRITE, WRITE, REPORT],
);
static COLUMNS_SUM: Kernel = kernel::<Objective>(&SOURCE, "columns_sum", &[SUMS, REPORT]);
static BACKWARD: Kernel = kernel::<Objective>(
    &SOURCE,
    "rows_backward",
    &[READ, WORDS, MASKS, READ, READ, WRITE, READ, SUMS],
);

/// Threads of the block that adds up the columns.
const SUM_THREADS: u32 = 1024;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Objective {
    rows: u32,
    count: u32,
    logits: u32,
    first: u32,
    clip: f32,
    value_coefficient: f32,
    entropy_floor_coefficient: f32,
    heads: Heads,
}

/// Columns of scratch: the front columns, then the columns of each head.
const fn columns(heads: usize) -> usize {
    8 + 6 * heads
}

pub(super) fn scratch(op: &PpoOp) -> usize {
    let PpoOp::Objective { loss, rows, .. } = op;
    2 * columns(loss.heads.len()) * rows
}

fn objective(loss: &PpoLoss, pass: PpoPass, rows: usize) -> Objective {
    Objective {
        rows: rows as u32,
        count: loss.heads.len() as u32,
        logits: loss.logits() as u32,
        first: (pass == PpoPass::First).into(),
        clip: loss.clip,
        value_coefficient: loss.value_coefficient,
        entropy_floor_coefficient: loss.entropy_floor_coefficient,
        heads: table(&loss.heads),
    }
}

pub(super) fn emit(op: &PpoOp) -> Emission {
    let PpoOp::Objective { loss, pass, rows } = op;
    let values = objective(loss, *pass, *rows);
    let row_by_row = |kernel| by_row(kernel, *rows, &loss.heads);
    let (report, sums) = (write(2), write(3).part(0, columns(loss.heads.len()) * rows));
    let row = [read(0), read(1), read(2), read(3), read(4), write(0), write(1)];
    let with = |last| [&row[..], &[last]].concat();
    smallvec![
        emitted(row_by_row(&FORWARD), &with(sums), values),
        emitted(Call::new(&COLUMNS_SUM, 1, SUM_THREADS), &[sums, report], values),
        emitted(row_by_row(&BACKWARD), &with(report), values),
    ]
}

//! Calls for [`ops::sample`](crate::ops::sample).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Kernel, KernelSource, Operand};
use smallvec::smallvec;

use super::policy::{Heads, WORDS, by_row, table};
use super::{Emission, READ, WRITE, emitted, kernel, read, source, write};
use crate::kernels::sample::Sampler;
use crate::ops::SampleOp;

pub(super) static SOURCE: KernelSource = source!("sample.cu");

const CHOICES: Operand = Operand::write::<u32>();
const MASKS: Operand = Operand::write::<u8>();

static DRAW: Kernel = kernel::<SampleValues>(
    &SOURCE,
    "draw",
    &[READ, WORDS, WORDS, CHOICES, MASKS, WRITE, WRITE, WRITE],
);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SampleValues {
    seed: [u32; 2],
    greedy: u32,
    count: u32,
    logits: u32,
    places: u32,
    words: u32,
    heads: Heads,
}

pub(super) fn emit(op: &SampleOp) -> Emission {
    let SampleOp::Draw { sampler, rows } = op;
    let Sampler { heads, seed, greedy } = &**sampler;
    let rules = SampleValues {
        seed: [*seed as u32, (*seed >> 32) as u32],
        greedy: (*greedy).into(),
        count: heads.len() as u32,
        logits: sampler.logits() as u32,
        places: sampler.places() as u32,
        words: sampler.words() as u32,
        heads: table(heads),
    };
    let operands = [read(0), read(1), read(2), write(0), write(1), write(2), write(3), write(4)];
    smallvec![emitted(by_row(&DRAW, *rows, heads), &operands, rules)]
}

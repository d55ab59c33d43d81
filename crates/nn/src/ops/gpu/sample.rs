//! Calls for [`ops::sample`](crate::ops::sample).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, Operand, Source};
use smallvec::smallvec;

use super::{Emission, READ, WRITE, emitted, kernel, read, source, write};
use crate::kernels::sample::Sampler;
use crate::ops::sample::Op;

pub(super) static SOURCE: Source = source!("sample.cu");

const WORDS: Operand = Operand::read::<u32>();
const CHOICES: Operand = Operand::write::<u32>();
const MASKS: Operand = Operand::write::<u8>();

static DRAW: Kernel =
    kernel::<Rules>(&SOURCE, "draw", &[READ, WORDS, WORDS, CHOICES, MASKS, WRITE, WRITE, WRITE]);

/// Heads that a sampler may have.
const HEADS: usize = 128;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Head {
    choices: u32,
    used_by: u32,
    floor: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Rules {
    seed: [u32; 2],
    greedy: u32,
    count: u32,
    logits: u32,
    places: u32,
    heads: [Head; HEADS],
}

pub(super) fn emit(op: &Op) -> Emission {
    let Op::Draw { sampler, rows } = op;
    let Sampler { heads, seed, greedy } = &**sampler;
    assert!(heads.len() <= HEADS, "a sampler with {} heads: expected at most {HEADS}", heads.len());
    let mut table = [Head::zeroed(); HEADS];
    for (to, head) in table.iter_mut().zip(heads) {
        *to = Head { choices: head.choices as u32, used_by: head.used_by, floor: head.floor };
    }
    let rules = Rules {
        seed: [*seed as u32, (*seed >> 32) as u32],
        greedy: (*greedy).into(),
        count: heads.len() as u32,
        logits: sampler.logits() as u32,
        places: sampler.places() as u32,
        heads: table,
    };
    let most = heads.iter().map(|head| head.choices).max().unwrap_or(0);
    let call = Call::new(&DRAW, *rows as u32, 32).shared((most * size_of::<f32>()) as u32);
    let operands = [read(0), read(1), read(2), write(0), write(1), write(2), write(3), write(4)];
    smallvec![emitted(call, &operands, rules)]
}

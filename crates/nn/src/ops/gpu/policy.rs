//! Declarations that drawing actions and their objective share (`policy.cuh`).

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, Operand};

use crate::kernels::ppo::PpoHead;

pub(super) const WORDS: Operand = Operand::read::<u32>();

/// Heads that a policy may have.
const HEADS: usize = 128;

/// A head of a policy.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct HeadValues {
    choices: u32,
    used_by: u32,
    floor: f32,
    entropy_coefficient: f32,
    entropy_floor: f32,
}

/// The heads, then zeros.
pub(super) type Heads = [HeadValues; HEADS];

/// A policy's heads as the kernels have them.
///
/// # Panics
/// If they are more than the kernels take.
pub(super) fn table(heads: &[PpoHead]) -> Heads {
    assert!(heads.len() <= HEADS, "a policy with {} heads: expected at most {HEADS}", heads.len());
    let mut table = [HeadValues::zeroed(); HEADS];
    for (to, head) in table.iter_mut().zip(heads) {
        *to = HeadValues {
            choices: head.choices as u32,
            used_by: head.used_by,
            floor: head.floor,
            entropy_coefficient: head.entropy_coefficient,
            entropy_floor: head.entropy_floor,
        };
    }
    table
}

/// The call of a kernel with a warp for each row, and shared memory for the choices of the largest
/// head.
pub(super) fn by_row(kernel: &'static Kernel, rows: usize, heads: &[PpoHead]) -> Call {
    let most = heads.iter().map(|head| head.choices).max().unwrap_or(0);
    Call::new(kernel, rows as u32, 32).shared((most * size_of::<f32>()) as u32)
}

//! Declarations of the GPU kernels for rewards and targets, in `targets.cu`.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand, Piece};

use super::targets::{ScalarMoments, Targets};

pub(super) static SOURCE: KernelSource = KernelSource {
    name: "crates/control/src/ppo/targets.cu",
    text: include_str!("targets.cu"),
    headers: &[],
};

const READ: Operand = Operand::read::<f32>();
const FLAGS: Operand = Operand::read::<u8>();
const WRITE: Operand = Operand::write::<f32>();

/// Rewards per call.
const ROW: usize = 256;

/// Threads per block of the kernels for targets.
const THREADS: u32 = 256;

static REWARD: Kernel = Kernel {
    source: &SOURCE,
    entry: "reward",
    operands: &[WRITE],
    values: size_of::<[f32; ROW]>(),
};
static TARGETS: Kernel = Kernel {
    source: &SOURCE,
    entry: "targets",
    operands: &[READ, READ, READ, FLAGS, FLAGS, WRITE, WRITE, Operand::write::<f64>()],
    values: size_of::<TargetValues>(),
};
static NORMALISE: Kernel = Kernel {
    source: &SOURCE,
    entry: "normalise",
    operands: &[WRITE, WRITE],
    values: size_of::<[f64; 3]>(),
};

/// The struct `Values` of `targets.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TargetValues {
    gamma: f64,
    lambda: f64,
    floor: f64,
    scale: [f64; 3],
    envs: u32,
    part: u32,
}

/// Adds rewards to a row of the same length.
pub(super) fn reward(rewards: &[f32]) -> Vec<Call> {
    let chunk = |(i, rewards): (usize, &[f32])| {
        let mut values = [0.0f32; ROW];
        values[..rewards.len()].copy_from_slice(rewards);
        let piece = Piece { argument: 0, start: i * ROW * size_of::<f32>(), len: rewards.len() };
        Call::new(&REWARD, 1, ROW as u32).with_pieces([piece]).values(values)
    };
    rewards.chunks(ROW).enumerate().map(chunk).collect()
}

/// Computes advantages and returns. If `part` is true, they stay unnormalised, and the moments
/// of the advantages are computed as well: with several ranks, or if each minibatch normalises its
/// own.
pub(super) fn targets(targets: &Targets, scale: ScalarMoments, envs: usize, part: bool) -> Call {
    let values = TargetValues {
        gamma: targets.discounts.gamma,
        lambda: targets.discounts.lambda,
        floor: targets.advantage_std_floor,
        scale: scale.to_array(),
        envs: envs as u32,
        part: part.into(),
    };
    Call::new(&TARGETS, 1, THREADS).values(values)
}

/// Performs [`Targets::normalise`].
pub(super) fn normalise(targets: &Targets, returns_std: f64, (mean, std): (f64, f64)) -> Call {
    let values = [returns_std, mean, std.max(targets.advantage_std_floor)];
    Call::new(&NORMALISE, 8, THREADS).values(values)
}

//! Sums over the pixels of each sample (`OverPixels` in `nn.cuh`).

use meristem_device::{Call, Kernel};

use crate::kernels::BatchShape;

/// Most threads of a block.
const THREADS: u32 = 256;

/// Channels that a block has side by side.
pub(super) fn columns(of: &BatchShape) -> u32 {
    of.c.next_power_of_two().min(32) as u32
}

/// The call with a block for these channels of each sample, and a thread for eight of its pixels.
pub(super) fn over_pixels(kernel: &'static Kernel, of: &BatchShape) -> Call {
    let columns = columns(of);
    let blocks = of.batch * of.c.div_ceil(columns as usize);
    let rows = of.pixels().div_ceil(8).next_power_of_two() as u32;
    Call::new(kernel, blocks as u32, (columns * rows).clamp(32, THREADS))
}

//! CPU kernels: pure functions over slices, for every instruction set. They run on the calling
//! thread; those that work in `parts`, also on idle workers of its device.
//!
//! # Layouts
//! Letters: `N` batch, `H` `W` image, `C` channels; sizes in elements of f32.
//! - images: `[N][H][W][C]` (channels last, F1); vectors `[N][C]`
//! - convolution weights (F3): `[groups][kh][kw][in per group][pad16(out per group)]`,
//!   depthwise (`groups == in == out`): `[kh][kw][pad16(C)]`
//! - linear weights: `[in][pad16(out)]`
//!
//! Padding lanes of weights must be zero; kernels leave those of gradients as they are, so lanes
//! that start as zeros stay zeros under SGD with momentum and decay.
//!
//! # Conventions
//! - Every kernel takes an [`Isa`] first and behaves the same for each, up to rounding. A result
//!   depends on nothing but the arguments and the instruction set.
//! - An operand that is absent is an empty slice: a bias, a gradient that is not wanted.
//! - A gradient with respect to an activation goes to a [`GradOut`]: overwritten or added to.
//!   A gradient with respect to a parameter is always added to.
//! - Lengths are those of the operation's [`Signature`](crate::ops::Signature), which the plan
//!   compiler checks once for all runs and [`ops::run`](crate::ops::run) at each call. Kernels do
//!   not check them again: a wrong one panics or gives a wrong result, and never leaves a slice.
//! - `scratch` is memory whose contents mean nothing before and after; its length comes from
//!   `scratch_len`. Kernels allocate nothing, but for the scratch of their parts, which a
//!   thread keeps and which grows to the largest.
//! - Slices that start on 64-byte boundaries are faster; none must.

// Loops over lanes index several arrays at once, which reads better than zipped iterators.
#![allow(clippy::needless_range_loop)]

mod macros;

pub mod blend;
pub mod conv;
pub mod elementwise;
mod lanes;
pub mod loss;
pub mod lstm;
mod math;
pub mod norm;
pub mod optim;
pub(crate) mod parts;
pub mod pool;
pub mod ppo;
pub mod rows;
pub mod sample;
mod simd;
pub(crate) mod tile;
mod transpose;

pub use meristem_device::isa::{self, Isa, IsaError};

/// Channels of packed weights are padded to a multiple of this: the f32 lanes of the widest
/// instruction set, so that packed weights do not depend on the machine.
pub const PAD: usize = 16;

/// `channels` rounded up to a multiple of [`PAD`].
pub const fn pad16(channels: usize) -> usize {
    channels.next_multiple_of(PAD)
}

/// Where a gradient goes, and whether it is added to what is there. No elements: it is not wanted.
#[derive(Debug, Default)]
pub struct GradOut<'a> {
    /// Destination.
    pub values: &'a mut [f32],
    /// `true`: add to the destination; `false`: overwrite it.
    pub accumulate: bool,
}

impl<'a> GradOut<'a> {
    /// Destination whose contents are overwritten.
    pub fn overwrite(values: &'a mut [f32]) -> Self {
        Self { values, accumulate: false }
    }

    /// Destination that is added to.
    pub fn add(values: &'a mut [f32]) -> Self {
        Self { values, accumulate: true }
    }
}

/// Shape of an image batch `[N][H][W][C]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageShape {
    /// Images.
    pub batch: usize,
    /// Rows.
    pub h: usize,
    /// Columns.
    pub w: usize,
    /// Channels.
    pub c: usize,
}

impl ImageShape {
    /// Elements of the batch.
    pub const fn len(&self) -> usize {
        self.batch * self.h * self.w * self.c
    }

    /// Whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pixels of one image.
    pub const fn pixels(&self) -> usize {
        self.h * self.w
    }
}

/// The first `n` f64 that fit into `scratch`, and what is behind them; takes `2·n + 1` f32.
pub(crate) fn split_f64(scratch: &mut [f32], n: usize) -> (&mut [f64], &mut [f32]) {
    let (head, tail) = scratch.split_at_mut(2 * n + 1);
    let (_, values, _) = bytemuck::pod_align_to_mut::<f32, f64>(head);
    (&mut values[..n], tail)
}

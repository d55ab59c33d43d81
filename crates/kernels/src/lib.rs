//! Kernels of the CPU: pure functions over slices, for every instruction set. They run on the
//! calling thread; kernels that work in [`parts`] also run on idle workers of its device.
//!
//! `meristem-nn` re-exports this crate as `meristem_nn::kernels`. It is a crate because its code is
//! compiled with the highest optimisation also in builds for tests, once for all of them.
//!
//! # Layouts
//! Letters: `N` batch, `H` `W` image, `C` channels; sizes in elements of f32.
//! - images: `[N][H][W][C]` (channels last, F1); vectors `[N][C]`
//! - convolution weights (F3): `[groups][kh][kw][in per group][pad16(out per group)]`,
//!   depthwise (`groups == in == out`): `[kh][kw][pad16(C)]`
//! - linear weights: `[in][pad16(out)]`
//!
//! Padding lanes of weights must be zero. Kernels leave padding lanes of gradients as they are, so
//! lanes that start as zeros stay zeros under every optimiser.
//!
//! # Conventions
//! - A kernel with code for each instruction set takes an [`Isa`] first and behaves the same for
//!   each, up to rounding. A result depends only on the arguments and the instruction set.
//! - An operand that is absent is an empty slice: a bias, a gradient that is not wanted.
//! - A gradient with respect to an activation goes to a [`GradOut`]: overwritten or added to.
//!   A gradient with respect to a parameter is always added to.
//! - Lengths follow the operation's `Signature` in `meristem_nn::ops`, which the plan compiler
//!   checks once for all runs and `ops::run` at each call. Kernels do not check
//!   them again: a wrong length panics or gives a wrong result, and never leads outside a slice.
//! - `scratch` is memory with unspecified contents before and after; its length comes from
//!   `scratch_len`. Kernels allocate only the scratch of their parts, which a thread keeps at the
//!   largest size that was needed.
//! - Slices need not be aligned; slices that start on 64-byte boundaries are faster.

// Loops over lanes index several arrays at once, which reads better than zipped iterators.
#![allow(clippy::needless_range_loop)]

mod macros;

pub mod blend;
pub mod conv;
pub mod dropout;
pub mod elementwise;
mod functions;
mod lanes;
pub mod loss;
pub mod lstm;
mod math;
pub mod muon;
pub mod norm;
pub mod optim;
pub mod parts;
pub mod pool;
pub mod ppo;
pub mod rows;
pub mod sample;
mod simd;
mod tile;
mod transpose;

pub use meristem_device::isa::{self, Isa, IsaError};

/// Channels of packed weights are padded to a multiple of this: the f32 lanes of the widest
/// instruction set, so that packed weights do not depend on the machine.
pub const PAD: usize = 16;

/// `channels` rounded up to a multiple of 16.
pub const fn pad16(channels: usize) -> usize {
    channels.next_multiple_of(PAD)
}

/// Destination of a gradient, and whether the gradient is added to it. Without elements the
/// gradient is not computed.
#[derive(Debug, Default)]
pub struct GradOut<'a> {
    /// Destination.
    pub values: &'a mut [f32],
    /// `true`: add to the destination; `false`: overwrite it.
    pub accumulate: bool,
}

impl<'a> GradOut<'a> {
    /// A destination that is overwritten.
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
pub struct BatchShape {
    /// Images.
    pub batch: usize,
    /// Rows.
    pub h: usize,
    /// Columns.
    pub w: usize,
    /// Channels.
    pub c: usize,
}

impl BatchShape {
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

/// The first `n` f64 that fit into `scratch`, and the rest of it; takes `2·n + 1` f32.
pub fn split_f64(scratch: &mut [f32], n: usize) -> (&mut [f64], &mut [f32]) {
    let (head, tail) = scratch.split_at_mut(2 * n + 1);
    let (_, values, _) = bytemuck::pod_align_to_mut::<f32, f64>(head);
    (&mut values[..n], tail)
}

//! 2-d convolution (cross-correlation, as PyTorch's `conv2d`): forward and both gradients. A linear
//! layer is a 1 × 1 convolution in which each sample is a pixel ([`ConvShape::linear`]).
//!
//! All three are `tile` jobs over a block of images at a time, whose copy in scratch has a zero
//! halo; a convolution without padding reads its input in place. `sliding` computes convolutions of
//! few channels with windows of three columns instead, `depthwise` those with a filter for each
//! channel, and [`winograd`] 3 × 3 convolutions if the plan chooses it.
//! - forward: rows are output pixels, the depth is the window, B the packed weights;
//! - data gradient: a forward convolution over `dy` with flipped and transposed weights, in
//!   `phases` if the stride is more than 1;
//! - weight gradient: rows are the window's elements, the depth is the output pixels, B is `dy`.

mod backward;
mod depthwise;
mod forward;
mod phases;
mod place;
mod shape;
mod sliding;
pub mod winograd;

pub use backward::{backward_data, backward_weight};
pub use forward::{forward, forward_with_moments, forward_with_sums};
pub use shape::ConvShape;

/// Inputs of a forward convolution.
#[derive(Clone, Copy, Debug)]
pub struct ConvInputs<'a> {
    /// Input `[N][H][W][in_c]`.
    pub x: &'a [f32],
    /// Packed weights, [`ConvShape::weight_len`] elements.
    pub w: &'a [f32],
    /// One value per output channel, or none.
    pub bias: &'a [f32],
}

/// Destinations of the gradients of the parameters, which are added.
#[derive(Debug)]
pub struct ParamGrads<'a> {
    /// Gradient of the weights, packed like them; padding lanes are left as they are.
    pub dw: &'a mut [f32],
    /// Gradient of the bias, one value per output channel (or feature).
    pub db: &'a mut [f32],
}

/// The part of `scratch` that starts on a cache line; loads of whole vectors that straddle two
/// lines take twice as long.
pub fn aligned(scratch: &mut [f32]) -> &mut [f32] {
    let skip = scratch.as_ptr().align_offset(64).min(scratch.len());
    &mut scratch[skip..]
}

/// Room that [`aligned`] may skip, in f32.
pub const ALIGNMENT: usize = 16;

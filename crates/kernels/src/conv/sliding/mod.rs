//! Direct convolutions with windows of three columns that move by one pixel, and with at most one
//! vector of output channels (NEON: two).
//!
//! # Method
//! A tile is a run of pixels of an output row, with a register of sums for each pixel; the lanes
//! are output channels. An input pixel lies in the windows of three output pixels:
//! ```text
//! input row     x−1    x    x+1   x+2        for each row of the window, each input channel:
//!                 ╲    │╲    │                    w[3] = weights of the row's three columns
//!                  ╲   │  ╲  │                    for each input pixel x of the tile:
//! output row   x−1  ╲  x    x+1                       a = broadcast(input[x])     1 load
//!                    3 sums                           sum[x+1] += a · w[0]
//!                                                     sum[x]   += a · w[1]
//!                                                     sum[x−1] += a · w[2]
//! ```
//! The gradient of the weights turns this around: it keeps the sums of a window's elements in
//! registers, and each input pixel meets the gradients of three neighbouring output pixels, with
//! zeros beside the first and last column.
//!
//! # Speed
//! A pixel is loaded once for three multiply-adds. The tile kernel loads it for each, and is
//! limited by loads in such layers. Pixels outside the image are left out, so no image is copied to
//! be padded.
//!
//! With AVX-512 and at most 8 output channels a register multiplies two input channels at once
//! (`factors`), with zeros for the last of an odd number. On processors with 256-bit units
//! (`avx512-256`), registers of 256 bits take one channel at a time.
//!
//! On an Intel core with AVX-512 (up to 217 GFLOP/s), the tile kernel reaches 100 to 130 in such
//! layers; this kernel reaches 188 forward and 218 for the weight gradient of 8→8 @32×32, with all
//! data in the cache.
//!
//! # Assumptions
//! - The window is three columns wide, with a stride of 1; output channels fit into one vector, or
//!   two of NEON.
//! - Factors are finite. An infinite factor may give NaN where it is multiplied by a padding zero:
//!   in the last channel of an odd number that is multiplied in pairs, and in the first and last
//!   column in the gradient of the weights.

mod factors;
mod kernels;
mod tile;
// The portable kernels do not use it.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod weights;

pub(super) use tile::SlidingOutput;

use super::ConvShape;
use crate::isa::Level;
use crate::{Isa, PAD};

/// Columns of a window.
const COLUMNS: usize = 3;

/// Kernels that are compiled for an instruction set and a number of columns.
struct SlidingKernels {
    /// Channels of the input that a register multiplies at once.
    channels: usize,
    /// Lanes of a register.
    lanes: usize,
    /// For a tile of one pixel, of two, and so on.
    tiles: &'static [tile::SlidingKernel],
    /// For sums of windows' elements.
    weights: weights::WeightKernels,
}

/// A convolution that takes this way.
#[derive(Clone, Copy)]
pub(super) struct Sliding {
    kernels: &'static SlidingKernels,
    /// Rows of the input and of the output.
    rows: [usize; 2],
    /// Columns of both.
    width: usize,
    /// Channels of the input and of the output.
    channels: [usize; 2],
    /// Rows of a window.
    window: usize,
    /// Input row where the window of output row 0 starts; negative above the image.
    first: isize,
}

impl Sliding {
    /// The forward convolution, if sliding windows fit it.
    pub(super) fn forward(isa: Isa, shape: &ConvShape) -> Option<Self> {
        Self::for_shape(isa, shape, shape.out_c, |kernels| Self {
            kernels,
            rows: [shape.in_h, shape.out_h()],
            width: shape.in_w,
            channels: [shape.in_c, shape.out_c],
            window: shape.kernel[0],
            first: -(shape.padding[0] as isize),
        })
    }

    /// The gradient of the weights, if sliding windows fit it.
    pub(super) fn weights(isa: Isa, shape: &ConvShape) -> Option<Self> {
        Self::forward(isa, shape).filter(|of| !of.kernels.weights.one.is_empty())
    }

    /// The convolution that computes the gradient of the input, if sliding windows fit it. Its
    /// weights are the layer's, rotated by half a turn.
    pub(super) fn data_gradient(isa: Isa, shape: &ConvShape) -> Option<Self> {
        Self::for_shape(isa, shape, shape.in_c, |kernels| Self {
            kernels,
            rows: [shape.out_h(), shape.in_h],
            width: shape.in_w,
            channels: [shape.out_c, shape.in_c],
            window: shape.kernel[0],
            first: shape.padding[0] as isize - (shape.kernel[0] as isize - 1),
        })
    }

    fn for_shape(
        isa: Isa,
        shape: &ConvShape,
        columns: usize,
        make: impl FnOnce(&'static SlidingKernels) -> Self,
    ) -> Option<Self> {
        if shape.slides() { kernels::kernels(isa, columns).map(make) } else { None }
    }

    /// Registers that the input's channels take.
    fn steps(&self) -> usize {
        self.channels[0].div_ceil(self.kernels.channels)
    }

    /// Elements of the weights, or of their sums: `[window][steps][3][lanes]`.
    fn weight_len(&self) -> usize {
        self.window * self.steps() * COLUMNS * self.kernels.lanes
    }

    /// Calls `f` with the places of an element of the packed weights (F3) `[window][3][in][PAD]`
    /// and of the same element in the layout of [`Sliding::run`].
    fn each_weight(&self, mut f: impl FnMut(usize, usize)) {
        let SlidingKernels { channels: at_once, lanes, .. } = *self.kernels;
        let [ci, co] = self.channels;
        for (row, channel) in (0..self.window).flat_map(|row| (0..ci).map(move |c| (row, c))) {
            for column in 0..COLUMNS {
                let from = ((row * COLUMNS + column) * ci + channel) * PAD;
                let step = row * self.steps() + channel / at_once;
                let to = (step * COLUMNS + column) * lanes + channel % at_once;
                (0..co).for_each(|c| f(from + c, to + c * at_once));
            }
        }
    }

    /// Packs weights for [`Sliding::run`] into the start of `to`.
    pub(super) fn pack<'a>(&self, w: &[f32], to: &'a mut [f32]) -> &'a [f32] {
        let to = &mut to[..self.weight_len()];
        to.fill(0.0);
        self.each_weight(|from, place| to[place] = w[from]);
        to
    }
}

impl ConvShape {
    /// Whether windows of three columns move by one pixel, over an output as wide as the input.
    pub const fn slides(&self) -> bool {
        let [_, width] = self.kernel;
        let by_one = self.stride[0] == 1 && self.stride[1] == 1;
        let fits = width == COLUMNS && by_one && self.padding[1] == 1 && self.groups == 1;
        fits && !self.is_dilated()
    }

    /// Elements of scratch that [`Sliding`] takes for any direction: packed weights, or their sums.
    pub(super) const fn sliding_len(&self) -> usize {
        let most = if self.in_c > self.out_c { self.in_c } else { self.out_c };
        if self.slides() { self.kernel[0] * COLUMNS * (most + 1) * PAD } else { 0 }
    }
}

/// Divides `n` into the fewest runs of at most `most`, as equal as can be.
fn runs(n: usize, most: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let count = n.div_ceil(most);
    let (size, longer) = (n / count.max(1), n % count.max(1));
    (0..count).map(move |i| {
        let start = i * size + i.min(longer);
        start..start + size + usize::from(i < longer)
    })
}

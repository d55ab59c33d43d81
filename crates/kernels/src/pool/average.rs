//! Average pooling over windows.

use super::{ClippedWindow, LANES, PoolShape};
use crate::macros::isa_kernels;
use crate::{GradOut, Isa};

/// Means of `N` channels of a window, which begins at the first element of `x`: sums of rows, then
/// their sum, which rounds less than one sum over a large window.
#[inline(always)]
fn mean<const N: usize>(window: &ClippedWindow, scale: f32, x: &[f32], y: &mut [f32]) {
    let mut total = [0f32; N];
    for row in 0..window.size[0] {
        let mut sum = [0f32; N];
        for column in 0..window.size[1] {
            let x = &x[row * window.strides[0] + column * window.strides[1]..][..N];
            for l in 0..N {
                sum[l] += x[l];
            }
        }
        for l in 0..N {
            total[l] += sum[l];
        }
    }
    for (y, total) in y.iter_mut().zip(total) {
        *y = total * scale;
    }
}

impl PoolShape {
    /// Weight of an element in its window's mean; padding counts as zeros (PyTorch's
    /// `count_include_pad`).
    pub fn scale(&self) -> f32 {
        1.0 / self.window.taps() as f32
    }
}

isa_kernels! {
    /// Mean of each window, whose elements in the padding are zeros.
    pub fn avg2d_forward(isa: Isa, shape: &PoolShape, x: &[f32], y: &mut [f32]) {
        shape.check();
        let (c, scale) = (shape.input.c.max(1), shape.scale());
        for ((at, window), y) in shape.clipped().zip(y.chunks_exact_mut(c)) {
            let x = &x[at..];
            for first in (0..c - c % LANES).step_by(LANES) {
                mean::<LANES>(&window, scale, &x[first..], &mut y[first..first + LANES]);
            }
            for first in c - c % LANES..c {
                mean::<1>(&window, scale, &x[first..], &mut y[first..first + 1]);
            }
        }
    }

    /// Gradient of [`avg2d_forward`]: `dy/taps` to every element of the window in the image, window
    /// by window.
    pub fn avg2d_backward(isa: Isa, shape: &PoolShape, dy: &[f32], dx: GradOut<'_>) {
        shape.check();
        let (c, scale) = (shape.input.c.max(1), shape.scale());
        if !dx.accumulate {
            dx.values.fill(0.0);
        }
        for ((at, window), dy) in shape.clipped().zip(dy.chunks_exact(c)) {
            for row in 0..window.size[0] {
                // The pixels of a row are side by side.
                let from = at + row * window.strides[0];
                let row = &mut dx.values[from..from + window.size[1] * c];
                for pixel in row.chunks_exact_mut(c) {
                    for (d, &g) in pixel.iter_mut().zip(dy) {
                        *d += g * scale;
                    }
                }
            }
        }
    }
}

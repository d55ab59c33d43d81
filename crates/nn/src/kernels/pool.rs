//! Max pooling and global average pooling over `[N][H][W][C]`.

use super::macros::isa_kernels;
use super::norm::channels::add_channel_sums;
use super::{GradOut, ImageShape, Isa};

/// Square max pooling without padding; rows and columns that fill no window are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolShape {
    /// Input.
    pub input: ImageShape,
    /// Window height and width, 1 to 16.
    pub kernel: usize,
    /// Vertical and horizontal stride.
    pub stride: usize,
}

impl PoolShape {
    /// Shape of the output.
    pub const fn output(&self) -> ImageShape {
        let ImageShape { batch, h, w, c } = self.input;
        let (h, w) = ((h - self.kernel) / self.stride + 1, (w - self.kernel) / self.stride + 1);
        ImageShape { batch, h, w, c }
    }

    /// Elements between the first elements of two windows' rows: input offset of output `(n, y,
    /// x)`.
    const fn offset(&self, n: usize, y: usize, x: usize) -> usize {
        let ImageShape { h, w, c, .. } = self.input;
        ((n * h + y * self.stride) * w + x * self.stride) * c
    }

    #[track_caller]
    fn check(&self) {
        assert!(
            (1..=16).contains(&self.kernel)
                && self.stride > 0
                && self.input.h >= self.kernel
                && self.input.w >= self.kernel,
            "max_pool: bad shape {self:?}"
        );
    }
}

/// Mean over height and width: `x` `[N][H][W][C]` to `y` `[N][C]`, overwritten.
pub fn global_avg_forward(isa: Isa, shape: &ImageShape, x: &[f32], y: &mut [f32]) {
    if shape.is_empty() {
        return;
    }
    let scale = 1.0 / shape.pixels() as f32;
    y.fill(0.0);
    for (x, y) in x.chunks_exact(shape.pixels() * shape.c).zip(y.chunks_exact_mut(shape.c)) {
        add_channel_sums(isa, x, y);
        y.iter_mut().for_each(|y| *y *= scale);
    }
}

isa_kernels! {
    /// Maximum of each window. `argmax`, if wanted, gets per output the window position
    /// `ky·kernel + kx` of the maximum: the first of equals in row-major order, the last NaN if
    /// there is one, as PyTorch.
    pub fn max2d_forward(isa: Isa, shape: &PoolShape, x: &[f32], y: &mut [f32],
                         argmax: &mut [u8]) {
        shape.check();
        let out = shape.output();
        if out.is_empty() {
            return;
        }
        for (i, y) in y.chunks_exact_mut(out.c).enumerate() {
            let at = shape.offset(i / out.pixels(), i / out.w % out.h, i % out.w);
            y.copy_from_slice(&x[at..at + out.c]);
            let mut codes = argmax.get_mut(i * out.c..(i + 1) * out.c);
            if let Some(codes) = &mut codes {
                codes.fill(0);
            }
            for k in 1..shape.kernel * shape.kernel {
                let row = k / shape.kernel * shape.input.w + k % shape.kernel;
                let x = &x[at + row * out.c..at + row * out.c + out.c];
                match &mut codes {
                    Some(codes) => for ((y, code), &x) in y.iter_mut().zip(&mut **codes).zip(x) {
                        let take = x > *y || x.is_nan();
                        *y = if take { x } else { *y };
                        *code = if take { k as u8 } else { *code };
                    }
                    None => for (y, &x) in y.iter_mut().zip(x) {
                        *y = if x > *y || x.is_nan() { x } else { *y };
                    }
                }
            }
        }
    }

    /// Gradient of [`max2d_forward`]: each `dy` goes to the position that `argmax` names.
    pub fn max2d_backward(isa: Isa, shape: &PoolShape, dy: &[f32], argmax: &[u8], dx: GradOut<'_>) {
        shape.check();
        let out = shape.output();
        if !dx.accumulate {
            dx.values.fill(0.0);
        }
        if out.is_empty() {
            return;
        }
        let pixels = dy.chunks_exact(out.c).zip(argmax.chunks_exact(out.c));
        for (i, (dy, argmax)) in pixels.enumerate() {
            let at = shape.offset(i / out.pixels(), i / out.w % out.h, i % out.w);
            for k in 0..shape.kernel * shape.kernel {
                let row = k / shape.kernel * shape.input.w + k % shape.kernel;
                let dx = &mut dx.values[at + row * out.c..at + row * out.c + out.c];
                for ((dx, &dy), &code) in dx.iter_mut().zip(dy).zip(argmax) {
                    *dx += if usize::from(code) == k { dy } else { 0.0 };
                }
            }
        }
    }

    /// Gradient of [`global_avg_forward`]: `dy/(H·W)` to every pixel.
    pub fn global_avg_backward(isa: Isa, shape: &ImageShape, dy: &[f32], dx: GradOut<'_>) {
        if shape.is_empty() {
            return;
        }
        let scale = 1.0 / shape.pixels() as f32;
        let images = dx.values.chunks_exact_mut(shape.pixels() * shape.c);
        for (image, dy) in images.zip(dy.chunks_exact(shape.c)) {
            for pixel in image.chunks_exact_mut(shape.c) {
                let it = pixel.iter_mut().zip(dy);
                if dx.accumulate {
                    it.for_each(|(d, &g)| *d += g * scale);
                } else {
                    it.for_each(|(d, &g)| *d = g * scale);
                }
            }
        }
    }
}

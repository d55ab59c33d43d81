//! Max pooling and global average pooling over `[N][H][W][C]`.

use super::macros::isa_kernels;
use super::norm::channels::add_channel_sums;
use super::{BatchShape, GradOut, Isa};

/// Square max pooling without padding; rows and columns that fill no window are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolShape {
    /// Input.
    pub input: BatchShape,
    /// Window height and width, 1 to 16.
    pub kernel: usize,
    /// Vertical and horizontal stride.
    pub stride: usize,
}

impl PoolShape {
    /// Shape of the output.
    pub const fn output(&self) -> BatchShape {
        let BatchShape { batch, h, w, c } = self.input;
        let (h, w) = ((h - self.kernel) / self.stride + 1, (w - self.kernel) / self.stride + 1);
        BatchShape { batch, h, w, c }
    }

    /// For each row of windows, the first input element of the first, and its first output element.
    fn rows(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (of, BatchShape { batch, h, w, c }) = (*self, self.output());
        let start = move |row: usize| (row / h * of.input.h + row % h * of.stride) * of.input.w * c;
        (0..batch * h).map(move |row| (start(row), row * w * c))
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
pub fn global_avg_forward(isa: Isa, shape: &BatchShape, x: &[f32], y: &mut [f32]) {
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

/// Channels that are processed together: the channel count of small hosts.
const LANES: usize = 8;

/// Offsets of the positions of a window from its first element.
trait PoolWindow: Copy {
    fn positions(&self) -> impl Iterator<Item = usize>;
}

/// A window of 2×2, the usual one: with so few positions the loop over them is unrolled.
#[derive(Clone, Copy)]
struct Window2x2([usize; 4]);

impl PoolWindow for Window2x2 {
    #[inline(always)]
    fn positions(&self) -> impl Iterator<Item = usize> {
        self.0.into_iter()
    }
}

impl PoolWindow for PoolShape {
    #[inline(always)]
    fn positions(&self) -> impl Iterator<Item = usize> {
        let Self { input, kernel, .. } = *self;
        let rows = (0..kernel).map(move |y| y * input.w);
        rows.flat_map(move |row| (row..row + kernel).map(move |at| at * input.c))
    }
}

impl PoolShape {
    fn of_two(&self) -> Option<Window2x2> {
        let BatchShape { w, c, .. } = self.input;
        (self.kernel == 2).then_some(Window2x2([0, c, w * c, (w + 1) * c]))
    }
}

/// Maxima of `N` channels of a window, which begins at the first element of `x`.
#[inline(always)]
fn maximum<const N: usize>(window: impl PoolWindow, x: &[f32], y: &mut [f32], codes: &mut [u8]) {
    let (mut most, mut code) = ([0f32; N], [0u32; N]);
    most.copy_from_slice(&x[..N]);
    for (k, at) in window.positions().enumerate().skip(1) {
        let x = &x[at..at + N];
        for l in 0..N {
            let take = x[l] > most[l] || x[l].is_nan();
            most[l] = if take { x[l] } else { most[l] };
            code[l] = if take { k as u32 } else { code[l] };
        }
    }
    y.copy_from_slice(&most);
    // `codes` is empty where they are not wanted.
    if let Ok(codes) = <&mut [u8; N]>::try_from(codes) {
        *codes = code.map(|code| code as u8);
    }
}

#[inline(always)]
fn maxima(shape: &PoolShape, window: impl PoolWindow, x: &[f32], y: &mut [f32], argmax: &mut [u8]) {
    let BatchShape { w, c: channels, .. } = shape.output();
    for (at, to) in shape.rows() {
        for i in 0..w {
            let (at, to) = (at + i * shape.stride * channels, to + i * channels);
            let (x, y) = (&x[at..], &mut y[to..to + channels]);
            let codes = argmax.get_mut(to..to + channels).unwrap_or_default();
            for c in (0..channels - channels % LANES).step_by(LANES) {
                let codes = codes.get_mut(c..c + LANES).unwrap_or_default();
                maximum::<LANES>(window, &x[c..], &mut y[c..c + LANES], codes);
            }
            for c in channels - channels % LANES..channels {
                let codes = codes.get_mut(c..c + 1).unwrap_or_default();
                maximum::<1>(window, &x[c..], &mut y[c..c + 1], codes);
            }
        }
    }
}

/// Sends gradients of `N` channels of a window to the positions that they came from.
#[inline(always)]
fn route<const N: usize, const ADD: bool>(
    window: impl PoolWindow,
    (dy, argmax): (&[f32], &[u8]),
    dx: &mut [f32],
) {
    let (mut from, mut code) = ([0f32; N], [0u32; N]);
    from.copy_from_slice(&dy[..N]);
    code.iter_mut().zip(&argmax[..N]).for_each(|(code, &k)| *code = k.into());
    for (k, at) in window.positions().enumerate() {
        let mut here = [0f32; N];
        for l in 0..N {
            here[l] = if code[l] == k as u32 { from[l] } else { 0.0 };
        }
        let dx = &mut dx[at..at + N];
        if ADD {
            dx.iter_mut().zip(here).for_each(|(dx, here)| *dx += here);
        } else {
            // Adding 0.0 turns −0.0 into 0.0, as a sum does.
            dx.iter_mut().zip(here).for_each(|(dx, here)| *dx = 0.0 + here);
        }
    }
}

#[inline(always)]
fn route_all<const ADD: bool>(
    shape: &PoolShape,
    window: impl PoolWindow,
    (dy, argmax): (&[f32], &[u8]),
    dx: &mut [f32],
) {
    let BatchShape { w, c: channels, .. } = shape.output();
    for (at, from) in shape.rows() {
        for i in 0..w {
            let (at, from) = (at + i * shape.stride * channels, from + i * channels);
            let whole = from..from + channels;
            let (dy, argmax, dx) = (&dy[whole.clone()], &argmax[whole], &mut dx[at..]);
            for c in (0..channels - channels % LANES).step_by(LANES) {
                route::<LANES, ADD>(window, (&dy[c..], &argmax[c..]), &mut dx[c..]);
            }
            for c in channels - channels % LANES..channels {
                route::<1, ADD>(window, (&dy[c..], &argmax[c..]), &mut dx[c..]);
            }
        }
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
        match shape.of_two() {
            Some(window) => maxima(shape, window, x, y, argmax),
            None => maxima(shape, *shape, x, y, argmax),
        }
    }

    /// Gradient of [`max2d_forward`]: each `dy` goes to the position that `argmax` names.
    pub fn max2d_backward(isa: Isa, shape: &PoolShape, dy: &[f32], argmax: &[u8], dx: GradOut<'_>) {
        shape.check();
        let out = shape.output();
        let covers = |side: usize| side.is_multiple_of(shape.kernel);
        let whole = shape.kernel == shape.stride && covers(shape.input.h) && covers(shape.input.w);
        if !dx.accumulate && !whole {
            dx.values.fill(0.0);
        }
        if out.is_empty() {
            return;
        }
        match (dx.accumulate || !whole, shape.of_two()) {
            (true, Some(window)) => route_all::<true>(shape, window, (dy, argmax), dx.values),
            (true, None) => route_all::<true>(shape, *shape, (dy, argmax), dx.values),
            (false, Some(window)) => route_all::<false>(shape, window, (dy, argmax), dx.values),
            (false, None) => route_all::<false>(shape, *shape, (dy, argmax), dx.values),
        }
    }

    /// Gradient of [`global_avg_forward`]: `dy/(H·W)` to every pixel.
    pub fn global_avg_backward(isa: Isa, shape: &BatchShape, dy: &[f32], dx: GradOut<'_>) {
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

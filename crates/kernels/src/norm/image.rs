//! Normalisation kernels over one image `[H][W][C]` with per-channel coefficients: the inner loops
//! of batch norm and group norm.

use crate::BatchShape;
use crate::lanes::{ChannelKernel, ChannelRange};
use crate::simd::Simd;

/// Code of a pooled output if ReLU blocks its gradient. Codes 0 to 3 are the position of the
/// window's maximum.
pub const BLOCKED: u8 = 4;

/// Number of pixels that are summed in f32 before the sum moves to f64. Sums through a pool move
/// after the row of windows that completes this number.
const RUN: usize = 256;

/// `z = (x − mean)·scale + beta`, then `max(z, floor)`, which propagates NaN; all slices `[C]`.
#[derive(Clone, Copy)]
pub(crate) struct Affine<'a> {
    pub(crate) mean: &'a [f32],
    pub(crate) scale: &'a [f32],
    pub(crate) beta: &'a [f32],
    /// 0 for a ReLU, −∞ for none.
    pub(crate) floor: f32,
}

/// [`Affine`] for a block of channels.
#[derive(Clone, Copy)]
struct AffineBlock<S> {
    mean: S,
    scale: S,
    beta: S,
    floor: S,
}

impl<S: Simd> AffineBlock<S> {
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    unsafe fn new<const WHOLE: bool>(of: &Affine<'_>, at: ChannelRange) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                mean: at.coefficients::<S, WHOLE>(of.mean),
                scale: at.coefficients::<S, WHOLE>(of.scale),
                beta: at.coefficients::<S, WHOLE>(of.beta),
                floor: S::splat(of.floor),
            }
        }
    }

    /// `z`, before the floor.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    unsafe fn apply(&self, x: S) -> S {
        // SAFETY: the caller's promise.
        unsafe { x.sub(self.mean).mul_add(self.scale, self.beta) }
    }
}

/// Normalises the pixels of `x` into `out`.
pub(crate) struct NormForward<'a> {
    pub(crate) affine: Affine<'a>,
    pub(crate) x: &'a [f32],
    pub(crate) out: &'a mut [f32],
}

impl ChannelKernel for NormForward<'_> {
    const AT_ONCE: usize = 4;

    fn pixels(&self) -> usize {
        self.x.len() / self.affine.mean.len().max(1)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let block = AffineBlock::<S>::new::<WHOLE>(&self.affine, at);
            for pixel in (0..self.x.len()).step_by(self.affine.mean.len() * S::PIXELS) {
                let z = block.apply(at.load_far::<S, WHOLE>(self.x, pixel));
                let z = z.select_le(block.floor, block.floor, z);
                at.store::<S, WHOLE>(z, self.out, pixel);
            }
        }
    }
}

/// Normalises the image `x` and pools it 2 × 2 into `out`; writes [codes](BLOCKED) if `CODES`.
pub(crate) struct ForwardPooled<'a, const CODES: bool> {
    pub(crate) affine: Affine<'a>,
    pub(crate) shape: BatchShape,
    pub(crate) x: &'a [f32],
    pub(crate) out: &'a mut [f32],
    pub(crate) codes: &'a mut [u8],
}

impl<const CODES: bool> ChannelKernel for ForwardPooled<'_, CODES> {
    /// Pooled pixels: a register may hold two neighbours.
    fn pixels(&self) -> usize {
        self.shape.w / 2
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let block = AffineBlock::<S>::new::<WHOLE>(&self.affine, at);
            let (c, row) = (self.shape.c, self.shape.w * self.shape.c);
            let numbers: [S; 4] = std::array::from_fn(|k| S::splat(k as f32));
            let blocked = S::splat(f32::from(BLOCKED));
            let mut to = 0;
            for y in 0..self.shape.h / 2 {
                let pair = &self.x[2 * y * row..(2 * y + 2) * row];
                for left in (0..self.shape.w / 2).step_by(S::PIXELS).map(|x| 2 * x * c) {
                    let mut best = block.apply(at.load_apart::<S, WHOLE>(pair, left, 2 * c));
                    let mut code = numbers[0];
                    for k in 1..4 {
                        let pixel = left + k % 2 * c + k / 2 * row;
                        let z = block.apply(at.load_apart::<S, WHOLE>(pair, pixel, 2 * c));
                        code = z.select_greater(best, numbers[k], code);
                        best = z.select_greater(best, z, best);
                    }
                    if CODES {
                        let code = best.select_le(block.floor, blocked, code);
                        at.store_bytes::<S, WHOLE>(code, self.codes, to);
                    }
                    let z = best.select_le(block.floor, block.floor, best);
                    at.store::<S, WHOLE>(z, self.out, to);
                    to += c * S::PIXELS;
                }
            }
        }
    }
}

/// Adds to `sums` and `dots` `[C]` the sums over pixels of `dz` and of `dz·(x − mean)`; `dz` is
/// `dout` where the activation passes it, else 0.
///
/// If `OUTPUTS`, the values are the outputs `z`, pooled or not, in place of `x`, and `dots` are the
/// sums of `dz·(z − beta)`, which is `dz·(x − mean)·scale` up to the rounding of `z`.
pub(crate) struct Reduce<'a, const OUTPUTS: bool> {
    pub(crate) affine: Affine<'a>,
    pub(crate) values: &'a [f32],
    pub(crate) dout: &'a [f32],
    pub(crate) sums: &'a mut [f64],
    pub(crate) dots: &'a mut [f64],
}

impl<const OUTPUTS: bool> ChannelKernel for Reduce<'_, OUTPUTS> {
    const AT_ONCE: usize = 4;

    fn pixels(&self) -> usize {
        self.values.len() / self.affine.mean.len().max(1)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let block = AffineBlock::<S>::new::<WHOLE>(&self.affine, at);
            let c = self.affine.mean.len();
            let zero = S::splat(0.0);
            for (values, dout) in self.values.chunks(RUN * c).zip(self.dout.chunks(RUN * c)) {
                let mut sums = RunningSums::new();
                for pixel in (0..values.len()).step_by(c * S::PIXELS) {
                    let value = at.load_far::<S, WHOLE>(values, pixel);
                    let dout = at.load::<S, WHOLE>(dout, pixel);
                    let (z, centre) = if OUTPUTS {
                        (value, block.beta)
                    } else {
                        (block.apply(value), block.mean)
                    };
                    sums.add(z.select_le(block.floor, zero, dout), value.sub(centre));
                }
                sums.flush(at, self.sums, self.dots);
            }
        }
    }
}

/// [`Reduce`] through a 2 × 2 pool; `codes` are the pixels that receive `dout`.
pub(crate) struct ReducePooled<'a> {
    pub(crate) mean: &'a [f32],
    pub(crate) shape: BatchShape,
    pub(crate) x: &'a [f32],
    pub(crate) dout: &'a [f32],
    pub(crate) codes: &'a [u8],
    pub(crate) sums: &'a mut [f64],
    pub(crate) dots: &'a mut [f64],
}

impl ChannelKernel for ReducePooled<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let mean = at.coefficients::<S, WHOLE>(self.mean);
            let (c, row) = (self.shape.c, self.shape.w * self.shape.c);
            let numbers: [S; 4] = std::array::from_fn(|k| S::splat(k as f32));
            let (zero, one) = (S::splat(0.0), numbers[1]);
            let blocked = S::splat(f32::from(BLOCKED));
            let (mut sums, mut pixels, mut from) = (RunningSums::new(), 0, 0);
            for y in 0..self.shape.h / 2 {
                let pair = &self.x[2 * y * row..(2 * y + 2) * row];
                for left in (0..self.shape.w / 2).map(|x| 2 * x * c) {
                    let code = at.load_bytes::<S, WHOLE>(self.codes, from);
                    let dout = at.load::<S, WHOLE>(self.dout, from);
                    let dz = code.select_eq(blocked, zero, dout);
                    let a = at.load::<S, WHOLE>(pair, left);
                    let b = at.load::<S, WHOLE>(pair, left + c);
                    let upper = code.select_eq(zero, a, b);
                    let a = at.load::<S, WHOLE>(pair, left + row);
                    let b = at.load::<S, WHOLE>(pair, left + row + c);
                    let lower = code.select_eq(numbers[2], a, b);
                    let x = code.select_le(one, upper, lower);
                    sums.add(dz, x.sub(mean));
                    from += c;
                }
                pixels += self.shape.w / 2;
                if pixels >= RUN {
                    sums.flush(at, self.sums, self.dots);
                    (sums, pixels) = (RunningSums::new(), 0);
                }
            }
            sums.flush(at, self.sums, self.dots);
        }
    }
}

/// Running sums of a block of channels.
struct RunningSums<S> {
    sum: S,
    dot: S,
}

impl<S: Simd> RunningSums<S> {
    /// # Safety
    /// As [`ChannelKernel::run`]; this holds for all methods.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self { sum: S::splat(0.0), dot: S::splat(0.0) } }
    }

    #[inline(always)]
    unsafe fn add(&mut self, dz: S, centred: S) {
        // SAFETY: the caller's promise.
        unsafe {
            self.sum = self.sum.add(dz);
            self.dot = dz.mul_add(centred, self.dot);
        }
    }

    #[inline(always)]
    unsafe fn flush(&self, at: ChannelRange, sums: &mut [f64], dots: &mut [f64]) {
        // SAFETY: the caller's promise.
        unsafe {
            at.flush(self.sum, sums);
            at.flush(self.dot, dots);
        }
    }
}

/// `dx = dz·scale − (offset + (x − mean)·slope)`, slices `[C]`: the gradient of a normalisation.
#[derive(Clone, Copy)]
pub(crate) struct NormGradient<'a> {
    /// Mean, scale, beta and floor of the forward pass.
    pub(crate) affine: Affine<'a>,
    /// Term of the gradient through the mean.
    pub(crate) offset: &'a [f32],
    /// Term of the gradient through the variance, for x − mean (not for x̂).
    pub(crate) slope: &'a [f32],
}

struct GradientBlock<S> {
    affine: AffineBlock<S>,
    offset: S,
    slope: S,
    at: ChannelRange,
}

impl<S: Simd> GradientBlock<S> {
    /// # Safety
    /// As [`ChannelKernel::run`]; this holds for all methods.
    #[inline(always)]
    unsafe fn new<const WHOLE: bool>(of: &NormGradient<'_>, at: ChannelRange) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                affine: AffineBlock::new::<WHOLE>(&of.affine, at),
                offset: at.coefficients::<S, WHOLE>(of.offset),
                slope: at.coefficients::<S, WHOLE>(of.slope),
                at,
            }
        }
    }

    /// `dx` of pixels with input `x`.
    #[inline(always)]
    unsafe fn value(&self, x: S, dz: S) -> S {
        // SAFETY: the caller's promise.
        unsafe {
            let centred = x.sub(self.affine.mean);
            let taken = centred.mul_add(self.slope, self.offset);
            dz.mul(self.affine.scale).sub(taken)
        }
    }

    /// Writes `dx` of the pixels at `pixel`, which have input `x`; adds it if `ADD`.
    #[inline(always)]
    unsafe fn put<const WHOLE: bool, const ADD: bool>(
        &self,
        x: S,
        dz: S,
        dx: &mut [f32],
        pixel: usize,
    ) {
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let mut value = self.value(x, dz);
            if ADD {
                value = self.at.load::<S, WHOLE>(dx, pixel).add(value);
            }
            self.at.store::<S, WHOLE>(value, dx, pixel);
        }
    }
}

/// Gradient of the input of [`NormForward`], added if `ADD`.
pub(crate) struct NormBackward<'a, const ADD: bool> {
    pub(crate) gradient: NormGradient<'a>,
    pub(crate) x: &'a [f32],
    pub(crate) dout: &'a [f32],
    pub(crate) dx: &'a mut [f32],
}

impl<const ADD: bool> ChannelKernel for NormBackward<'_, ADD> {
    const AT_ONCE: usize = 4;

    fn pixels(&self) -> usize {
        self.x.len() / self.gradient.offset.len().max(1)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let block = GradientBlock::<S>::new::<WHOLE>(&self.gradient, at);
            let zero = S::splat(0.0);
            let c = self.gradient.offset.len();
            for pixel in (0..self.x.len()).step_by(c * S::PIXELS) {
                let x = at.load_far::<S, WHOLE>(self.x, pixel);
                let dout = at.load::<S, WHOLE>(self.dout, pixel);
                let dz = block.affine.apply(x).select_le(block.affine.floor, zero, dout);
                block.put::<WHOLE, ADD>(x, dz, self.dx, pixel);
            }
        }
    }
}

/// Gradient of the input of [`ForwardPooled`] from its codes, added if `ADD`.
pub(crate) struct BackwardPooled<'a, const ADD: bool> {
    pub(crate) gradient: NormGradient<'a>,
    pub(crate) shape: BatchShape,
    pub(crate) x: &'a [f32],
    pub(crate) dout: &'a [f32],
    pub(crate) codes: &'a [u8],
    pub(crate) dx: &'a mut [f32],
}

impl<const ADD: bool> ChannelKernel for BackwardPooled<'_, ADD> {
    /// Pooled pixels, if each pixel is in a window: a register may hold two neighbours.
    fn pixels(&self) -> usize {
        let BatchShape { h, w, .. } = self.shape;
        if h.is_multiple_of(2) && w.is_multiple_of(2) { w / 2 } else { 1 }
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let block = GradientBlock::<S>::new::<WHOLE>(&self.gradient, at);
            let BatchShape { h, w, c, .. } = self.shape;
            let row = w * c;
            let numbers: [S; 4] = std::array::from_fn(|k| S::splat(k as f32));
            let zero = numbers[0];
            let mut from = 0;
            for y in 0..h / 2 {
                let here = 2 * y * row..(2 * y + 2) * row;
                let (x, dx) = (&self.x[here.clone()], &mut self.dx[here]);
                for left in (0..w / 2).step_by(S::PIXELS).map(|x| 2 * x * c) {
                    let code = at.load_bytes::<S, WHOLE>(self.codes, from);
                    let dout = at.load::<S, WHOLE>(self.dout, from);
                    for k in 0..4 {
                        let pixel = left + k % 2 * c + k / 2 * row;
                        let dz = code.select_eq(numbers[k], dout, zero);
                        let x = at.load_apart::<S, WHOLE>(x, pixel, 2 * c);
                        let mut value = block.value(x, dz);
                        if ADD {
                            value = at.load_apart::<S, WHOLE>(dx, pixel, 2 * c).add(value);
                        }
                        at.store_apart::<S, WHOLE>(value, dx, pixel, 2 * c);
                    }
                    from += c * S::PIXELS;
                }
                // An odd last column is in no window, and below, an odd last row.
                for pixel in (w / 2 * 2..w).flat_map(|x| [x * c, x * c + row]) {
                    block.put::<WHOLE, ADD>(at.load::<S, WHOLE>(x, pixel), zero, dx, pixel);
                }
            }
            for pixel in (h / 2 * 2 * row..h * row).step_by(c) {
                let x = at.load::<S, WHOLE>(self.x, pixel);
                block.put::<WHOLE, ADD>(x, zero, self.dx, pixel);
            }
        }
    }
}

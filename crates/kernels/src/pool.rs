//! Max pooling, average pooling, and global average pooling over `[N][H][W][C]`.

mod average;

use super::macros::isa_kernels;
use super::norm::channels::add_channel_sums;
use super::{BatchShape, GradOut, Isa};

pub use average::{avg2d_backward, avg2d_forward};

/// Windows of a pooling: their size, the distance between them, and the rows and columns around the
/// image that they may cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolGeometry {
    /// Window height and width.
    pub kernel: [usize; 2],
    /// Vertical and horizontal stride.
    pub stride: [usize; 2],
    /// Rows above and below, columns left and right; at most half of the window.
    pub padding: [usize; 2],
}

impl PoolGeometry {
    /// Square windows without padding.
    pub const fn square(kernel: usize, stride: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [stride; 2], padding: [0; 2] }
    }

    /// The same windows with this padding.
    pub const fn padded(self, padding: [usize; 2]) -> Self {
        Self { padding, ..self }
    }

    /// Elements of a window.
    pub const fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Windows along a side of `size` elements, in an axis; `None` if no window fits.
    pub const fn windows(&self, axis: usize, size: usize) -> Option<usize> {
        let (kernel, stride, padded) =
            (self.kernel[axis], self.stride[axis], size + 2 * self.padding[axis]);
        if kernel == 0 || stride == 0 || size == 0 || padded < kernel {
            return None;
        }
        Some((padded - kernel) / stride + 1)
    }

    /// Whether the padding is at most half of the window, as PyTorch requires: then no window lies
    /// in the padding alone.
    pub const fn pads_by_half(&self) -> bool {
        2 * self.padding[0] <= self.kernel[0] && 2 * self.padding[1] <= self.kernel[1]
    }
}

/// A pooling over a batch; rows and columns that fill no window are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolShape {
    /// Input.
    pub input: BatchShape,
    /// Windows.
    pub window: PoolGeometry,
}

/// Positions in a window that a byte can name.
const BYTE: usize = 256;

impl PoolShape {
    /// Square windows without padding.
    pub const fn square(input: BatchShape, kernel: usize, stride: usize) -> Self {
        Self { input, window: PoolGeometry::square(kernel, stride) }
    }

    /// Shape of the output.
    pub const fn output(&self) -> BatchShape {
        let BatchShape { batch, h, w, c } = self.input;
        let (h, w) = match (self.window.windows(0, h), self.window.windows(1, w)) {
            (Some(h), Some(w)) => (h, w),
            _ => (0, 0),
        };
        BatchShape { batch, h, w, c }
    }

    /// Whether the position of a window's maximum is a u32, because a byte cannot name it.
    pub const fn is_wide(&self) -> bool {
        self.window.taps() > BYTE
    }

    const fn is_padded(&self) -> bool {
        self.window.padding[0] > 0 || self.window.padding[1] > 0
    }

    /// For each row of windows, the first input element of its first window, and its first output
    /// element.
    fn rows(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (of, BatchShape { batch, h, w, c }) = (*self, self.output());
        let stride = of.window.stride[0];
        let start = move |row: usize| (row / h * of.input.h + row % h * stride) * of.input.w * c;
        (0..batch * h).map(move |row| (start(row), row * w * c))
    }

    /// The parts of all windows inside the image, in the order of the outputs, each with its first
    /// input element.
    fn clipped(&self) -> impl Iterator<Item = (usize, ClippedWindow)> + use<> {
        let (of, BatchShape { batch, h, w, .. }) = (*self, self.output());
        let BatchShape { h: in_h, w: in_w, c, .. } = of.input;
        let along = move |axis: usize, at: usize, size: usize| {
            let (place, padding) = (at * of.window.stride[axis], of.window.padding[axis]);
            let first = padding.saturating_sub(place);
            let end = of.window.kernel[axis].min(size + padding - place);
            (place + first - padding, first, end - first)
        };
        let places = (0..batch).flat_map(move |n| (0..h * w).map(move |at| (n, at / w, at % w)));
        places.map(move |(n, y, x)| {
            let ((top, row, height), (left, column, width)) =
                (along(0, y, in_h), along(1, x, in_w));
            let window = ClippedWindow {
                first: [row, column],
                size: [height, width],
                width: of.window.kernel[1],
                strides: [in_w * c, c],
            };
            (((n * in_h + top) * in_w + left) * c, window)
        })
    }

    #[track_caller]
    fn check(&self) {
        let BatchShape { h, w, .. } = self.input;
        assert!(
            self.window.windows(0, h).is_some()
                && self.window.windows(1, w).is_some()
                && self.window.pads_by_half(),
            "pool: bad shape {self:?}"
        );
    }
}

/// The part of a window inside the image; never empty, as padding is at most half of a window.
#[derive(Clone, Copy)]
struct ClippedWindow {
    /// First row and column of this part, from those of the window.
    first: [usize; 2],
    /// Numbers of rows and columns of this part.
    size: [usize; 2],
    /// Columns of the whole window.
    width: usize,
    /// Elements from row to row and from pixel to pixel of the image.
    strides: [usize; 2],
}

impl ClippedWindow {
    /// Offset of the `k`-th position of the window from the first element of this part.
    fn offset(&self, k: usize) -> usize {
        let (row, column) = (k / self.width - self.first[0], k % self.width - self.first[1]);
        row * self.strides[0] + column * self.strides[1]
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

/// Number of a position in a window, as it is stored.
trait Position: Copy {
    fn new(k: u32) -> Self;
    fn number(self) -> u32;
}

impl Position for u8 {
    #[inline(always)]
    fn new(k: u32) -> Self {
        k as u8
    }

    #[inline(always)]
    fn number(self) -> u32 {
        self.into()
    }
}

impl Position for u32 {
    #[inline(always)]
    fn new(k: u32) -> Self {
        k
    }

    #[inline(always)]
    fn number(self) -> u32 {
        self
    }
}

/// Offsets of the positions of a window from its first element.
trait PoolWindow: Copy {
    fn positions(&self) -> impl Iterator<Item = usize>;

    /// Number in the whole window of the `k`-th of these positions.
    #[inline(always)]
    fn number(&self, k: u32) -> u32 {
        k
    }
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
        let Self { input, window } = *self;
        let [height, width] = window.kernel;
        let rows = (0..height).map(move |y| y * input.w);
        rows.flat_map(move |row| (row..row + width).map(move |at| at * input.c))
    }
}

impl PoolWindow for ClippedWindow {
    #[inline(always)]
    fn positions(&self) -> impl Iterator<Item = usize> {
        let Self { size: [height, width], strides, .. } = *self;
        let rows = (0..height).map(move |y| y * strides[0]);
        rows.flat_map(move |row| (0..width).map(move |x| row + x * strides[1]))
    }

    #[inline(always)]
    fn number(&self, k: u32) -> u32 {
        let (row, column) = (k as usize / self.size[1], k as usize % self.size[1]);
        ((row + self.first[0]) * self.width + column + self.first[1]) as u32
    }
}

impl PoolShape {
    fn of_two(&self) -> Option<Window2x2> {
        let BatchShape { w, c, .. } = self.input;
        (self.window.kernel == [2; 2]).then_some(Window2x2([0, c, w * c, (w + 1) * c]))
    }
}

/// Maxima of `N` channels of a window, which begins at the first element of `x`.
#[inline(always)]
fn maximum<const N: usize, P: Position>(
    window: impl PoolWindow,
    x: &[f32],
    y: &mut [f32],
    codes: &mut [P],
) {
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
    if let Ok(codes) = <&mut [P; N]>::try_from(codes) {
        *codes = code.map(|k| P::new(window.number(k)));
    }
}

/// Maxima of all channels of a window.
#[inline(always)]
fn pixel<P: Position>(window: impl PoolWindow, x: &[f32], y: &mut [f32], codes: &mut [P]) {
    let channels = y.len();
    for c in (0..channels - channels % LANES).step_by(LANES) {
        let codes = codes.get_mut(c..c + LANES).unwrap_or_default();
        maximum::<LANES, P>(window, &x[c..], &mut y[c..c + LANES], codes);
    }
    for c in channels - channels % LANES..channels {
        let codes = codes.get_mut(c..c + 1).unwrap_or_default();
        maximum::<1, P>(window, &x[c..], &mut y[c..c + 1], codes);
    }
}

#[inline(always)]
fn maxima<P: Position>(
    shape: &PoolShape,
    window: impl PoolWindow,
    x: &[f32],
    y: &mut [f32],
    argmax: &mut [P],
) {
    let BatchShape { w, c: channels, .. } = shape.output();
    for (at, to) in shape.rows() {
        for i in 0..w {
            let (at, to) = (at + i * shape.window.stride[1] * channels, to + i * channels);
            let codes = argmax.get_mut(to..to + channels).unwrap_or_default();
            pixel(window, &x[at..], &mut y[to..to + channels], codes);
        }
    }
}

/// Maxima of windows without padding.
#[inline(always)]
fn dense_maxima<P: Position>(shape: &PoolShape, x: &[f32], y: &mut [f32], argmax: &mut [P]) {
    match shape.of_two() {
        Some(window) => maxima(shape, window, x, y, argmax),
        None => maxima(shape, *shape, x, y, argmax),
    }
}

/// Maxima of windows of any shape.
#[inline(always)]
fn clipped_maxima<P: Position>(shape: &PoolShape, x: &[f32], y: &mut [f32], argmax: &mut [P]) {
    let c = shape.input.c;
    for ((at, window), (i, y)) in shape.clipped().zip(y.chunks_exact_mut(c).enumerate()) {
        let codes = argmax.get_mut(i * c..(i + 1) * c).unwrap_or_default();
        pixel(window, &x[at..], y, codes);
    }
}

/// Maximum of each window. `argmax`, if wanted, gets per output the window position `ky·width + kx`
/// of the maximum: the first of equals in row-major order, the last NaN if there is one, as
/// PyTorch. Padding never has the maximum.
pub fn max2d_forward(isa: Isa, shape: &PoolShape, x: &[f32], y: &mut [f32], argmax: &mut [u8]) {
    shape.check();
    match (shape.output().is_empty(), shape.is_padded()) {
        (true, _) => {}
        (_, true) => clipped_forward(isa, shape, x, y, argmax),
        _ => dense_forward(isa, shape, x, y, argmax),
    }
}

/// [`max2d_forward`] of windows that are too [wide](PoolShape::is_wide) for a byte.
pub fn max2d_forward_wide(
    isa: Isa,
    shape: &PoolShape,
    x: &[f32],
    y: &mut [f32],
    argmax: &mut [u32],
) {
    shape.check();
    if !shape.output().is_empty() {
        clipped_forward_wide(isa, shape, x, y, argmax);
    }
}

// Padded and unpadded windows are separate kernels: compiled as one, the compiler unrolls the loops
// over a window less, which takes 1.3 times as long for 3 × 3.
isa_kernels! {
    fn dense_forward(isa: Isa, shape: &PoolShape, x: &[f32], y: &mut [f32], argmax: &mut [u8]) {
        dense_maxima(shape, x, y, argmax);
    }

    fn clipped_forward(isa: Isa, shape: &PoolShape, x: &[f32], y: &mut [f32], argmax: &mut [u8]) {
        clipped_maxima(shape, x, y, argmax);
    }

    fn clipped_forward_wide(isa: Isa, shape: &PoolShape, x: &[f32], y: &mut [f32],
                            argmax: &mut [u32]) {
        clipped_maxima(shape, x, y, argmax);
    }
}

/// Adds each output's gradient at the position of the maximum, for windows that are padded or
/// large: with many positions, writing one element takes less time than writing all of them.
#[inline(always)]
fn scatter<P: Position>(shape: &PoolShape, dy: &[f32], argmax: &[P], dx: GradOut<'_>) {
    shape.check();
    if !dx.accumulate {
        dx.values.fill(0.0);
    }
    let c = shape.input.c.max(1);
    let outputs = dy.chunks_exact(c).zip(argmax.chunks_exact(c));
    for ((at, window), (dy, codes)) in shape.clipped().zip(outputs) {
        for (channel, (dy, code)) in dy.iter().zip(codes).enumerate() {
            dx.values[at + window.offset(code.number() as usize) + channel] += dy;
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
            let (at, from) = (at + i * shape.window.stride[1] * channels, from + i * channels);
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
    /// Gradient of [`max2d_forward_wide`].
    pub fn max2d_backward_wide(isa: Isa, shape: &PoolShape, dy: &[f32], argmax: &[u32],
                               dx: GradOut<'_>) {
        scatter(shape, dy, argmax, dx);
    }

    /// Gradient of [`max2d_forward`]: each `dy` goes to the position that `argmax` names.
    pub fn max2d_backward(isa: Isa, shape: &PoolShape, dy: &[f32], argmax: &[u8], dx: GradOut<'_>) {
        shape.check();
        if shape.is_padded() {
            return scatter(shape, dy, argmax, dx);
        }
        let (out, [height, width]) = (shape.output(), shape.window.kernel);
        let whole = shape.window.kernel == shape.window.stride
            && shape.input.h.is_multiple_of(height)
            && shape.input.w.is_multiple_of(width);
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

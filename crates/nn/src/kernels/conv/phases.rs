//! The gradient of the input of a strided convolution, in phases: input pixels at the distance of
//! the stride meet the same taps.
//! ```text
//! 3 taps, stride 2, padding 1                input   0   1   2   3   4   5
//! phase 0 (even rows): tap 1                     taps │1│ 0,2 │1│ 0,2 │1│ 0,2
//! phase 1 (odd rows): taps 0 and 2            output   0   0,1  1   1,2  2   2,3
//! ```
//! Each phase is a product over its taps, dense in the output's gradient. With stride 1 there is
//! one phase, which has all taps. A convolution over gradients with zeros between them would
//! multiply each of them by every tap: four times as much with stride 2.

use super::ConvShape;
use super::place::{Placement, Strides};
use crate::kernels::macros::isa_kernels;
use crate::kernels::tile::Nest;
use crate::kernels::{BatchShape, GradOut, Isa, PAD};

/// The rows, or the columns, of a phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct AxisPhase {
    /// First row of the input; the next ones follow at the distance of the stride.
    pub(super) first: usize,
    /// Number of rows of the input.
    pub(super) len: usize,
    /// Taps that meet these rows, from the last to the first: number, last, and distance.
    pub(super) taps: usize,
    last_tap: usize,
    tap_step: usize,
    /// Row of the output's gradient that the last tap and the first row meet, which may be outside.
    pub(super) start: isize,
    /// Distance between the gradient's rows of consecutive taps, not 0.
    pub(super) spacing: usize,
}

/// Input pixels that meet the same taps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Phase {
    pub(super) rows: AxisPhase,
    pub(super) columns: AxisPhase,
}

impl AxisPhase {
    /// The rows from `first` on, which is less than the stride; columns with `axis` 1.
    const fn new(shape: &ConvShape, axis: usize, first: usize) -> Self {
        let size = if axis == 0 { shape.in_h } else { shape.in_w };
        let (stride, dilation) = (shape.stride[axis], shape.dilation[axis]);
        let reach = (first + shape.padding[axis]) as isize;
        let (mut first_tap, mut last_tap, mut taps, mut tap) = (0, 0, 0, 0);
        while tap < shape.kernel[axis] {
            if (reach - (tap * dilation) as isize) % stride as isize == 0 {
                first_tap = if taps == 0 { tap } else { first_tap };
                (last_tap, taps) = (tap, taps + 1);
            }
            tap += 1;
        }
        let tap_step = if taps > 1 { (last_tap - first_tap) / (taps - 1) } else { 1 };
        Self {
            first,
            len: (size - first).div_ceil(stride),
            taps,
            last_tap,
            tap_step,
            start: (reach - (last_tap * dilation) as isize) / stride as isize,
            spacing: if taps > 1 { tap_step * dilation / stride } else { 1 },
        }
    }

    /// First row, and number of rows, of the output's gradient that all phases read; one row if
    /// they read none.
    const fn read(shape: &ConvShape, axis: usize) -> (isize, usize) {
        let phases = Self::count(shape, axis);
        let (mut from, mut to, mut first) = (isize::MAX, isize::MIN, 0);
        while first < phases {
            let of = Self::new(shape, axis, first);
            if of.taps > 0 {
                let last = of.start + (of.len - 1 + (of.taps - 1) * of.spacing) as isize;
                from = if of.start < from { of.start } else { from };
                to = if last > to { last } else { to };
            }
            first += 1;
        }
        if from > to { (0, 1) } else { (from, (to - from + 1) as usize) }
    }

    /// Number of phases.
    const fn count(shape: &ConvShape, axis: usize) -> usize {
        let size = if axis == 0 { shape.in_h } else { shape.in_w };
        if shape.stride[axis] < size { shape.stride[axis] } else { size }
    }

    /// The taps, the last one first.
    fn taps(self) -> impl Iterator<Item = usize> {
        (0..self.taps).map(move |tap| self.last_tap - tap * self.tap_step)
    }
}

impl Phase {
    /// Taps.
    pub(super) const fn taps(&self) -> usize {
        self.rows.taps * self.columns.taps
    }

    /// The taps' numbers in the weights, in the order of [`Phase::depth`].
    pub(super) fn each_tap(self, shape: &ConvShape) -> impl Iterator<Item = usize> {
        let width = shape.kernel[1];
        self.rows.taps().flat_map(move |y| self.columns.taps().map(move |x| y * width + x))
    }

    /// Elements of a gradient's window, over `channels` channels.
    pub(super) fn depth(&self, channels: usize, strides: Strides) -> Nest {
        let [ny, nx] = [self.rows.taps, self.columns.taps];
        let [row, pixel] = [self.rows.spacing * strides.row, self.columns.spacing * strides.pixel];
        // A row of the window is contiguous: a pixel holds the job's channels and nothing else.
        if nx == 1 || pixel == channels {
            return Nest { counts: [1, ny, nx * channels], strides: [0, row, 1] };
        }
        Nest { counts: [ny, nx, channels], strides: [row, pixel, 1] }
    }

    /// The windows' first elements for all pixels of the phase, from [`Phase::offset`] on.
    pub(super) fn windows(&self, images: usize, strides: Strides) -> Nest {
        Nest {
            counts: [images, self.rows.len, self.columns.len],
            strides: [strides.image, strides.row, strides.pixel],
        }
    }

    /// The first window's first element.
    pub(super) fn offset(&self, placement: &Placement, strides: Strides) -> usize {
        let at = [self.rows.start + placement.origin[0], self.columns.start + placement.origin[1]];
        at[0] as usize * strides.row + at[1] as usize * strides.pixel
    }
}

impl ConvShape {
    /// The phases of the input; none of an empty input.
    pub(super) fn phases(&self) -> impl Iterator<Item = Phase> {
        let of = *self;
        (0..AxisPhase::count(self, 0)).flat_map(move |y| {
            let rows = AxisPhase::new(&of, 0, y);
            (0..AxisPhase::count(&of, 1))
                .map(move |x| Phase { rows, columns: AxisPhase::new(&of, 1, x) })
        })
    }

    /// Whether there is one phase: all pixels of the input, which meet some taps.
    pub(super) const fn has_one_phase(&self) -> bool {
        let one = AxisPhase::count(self, 0) == 1 && AxisPhase::count(self, 1) == 1;
        one && AxisPhase::new(self, 0, 0).taps > 0 && AxisPhase::new(self, 1, 0).taps > 0
    }

    /// Elements of the largest phase of one image for a job, if there are several phases.
    pub(super) const fn phase_len(&self) -> usize {
        if self.has_one_phase() {
            return 0;
        }
        let [rows, columns] = [AxisPhase::new(self, 0, 0).len, AxisPhase::new(self, 1, 0).len];
        rows * columns * self.job_in()
    }

    /// The output's gradient as the phases read it, channels of job `g`.
    pub(super) const fn gradient_placement(&self, g: usize) -> Placement {
        let c = self.job_out();
        let [(top, h), (left, w)] = [AxisPhase::read(self, 0), AxisPhase::read(self, 1)];
        Placement {
            image: self.output(),
            channels: [g * c, c],
            size: [h, w, self.scratch_channels(c)],
            origin: [-top, -left],
        }
    }

    /// Strides of the output's gradient read in place, if the phases read whole images of it.
    pub(super) const fn gradient_in_place(&self) -> Option<Strides> {
        let Placement { image, size: [h, w, c], origin: [top, left], .. } =
            self.gradient_placement(0);
        let whole = h == image.h && w == image.w && c == image.c && top == 0 && left == 0;
        if whole && self.jobs() == 1 { Some(self.gradient_placement(0).strides()) } else { None }
    }
}

/// Pixels of a phase in whole images.
#[derive(Clone, Copy)]
pub(super) struct PhasePixels {
    phase: Phase,
    /// Images.
    image: BatchShape,
    stride: [usize; 2],
    /// First channel, and number of channels.
    channels: [usize; 2],
}

impl PhasePixels {
    /// The pixels of `phase` in `images` images, channels of job `g`.
    pub(super) fn new(shape: &ConvShape, phase: Phase, images: usize, g: usize) -> Self {
        let image = BatchShape { batch: images, ..shape.input() };
        let c = shape.job_in();
        Self { phase, image, stride: shape.stride, channels: [g * c, c] }
    }

    /// Number of elements.
    pub(super) const fn len(&self) -> usize {
        self.image.batch * self.phase.rows.len * self.phase.columns.len * self.channels[1]
    }
}

isa_kernels! {
    /// Writes or adds the elements of a phase, one after the other in `from`, to their places in
    /// the images.
    pub(super) fn spread(isa: Isa, of: PhasePixels, from: &[f32], to: GradOut<'_>) {
        let PhasePixels { phase, image, stride, channels: [first, n] } = of;
        let Phase { rows, columns } = phase;
        let GradOut { values, accumulate } = to;
        let mut pixels = from.chunks_exact(n);
        for image_row in 0..image.batch * rows.len {
            let (k, y) = (image_row / rows.len, image_row % rows.len);
            let row = (k * image.h + rows.first + y * stride[0]) * image.w + columns.first;
            for x in 0..columns.len {
                let start = (row + x * stride[1]) * image.c + first;
                if let Some(from) = pixels.next() {
                    put(&mut values[start..start + n], from, accumulate);
                }
            }
        }
    }
}

/// Writes or adds a pixel, whose channels are mostly whole vectors.
#[inline(always)]
fn put(to: &mut [f32], from: &[f32], accumulate: bool) {
    let (to, to_rest) = to.as_chunks_mut::<PAD>();
    let (from, from_rest) = from.as_chunks::<PAD>();
    for (to, from) in to.iter_mut().zip(from) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = if accumulate { *to + from } else { from };
        }
    }
    for (to, &from) in to_rest.iter_mut().zip(from_rest) {
        *to = if accumulate { *to + from } else { from };
    }
}

//! The gradient of the input of a strided convolution, in phases: input pixels at the distance of
//! the stride meet the same taps.
//! ```text
//! 3 taps, stride 2, padding 1                input   0   1   2   3   4   5
//! phase 0 (even rows): tap 1                     taps │1│ 0,2 │1│ 0,2 │1│ 0,2
//! phase 1 (odd rows): taps 0 and 2            output   0   0,1  1   1,2  2   2,3
//! ```
//! Each phase is a product over its taps, dense in the output's gradient. Its rows are the phase's
//! pixels in the input's gradient. With stride 1 there is one phase, which has all taps. A
//! convolution over gradients with zeros between them would multiply each of them by every tap:
//! four times as much with stride 2.

use super::ConvShape;
use super::place::{Placement, Strides};
use crate::tile::Nest;

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

    /// Places of its pixels in the input's images.
    pub(super) fn pixels(&self, shape: &ConvShape) -> PhasePixels {
        let ([down, right], c) = (shape.stride, shape.in_c);
        let row = shape.in_w * c;
        let dense = self.rows.len == shape.in_h && self.columns.len == shape.in_w;
        PhasePixels {
            first: self.rows.first * row + self.columns.first * c,
            runs: (!dense).then_some([shape.in_h * row, down * row]),
            step: if dense { c } else { right * c },
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

    /// Whether each pixel of the input meets some taps.
    pub(super) const fn reaches_all(&self) -> bool {
        let (mut axis, mut all) = (0, true);
        while axis < 2 {
            let mut first = 0;
            while first < AxisPhase::count(self, axis) {
                all = all && AxisPhase::new(self, axis, first).taps > 0;
                first += 1;
            }
            axis += 1;
        }
        all
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

/// Places of a phase's pixels in the images, in elements.
pub(super) struct PhasePixels {
    /// The first one.
    pub(super) first: usize,
    /// Distances between images and between rows, if pixels of a row are not followed by those of
    /// the next row.
    pub(super) runs: Option<[usize; 2]>,
    /// Distance between neighbours.
    pub(super) step: usize,
}

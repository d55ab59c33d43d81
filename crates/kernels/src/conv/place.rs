//! Copies of image blocks into scratch: with a zero halo, so that windows need no branches, of one
//! group's channels only.

use crate::BatchShape;

/// Layout of images in scratch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placement {
    /// One image's rows, columns and channels as stored.
    pub(super) image: BatchShape,
    /// First channel and number of channels taken.
    pub(super) channels: [usize; 2],
    /// Rows, columns and channels of the copy; more than are taken stay zero.
    pub(super) size: [usize; 3],
    /// Row and column of the copy where pixel (0, 0) goes; pixels outside the copy are left out.
    pub(super) origin: [isize; 2],
}

/// Strides of an image block: from one image, row, pixel to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strides {
    pub(super) image: usize,
    pub(super) row: usize,
    pub(super) pixel: usize,
}

impl Placement {
    pub(super) const fn strides(&self) -> Strides {
        let [h, w, c] = self.size;
        Strides { image: h * w * c, row: w * c, pixel: c }
    }

    /// Copies whole images `x` to the start of `to`; the halo in `to` must be zero.
    pub(super) fn copy(&self, x: &[f32], to: &mut [f32]) {
        let strides = self.strides();
        let BatchShape { h, w, c, .. } = self.image;
        let columns = self.visible(1, w);
        if columns.is_empty() {
            return;
        }
        for (x, to) in x.chunks_exact(h * w * c).zip(to.chunks_exact_mut(strides.image)) {
            for y in self.visible(0, h) {
                let row = self.target(0, y) * strides.row;
                let from = &x[(y * w + columns.start) * c..(y * w + columns.end) * c];
                let to = &mut to[row + self.target(1, columns.start) * strides.pixel..];
                self.copy_row(from, to);
            }
        }
    }

    fn copy_row(&self, from: &[f32], to: &mut [f32]) {
        let (c, [first, n]) = (self.image.c, self.channels);
        let step = self.size[2];
        if step == c && n == c {
            to[..from.len()].copy_from_slice(from);
            return;
        }
        for (from, to) in from.chunks_exact(c).zip(to.chunks_mut(step)) {
            to[..n].copy_from_slice(&from[first..first + n]);
        }
    }

    /// Row or column of the copy for one of the image, which must be visible.
    const fn target(&self, axis: usize, i: usize) -> usize {
        (self.origin[axis] + i as isize) as usize
    }

    /// Rows or columns of the image that lie inside the copy.
    fn visible(&self, axis: usize, n: usize) -> std::ops::Range<usize> {
        let start = (-self.origin[axis]).max(0) as usize;
        let end = (self.size[axis] as isize - self.origin[axis]).max(0) as usize;
        start..end.min(n).max(start)
    }
}

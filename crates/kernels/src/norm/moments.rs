//! Mean and variance of each channel over some images, from sums that are fed block by block.

use super::channels;
use crate::{BatchShape, Isa, split_f64};

/// Mean and biased variance of each channel over some images of a batch: `[mean, variance][C]`.
#[derive(Debug)]
pub struct ChannelMoments<'a>(pub &'a mut [f64]);

/// Scratch of one [`StatsSums`] in f32, for `c` channels.
pub const fn stats_scratch_len(c: usize) -> usize {
    8 * c + 64
}

/// Sums for [`ChannelMoments`], fed block by block.
#[derive(Debug)]
pub struct StatsSums<'a> {
    shape: BatchShape,
    pixels: usize,
    shift: &'a mut [f32],
    sums: &'a mut [f64],
    squares: &'a mut [f64],
}

impl<'a> StatsSums<'a> {
    /// Takes [`stats_scratch_len`] f32 of scratch; `shape` has the size of an image.
    pub fn new(scratch: &'a mut [f32], shape: BatchShape) -> Self {
        let (values, rest) = split_f64(scratch, 2 * shape.c);
        values.fill(0.0);
        let (sums, squares) = values.split_at_mut(shape.c);
        Self { shape, pixels: 0, shift: &mut rest[..shape.c], sums, squares }
    }

    /// Adds images one by one: the passes over the channels of an image find it in the cache.
    pub fn add_each(&mut self, isa: Isa, images: &[f32]) {
        images.chunks(self.shape.pixels() * self.shape.c).for_each(|image| self.add(isa, image));
    }

    /// Adds the next whole images. The first image of all is read twice, first for its mean.
    pub fn add(&mut self, isa: Isa, images: &[f32]) {
        if self.pixels == 0 {
            self.shift.fill(0.0);
            let first = &images[..self.shape.pixels() * self.shape.c];
            channels::add_shifted(isa, first, self.shift, self.sums, self.squares);
            let scale = 1.0 / self.shape.pixels() as f64;
            for (shift, sum) in self.shift.iter_mut().zip(&mut *self.sums) {
                *shift = (*sum * scale) as f32;
            }
            self.sums.fill(0.0);
            self.squares.fill(0.0);
        }
        channels::add_shifted(isa, images, self.shift, self.sums, self.squares);
        self.pixels += images.len() / self.shape.c;
    }

    /// Writes mean and biased variance.
    pub fn finish(self, ChannelMoments(to): ChannelMoments<'_>) {
        let scale = 1.0 / self.pixels as f64;
        for c in 0..self.shape.c {
            let (mean, square) = (self.sums[c] * scale, self.squares[c] * scale);
            to[c] = f64::from(self.shift[c]) + mean;
            let var = square - mean * mean;
            // Rounding may leave a constant channel slightly below 0; NaN stays.
            to[self.shape.c + c] = if var < 0.0 { 0.0 } else { var };
        }
    }
}

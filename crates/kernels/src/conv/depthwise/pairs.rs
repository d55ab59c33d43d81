//! Pairs of rows of a depthwise convolution, with windows of 3 × 3 and stride 1.
//!
//! ```text
//! input                       outputs
//! row 0   . . . . . .         row 0   o o o o     rows 0 to 2 of the input
//! row 1   . . . . . .         row 1   o o o o     rows 1 to 3
//! row 2   . . . . . .
//! row 3   . . . . . .
//!
//! for each row of the input:
//!     load its weights in both rows of windows: three new ones, and the three of the row before
//!     for each of its six elements: load it, and add its products to up to six of the eight sums
//! ```
//! Eight sums that do not wait for each other hide the latency of a multiply-add, and six weights
//! leave room for them in the sixteen registers of AVX2. At edges the first or the last row or
//! column is left out, so an image with an even number of rows and a multiple of four columns has
//! no other outputs.

use super::{Depthwise, RowTaps, load};
use crate::macros::unroll;
use crate::simd::Simd;

/// Rows and columns of the windows of which two rows are computed at once.
pub(super) const SIDE: usize = 3;

/// Pixels of each of two rows that are computed together: eight sums, which do not wait for each
/// other, hide the latency of a multiply-add.
const PIXELS_OF_TWO: usize = 4;

/// Columns of the input that the windows of these pixels have together.
const COLUMNS_OF_TWO: usize = PIXELS_OF_TWO + SIDE - 1;

impl<S: Simd> RowTaps<S> {
    /// Computes two rows of outputs, of which `to` is the first.
    ///
    /// # Safety
    /// As [`RowTaps::pixels`], for [`Depthwise::pair`], which says what `has` is.
    #[inline(always)]
    pub(super) unsafe fn pair<const WHOLE: bool>(
        &self,
        of: &Depthwise<'_>,
        has: [bool; 2],
        to: *mut f32,
    ) {
        let Depthwise { columns, whole_columns: whole, channels, .. } = of;
        let to_row = columns.to_size * channels;
        let mut output = 0;
        while output < columns.outputs {
            let x = self.x.wrapping_offset(columns.row(output) * *channels as isize);
            let left = output < whole.start;
            // SAFETY: the caller's promise.
            unsafe {
                let to = to.add(output * self.steps.to);
                let to = [to, to.add(to_row)];
                output += if output + PIXELS_OF_TWO <= columns.outputs {
                    match [left, output + PIXELS_OF_TWO > whole.end] {
                        [false, false] => self.two::<WHOLE, PIXELS_OF_TWO, 0, 0>(x, has, to),
                        [false, true] => self.two::<WHOLE, PIXELS_OF_TWO, 0, 1>(x, has, to),
                        [true, false] => self.two::<WHOLE, PIXELS_OF_TWO, 1, 0>(x, has, to),
                        [true, true] => self.two::<WHOLE, PIXELS_OF_TWO, 1, 1>(x, has, to),
                    }
                } else if left {
                    self.two::<WHOLE, 1, 1, 0>(x, has, to)
                } else if output < whole.end {
                    self.two::<WHOLE, 1, 0, 0>(x, has, to)
                } else {
                    self.two::<WHOLE, 1, 0, 1>(x, has, to)
                };
            }
        }
    }

    /// Computes `P` neighbouring outputs of two rows as [`RowTaps::pixels`] does, in the same
    /// order, without the first `LEFT` and the last `RIGHT` columns of the input that their windows
    /// have. Returns `P`.
    ///
    /// # Safety
    /// As [`RowTaps::pair`].
    #[inline(always)]
    unsafe fn two<const WHOLE: bool, const P: usize, const LEFT: usize, const RIGHT: usize>(
        &self,
        x: *const f32,
        has: [bool; 2],
        to: [*mut f32; 2],
    ) -> usize {
        // Hidden row numbers: with the loop unrolled, the compiler would compute one sum after the
        // other, each addition waiting for the one before.
        let row = |r: usize| x.wrapping_add(S::opaque(r) * self.steps.x[0]);
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[S::splat(0.0); P]; 2];
            let mut weights = self.weights_of_row(0);
            if has[0] {
                let weights = [weights, weights];
                self.taps::<WHOLE, P, LEFT, RIGHT, true, false>(&mut sums, row(0), weights);
            }
            for r in 1..S::opaque(SIDE) {
                let above = weights;
                weights = self.weights_of_row(S::opaque(r));
                let weights = [weights, above];
                self.taps::<WHOLE, P, LEFT, RIGHT, true, true>(&mut sums, row(r), weights);
            }
            if has[1] {
                let weights = [weights, weights];
                self.taps::<WHOLE, P, LEFT, RIGHT, false, true>(&mut sums, row(SIDE), weights);
            }
            self.put::<WHOLE, P>(sums[0], to[0]);
            self.put::<WHOLE, P>(sums[1], to[1]);
        }
        P
    }

    /// The weights of a row of taps.
    ///
    /// # Safety
    /// As [`RowTaps::pair`].
    #[inline(always)]
    unsafe fn weights_of_row(&self, r: usize) -> [S; SIDE] {
        let [row, tap] = self.steps.weights;
        // SAFETY: the caller's promise.
        unsafe {
            let mut weights = [S::splat(0.0); SIDE];
            unroll!(SIDE, k, {
                weights[k] = S::load(self.weights.wrapping_add(r * row + k * tap));
            });
            weights
        }
    }

    /// Adds the products of a row of the input with these weights: to the sums of the first row of
    /// outputs if `FIRST`, and of the second if `SECOND`.
    ///
    /// # Safety
    /// As [`RowTaps::two`].
    #[inline(always)]
    unsafe fn taps<
        const WHOLE: bool,
        const P: usize,
        const LEFT: usize,
        const RIGHT: usize,
        const FIRST: bool,
        const SECOND: bool,
    >(
        &self,
        sums: &mut [[S; P]; 2],
        x: *const f32,
        weights: [[S; SIDE]; 2],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            unroll!(COLUMNS_OF_TWO, column, {
                if LEFT <= column && column + RIGHT < P + SIDE - 1 {
                    let x = load::<S, WHOLE>(x.wrapping_add(column * self.steps.x[1]), self.count);
                    unroll!(P, p, {
                        let k = column.wrapping_sub(p);
                        if k < SIDE {
                            if FIRST {
                                sums[0][p] = x.mul_add(weights[0][k], sums[0][p]);
                            }
                            if SECOND {
                                sums[1][p] = x.mul_add(weights[1][k], sums[1][p]);
                            }
                        }
                    });
                }
            });
        }
    }
}

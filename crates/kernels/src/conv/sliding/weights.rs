//! Gradients of the weights: sums over the output's pixels of a window's elements times the
//! gradient there.

use std::ops::Range;

use super::factors::Factors;
use super::{COLUMNS, Sliding, runs};
use crate::simd::Simd;

/// Rows of an image, and the destination of the sums of their products.
pub(super) struct WeightRows {
    /// First input pixel of each row of the window; a kernel of R rows reads the first R entries.
    a: [*const f32; 3],
    /// Stride between rows of the input.
    row: usize,
    /// Channels of the input.
    channels: usize,
    /// First pixel of the output's gradient.
    d: *const f32,
    /// Channels of the output.
    outputs: usize,
    /// Rows and columns of the output.
    size: [usize; 2],
    /// Destination of the sums, which are added: `[steps][3][lanes]` for a row of the window.
    to: *mut f32,
    /// Stride between rows of the window in `to`.
    to_row: usize,
}

pub(super) type WeightKernel = unsafe fn(&WeightRows);

/// Kernels by the number of registers of channels that they sum; of each pair, the second has a
/// last register that is not full.
pub(super) struct WeightKernels {
    /// For one row of the window.
    pub(super) one: &'static [[WeightKernel; 2]],
    /// For three rows at once: with few channels the sums of one row are too few to keep the units
    /// busy.
    pub(super) three: &'static [[WeightKernel; 2]],
}

impl Sliding {
    /// Adds the gradients of the weights for whole images `x` and the output's gradients `dy` to
    /// `dw` `[window][3][in][PAD]`. `scratch` has room for the sums.
    pub(in super::super) fn weight_gradient(
        &self,
        x: &[f32],
        dy: &[f32],
        dw: &mut [f32],
        scratch: &mut [f32],
    ) {
        let [image, out_image] =
            [0, 1].map(|side| self.rows[side] * self.width * self.channels[side]);
        assert!(x.len().is_multiple_of(image), "sliding: whole images");
        assert_eq!(x.len() / image * out_image, dy.len(), "sliding: gradient");
        let sums = &mut scratch[..self.weight_len()];
        sums.fill(0.0);
        let at_once = if self.steps() <= self.kernels.weights.three.len() && self.window == 3 {
            3
        } else {
            1
        };
        for (x, dy) in x.chunks_exact(image).zip(dy.chunks_exact(out_image)) {
            for rows in runs(self.window, at_once) {
                // First the output rows for which all rows of the window are in the image, then the
                // remaining output rows.
                let each = rows.clone().map(|row| self.output_rows(row));
                let most = each.reduce(|a, b| a.start.max(b.start)..a.end.min(b.end));
                let inner = most.filter(|inner| !inner.is_empty()).unwrap_or(0..0);
                self.add_rows(x, dy, rows.clone(), inner.clone(), sums);
                for row in rows {
                    let all = self.output_rows(row);
                    let rest = if inner.is_empty() {
                        [all, 0..0]
                    } else {
                        [all.start..inner.start, inner.end..all.end]
                    };
                    for outputs in rest {
                        self.add_rows(x, dy, row..row + 1, outputs, sums);
                    }
                }
            }
        }
        self.each_weight(|to, from| dw[to] += sums[from]);
    }

    /// Output rows for which row `row` of the window is in the image.
    fn output_rows(&self, row: usize) -> Range<usize> {
        let top = row as isize + self.first;
        let start = (-top).max(0) as usize;
        let end = (self.rows[0] as isize - top).max(0) as usize;
        start..end.min(self.rows[1]).max(start)
    }

    /// Adds the sums over some output rows for some rows of the window, all in the image.
    fn add_rows(
        &self,
        x: &[f32],
        dy: &[f32],
        rows: Range<usize>,
        outputs: Range<usize>,
        sums: &mut [f32],
    ) {
        if outputs.is_empty() {
            return;
        }
        let ([ci, co], of) = (self.channels, &self.kernels.weights);
        let kernels = if rows.len() == 3 { of.three } else { of.one };
        assert!(rows.len() == 1 || rows.len() == 3, "sliding: kernels of one row or three");
        let (row, step) = (self.width * ci, COLUMNS * self.kernels.lanes);
        let to_row = self.steps() * step;
        let dy = &dy[outputs.start * self.width * co..outputs.end * self.width * co];
        for steps in runs(self.steps(), kernels.len()) {
            let rest = steps.end * self.kernels.channels > ci;
            let a = std::array::from_fn(|r| {
                let top = rows.start + r.min(rows.len() - 1) + outputs.start;
                let x = &x[top.wrapping_add_signed(self.first) * row..][..outputs.len() * row];
                x[steps.start * self.kernels.channels..].as_ptr()
            });
            let to = &mut sums[rows.start * to_row + steps.start * step..];
            assert!((rows.len() - 1) * to_row + steps.len() * step <= to.len(), "sliding: sums");
            let rows = WeightRows {
                a,
                row,
                channels: ci,
                d: dy.as_ptr(),
                outputs: co,
                size: [outputs.len(), self.width],
                to: to.as_mut_ptr(),
                to_row,
            };
            // SAFETY: the kernel is compiled for `steps.len()` steps and an instruction set that
            // the machine has. Each row of the window has an input row for each output row; `rest`
            // is set if the last step is partial; the sums are within their slice.
            unsafe { kernels[steps.len() - 1][usize::from(rest)](&rows) };
        }
    }
}

/// The kernel: R rows of the window, N registers of channels, of which the last has one channel
/// only if `REST`.
///
/// # Safety
/// The machine has the instructions of `F`, the code is compiled for them, and the pointers cover
/// all elements that it addresses.
#[inline(always)]
pub(super) unsafe fn sums<F: Factors, const R: usize, const N: usize, const REST: bool>(
    t: &WeightRows,
) {
    let [height, width] = t.size;
    // SAFETY: the caller's promise covers every address below.
    unsafe {
        let zero = F::Register::splat(0.0);
        let mut sums = [[[zero; COLUMNS]; N]; R];
        for y in 0..height {
            let d = t.d.add(y * width * t.outputs);
            let mut at: [*const f32; R] = std::array::from_fn(|r| t.a[r].add(y * t.row));
            // Gradients of the outputs whose window has the input pixel right of the middle, in the
            // middle, and left of it.
            let (mut right, mut middle) = (zero, F::gradient(d, t.outputs));
            for x in 1..=width {
                let left =
                    if x < width { F::gradient(d.add(x * t.outputs), t.outputs) } else { zero };
                for r in 0..R {
                    for n in 0..N {
                        let p = at[r].add(n * F::CHANNELS);
                        let a = if REST && n + 1 == N {
                            F::Register::broadcast(p)
                        } else {
                            F::input(p)
                        };
                        let [of_left, of_middle, of_right] = &mut sums[r][n];
                        *of_left = a.mul_add(left, *of_left);
                        *of_middle = a.mul_add(middle, *of_middle);
                        *of_right = a.mul_add(right, *of_right);
                    }
                    at[r] = at[r].wrapping_add(t.channels);
                }
                (right, middle) = (middle, left);
            }
        }
        for (r, row) in sums.iter().enumerate() {
            for (i, &sum) in row.iter().flatten().enumerate() {
                let to = t.to.add(r * t.to_row + i * F::Register::LANES);
                sum.add(F::Register::load(to)).store(to);
            }
        }
    }
}

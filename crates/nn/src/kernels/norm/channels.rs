//! Sums per channel over `[pixels][C]`, shared by batch norm, group norm and bias gradients.
//!
//! Channels are taken in blocks of a constant width, which the compiler turns into registers.
//! Sums are f32 over at most [`ROWS`] pixels and f64 beyond.

use crate::kernels::Isa;
use crate::kernels::macros::isa_kernels;

/// Pixels that are summed in f32: the error stays below `ROWS·2⁻²⁴` of the sum of magnitudes.
const ROWS: usize = 64;

/// Width that few channels are gathered to: a row is then several whole pixels.
const WIDE: usize = 32;

/// Calls `$f::<W>(c0, …)` for blocks of channels of width 32, 16, 8 and 1 that cover `$c`.
macro_rules! channel_blocks {
    ($c:expr, $f:ident($($arg:expr),*)) => {{
        let (c, mut c0) = ($c, 0);
        while c0 + 32 <= c {
            $f::<32>(c0, $($arg),*);
            c0 += 32;
        }
        if c0 + 16 <= c {
            $f::<16>(c0, $($arg),*);
            c0 += 16;
        }
        if c0 + 8 <= c {
            $f::<8>(c0, $($arg),*);
            c0 += 8;
        }
        while c0 < c {
            $f::<1>(c0, $($arg),*);
            c0 += 1;
        }
    }};
}

/// Elements `at..at + W` of a slice.
#[inline(always)]
pub(crate) fn lanes<const W: usize>(x: &[f32], at: usize) -> &[f32; W] {
    x[at..at + W].first_chunk().expect("a slice of W elements")
}

/// Sums of `x − shift` and of its square for the columns `c0..c0 + W` of rows of `step` elements.
#[inline(always)]
fn sums<const W: usize, const SQUARES: bool>(
    x: &[f32],
    step: usize,
    c0: usize,
    shift: &[f32; W],
) -> ([f64; W], [f64; W]) {
    let (mut sum, mut square) = ([0f64; W], [0f64; W]);
    for rows in x.chunks(ROWS * step) {
        let (mut part, mut part_square) = ([0f32; W], [0f32; W]);
        for row in rows.chunks_exact(step) {
            let row = lanes::<W>(row, c0);
            for l in 0..W {
                let d = row[l] - shift[l];
                part[l] += d;
                if SQUARES {
                    part_square[l] += d * d;
                }
            }
        }
        for l in 0..W {
            sum[l] += f64::from(part[l]);
            square[l] += f64::from(part_square[l]);
        }
    }
    (sum, square)
}

#[inline(always)]
fn add_block<const W: usize>(c0: usize, x: &[f32], shift: &[f32], to: (&mut [f64], &mut [f64])) {
    let (sum, square) = sums::<W, true>(x, shift.len(), c0, lanes(shift, c0));
    for l in 0..W {
        to.0[c0 + l] += sum[l];
        to.1[c0 + l] += square[l];
    }
}

#[inline(always)]
fn add_sum_block<const W: usize>(c0: usize, x: &[f32], to: &mut [f32]) {
    let (sum, _) = sums::<W, false>(x, to.len(), c0, &[0.0; W]);
    for l in 0..W {
        to[c0 + l] += sum[l] as f32;
    }
}

isa_kernels! {
    /// Adds to `sums` and `squares` `[C]` the sums over the pixels of `x` `[pixels][C]` of
    /// `x − shift` and of its square.
    pub(crate) fn add_shifted(isa: Isa, x: &[f32], shift: &[f32], sums_to: &mut [f64],
                              squares_to: &mut [f64]) {
        let c = shift.len();
        if c == 0 {
            return;
        }
        let mut x = x;
        if WIDE.is_multiple_of(c) {
            let mut wide = [0f32; WIDE];
            wide.chunks_exact_mut(c).for_each(|w| w.copy_from_slice(shift));
            let (body, rest) = x.split_at(x.len() - x.len() % WIDE);
            let (sum, square) = sums::<WIDE, true>(body, WIDE, 0, &wide);
            for l in 0..WIDE {
                sums_to[l % c] += sum[l];
                squares_to[l % c] += square[l];
            }
            x = rest;
        }
        channel_blocks!(c, add_block(x, shift, (&mut *sums_to, &mut *squares_to)));
    }

    /// Adds to `to` `[C]` the sums over the pixels of `x` `[pixels][C]`.
    pub(crate) fn add_channel_sums(isa: Isa, x: &[f32], to: &mut [f32]) {
        channel_blocks!(to.len(), add_sum_block(x, &mut *to));
    }
}

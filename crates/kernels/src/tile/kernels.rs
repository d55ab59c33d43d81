//! The kernels for each instruction set: tiles that fit its registers.

use super::{ColumnBlock, FactorLayout, ProductJob, tile};
use crate::Isa;
use crate::simd::Simd;
use crate::simd::portable::Lanes8;

/// Blocks by name. Arguments: the function that compiles the kernel, the vector type, whether A is
/// read by lanes, V, U, and the possible numbers of rows of a tile.
macro_rules! blocks {
    ($($name:ident = $compiled:ident, $vector:ty, $lanes:literal, $v:literal, $u:literal;
       $($p:literal)*,)*) => {
        $(const $name: &ColumnBlock = &ColumnBlock {
            width: $v * <$vector as Simd>::LANES,
            lanes: <$vector as Simd>::LANES,
            kernels: &[$($compiled::<$vector, $lanes, $p, $v, $u>,)*],
        };)*
    };
}

/// The block of columns to compute next, if `cols` remain. Only its last vector may have fewer
/// columns than lanes, and none has no column.
pub(super) fn block(isa: Isa, job: &ProductJob<'_>, cols: usize) -> &'static ColumnBlock {
    #[cfg(target_arch = "x86_64")]
    let block = x86::block(isa, job, cols);
    #[cfg(target_arch = "aarch64")]
    let block = neon::block(isa.level(), job.mode, cols);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let (block, _) = (None, isa);
    block.unwrap_or_else(|| portable::block(job.mode, cols))
}

mod portable {
    use super::{ColumnBlock, FactorLayout, Lanes8, Simd, tile};

    pub(super) fn block(mode: FactorLayout, cols: usize) -> &'static ColumnBlock {
        match (mode, cols) {
            (FactorLayout::Lanes, _) => LANES,
            (_, ..=8) => X1,
            _ => X2,
        }
    }

    blocks! {
        X1 = tile, Lanes8, false, 1, 4; 1 2 3 4,
        X2 = tile, Lanes8, false, 2, 1; 1 2,
        LANES = tile, Lanes8, true, 1, 4; 1 2 3 4,
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{ColumnBlock, FactorLayout, Simd, tile};
    use crate::isa::Level;
    use crate::simd::neon::Quad;

    pub(super) fn block(
        level: Level,
        mode: FactorLayout,
        cols: usize,
    ) -> Option<&'static ColumnBlock> {
        Some(match (level, mode, cols) {
            (Level::Portable, ..) => return None,
            (_, FactorLayout::Lanes, ..=4) => LANES_X1,
            (_, FactorLayout::Lanes, _) => LANES_X2,
            (_, _, ..=4) => X1,
            (_, _, ..=12) => X2,
            _ => X4,
        })
    }

    // At most 24 sums, with registers for B and A, and as many rows as addresses fit into
    // registers. Not unrolled: an address and an index make the operand of a load.
    blocks! {
        X1 = tile, Quad, false, 1, 1; 1 2 3 4 5 6 7 8 9 10 11 12,
        X2 = tile, Quad, false, 2, 1; 1 2 3 4 5 6 7 8 9 10 11,
        X4 = tile, Quad, false, 4, 1; 1 2 3 4 5 6,
        LANES_X1 = tile, Quad, true, 1, 1; 1 2 3 4 5 6 7 8 9 10 11 12,
        LANES_X2 = tile, Quad, true, 2, 1; 1 2 3 4 5 6 7 8 9,
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::pairs::pairs;
    use super::super::{MatrixLayout, ResolvedTile};
    use super::{ColumnBlock, FactorLayout, Isa, ProductJob, Simd, tile};
    use crate::isa::Level;
    use crate::simd::{avx2::Ymm, avx512::Zmm};

    pub(super) fn block(
        isa: Isa,
        job: &ProductJob<'_>,
        cols: usize,
    ) -> Option<&'static ColumnBlock> {
        let run = job.depth.counts[2];
        if job.b_layout == MatrixLayout::Pairs {
            return Some(ZMM_PAIRS);
        }
        Some(match (isa.level(), job.mode, cols) {
            (Level::Portable | Level::Neon, ..) => return None,
            (Level::Avx2, FactorLayout::Lanes, _) => YMM_LANES,
            (Level::Avx2, _, ..=8) => YMM_X1,
            (Level::Avx2, ..) => YMM_X2,
            (Level::Avx512, FactorLayout::Lanes, ..=8) => EVEX_LANES,
            (Level::Avx512, FactorLayout::Lanes, _) => ZMM_LANES,
            // Unrolled by three: three input channels times three columns are a multiple of three,
            // and not of four.
            (Level::Avx512, _, ..=8) if run.is_multiple_of(3) && !run.is_multiple_of(4) => {
                EVEX_X1_THIRDS
            }
            (Level::Avx512, _, ..=8) => EVEX_X1,
            (Level::Avx512, _, ..=24) => ZMM_X1,
            (Level::Avx512, ..) => ZMM_X2,
        })
    }

    /// # Safety
    /// As [`tile`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<S: Simd, const L: bool, const P: usize, const V: usize, const U: usize>(
        t: &ResolvedTile,
    ) {
        // SAFETY: the caller's promise.
        unsafe { tile::<S, L, P, V, U>(t) }
    }

    /// `Ymm` compiled here has 32 registers: for 8 columns that is better than half a `zmm`.
    ///
    /// # Safety
    /// As [`tile`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn avx512<S: Simd, const L: bool, const P: usize, const V: usize, const U: usize>(
        t: &ResolvedTile,
    ) {
        // SAFETY: the caller's promise.
        unsafe { tile::<S, L, P, V, U>(t) }
    }

    blocks! {
        YMM_X1 = avx2, Ymm, false, 1, 4; 1 2 3 4 5 6 7 8 9 10,
        YMM_X2 = avx2, Ymm, false, 2, 1; 1 2 3 4 5 6,
        YMM_LANES = avx2, Ymm, true, 1, 2; 1 2 3 4 5 6 7 8 9 10 11 12,
        EVEX_X1 = avx512, Ymm, false, 1, 4;
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28,
        EVEX_X1_THIRDS = avx512, Ymm, false, 1, 3;
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28,
        EVEX_LANES = avx512, Ymm, true, 1, 4;
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24,
        ZMM_X1 = avx512, Zmm, false, 1, 4;
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28,
        ZMM_X2 = avx512, Zmm, false, 2, 1; 1 2 3 4 5 6 7 8 9 10 11 12 13 14,
        ZMM_LANES = avx512, Zmm, true, 1, 4;
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24,
        ZMM_PAIRS = pairs, Ymm, false, 1, 4;
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26,
    }
}

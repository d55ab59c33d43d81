//! The kernels for each instruction set and number of output channels.

#[cfg(target_arch = "x86_64")]
use super::factors::TwoChannels;
use super::factors::{Factors, One};
use super::{Isa, Level, SlidingKernels, weights};
use crate::simd::Simd;
use crate::simd::portable::Lanes8;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Ymm, avx512::Zmm};
#[cfg(target_arch = "aarch64")]
use crate::simd::{neon::Quad, several::Several};

/// The kernels for `columns` output channels, if there are any.
pub(super) fn kernels(isa: Isa, columns: usize) -> Option<&'static SlidingKernels> {
    match (isa.level(), columns) {
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, ..=8) if isa.halves() => Some(&x86::EVEX),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, ..=8) => Some(&x86::ZMM_TWO),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, ..=16) => Some(&x86::ZMM),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx2, ..=8) => Some(&x86::YMM),
        #[cfg(target_arch = "aarch64")]
        (Level::Neon, ..=4) => Some(&QUAD),
        #[cfg(target_arch = "aarch64")]
        (Level::Neon, ..=8) => Some(&QUAD_TWO),
        (Level::Portable, ..=8) => Some(&PORTABLE),
        _ => None,
    }
}

/// The kernels of an instruction set. Arguments: the functions for tiles and for sums that are
/// compiled for it, their factors, pixels of a tile, and registers of channels that are summed
/// together, for one row of a window and for three rows.
macro_rules! kernels {
    ($tile:path, $sums:path, $factors:ty;
     tiles $($p:literal)*; one row $($n:literal)*; three rows $($m:literal)*) => {{
        #[allow(unused_imports)]
        use $sums as sums;
        use $tile as tile;
        SlidingKernels {
            channels: <$factors as Factors>::CHANNELS,
            lanes: <<$factors as Factors>::Register as Simd>::LANES,
            tiles: &[$(tile::<$factors, $p>),*],
            weights: weights::WeightKernels {
                one: &[$([sums::<$factors, 1, $n, false>, sums::<$factors, 1, $n, true>]),*],
                three: &[$([sums::<$factors, 3, $m, false>, sums::<$factors, 3, $m, true>]),*],
            },
        }
    }};
}

/// No kernels for sums of windows' elements: the compiler keeps the sums in memory, so that the
/// tile kernel is faster.
static PORTABLE: SlidingKernels = kernels! {
    super::tile::tile, super::weights::sums, One<Lanes8>;
    tiles 1 2 3; one row; three rows
};

/// 32 registers: 14 sums, 3 weights, and 15 inputs, which the compiler loads ahead.
#[cfg(target_arch = "aarch64")]
static QUAD: SlidingKernels = kernels! {
    super::tile::tile, super::weights::sums, One<Quad>;
    tiles 1 2 3 4 5 6 7 8 9 10 11 12 13 14; one row 1 2 3 4 5 6 7 8; three rows 1 2
};

/// At most 8 channels, in two registers: 16 sums, 6 weights, and 10 inputs.
#[cfg(target_arch = "aarch64")]
static QUAD_TWO: SlidingKernels = kernels! {
    super::tile::tile, super::weights::sums, One<Several<Quad, 2>>;
    tiles 1 2 3 4 5 6 7 8; one row 1 2 3; three rows 1
};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::{SlidingKernels, tile, weights};
    use super::{Factors, One, Simd, TwoChannels, Ymm, Zmm};

    /// # Safety
    /// As [`tile::tile`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn tile_avx2<F: Factors, const P: usize>(t: &tile::RowTile) {
        // SAFETY: the caller's promise.
        unsafe { tile::tile::<F, P>(t) }
    }

    /// # Safety
    /// As [`tile::tile`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn tile_avx512<F: Factors, const P: usize>(t: &tile::RowTile) {
        // SAFETY: the caller's promise.
        unsafe { tile::tile::<F, P>(t) }
    }

    /// # Safety
    /// As [`weights::sums`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn sums_avx2<F: Factors, const R: usize, const N: usize, const REST: bool>(
        t: &weights::WeightRows,
    ) {
        // SAFETY: the caller's promise.
        unsafe { weights::sums::<F, R, N, REST>(t) }
    }

    /// # Safety
    /// As [`weights::sums`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn sums_avx512<F: Factors, const R: usize, const N: usize, const REST: bool>(
        t: &weights::WeightRows,
    ) {
        // SAFETY: the caller's promise.
        unsafe { weights::sums::<F, R, N, REST>(t) }
    }

    /// 16 registers: 12 sums, 3 weights or gradients, and an input.
    pub(super) static YMM: SlidingKernels = kernels! {
        self::tile_avx2, self::sums_avx2, One<Ymm>;
        tiles 1 2 3 4 5 6 7 8 9 10 11 12; one row 1 2 3 4; three rows 1
    };

    /// 32 registers. Tiles leave some of them unused, because wider tiles are no faster.
    pub(super) static ZMM: SlidingKernels = kernels! {
        self::tile_avx512, self::sums_avx512, One<Zmm>;
        tiles 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; one row 1 2 3 4 5 6 7 8; three rows 1 2 3
    };

    /// At most 8 channels, one input channel at a time: pairs would multiply by zeros if the number
    /// of channels is odd.
    pub(super) static EVEX: SlidingKernels = kernels! {
        self::tile_avx512, self::sums_avx512, One<Ymm>;
        tiles 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; one row 1 2 3 4 5 6 7 8; three rows 1 2 3
    };

    /// At most 8 channels, two input channels at a time.
    pub(super) static ZMM_TWO: SlidingKernels = kernels! {
        self::tile_avx512, self::sums_avx512, TwoChannels;
        tiles 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; one row 1 2 3 4; three rows 1 2
    };
}

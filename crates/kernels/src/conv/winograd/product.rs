//! Products of the points: many rows, which are neighbours in memory, and a short depth. Kernels of
//! this file compute products of few channels. They are compiled for the distance from row to row,
//! so they need no addresses of rows; the tile kernel loads one for every four multiply-adds.

use crate::isa::Level;
use crate::macros::{unroll, unroll_rows};
use crate::simd::Simd;
#[cfg(target_arch = "aarch64")]
use crate::simd::neon::Quad;
use crate::simd::portable::Lanes8;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Ymm, avx512::Zmm};
use crate::tile::{self, FactorLayout, MatrixLayout, Nest, ProductJob};
use crate::{Isa, pad16};

/// `C[r][c] = Σ_k A[r][k]·B[k][c]`.
pub(super) struct PointProduct<'a> {
    /// `[rows][depth]`.
    pub(super) a: &'a [f32],
    pub(super) depth: usize,
    /// `[depth]` rows of the columns, padded.
    pub(super) b: &'a [f32],
    /// Layout of B.
    pub(super) layout: MatrixLayout,
    /// `[rows][cols]`, overwritten.
    pub(super) c: &'a mut [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// `C[k][c] += Σ_t A[t][k]·B[t][c]`.
pub(super) struct PointSums<'a> {
    /// `[terms][depth]`.
    pub(super) a: &'a [f32],
    /// A multiple of 8.
    pub(super) depth: usize,
    /// `[terms][cols]`.
    pub(super) b: &'a [f32],
    /// `[depth][pad16(cols)]`.
    pub(super) c: &'a mut [f32],
    pub(super) terms: usize,
    pub(super) cols: usize,
}

/// Addresses of a kernel, and distances between rows, in elements.
struct ProductCall {
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    a_step: usize,
    b_step: usize,
    c_step: usize,
    /// For sums, the number of terms; for products, the number of rows divided by the rows that the
    /// kernel computes at a time.
    len: usize,
}

type ProductKernel = unsafe fn(&ProductCall);

/// Most columns for which the kernels of this file are faster: the columns of one panel.
const FEW: usize = 32;

/// Depths that kernels of [`PointProduct`] are compiled for.
const DEPTHS: [usize; 3] = [8, 16, 32];

/// Elements of a term that the kernels of [`PointSums`] take.
const AT_ONCE: usize = 8;

/// Rows, and the kernel for them.
type OfRows = (usize, ProductKernel);

/// Kernels for one number of columns.
struct ProductKernels {
    cols: usize,
    /// Kernels for each of [`DEPTHS`], from the largest number of rows to the smallest.
    forward: [&'static [OfRows]; DEPTHS.len()],
    sums: ProductKernel,
}

impl PointProduct<'_> {
    /// Computes it.
    pub(super) fn run(self, isa: Isa) {
        let Self { a, depth, b, layout, c, rows, cols } = self;
        let compiled = DEPTHS.iter().position(|of| *of == depth);
        let Some(of) = compiled.filter(|_| cols <= FEW) else {
            let job = ProductJob {
                mode: FactorLayout::Broadcast,
                a,
                rows: Nest { counts: [1, 1, rows], strides: [0, 0, depth] },
                depth: Nest { counts: [1, 1, depth], strides: [0, 0, 1] },
                b,
                b_layout: layout,
                c,
                c_step: cols,
                c_runs: None,
                cols,
                bias: None,
                accumulate: false,
            };
            return tile::run(isa, job);
        };
        let b_step = pad16(cols);
        assert!(rows * depth <= a.len(), "product: A");
        assert!(depth * b_step <= b.len() && rows * cols <= c.len(), "product: B and C");
        assert!(cols.is_multiple_of(8), "product: whole vectors");
        for (col, kernels) in blocks(isa, cols) {
            let mut row = 0;
            for &(n, kernel) in kernels.forward[of] {
                let len = (rows - row) / n;
                if len > 0 {
                    // SAFETY: the kernel is of an instruction set that the machine has; `len` times
                    // `n` rows from `row` on and its columns from `col` on are there, as checked.
                    unsafe {
                        kernel(&ProductCall {
                            a: a.as_ptr().add(row * depth),
                            b: b.as_ptr().add(col),
                            c: c.as_mut_ptr().add(row * cols + col),
                            a_step: depth,
                            b_step,
                            c_step: cols,
                            len,
                        });
                    }
                }
                row += len * n;
            }
        }
    }
}

impl PointSums<'_> {
    /// Computes it.
    pub(super) fn run(self, isa: Isa) {
        let Self { a, depth, b, c, terms, cols } = self;
        if cols > FEW || !DEPTHS.contains(&depth) {
            let job = ProductJob {
                mode: FactorLayout::Broadcast,
                a,
                rows: Nest { counts: [1, 1, depth], strides: [0, 0, 1] },
                depth: Nest { counts: [1, 1, terms], strides: [0, 0, depth] },
                b,
                b_layout: MatrixLayout::Rows(cols),
                c,
                c_step: pad16(cols),
                c_runs: None,
                cols,
                bias: None,
                accumulate: true,
            };
            return tile::run(isa, job);
        }
        let c_step = pad16(cols);
        assert!(terms * depth <= a.len(), "product: A");
        assert!(terms * cols <= b.len() && depth * c_step <= c.len(), "product: B and C");
        assert!(cols.is_multiple_of(8), "product: whole vectors");
        assert!(depth.is_multiple_of(AT_ONCE), "product: whole runs of the depth");
        for (col, kernels) in blocks(isa, cols) {
            for k in (0..depth).step_by(AT_ONCE) {
                // SAFETY: the kernel is of an instruction set that the machine has; a run of
                // elements from `k` on of each term and its columns from `col` on are there, as
                // checked.
                unsafe {
                    (kernels.sums)(&ProductCall {
                        a: a.as_ptr().add(k),
                        b: b.as_ptr().add(col),
                        c: c.as_mut_ptr().add(k * c_step + col),
                        a_step: depth,
                        b_step: cols,
                        c_step,
                        len: terms,
                    });
                }
            }
        }
    }
}

/// The first column of each block, and its kernels.
fn blocks(isa: Isa, cols: usize) -> impl Iterator<Item = (usize, &'static ProductKernels)> {
    let mut col = 0;
    std::iter::from_fn(move || {
        let (at, left) = (col, cols - col);
        let kernels = (left > 0).then(|| kernels(isa.level(), left))?;
        col += kernels.cols;
        Some((at, kernels))
    })
}

/// Computes R rows of V vectors at a time, over a depth of D. The loop over the depth is unrolled U
/// times; U divides the depth.
///
/// # Safety
/// The machine has the instructions of `S`, the code is compiled for them, and the call's pointers
/// cover all elements that it addresses.
#[inline(always)]
unsafe fn forward<S: Simd, const V: usize, const U: usize, const D: usize, const R: usize>(
    of: &ProductCall,
) {
    // SAFETY: the caller's promise covers every address below.
    unsafe {
        let (mut a, mut c) = (of.a, of.c);
        for _ in 0..of.len {
            let mut sums = [[S::splat(0.0); V]; R];
            // Keeping all factors in registers would leave none for the sums.
            let (mut at, mut b) = (a, of.b.add(S::opaque(0)));
            for _ in 0..D / U {
                unroll!(U, k, {
                    add_depth::<S, V, D, R>(at.add(k), b.add(k * of.b_step), &mut sums);
                });
                (at, b) = (at.wrapping_add(U), b.wrapping_add(U * of.b_step));
            }
            unroll_rows!(R, r, {
                unroll!(V, v, {
                    sums[r][v].store(c.add(r * of.c_step + v * S::LANES));
                });
            });
            (a, c) = (a.wrapping_add(R * D), c.wrapping_add(R * of.c_step));
        }
    }
}

/// # Safety
/// As [`forward`].
#[inline(always)]
unsafe fn add_depth<S: Simd, const V: usize, const D: usize, const R: usize>(
    a: *const f32,
    b: *const f32,
    sums: &mut [[S; V]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut factors = [S::splat(0.0); V];
        unroll!(V, v, {
            factors[v] = S::load(b.add(v * S::LANES));
        });
        unroll_rows!(R, r, {
            let x = S::broadcast(a.add(r * D));
            unroll!(V, v, {
                sums[r][v] = x.mul_add(factors[v], sums[r][v]);
            });
        });
    }
}

/// Sums for [`AT_ONCE`] elements of each term and V vectors.
///
/// # Safety
/// As [`forward`].
#[inline(always)]
unsafe fn sums<S: Simd, const V: usize>(of: &ProductCall) {
    // SAFETY: the caller's promise covers every address below.
    unsafe {
        let (mut a, mut b) = (of.a, of.b);
        let mut sums = [[S::splat(0.0); V]; AT_ONCE];
        for _ in 0..of.len {
            let mut factors = [S::splat(0.0); V];
            unroll!(V, v, {
                factors[v] = S::load(b.add(v * S::LANES));
            });
            unroll!(AT_ONCE, k, {
                let x = S::broadcast(a.add(k));
                unroll!(V, v, {
                    sums[k][v] = x.mul_add(factors[v], sums[k][v]);
                });
            });
            (a, b) = (a.wrapping_add(of.a_step), b.wrapping_add(of.b_step));
        }
        unroll!(AT_ONCE, k, {
            unroll!(V, v, {
                let to = of.c.add(k * of.c_step + v * S::LANES);
                sums[k][v].add(S::load(to)).store(to);
            });
        });
    }
}

/// The widest kernels that `cols` columns fill.
fn kernels(level: Level, cols: usize) -> &'static ProductKernels {
    match (level, cols) {
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, 32..) => &x86::ZMM_TWO,
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, 16..) => &x86::ZMM,
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, _) => &x86::EVEX,
        #[cfg(target_arch = "x86_64")]
        (Level::Avx2, _) => &x86::YMM,
        #[cfg(target_arch = "aarch64")]
        (Level::Neon, _) => &QUAD,
        _ => &PORTABLE,
    }
}

/// The kernels of an instruction set: functions compiled for it, vectors, their number, and rows.
macro_rules! kernels {
    ($forward:ident, $sums:ident, $S:ty, $v:literal, $u:literal, $rows:tt) => {
        ProductKernels {
            cols: $v * <$S as Simd>::LANES,
            forward: [
                kernels!(@ $forward, $S, $v, $u, 8, $rows),
                kernels!(@ $forward, $S, $v, $u, 16, $rows),
                kernels!(@ $forward, $S, $v, $u, 32, $rows),
            ],
            sums: $sums::<$S, $v>,
        }
    };
    (@ $forward:ident, $S:ty, $v:literal, $u:literal, $d:literal, [$($r:literal)*]) => {
        &[$(($r, $forward::<$S, $v, $u, $d, $r>)),*]
    };
}

static PORTABLE: ProductKernels = kernels!(forward, sums, Lanes8, 1, 1, [4 1]);

/// 8 columns.
#[cfg(target_arch = "aarch64")]
static QUAD: ProductKernels = kernels!(forward, sums, Quad, 2, 4, [8 4 2 1]);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ProductCall, ProductKernels, Simd, Ymm, Zmm, forward, sums};

    /// # Safety
    /// As [`forward`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn forward_avx2<
        S: Simd,
        const V: usize,
        const U: usize,
        const D: usize,
        const R: usize,
    >(
        of: &ProductCall,
    ) {
        // SAFETY: the caller's promise.
        unsafe { forward::<S, V, U, D, R>(of) }
    }

    /// # Safety
    /// As [`sums`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn sums_avx2<S: Simd, const V: usize>(of: &ProductCall) {
        // SAFETY: the caller's promise.
        unsafe { sums::<S, V>(of) }
    }

    /// # Safety
    /// As [`forward`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn forward_avx512<
        S: Simd,
        const V: usize,
        const U: usize,
        const D: usize,
        const R: usize,
    >(
        of: &ProductCall,
    ) {
        // SAFETY: the caller's promise.
        unsafe { forward::<S, V, U, D, R>(of) }
    }

    /// # Safety
    /// As [`sums`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn sums_avx512<S: Simd, const V: usize>(of: &ProductCall) {
        // SAFETY: the caller's promise.
        unsafe { sums::<S, V>(of) }
    }

    pub(super) static YMM: ProductKernels =
        kernels!(forward_avx2, sums_avx2, Ymm, 1, 1, [12 8 4 2 1]);
    /// 8 columns, with the registers of AVX-512.
    pub(super) static EVEX: ProductKernels =
        kernels!(forward_avx512, sums_avx512, Ymm, 1, 8, [16 8 4 2 1]);
    pub(super) static ZMM: ProductKernels =
        kernels!(forward_avx512, sums_avx512, Zmm, 1, 8, [16 8 4 2 1]);
    pub(super) static ZMM_TWO: ProductKernels =
        kernels!(forward_avx512, sums_avx512, Zmm, 2, 8, [12 8 4 2 1]);
}

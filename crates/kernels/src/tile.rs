//! The register-tile product: every convolution and linear layer, forward and backward, is a
//! [`ProductJob`] of it, unless `conv::sliding`, `conv::depthwise` or `conv::winograd` computes it.
//!
//! A job computes, for rows `r` and columns `c`,
//! ```text
//! C[r·c_step + c] (+)= bias[c] + Σ_k A[rows(r) + depth(k)] · B[k][c]
//! ```
//! where `rows` and `depth` are three nested loops each ([`Nest`]), so that windows of an image are
//! read in place. Rows of C may be strided by the outer loops of `rows`, too (`c_runs`). In
//! [`FactorLayout::Lanes`] (depthwise) A has a value per column, too: `A[… + c]`.
//!
//! # Method
//! C is cut into tiles of P rows × V vectors of columns. The P·V sums of a tile stay in registers
//! over the whole depth, and are written once:
//! ```text
//! for each block of V vectors of columns:                     k →             V vectors
//!     for each tile of P rows:                              ┌───────┐ P     ┌─────────┐ k
//!         sum[P][V] = 0                                     │   A   │   ×   │    B    │ ↓
//!         for k in depth:                                   └───────┘       └─────────┘
//!             b[V] = B[k][block]            V loads                     =   ┌─────────┐ P
//!             for p in P:                                                   │  sums   │
//!                 a = A[row p + depth(k)]   1 broadcast                     └─────────┘
//!                 sum[p] += a · b           V multiply-adds             all in registers
//!         C[tile] = sum + bias
//! ```
//!
//! # Speed
//! A step of the depth takes P + V loads for P·V multiply-adds, and no store. P·V independent sums
//! hide the latency of a multiply-add. Rows are dealt so that tiles differ by at most one row: a
//! kernel exists for each number of rows, and none computes a surplus row. The address of each row
//! is formed once for U steps of the depth, which are unrolled.
//!
//! With at most 8 columns, half of a register of 16 lanes is empty. With AVX-512, products of 5 to
//! 8 columns take two elements of the depth at a time (`pairs`). A wide product of few rows divides
//! its columns among idle workers (`columns`); no column depends on another, so the parts change no
//! bit.
//!
//! # Assumptions
//! - B is padded to whole vectors ([`readable_cols`]) and lies in rows, panels or pairs
//!   ([`MatrixLayout`]).
//! - Sums go over k in order; with `pairs`, even and odd k go into two sums, each in order, which
//!   are added at the end. Each multiply-add rounds once on instruction sets with fused
//!   multiply-add.

mod columns;
mod kernels;
mod layout;
mod nest;
#[cfg(target_arch = "x86_64")]
mod pairs;

use columns::{SharedOutput, in_columns};
pub(crate) use layout::{MatrixLayout, in_panels, paired_len, takes_pairs, to_pairs, to_panels};
use layout::{PANEL, panel};
pub(crate) use nest::Nest;
use nest::RowWalk;

use super::isa::Level;
use super::macros::{unroll, unroll_rows};
use super::simd::Simd;
use super::{Isa, PAD, pad16};

/// Values of A for the columns of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FactorLayout {
    /// One value for all columns.
    Broadcast,
    /// One value per column.
    Lanes,
}

/// One product; see the module. `B` (and `A` in [`FactorLayout::Lanes`]) must be readable up to a
/// multiple of 8 columns, and up to a multiple of [`PAD`] if more than 8 columns remain at the end.
pub(crate) struct ProductJob<'a> {
    pub(crate) mode: FactorLayout,
    pub(crate) a: &'a [f32],
    pub(crate) rows: Nest,
    pub(crate) depth: Nest,
    pub(crate) b: &'a [f32],
    pub(crate) b_layout: MatrixLayout,
    pub(crate) c: &'a mut [f32],
    pub(crate) c_step: usize,
    /// Strides of C for the two outer loops of `rows`, if it is not dense: then `c_step` is the
    /// stride of the inner loop only.
    pub(crate) c_runs: Option<[usize; 2]>,
    pub(crate) cols: usize,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) accumulate: bool,
}

impl ProductJob<'_> {
    /// Places of the rows of C: one run, or a run for each turn of the outer loops of `rows`.
    fn c_rows(&self) -> Nest {
        match self.c_runs {
            None => Nest { counts: [1, 1, self.rows.len()], strides: [0, 0, self.c_step] },
            Some([outer, middle]) => {
                Nest { counts: self.rows.counts, strides: [outer, middle, self.c_step] }
            }
        }
    }
}

/// Columns of B that are read for `cols` columns: whole vectors.
pub(crate) const fn readable_cols(cols: usize) -> usize {
    match cols % PAD {
        0 => cols,
        1..=8 => cols / PAD * PAD + 8,
        _ => cols.next_multiple_of(PAD),
    }
}

/// Most rows of a tile, over all instruction sets.
const ROWS_MAX: usize = 28;

/// A tile with its pointers resolved.
struct ResolvedTile {
    a: [*const f32; ROWS_MAX],
    depth: Nest,
    b: *const f32,
    b_step: usize,
    to: TileStore,
}

/// Destination of a tile's sums.
pub(super) struct TileStore {
    pub(super) c: *mut f32,
    pub(super) c_step: usize,
    /// Number of valid columns of the last vector; the other lanes are neither read from C nor
    /// written to it.
    pub(super) last: usize,
    /// Null where there is none.
    pub(super) bias: *const f32,
    pub(super) accumulate: bool,
}

type TileKernel = unsafe fn(&ResolvedTile);

/// Width and kernels of a block of columns.
struct ColumnBlock {
    /// Columns of the block, whole vectors.
    width: usize,
    lanes: usize,
    /// The kernel for a tile of one row, of two, and so on.
    kernels: &'static [TileKernel],
}

/// Runs a job.
pub(crate) fn run(isa: Isa, job: ProductJob<'_>) {
    let (rows, depth) = (job.rows.len(), job.depth.len());
    if rows == 0 || job.cols == 0 || depth == 0 {
        return;
    }
    let cols = readable_cols(job.cols);
    let a_cols = if job.mode == FactorLayout::Lanes { cols } else { 1 };
    assert!(job.rows.last() + job.depth.last() + a_cols <= job.a.len(), "tile: A is too short");
    let b_len = match job.b_layout {
        MatrixLayout::Rows(step) => (depth - 1) * step + cols,
        MatrixLayout::Panels => depth * pad16(job.cols),
        MatrixLayout::Pairs => {
            let fits =
                job.cols <= 8 && job.depth.strides[2] == 1 && job.mode == FactorLayout::Broadcast;
            assert!(fits && isa.level() == Level::Avx512, "tile: no pairs");
            paired_len(&job.depth)
        }
    };
    assert!(b_len <= job.b.len(), "tile: B is too short");
    let c_rows = job.c_rows();
    assert!(c_rows.last() + job.cols <= job.c.len(), "tile: C is too short");
    assert!(c_rows.are_apart(job.cols), "tile: rows of C overlap");
    assert!(job.bias.is_none_or(|bias| bias.len() >= job.cols), "tile: bias is too short");
    let c = SharedOutput(job.c.as_mut_ptr());
    in_columns(job.cols, rows * depth, |cols| {
        let mut col = cols.start;
        while col < cols.end {
            let block = kernels::block(isa, &job, job.cols - col);
            // SAFETY: the block lies within these columns, as its width divides a panel's; its
            // kernels are compiled for `isa`, and this machine has its instructions; A, B, C and
            // bias were checked above, up to `readable_cols`; no other thread has these columns.
            unsafe { run_block(&job, &c, block, col) };
            col += block.width;
        }
    });
}

/// # Safety
/// The machine has the instructions of `block`, and the slices of `job` cover all elements that it
/// addresses. `c` is the address of the job's C, in which no other thread uses the block's columns.
unsafe fn run_block(
    job: &ProductJob<'_>,
    SharedOutput(c): &SharedOutput,
    block: &ColumnBlock,
    col: usize,
) {
    let c_rows = job.c_rows();
    let [outer, middle, rows] = c_rows.counts;
    let rows_max = block.kernels.len();
    let tiles = rows.div_ceil(rows_max);
    // Tiles of equal size, the first `longer` one row taller: no tile computes a surplus row.
    let (size, longer) = (rows / tiles, rows % tiles);
    let kernels = [size, (size + 1).min(rows_max)].map(|rows| block.kernels[rows - 1]);
    let a_col = if job.mode == FactorLayout::Lanes { col } else { 0 };
    let width = block.width.min(job.cols - col);
    let (b, b_step) = match job.b_layout {
        MatrixLayout::Rows(step) => (col, step),
        // A block lies within a panel: it begins at a multiple of its width, which divides a
        // panel's.
        MatrixLayout::Panels => {
            let (start, step) = panel(job.depth.len(), job.cols, col);
            (start + col % PANEL, step)
        }
        MatrixLayout::Pairs => (0, PAD),
    };
    let mut tile = ResolvedTile {
        a: [std::ptr::null(); ROWS_MAX],
        depth: job.depth,
        // SAFETY: the first row of column `col`, which B and C have.
        b: unsafe { job.b.as_ptr().add(b) },
        b_step,
        to: TileStore {
            c: std::ptr::null_mut(),
            c_step: job.c_step,
            last: width - (width - 1) / block.lanes * block.lanes,
            // SAFETY: as above, for the bias.
            bias: job.bias.map_or(std::ptr::null(), |bias| unsafe { bias.as_ptr().add(col) }),
            accumulate: job.accumulate,
        },
    };
    let mut rows = RowWalk::new(job.rows);
    for run in 0..outer * middle {
        let run = run / middle * c_rows.strides[0] + run % middle * c_rows.strides[1];
        let mut first = 0;
        for t in 0..tiles {
            let n = size + usize::from(t < longer);
            // SAFETY: rows of A, of which there are no more than the tiles have together.
            unsafe { rows.next(job.a.as_ptr().add(a_col), &mut tile.a[..n]) };
            // SAFETY: row `first` of the run and column `col` of C.
            tile.to.c = unsafe { c.add(run + first * job.c_step + col) };
            // SAFETY: the caller's promise; the tile has `n` row pointers.
            unsafe { kernels[usize::from(t < longer)](&tile) };
            first += n;
        }
    }
}

/// The kernel: P rows × V vectors, U depth steps at a time (each row's address is formed once for
/// all of them). It has no closures: not every build inlines them, and a call would move all sums
/// to memory.
///
/// # Safety
/// The machine has the instructions of `S`, the code is compiled for them, and the tile's pointers
/// cover all elements that it addresses.
#[inline(always)]
unsafe fn tile<S: Simd, const LANES_MODE: bool, const P: usize, const V: usize, const U: usize>(
    t: &ResolvedTile,
) {
    let Nest { counts, strides } = t.depth;
    let mut b = t.b;
    let rows: &[*const f32; P] = t.a.first_chunk().expect("P <= ROWS_MAX");
    // SAFETY: the caller's promise covers every pointer below; `last` lanes of the last vector and
    // all lanes of the others exist in C and bias.
    unsafe {
        let mut acc = [[S::splat(0.0); V]; P];
        let step = strides[2];
        for i in 0..counts[0] {
            for j in 0..counts[1] {
                let mut offset = i * strides[0] + j * strides[1];
                for _ in 0..counts[2] / U {
                    offset = S::opaque(offset);
                    let mut bv = [[S::splat(0.0); V]; U];
                    unroll!(U, u, {
                        unroll!(V, v, {
                            bv[u][v] = S::load(b.add(u * t.b_step + v * S::LANES));
                        });
                    });
                    unroll_rows!(P, p, {
                        for u in 0..U {
                            let at = rows[p].add(offset + u * step);
                            for v in 0..V {
                                let a = read::<S, LANES_MODE>(at, v);
                                acc[p][v] = a.mul_add(bv[u][v], acc[p][v]);
                            }
                        }
                    });
                    offset += U * step;
                    b = b.add(U * t.b_step);
                }
                for _ in 0..counts[2] % U {
                    offset = S::opaque(offset);
                    let mut bv = [S::splat(0.0); V];
                    unroll!(V, v, {
                        bv[v] = S::load(b.add(v * S::LANES));
                    });
                    unroll_rows!(P, p, {
                        for v in 0..V {
                            let a = read::<S, LANES_MODE>(rows[p].add(offset), v);
                            acc[p][v] = a.mul_add(bv[v], acc[p][v]);
                        }
                    });
                    offset += step;
                    b = b.add(t.b_step);
                }
            }
        }
        finish(&t.to, &mut acc);
    }
}

/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn read<S: Simd, const LANES_MODE: bool>(at: *const f32, v: usize) -> S {
    // SAFETY: the caller's promise.
    unsafe { if LANES_MODE { S::load(at.add(v * S::LANES)) } else { S::broadcast(at) } }
}

/// Adds bias and old values if there are any, and stores.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
pub(super) unsafe fn finish<S: Simd, const P: usize, const V: usize>(
    t: &TileStore,
    acc: &mut [[S; V]; P],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let partial = t.last < S::LANES;
        if !t.bias.is_null() {
            for v in 0..V {
                let at = t.bias.add(v * S::LANES);
                let bias = if partial && v + 1 == V { S::load_n(at, t.last) } else { S::load(at) };
                for row in acc.iter_mut() {
                    row[v] = row[v].add(bias);
                }
            }
        }
        for (p, row) in acc.iter().enumerate() {
            for (v, &value) in row.iter().enumerate() {
                let at = t.c.add(p * t.c_step + v * S::LANES);
                match (partial && v + 1 == V, t.accumulate) {
                    (false, false) => value.store(at),
                    (false, true) => value.add(S::load(at)).store(at),
                    (true, false) => value.store_n(at, t.last),
                    (true, true) => value.add(S::load_n(at, t.last)).store_n(at, t.last),
                }
            }
        }
    }
}

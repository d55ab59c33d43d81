//! A tile of at most 8 columns that fills registers of 16: an even element of the depth and the odd
//! one after it are multiplied at once.
//!
//! A register of B has `b[k][0] b[k+1][0] b[k][1] b[k+1][1] …` of 8 columns
//! ([`to_pairs`](super::to_pairs)), one of A the two elements of its row, which are neighbours in
//! memory, 8 times (a broadcast of 64 bits). The sums of the even and of the odd elements are added
//! at the end. The last element of an odd run is paired with zeros and broadcast alone, so that no
//! element outside the depth is multiplied.
//!
//! On a Zen 5 core (512-bit units) the 8-column products of the host `baseline` take about half the
//! time that they take in registers of 8.

use super::{Nest, ResolvedTile, finish};
use crate::PAD;
use crate::macros::{unroll, unroll_rows};
use crate::simd::Simd;
use crate::simd::{avx2::Ymm, avx512::Zmm};

/// The kernel: P rows, U pairs at a time. The other parameters are as in the kernels of `tile`.
///
/// # Safety
/// As [`tile`](super::tile), for AVX-512. B is packed, and the elements of a run are contiguous in
/// A.
// The list of kernels gives all of them the same parameters.
#[allow(clippy::extra_unused_type_parameters)]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
pub(super) unsafe fn pairs<S, const L: bool, const P: usize, const V: usize, const U: usize>(
    t: &ResolvedTile,
) {
    let Nest { counts, strides } = t.depth;
    let mut b = t.b;
    let rows: &[*const f32; P] = t.a.first_chunk().expect("P <= ROWS_MAX");
    // SAFETY: the caller's promise covers every pointer below.
    unsafe {
        let mut acc = [Zmm::splat(0.0); P];
        let pairs = counts[2] / 2;
        for i in 0..counts[0] {
            for j in 0..counts[1] {
                let mut offset = i * strides[0] + j * strides[1];
                for _ in 0..pairs / U {
                    offset = <Zmm>::opaque(offset);
                    let mut bv = [Zmm::splat(0.0); U];
                    unroll!(U, u, {
                        bv[u] = Zmm::load(b.add(u * PAD));
                    });
                    unroll_rows!(P, p, {
                        for u in 0..U {
                            let a = Zmm::broadcast_pair(rows[p].add(offset + 2 * u));
                            acc[p] = a.mul_add(bv[u], acc[p]);
                        }
                    });
                    offset += 2 * U;
                    b = b.add(U * PAD);
                }
                for _ in 0..pairs % U {
                    offset = <Zmm>::opaque(offset);
                    let bv = Zmm::load(b);
                    unroll_rows!(P, p, {
                        let a = Zmm::broadcast_pair(rows[p].add(offset));
                        acc[p] = a.mul_add(bv, acc[p]);
                    });
                    offset += 2;
                    b = b.add(PAD);
                }
                if counts[2] % 2 == 1 {
                    offset = <Zmm>::opaque(offset);
                    let bv = Zmm::load(b);
                    unroll_rows!(P, p, {
                        acc[p] = Zmm::broadcast(rows[p].add(offset)).mul_add(bv, acc[p]);
                    });
                    b = b.add(PAD);
                }
            }
        }
        let mut sums = [[Ymm::splat(0.0)]; P];
        unroll_rows!(P, p, {
            sums[p] = [acc[p].add_neighbours()];
        });
        finish(&t.to, &mut sums);
    }
}

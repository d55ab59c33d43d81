//! Non-temporal stores for results too large for the caches.
//!
//! An ordinary store to a line that is in no cache reads the line first, and a large result evicts
//! everything else. Non-temporal stores cost half the memory traffic.

use crate::ground::Element;
use crate::ground::Isa;

/// Elements that are computed at a time: they and their inputs fit into the nearest cache.
const BLOCK: usize = 2048;
/// Size in bytes from which a result is written past the caches: later reads would not find it
/// there.
const PAST_CACHES_BYTES: usize = 16 << 20;
/// Bytes of a cache line.
const LINE: usize = 64;

#[repr(align(64))]
struct AlignedBlock<T>([T; BLOCK]);

/// Overwrites `to` block by block, in order. `make` receives the position of a block, and the block
/// with unspecified elements. A result of 16 MiB or more is written past the caches.
///
/// To be called within [`Vectorized::run`](super::Vectorized::run), so that `make` is compiled for
/// its instruction set.
#[inline(always)]
pub fn write_blocks<T: Element>(isa: Isa, to: &mut [T], mut make: impl FnMut(usize, &mut [T])) {
    if size_of_val(to) < PAST_CACHES_BYTES {
        for (i, block) in to.chunks_mut(BLOCK).enumerate() {
            make(i * BLOCK, block);
        }
        return;
    }
    let AlignedBlock(buffer) = &mut AlignedBlock([T::zeroed(); BLOCK]);
    let store = store(isa);
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (first, rest) = to.split_at_mut(head);
    let mut at = 0;
    for block in std::iter::once(first).chain(rest.chunks_mut(BLOCK)) {
        let made = &mut buffer[..block.len()];
        make(at, made);
        at += block.len();
        store(bytemuck::cast_slice(made), bytemuck::cast_slice_mut(block));
    }
    finish();
}

/// Copies a block to another of the same length.
type StoreFn = fn(&[u8], &mut [u8]);

/// An ordinary copy. Cores of aarch64 detect runs of stores to whole lines, and write them without
/// reading.
#[cfg(not(target_arch = "x86_64"))]
fn store(_isa: Isa) -> StoreFn {
    |from, to| to.copy_from_slice(from)
}

/// Does nothing: ordinary stores need no fence.
#[cfg(not(target_arch = "x86_64"))]
fn finish() {}

#[cfg(target_arch = "x86_64")]
use x86::{finish, store};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m128i, __m512i, _mm_sfence, _mm_stream_si128, _mm512_stream_si512};

    use super::{LINE, StoreFn};
    use crate::ground::isa::{Isa, Level};

    /// The widest store of an instruction set.
    pub(super) fn store(isa: Isa) -> StoreFn {
        match isa.level() {
            // SAFETY: an `Isa` of this level exists only on machines that have it.
            Level::Avx512 => |from, to| unsafe { avx512(from, to) },
            _ => sse2,
        }
    }

    /// Orders the non-temporal stores before later stores.
    pub(super) fn finish() {
        // SAFETY: every x86-64 has SSE.
        unsafe { _mm_sfence() };
    }

    /// The lines of `to` and the same bytes of `from`; `None`, after an ordinary copy, if `to` does
    /// not consist of whole cache lines.
    fn lines<'a>(
        from: &'a [u8],
        to: &'a mut [u8],
    ) -> Option<impl Iterator<Item = (&'a [u8; LINE], &'a mut [u8; LINE])>> {
        assert_eq!(from.len(), to.len(), "a block and its copy");
        if to.as_ptr().align_offset(LINE) != 0 || !to.len().is_multiple_of(LINE) {
            to.copy_from_slice(from);
            return None;
        }
        let (from, to) = (from.as_chunks::<LINE>().0, to.as_chunks_mut::<LINE>().0);
        Some(from.iter().zip(to))
    }

    #[target_feature(enable = "avx512f")]
    fn avx512(from: &[u8], to: &mut [u8]) {
        for (from, to) in lines(from, to).into_iter().flatten() {
            // SAFETY: a line of 64 bytes each, `to` on a boundary of 64.
            unsafe {
                let line = from.as_ptr().cast::<__m512i>().read_unaligned();
                _mm512_stream_si512(to.as_mut_ptr().cast(), line);
            }
        }
    }

    fn sse2(from: &[u8], to: &mut [u8]) {
        for (from, to) in lines(from, to).into_iter().flatten() {
            let (from, to) = (from.as_chunks::<16>().0, to.as_chunks_mut::<16>().0);
            for (from, to) in from.iter().zip(to) {
                // SAFETY: 16 bytes each, `to` on a boundary of 16; every x86-64 has SSE2.
                unsafe {
                    let part = from.as_ptr().cast::<__m128i>().read_unaligned();
                    _mm_stream_si128(to.as_mut_ptr().cast(), part);
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn all() -> Vec<StoreFn> {
        Isa::available().into_iter().map(store).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small and large results, aligned to a cache line and not, in whole blocks and not.
    #[test]
    fn every_element_is_written_once_and_in_order() {
        let large = PAST_CACHES_BYTES / size_of::<u32>();
        for len in [0, 1, BLOCK, 3 * BLOCK + 5, large - 1, large, large + BLOCK / 2 + 3] {
            for skip in [0, 1, 15] {
                let mut all = vec![u32::MAX; skip + len + 1];
                let mut next = 0;
                write_blocks(Isa::detect(), &mut all[skip..skip + len], |at, block| {
                    assert_eq!(at, next);
                    next += block.len();
                    block.iter_mut().zip(at as u32..).for_each(|(to, i)| *to = i);
                });
                assert_eq!(next, len);
                assert!(all[skip..skip + len].iter().zip(0..).all(|(got, i)| *got == i), "{len}");
                assert!(all[..skip].iter().chain(&all[skip + len..]).all(|x| *x == u32::MAX));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_way_to_store_copies() {
        let from: Vec<u8> = (0..=255).cycle().take(4096).collect();
        for store in x86::all() {
            for (skip, len) in [(0, 4096), (0, 100), (1, 640), (16, 64)] {
                let mut to = AlignedBlock([0u8; BLOCK]).0.repeat(4);
                let start = to.as_ptr().align_offset(LINE) + skip;
                store(&from[..len], &mut to[start..start + len]);
                assert_eq!(to[start..start + len], from[..len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|byte| *byte == 0));
            }
        }
    }
}

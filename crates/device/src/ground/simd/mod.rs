//! Loops compiled for the vectors of an instruction set.
//!
//! For memory-bound loops in plain Rust that the compiler vectorises: the same code is compiled
//! once for each instruction set, and selected at run time. There is no contraction to fused
//! multiply-add, so every version gives the same bits.

mod fetch;
mod past_caches;

pub use fetch::fetch;
pub use past_caches::write_blocks;

use crate::ground::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::ground::isa::Level;

/// A loop to run. `run` must be `#[inline(always)]`, and so must the functions that its hot part
/// calls: code that is not inlined is compiled for the baseline processor only.
pub trait Vectorized {
    /// Result of the loop.
    type Output;

    /// Runs the loop.
    fn run(self) -> Self::Output;
}

/// Runs `kernel`, compiled for the instruction set `isa`. Kernels pass
/// [`Args::isa`](crate::Args::isa). NEON is part of every aarch64, so a program for aarch64 is
/// compiled for it as a whole, and `kernel` runs as it is.
pub fn vectorize<K: Vectorized>(isa: Isa, kernel: K) -> K::Output {
    match isa.level() {
        // SAFETY: an `Isa` of this level exists only on machines that have it.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512(kernel) },
        _ => kernel.run(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<K: Vectorized>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<K: Vectorized>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scale<'a>(&'a [u8], &'a mut [f32]);

    impl Vectorized for Scale<'_> {
        type Output = usize;

        #[inline(always)]
        fn run(self) -> usize {
            for (value, byte) in self.1.iter_mut().zip(self.0) {
                *value = f32::from(*byte) * 0.1 + 0.3;
            }
            self.1.len()
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1003).collect();
        let plain: Vec<u32> = bytes.iter().map(|b| (f32::from(*b) * 0.1 + 0.3).to_bits()).collect();
        for isa in Isa::available() {
            let mut values = vec![0.0; bytes.len()];
            assert_eq!(vectorize(isa, Scale(&bytes, &mut values)), 1003);
            assert_eq!(values.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), plain, "{isa}");
        }
    }
}

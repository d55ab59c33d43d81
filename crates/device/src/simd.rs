//! Running a loop with the widest vectors that the processor has.
//!
//! For memory-bound loops in plain Rust that the compiler vectorises: the same code is compiled once
//! for each instruction set, and picked at run time. No contraction to fused multiply-add takes
//! place, so every version gives the same bits.

mod past_caches;

pub use past_caches::write_blocks;
use std::sync::OnceLock;

/// A loop to run. `run` must be `#[inline(always)]`, and so must what it calls in the hot part:
/// code that is not inlined is compiled for the baseline processor only.
pub trait Vectorized {
    /// What it returns.
    type Output;

    /// The loop.
    fn run(self) -> Self::Output;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    const ALL: &[Level] = &[
        #[cfg(target_arch = "x86_64")]
        Level::Avx512,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        Level::Portable,
    ];

    /// Whether this processor has it.
    fn is_there(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => std::is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                std::is_x86_feature_detected!("avx512f")
                    && std::is_x86_feature_detected!("avx512bw")
                    && std::is_x86_feature_detected!("avx512dq")
                    && std::is_x86_feature_detected!("avx512vl")
            }
        }
    }
}

/// The best level of this processor.
fn best() -> Level {
    static BEST: OnceLock<Level> = OnceLock::new();
    let best = || Level::ALL.iter().copied().find(|l| l.is_there()).unwrap_or(Level::Portable);
    *BEST.get_or_init(best)
}

/// Runs `kernel` compiled for the best instruction set of this processor.
pub fn vectorize<K: Vectorized>(kernel: K) -> K::Output {
    run_at(best(), kernel)
}

/// Runs `kernel` compiled for a level, or for the portable one if this processor lacks it.
fn run_at<K: Vectorized>(level: Level, kernel: K) -> K::Output {
    match level {
        // SAFETY: the arm's guard has found these features on this processor.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 if level.is_there() => unsafe { avx2(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if level.is_there() => unsafe { avx512(kernel) },
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
    fn every_level_gives_the_same_bits() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1003).collect();
        let plain: Vec<u32> = bytes.iter().map(|b| (f32::from(*b) * 0.1 + 0.3).to_bits()).collect();
        for &level in Level::ALL {
            let mut values = vec![0.0; bytes.len()];
            assert_eq!(run_at(level, Scale(&bytes, &mut values)), 1003);
            assert_eq!(values.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), plain, "{level:?}");
        }
        assert_eq!(vectorize(Scale(&bytes, &mut [0.0; 1003])), 1003);
    }
}

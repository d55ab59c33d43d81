//! Division by a number that is known before a kernel starts.

use bytemuck::{Pod, Zeroable};

/// A divisor as the kernels have it (`Divisor` in `nn.cuh`): a multiplication and a shift take the
/// place of a division, which a GPU does in some twenty instructions. For numbers below 2³¹.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Divisor {
    by: u32,
    magic: u32,
    shift: u32,
}

impl Divisor {
    /// Divides by `by`, which is below 2³¹; a `by` of 0, which no kernel uses, counts as 1.
    pub(super) fn new(by: usize) -> Divisor {
        let by = by.max(1) as u64;
        let shift = by.next_power_of_two().trailing_zeros();
        // Granlund and Montgomery: n/by = (n·(2³² + magic)) >> (32 + shift).
        let magic = (((1u64 << shift) - by) << 32) / by + 1;
        Divisor { by: by as u32, magic: magic as u32, shift }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As in `nn.cuh`.
    fn quotient(of: Divisor, n: u32) -> u32 {
        (((u64::from(n) * u64::from(of.magic)) >> 32) as u32 + n) >> of.shift
    }

    proptest! {
        #[test]
        fn it_divides(n in 0u32..1 << 31, large in 1usize..1 << 31, small in 1usize..5000) {
            for by in [large, small] {
                let near = (n / by as u32).wrapping_mul(by as u32);
                for n in [n, near, near.saturating_sub(1), (1 << 31) - 1, 0] {
                    prop_assert_eq!(quotient(Divisor::new(by), n), n / by as u32);
                }
            }
        }
    }
}

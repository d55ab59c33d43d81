//! Block sizes of the pool: multiples of 64 bytes up to 1 KiB, then eight steps per octave.
//! Rounding adds less than 64 bytes up to 1 KiB, and at most an eighth above.

use crate::execution::ALIGNMENT;

/// Classes of one granule each, before the octaves.
const SMALL: usize = 16;
/// Steps in an octave.
const STEPS: usize = 8;

/// The class of the smallest blocks that hold `bytes` (at least 1, at most `isize::MAX / 2`).
pub(crate) fn class_of(bytes: usize) -> usize {
    let granules = bytes.div_ceil(ALIGNMENT);
    if granules <= SMALL {
        return granules.saturating_sub(1);
    }
    // granules is in (2^octave, 2^(octave + 1)].
    let octave = (granules - 1).ilog2() as usize;
    let step = 1 << (octave - 3);
    let steps = (granules - (1 << octave)).div_ceil(step);
    SMALL + (octave - 4) * STEPS + steps - 1
}

/// Bytes of a block of this class.
pub(crate) fn class_size(class: usize) -> usize {
    if class < SMALL {
        return (class + 1) * ALIGNMENT;
    }
    let (octave, steps) = ((class - SMALL) / STEPS + 4, (class - SMALL) % STEPS + 1);
    ((1 << octave) + (steps << (octave - 3))) * ALIGNMENT
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn classes_are_consecutive_and_rising() {
        for class in 0..250 {
            assert_eq!(class_of(class_size(class)), class);
            assert_eq!(class_of(class_size(class) + 1), class + 1);
        }
    }

    proptest! {
        #[test]
        fn a_block_fits_and_wastes_at_most_an_eighth(bytes in 1usize..1 << 50) {
            let size = class_size(class_of(bytes));
            prop_assert!(size >= bytes);
            prop_assert!(size - bytes < (bytes / 8).max(ALIGNMENT) + ALIGNMENT);
        }
    }
}

//! The draws of an order: an unbiased shuffle.

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;

/// Fisher–Yates shuffle from the end, as described in the documentation of the order.
pub(crate) fn shuffle(random: &mut ChaCha8Rng, items: &mut [u32]) {
    for i in (1..items.len()).rev() {
        let j = below(random, i as u32 + 1);
        items.swap(i, j as usize);
    }
}

/// An unbiased draw from `0..n`, n >= 1: D. Lemire, "Fast random integer generation in an
/// interval", 2019 (arXiv 1805.10941).
pub(crate) fn below(random: &mut ChaCha8Rng, n: u32) -> u32 {
    let mut product = u64::from(random.next_u32()) * u64::from(n);
    if (product as u32) < n {
        let threshold = n.wrapping_neg() % n; // 2^32 mod n
        while (product as u32) < threshold {
            product = u64::from(random.next_u32()) * u64::from(n);
        }
    }
    (product >> 32) as u32
}

//! Random numbers as a function of a key. There is no shared generator, and the numbers depend
//! neither on the order of execution nor on the number of threads. Every backend computes the same
//! numbers.

/// Philox4x32 with 10 rounds: four random words for a key and a counter. A pure function, so any
/// number of any stream can be computed directly (Salmon et al., "Parallel random numbers: as easy
/// as 1, 2, 3", SC 2011).
#[inline]
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut key, mut x) = (key, counter);
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let a = u64::from(MULTIPLIERS[0]) * u64::from(x[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(x[2]);
        x = [
            (b >> 32) as u32 ^ x[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ x[3] ^ key[1],
            a as u32,
        ];
    }
    x
}

/// Purpose of random numbers: different purposes never share numbers. The codes never change, so
/// that runs can be repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Splitting a dataset.
    Split,
    /// Order of samples.
    Shuffle,
    /// Augmentation; `env` is the epoch and `step` the sample (D8).
    Augment,
    /// Initial weights.
    Init,
    /// A controller's own choices.
    Controller,
    /// Sampling actions.
    Actions,
    /// Tests and benchmarks.
    Test,
    /// Orders of modules for the estimation of Shapley values.
    Counterfactuals,
    /// Generated datasets; `env` is the dataset and `step` the sample.
    Synthetic,
    /// Settings that are drawn from a space: for members, `env` is the member and `step` the
    /// setting; for tasks on which a policy is trained, `env` is above all numbers of members.
    Members,
    /// Copies and changes of members in population-based training; `env` is the member.
    Exploration,
    /// Keys of dropout layers; `step` is a hash of the layer's name.
    Dropout,
    /// Any other purpose, with a unique number.
    Custom(u32),
}

impl Purpose {
    fn code(self) -> [u32; 2] {
        match self {
            Purpose::Split => [0, 1],
            Purpose::Shuffle => [0, 2],
            Purpose::Augment => [0, 3],
            Purpose::Init => [0, 4],
            Purpose::Controller => [0, 5],
            Purpose::Actions => [0, 6],
            Purpose::Test => [0, 7],
            Purpose::Counterfactuals => [0, 8],
            Purpose::Synthetic => [0, 9],
            Purpose::Members => [0, 10],
            Purpose::Exploration => [0, 11],
            Purpose::Dropout => [0, 12],
            Purpose::Custom(number) => [1, number],
        }
    }
}

/// A generator keyed by (seed, purpose, env, step). Generators with different keys are independent.
///
/// The key of the numbers is the first half of `philox(seed, [purpose, purpose, env, env])`, and
/// number block n of the generator is `philox(key, [n, n, step, step])`, each pair being the low
/// and the high word; the words of a block are used in order.
#[derive(Debug, Clone)]
pub struct Rng {
    key: [u32; 2],
    step: u64,
    block: u64,
    words: [u32; 4],
    /// Words of the block already used.
    used: usize,
}

impl Rng {
    /// The generator of this key, at its start.
    pub fn new(seed: u64, purpose: Purpose, env: u64, step: u64) -> Rng {
        let [a, b] = purpose.code();
        let [c, d] = halves(env);
        let [k0, k1, ..] = philox(halves(seed), [a, b, c, d]);
        Rng { key: [k0, k1], step, block: 0, words: [0; 4], used: 4 }
    }

    /// 32 random bits.
    #[inline]
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            let ([n0, n1], [s0, s1]) = (halves(self.block), halves(self.step));
            self.words = philox(self.key, [n0, n1, s0, s1]);
            self.block += 1;
            self.used = 0;
        }
        let word = self.words[self.used];
        self.used += 1;
        word
    }

    /// 64 random bits: two words, the first the low half.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let low = self.next_u32();
        u64::from(low) | u64::from(self.next_u32()) << 32
    }

    /// Fills with random bytes: each four bytes are a word, the low byte first; remaining bytes are
    /// the low bytes of one more word.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(4) {
            let word = self.next_u32().to_le_bytes();
            part.copy_from_slice(&word[..part.len()]);
        }
    }

    /// Uniform in [0, 1): the upper 24 bits of a word, so every value is a multiple of 2^-24.
    #[inline]
    pub fn uniform(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Uniform in 0..n, without bias (Lemire, "Fast random integer generation in an interval",
    /// 2019); 0 if n is 0.
    #[inline]
    pub fn below(&mut self, n: u32) -> u32 {
        let mut product = u64::from(self.next_u32()) * u64::from(n);
        if (product as u32) < n {
            let threshold = n.wrapping_neg() % n;
            while (product as u32) < threshold {
                product = u64::from(self.next_u32()) * u64::from(n);
            }
        }
        (product >> 32) as u32
    }

    /// Puts the elements in a random order, every order equally likely if there are fewer than 2^32
    /// elements (Fisher-Yates from the back).
    pub fn shuffle<T>(&mut self, elements: &mut [T]) {
        for i in (1..elements.len()).rev() {
            let bound = u32::try_from(i + 1).unwrap_or(u32::MAX);
            elements.swap(i, self.below(bound) as usize);
        }
    }
}

/// Low and high word.
fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::{Purpose, Rng, philox};

    /// Known answers of the authors' Random123 library (kat_vectors, philox4x32 10).
    #[test]
    fn philox_known_answers() {
        let ones = u32::MAX;
        assert_eq!(philox([0; 2], [0; 4]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([ones; 2], [ones; 4]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let counter = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        let key = [0xa4093822, 0x299f31d0];
        assert_eq!(philox(key, counter), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn keys_are_told_apart() {
        let mut seen = std::collections::HashSet::new();
        for seed in [0, 1, 1 << 32] {
            for purpose in
                [Purpose::Split, Purpose::Augment, Purpose::Custom(1), Purpose::Custom(3)]
            {
                for env in [0, 1, 1 << 32] {
                    for step in [0, 1, 1 << 32] {
                        let mut rng = Rng::new(seed, purpose, env, step);
                        assert!(seen.insert((rng.next_u64(), rng.next_u64(), rng.next_u64())));
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_are_those_of_the_words() {
        let mut bytes = [0; 11];
        let mut rng = Rng::new(7, Purpose::Test, 0, 0);
        rng.fill(&mut bytes);
        let mut words = Rng::new(7, Purpose::Test, 0, 0);
        let expected: Vec<u8> = (0..3).flat_map(|_| words.next_u32().to_le_bytes()).collect();
        assert_eq!(bytes[..], expected[..11]);
        assert_eq!(rng.next_u32(), words.next_u32());
    }

    #[test]
    fn below_is_even() {
        let mut rng = Rng::new(7, Purpose::Test, 0, 0);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[rng.below(7) as usize] += 1;
        }
        // Standard deviation of a count is about 93.
        assert!(counts.iter().all(|&n| n.abs_diff(10_000) < 500), "{counts:?}");
        // A bound for which a plain product would be off by a third.
        let n = 3 << 30;
        let low = (0..30_000).filter(|_| rng.below(n) < n / 3).count();
        assert!(low.abs_diff(10_000) < 500, "{low}");
        assert_eq!(rng.below(0), 0);
        assert_eq!(rng.below(1), 0);
    }

    #[test]
    fn shuffle_reaches_every_order_evenly() {
        let mut counts = std::collections::HashMap::new();
        for step in 0..24_000 {
            let mut order = [0u8, 1, 2, 3];
            Rng::new(3, Purpose::Shuffle, 0, step).shuffle(&mut order);
            *counts.entry(order).or_insert(0u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|&n| n.abs_diff(1000) < 200), "{counts:?}");
    }

    proptest! {
        #[test]
        fn below_is_below_and_uniform_in_range(seed: u64, step: u64, n in 1u32..) {
            let mut rng = Rng::new(seed, Purpose::Test, 0, step);
            prop_assert!(rng.below(n) < n);
            let u = rng.uniform();
            prop_assert!((0.0..1.0).contains(&u));
        }
    }
}

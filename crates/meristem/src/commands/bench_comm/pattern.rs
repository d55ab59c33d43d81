//! Inputs with known sums: integers, whose sums are exact in any order, with the largest elements
//! of every rank and of the sum at known indices.
//!
//! There are four kinds of elements: *common* elements are large on all ranks, *winners* and
//! *losers* are large on one rank, and the others are small on all ranks. A rank sends the common
//! elements, its winners and its losers: k elements in total. The largest k elements of the sum are
//! the common elements and the winners of all ranks. All kinds are distributed evenly over the
//! tensor, so regions of equal length (Ok-Topk) have the same number of each.

use meristem::comm::picks;

/// Kind of sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Expected {
    /// Sum of all elements.
    Dense,
    /// Sum of the elements that the ranks send.
    Sent,
    /// Largest elements of the sum of the sent elements.
    Largest,
}

/// Layout of the large elements of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pattern {
    len: usize,
    ranks: usize,
    /// Number of parts of equal length and content.
    regions: usize,
    /// Common elements in each region.
    common: usize,
    /// Winners of each rank in each region.
    winners: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Common,
    Winner(usize),
    Loser(usize),
}

impl Pattern {
    /// Creates a pattern in which each rank sends about `density * len` elements; [`k`](Pattern::k)
    /// returns the exact number.
    pub(super) fn new(len: usize, ranks: usize, density: f64) -> Pattern {
        let k = picks(density, len);
        let regions = ranks.min(k).max(1);
        let per_region = k / regions;
        // In a region, the sum has as many large elements as each rank sends. Half of the large
        // elements are winners, the same number of each rank.
        let winners = per_region / (2 * ranks);
        let common = per_region - ranks * winners;
        let fits = common + ranks * ranks * winners <= len / regions;
        let (common, winners) = if fits { (common, winners) } else { (per_region, 0) };
        Pattern { len, ranks, regions, common, winners }
    }

    /// Number of elements that each rank sends, with the same number from each region.
    pub(super) fn k(&self) -> usize {
        self.regions * (self.common + self.ranks * self.winners)
    }

    /// Writes the input of a rank.
    pub(super) fn input(&self, rank: usize, out: &mut [f32]) {
        out.iter_mut().enumerate().for_each(|(at, value)| *value = small(at, rank));
        for (at, kind) in self.large() {
            match kind {
                Kind::Winner(owner) | Kind::Loser(owner) if owner != rank => {}
                _ => out[at] = large(at, kind, rank),
            }
        }
    }

    /// Writes the expected sum.
    pub(super) fn expected(&self, expected: Expected, out: &mut [f32]) {
        let sum = |value: &dyn Fn(usize) -> f32| (0..self.ranks).map(value).sum::<f32>();
        match expected {
            Expected::Dense => {
                out.iter_mut()
                    .enumerate()
                    .for_each(|(at, out)| *out = sum(&|rank| small(at, rank)));
            }
            _ => out.fill(0.0),
        }
        for (at, kind) in self.large() {
            out[at] = match (kind, expected) {
                (Kind::Common, _) => sum(&|rank| large(at, kind, rank)),
                (Kind::Loser(_), Expected::Largest) => 0.0,
                (Kind::Winner(owner) | Kind::Loser(owner), Expected::Dense) => {
                    out[at] - small(at, owner) + large(at, kind, owner)
                }
                (Kind::Winner(owner) | Kind::Loser(owner), _) => large(at, kind, owner),
            };
        }
    }

    /// Indices and kinds of the large elements.
    fn large(&self) -> impl Iterator<Item = (usize, Kind)> {
        let Pattern { len, ranks, regions, common, winners } = *self;
        let count = common + ranks * ranks * winners;
        (0..regions).flat_map(move |region| {
            let (start, end) = (region * len / regions, (region + 1) * len / regions);
            (0..count).map(move |j| {
                // Common elements are spread evenly. The other large elements are assigned to the
                // ranks in turns; a turn whose number is a multiple of the number of ranks has
                // winners.
                let before = j * common / count;
                let kind = if before != (j + 1) * common / count {
                    Kind::Common
                } else {
                    let (turn, owner) = ((j - before) / ranks, (j - before) % ranks);
                    if turn % ranks == 0 { Kind::Winner(owner) } else { Kind::Loser(owner) }
                };
                (start + j * (end - start) / count, kind)
            })
        })
    }
}

/// Hash of two numbers.
fn hash(at: usize, rank: usize) -> u32 {
    let mixed = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64) << 32;
    (mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as u32
}

/// Returns an integer below 2^13 in magnitude, a hash of the place and the rank.
fn small(at: usize, rank: usize) -> f32 {
    (hash(at, rank) % 16_383) as f32 - 8191.0
}

/// Returns the value of a large element: losers are from 2^14 to 2^15, winners up to 2^16, common
/// elements up to 2^17, with the same sign on all ranks. Sums over 64 ranks are below 2^24, so they
/// are exact in f32.
fn large(at: usize, kind: Kind, rank: usize) -> f32 {
    let bits = hash(at, rank);
    let magnitude = match kind {
        Kind::Common => (1 << 16) + bits % (1 << 16),
        Kind::Winner(_) => (1 << 15) + bits % (1 << 15),
        Kind::Loser(_) => (1 << 14) + bits % (1 << 14),
    };
    if at.is_multiple_of(3) { -(magnitude as f32) } else { magnitude as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn largest(values: &[f32], k: usize) -> Vec<f32> {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].abs().total_cmp(&values[a].abs()).then(a.cmp(&b)));
        let mut kept = vec![0.0; values.len()];
        order[..k].iter().for_each(|&i| kept[i] = values[i]);
        kept
    }

    fn added(all: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
        all.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect()).unwrap()
    }

    /// Expected sums equal sums of the inputs by the definition.
    #[test]
    fn expected_sums_equal_sums_of_the_inputs() {
        for (len, ranks) in [(1, 1), (7, 3), (256, 2), (1000, 3), (5003, 4), (3001, 5), (0, 2)] {
            for density in [1e-9, 0.01, 0.1, 0.3, 1.0] {
                let pattern = Pattern::new(len, ranks, density);
                let k = pattern.k();
                let wanted = density * len as f64;
                assert!(k <= len && k as f64 <= wanted.max(1.0) + 1.0, "{pattern:?}");
                assert!(k as f64 + ranks as f64 + 1.0 >= wanted, "{pattern:?}");
                let inputs: Vec<Vec<f32>> = (0..ranks)
                    .map(|rank| {
                        let mut input = vec![f32::NAN; len];
                        pattern.input(rank, &mut input);
                        input
                    })
                    .collect();
                let expected = |which| {
                    let mut out = vec![f32::NAN; len];
                    pattern.expected(which, &mut out);
                    out
                };
                let sent = added(inputs.iter().map(|input| largest(input, k)));
                assert_eq!(expected(Expected::Dense), added(inputs.iter().cloned()), "{pattern:?}");
                assert_eq!(expected(Expected::Largest), largest(&sent, k), "{pattern:?}");
                assert_eq!(expected(Expected::Sent), sent, "{pattern:?}");
            }
        }
        // Winners differ between ranks, so the test detects interchanged ranks.
        let Pattern { common, winners, .. } = Pattern::new(100_000, 2, 0.01);
        assert!(common > 0 && winners > 0);
    }
}

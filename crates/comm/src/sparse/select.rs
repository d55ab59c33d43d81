//! Exact selection of the k elements of largest magnitude; among equals the lower index wins.
//!
//! A sample gives a threshold that slightly more than k elements reach. One pass collects these
//! elements as candidates, among which the exact threshold is found. If the sample was misleading,
//! with fewer than k candidates or far too many, histograms of all elements find the exact
//! threshold, one digit per pass.

use meristem_device::Isa;
use meristem_device::simd::{Vectorized, vectorize};

use super::pieces::SliceList;
use crate::number::{Magnitude, SumElement};

/// Elements per block.
pub(crate) const BLOCK: usize = 64;

/// A source of elements. A selection visits each element once, in order, slice by slice; a source
/// may compute elements on the visit.
pub(crate) trait ElementSource {
    /// Type of the elements.
    type Item: SumElement;
    /// The elements of one slice.
    type SourceSlice<'p>: SourceSlice<Item = Self::Item>
    where
        Self: 'p;
    /// The slices of the elements; for computed elements, the slices of their inputs.
    fn slices(&self) -> &[&[Self::Item]];
    /// The elements of slice number `slice`. The first of them has index `start` among all
    /// elements.
    fn part(&mut self, slice: usize, start: usize) -> Self::SourceSlice<'_>;
    /// Elements from `start` on, before they are visited.
    fn peek(&self, start: usize) -> [Self::Item; RUN];
    /// All elements, after all of them were visited.
    fn visited(&self) -> SliceList<'_, Self::Item>;
}

/// A slice of a source.
pub(crate) trait SourceSlice {
    /// Type of the elements.
    type Item: SumElement;
    /// Visits `out.len()` elements, at most [`BLOCK`], from element `start` of the slice on.
    fn visit(&mut self, start: usize, out: &mut [Self::Item]);
}

impl<T: SumElement> SourceSlice for &[T] {
    type Item = T;
    #[inline(always)]
    fn visit(&mut self, start: usize, out: &mut [T]) {
        out.copy_from_slice(&self[start..start + out.len()]);
    }
}

impl<T: SumElement> ElementSource for SliceList<'_, T> {
    type Item = T;
    type SourceSlice<'p>
        = &'p [T]
    where
        Self: 'p;
    fn slices(&self) -> &[&[T]] {
        SliceList::slices(self)
    }
    #[inline(always)]
    fn part(&mut self, slice: usize, _: usize) -> &[T] {
        SliceList::slices(self)[slice]
    }
    #[inline(always)]
    fn peek(&self, start: usize) -> [T; RUN] {
        self.run(start)
    }
    #[inline(always)]
    fn visited(&self) -> SliceList<'_, T> {
        SliceList::new(SliceList::slices(self).iter().map(|slice| &**slice))
    }
}

/// Number of candidates to allocate for selecting k of `len` elements: the expected number above a
/// sampled threshold, plus four standard deviations, because a small sample estimates poorly.
pub(crate) fn candidates_len(len: usize, k: usize) -> usize {
    let rank = sampled_count(len, k) + 1.0;
    let share = (rank + 4.0 * rank.sqrt()) / sampled_len(len) as f64;
    len.min((share * len as f64) as usize + 1024)
}

/// Magnitude type of a source's elements.
pub(crate) type MagnitudeOf<S> = <<S as ElementSource>::Item as SumElement>::Magnitude;

/// Memory for indices and values of elements, of the same length.
pub(crate) struct Picks<'a, T> {
    pub(crate) indices: &'a mut [u32],
    pub(crate) values: &'a mut [T],
}

/// Writes the `picks.indices.len()` elements of largest magnitude, in order of index; there must be
/// at least as many elements. With less memory for `candidates` than [`candidates_len`], the
/// selection is slower, not wrong.
///
/// `known` is the threshold of an earlier selection. If fewer than k elements reach it, but at
/// least k/2, only these are selected. Returns the number of selected elements.
pub(crate) fn top_k<S: ElementSource>(
    isa: Isa,
    source: &mut S,
    known: Option<MagnitudeOf<S>>,
    candidates: Picks<'_, S::Item>,
    picks: Picks<'_, S::Item>,
) -> usize {
    let Picks { indices: places, values: held } = candidates;
    let Picks { indices, values } = picks;
    let (len, k) = (len_of(source), indices.len());
    let low = known.unwrap_or_else(|| sampled_threshold(source, k));
    let found = Collect { source: &mut *source, low, found: &mut *places, values: &mut *held };
    let found = vectorize(isa, found);
    let mut picked = k;
    let visited = source.visited();
    let all = visited.iter().enumerate().map(numbered);
    if k == len {
        indices.iter_mut().zip(0..).for_each(|(index, i)| *index = i);
        visited.copy(0, values);
    } else if k > 0 {
        match places.get(..found).zip(held.get(..found)) {
            Some((found, held)) if found.len() >= k => {
                let cut = MagnitudeCut::at(held.iter().map(|value| value.magnitude()), k);
                cut.keep(found.iter().copied().zip(held.iter().copied()), indices, values);
            }
            Some((found, held)) if known.is_some() && found.len() >= k.div_ceil(2) => {
                picked = found.len();
                indices[..picked].copy_from_slice(found);
                values[..picked].copy_from_slice(held);
            }
            // Every non-zero element is a candidate, and there are fewer than k: add zeros.
            Some((found, _)) if low <= MagnitudeOf::<S>::narrow(1) => {
                let cut =
                    MagnitudeCut { threshold: MagnitudeOf::<S>::narrow(0), equal: k - found.len() };
                cut.keep(all, indices, values);
            }
            // The known threshold is outdated: use a sample.
            _ if known.is_some() => {
                let candidates = Picks { indices: places, values: held };
                let picks = Picks { indices, values };
                return top_k(isa, &mut visited.clone(), None, candidates, picks);
            }
            _ => {
                let cut = MagnitudeCut::at(visited.iter().map(|value| value.magnitude()), k);
                cut.keep(all, indices, values);
            }
        }
    }
    picked
}

/// An element with its index, which fits 32 bits.
fn numbered<T>((index, element): (usize, T)) -> (u32, T) {
    (index as u32, element)
}

fn len_of(source: &impl ElementSource) -> usize {
    source.slices().iter().map(|slice| slice.len()).sum()
}

/// Number of consecutive elements per sampled run: about a cache line.
pub(crate) const RUN: usize = 16;
/// Largest size of a sample.
const SAMPLE: usize = 1 << 15;

/// Number of elements sampled from `len`.
fn sampled_len(len: usize) -> usize {
    (len / RUN).clamp(1, SAMPLE / RUN) * RUN.min(len.max(1))
}

/// Expected number of sampled elements among the k largest of `len` elements, plus four standard
/// deviations of a binomial count.
fn sampled_count(len: usize, k: usize) -> f64 {
    let expected = k as f64 / len.max(1) as f64 * sampled_len(len) as f64;
    expected + 4.0 * expected.sqrt() + 4.0
}

/// A magnitude of at least 1 that somewhat more than k elements reach, estimated from a sample. For
/// k = 0 and k = `len`, which need no candidates, a magnitude that no element reaches.
fn sampled_threshold<S: ElementSource>(source: &S, k: usize) -> MagnitudeOf<S> {
    let len = len_of(source);
    let one = MagnitudeOf::<S>::narrow(1);
    if k == 0 || k == len {
        return MagnitudeOf::<S>::MAX;
    }
    if len < RUN {
        return one;
    }
    let mut sample = [one; SAMPLE];
    let size = sampled_len(len);
    let step = len / (size / RUN);
    for (run, sampled) in sample[..size].chunks_exact_mut(RUN).enumerate() {
        // Pseudo-random positions, because equal steps could miss values of a periodic pattern.
        let jitter = (run as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let start = run * step + (jitter as usize) % (step - RUN + 1);
        for (magnitude, value) in sampled.iter_mut().zip(source.peek(start)) {
            *magnitude = value.magnitude();
        }
    }
    let rank = sampled_count(len, k) as usize;
    if rank >= size {
        return one;
    }
    let (_, nth, _) = sample[..size].select_nth_unstable_by(rank, |a, b| b.cmp(a));
    (*nth).max(one)
}

/// Aligned to cache lines: a vector access that crosses a line takes twice as long.
#[repr(align(64))]
struct AlignedLine<T>(T);

/// Collects the elements of at least a given magnitude. Returns their number, or `usize::MAX` if
/// they do not fit. Visits all elements in either case.
struct Collect<'a, S: ElementSource> {
    source: &'a mut S,
    low: MagnitudeOf<S>,
    found: &'a mut [u32],
    values: &'a mut [S::Item],
}

impl<S: ElementSource> Vectorized for Collect<'_, S> {
    type Output = usize;

    #[inline(always)]
    fn run(self) -> usize {
        let Collect { source, low, found, values } = self;
        let (mut first, mut count) = (0, 0);
        let AlignedLine(block) = &mut AlignedLine([S::Item::ZERO; BLOCK]);
        for slice in 0..source.slices().len() {
            let len = source.slices()[slice].len();
            let whole = len - len % BLOCK;
            let mut part = source.part(slice, first);
            for at in (0..whole).step_by(BLOCK) {
                part.visit(at, block);
                let reach = reaching(block, low);
                count =
                    append_reaching((reach, block), first + at, (&mut *found, &mut *values), count);
            }
            let rest = len - whole;
            part.visit(whole, &mut block[..rest]);
            let reach = reaching(block, low) & ((1 << rest) - 1);
            count =
                append_reaching((reach, block), first + whole, (&mut *found, &mut *values), count);
            first += len;
        }
        if count > found.len() { usize::MAX } else { count }
    }
}

/// Bit mask of the elements of at least this magnitude.
#[inline(always)]
fn reaching<T: SumElement>(block: &[T; BLOCK], low: T::Magnitude) -> u64 {
    let mut bits = 0;
    // This loop compiles to vector comparisons, whose masks are combined.
    for (i, value) in block.iter().enumerate() {
        bits |= u64::from(value.magnitude() >= low) << i;
    }
    bits
}

/// Appends the elements whose bits are set; elements that do not fit are only counted.
#[inline(always)]
fn append_reaching<T: SumElement>(
    (mut bits, block): (u64, &[T; BLOCK]),
    start: usize,
    (found, values): (&mut [u32], &mut [T]),
    mut count: usize,
) -> usize {
    while bits != 0 {
        let at = bits.trailing_zeros() as usize;
        if let (Some(slot), Some(value)) = (found.get_mut(count), values.get_mut(count)) {
            (*slot, *value) = ((start + at) as u32, block[at]);
        }
        count += 1;
        bits &= bits - 1;
    }
    count
}

/// A selection: all elements above a magnitude, and the first `equal` elements of this magnitude.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MagnitudeCut<M> {
    threshold: M,
    equal: usize,
}

/// Bits of a magnitude that one pass examines.
const DIGIT: u32 = 11;

impl<M: Magnitude> MagnitudeCut<M> {
    /// The cut that keeps exactly k elements; there must be at least k.
    pub(crate) fn at(magnitudes: impl Iterator<Item = M> + Clone, k: usize) -> Self {
        let mut prefix = 0u64;
        let mut left = k;
        let mut shift = M::BITS;
        while shift > 0 {
            let above = shift;
            shift = shift.saturating_sub(DIGIT);
            let mask = (1u64 << (above - shift)) - 1;
            let mut counts = [0usize; 1 << DIGIT];
            // `for_each`, because `for` would check for the end of a slice at each element.
            magnitudes.clone().for_each(|magnitude| {
                let bits = magnitude.wide();
                if bits >> above == prefix {
                    counts[(bits >> shift & mask) as usize] += 1;
                }
            });
            let mut digit = mask as usize;
            while digit > 0 && counts[digit] < left {
                left -= counts[digit];
                digit -= 1;
            }
            prefix = prefix << (above - shift) | digit as u64;
        }
        MagnitudeCut { threshold: M::narrow(prefix), equal: left }
    }

    /// Writes the selected elements in order of index; `indices` has their number.
    pub(crate) fn keep<T: SumElement<Magnitude = M>>(
        self,
        elements: impl Iterator<Item = (u32, T)>,
        indices: &mut [u32],
        values: &mut [T],
    ) {
        let MagnitudeCut { threshold, mut equal } = self;
        let mut n = 0;
        for (index, value) in elements {
            let magnitude = value.magnitude();
            let ties = magnitude == threshold && equal > 0;
            // Always written, and overwritten by the next element if not selected, so that there is
            // no branch to predict.
            match (indices.get_mut(n), values.get_mut(n)) {
                (Some(to), Some(of)) => (*to, *of) = (index, value),
                _ => return,
            }
            n += usize::from(magnitude > threshold || ties);
            equal -= usize::from(ties);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::{Just, Strategy, any, prop_assert_eq, prop_oneof, proptest};
    use proptest::test_runner::TestCaseResult;

    use super::*;

    /// The k largest elements, by sorting.
    fn slow<T: SumElement>(values: &[T], k: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(values[i as usize].magnitude()));
        order.truncate(k);
        order.sort_unstable();
        order
    }

    /// Checks the selection on one slice and on several.
    fn check<T: SumElement>(values: &[T], k: usize, room: usize) -> TestCaseResult {
        let (some, others) = values.split_at(values.len() / 3);
        let (more, rest) = others.split_at(others.len().min(65));
        for mut source in [SliceList::from(values), SliceList::new([some, more, rest].into_iter())]
        {
            let (mut places, mut held) = (vec![0; room], vec![T::ZERO; room]);
            let candidates = Picks { indices: &mut places, values: &mut held };
            let (mut indices, mut picked) = (vec![u32::MAX; k], vec![T::ZERO; k]);
            let picks = Picks { indices: &mut indices, values: &mut picked };
            let n = top_k(Isa::detect(), &mut source, None, candidates, picks);
            prop_assert_eq!(n, k);
            prop_assert_eq!(&indices, &slow(values, k));
            for (i, value) in indices.iter().zip(&picked) {
                prop_assert_eq!(value.magnitude(), values[*i as usize].magnitude());
            }
        }
        Ok(())
    }

    fn number() -> impl Strategy<Value = f64> {
        prop_oneof![
            8 => -2.0..2.0f64,
            2 => Just(0.0),
            1 => Just(-0.0),
            2 => Just(1.0),
            1 => Just(f64::NAN),
            1 => Just(f64::NEG_INFINITY),
            1 => any::<f64>(),
        ]
    }

    proptest! {
        #[test]
        fn selection_matches_sorting(
            values in proptest::collection::vec(number(), 0..400),
            share in 0.0..=1.0f64,
            room in 0usize..500,
        ) {
            let k = (share * values.len() as f64) as usize;
            check(&values, k, room)?;
            check(&values.iter().map(|&x| x as f32).collect::<Vec<_>>(), k, room)?;
            check(&values.iter().map(|&x| bf16::from_f64(x)).collect::<Vec<_>>(), k, room)?;
        }
    }

    #[test]
    fn large_inputs_use_every_path() {
        let mut rng =
            meristem_device::random::Rng::new(5, meristem_device::random::Purpose::Test, 0, 0);
        let even: Vec<f32> = (0..300_001).map(|_| rng.uniform() - 0.5).collect();
        let mut sparse = vec![0.0f32; 300_001];
        (0..1000).for_each(|i| sparse[i * 299] = even[i]);
        // Runs of equal elements.
        let mut hidden = even.clone();
        (0..300_001 / 16).for_each(|i| {
            if i % 3 == 0 {
                hidden[i * 16..i * 16 + 16].fill(3.0)
            }
        });
        for values in [even, sparse, hidden, vec![1.5; 300_001], vec![0.0; 300_001]] {
            for k in [0, 1, 300, 3000, 150_000, 300_000, 300_001] {
                check(&values, k, candidates_len(values.len(), k)).unwrap();
            }
        }
    }

    /// The fast path applies: enough candidates, and memory for them.
    #[test]
    fn a_sample_finds_enough_candidates_that_fit() {
        let mut rng =
            meristem_device::random::Rng::new(6, meristem_device::random::Purpose::Test, 0, 0);
        let values: Vec<f32> = (0..8_000_003).map(|_| rng.uniform() - 0.5).collect();
        for k in [1, 10, 100, 1000, 8000, 80_000] {
            let low = sampled_threshold(&SliceList::from(&values[..]), k);
            let found = values.iter().filter(|value| value.magnitude() >= low).count();
            let room = candidates_len(values.len(), k);
            assert!((k..=room).contains(&found), "k = {k}: {found} found, room for {room}");
        }
    }

    #[test]
    fn a_known_threshold_may_pick_fewer() {
        let values = [5.0f32, -1.0, 4.0, 0.5, -3.0];
        let pick = |threshold: f32, k: usize| {
            let (mut indices, mut picked) = (vec![0; k], vec![0.0; k]);
            let known = Some(threshold.to_bits());
            let room = Picks { indices: &mut [0; 5], values: &mut [0.0; 5] };
            let picks = Picks { indices: &mut indices, values: &mut picked };
            let n = top_k(Isa::detect(), &mut SliceList::from(&values[..]), known, room, picks);
            indices.truncate(n);
            indices
        };
        assert_eq!(pick(3.5, 4), [0, 2]);
        assert_eq!(pick(4.5, 4), [0, 1, 2, 4]); // too few, so the selection is exact
        assert_eq!(pick(0.9, 3), [0, 2, 4]); // more than wanted
        // More than fit: the threshold is outdated and recomputed.
        let values: Vec<f32> = (0..5000).map(|i| (i * 37 % 5000) as f32).collect();
        let (mut places, mut held) = ([0; 1100], [0.0; 1100]);
        let (mut indices, mut picked) = ([0; 50], [0.0; 50]);
        let known = Some(1.0f32.to_bits());
        let room = Picks { indices: &mut places, values: &mut held };
        let picks = Picks { indices: &mut indices, values: &mut picked };
        let mut source = SliceList::from(&values[..]);
        assert_eq!(top_k(Isa::detect(), &mut source, known, room, picks), 50);
        assert_eq!(indices[..], slow(&values, 50));
    }

    /// `u32::MAX` elements, the largest number; their type has no size, so they need no memory.
    #[test]
    fn the_last_index_fits() {
        let all = vec![(); u32::MAX as usize];
        let mut last = all.iter().copied().enumerate().map(numbered).rev();
        assert_eq!(
            (last.next(), last.next()),
            (Some((u32::MAX - 1, ())), Some((u32::MAX - 2, ())))
        );
    }

    #[test]
    fn magnitude_cuts_count_equal_elements() {
        assert_eq!(
            MagnitudeCut::at([5u32, 7, 7, 7, 2].into_iter(), 3),
            MagnitudeCut { threshold: 7, equal: 3 }
        );
        assert_eq!(
            MagnitudeCut::at([5u32, 7, 7, 7, 2].into_iter(), 4),
            MagnitudeCut { threshold: 5, equal: 1 }
        );
        assert_eq!(
            MagnitudeCut::at([0u16; 4].into_iter(), 2),
            MagnitudeCut { threshold: 0, equal: 2 }
        );
        let top = u64::MAX >> 1;
        assert_eq!(
            MagnitudeCut::at([top, top - 1].into_iter(), 2),
            MagnitudeCut { threshold: top - 1, equal: 1 }
        );
    }
}

//! Values, guarded memory and error bounds for the conformance suite.

use meristem_kernels::Isa;

/// Half a unit in the last place of 1: the relative error of one f32 rounding.
pub(crate) const ROUNDING: f64 = 1.0 / 16_777_216.0;

/// A small deterministic generator; the tests need variety, not randomness.
pub(crate) struct Values(u64);

impl Values {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    /// A uniform number in [−1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        ((self.next() % (1 << 24)) as f64 / f64::from(1 << 23) - 1.0) as f32
    }

    pub(crate) fn vec(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.next() % of.len() as u64) as usize]
    }
}

/// A destination between guards, which detect a write beyond it.
pub(crate) struct Guarded(Vec<f32>);

const GUARD: usize = 64;
const SENTINEL: f32 = 12_345.678;

impl Guarded {
    pub(crate) fn new(values: &[f32]) -> Self {
        let mut all = vec![SENTINEL; GUARD];
        all.extend_from_slice(values);
        all.extend([SENTINEL; GUARD]);
        Self(all)
    }

    /// A destination filled with NaN, to detect elements that are not overwritten.
    pub(crate) fn poisoned(n: usize) -> Self {
        Self::new(&vec![f32::NAN; n])
    }

    pub(crate) fn get(&mut self) -> &mut [f32] {
        let n = self.0.len();
        &mut self.0[GUARD..n - GUARD]
    }

    /// The values; panics if a guard was overwritten.
    pub(crate) fn check(&self, what: &str) -> &[f32] {
        let n = self.0.len();
        let guards = self.0[..GUARD].iter().chain(&self.0[n - GUARD..]);
        assert!(guards.copied().all(|v| v == SENTINEL), "{what}: wrote outside its destination");
        &self.0[GUARD..n - GUARD]
    }
}

/// Scratch with arbitrary contents, which must not affect results.
pub(crate) fn scratch(n: usize) -> Vec<f32> {
    vec![f32::NAN; n]
}

/// An exact value, and a bound of the error of computing it in f32.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Exact {
    pub(crate) value: f64,
    /// Sum of the magnitudes of the terms.
    pub(crate) magnitude: f64,
    /// Roundings on the longest path from a term to the result.
    pub(crate) roundings: usize,
}

impl Exact {
    /// Adds the term `v`, itself exact.
    pub(crate) fn add(&mut self, v: f64) {
        self.value += v;
        self.magnitude += v.abs();
        self.roundings += 1;
    }

    pub(crate) fn tolerance(&self) -> f64 {
        (self.roundings + 2) as f64 * ROUNDING * self.magnitude + 1e-37
    }
}

/// Panics unless every value is within its bound.
pub(crate) fn compare(what: &str, isa: Isa, got: &[f32], want: &[Exact]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want.value).abs();
        assert!(
            error <= want.tolerance(),
            "{what} ({isa}) at {i}: got {got}, expected {}, error {error:e} > {:e}",
            want.value,
            want.tolerance()
        );
    }
}

/// Panics unless every value is within `tolerance` of its f64 value.
pub(crate) fn compare_within(what: &str, isa: Isa, (got, want): (&[f32], &[f64]), tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(
            error <= tolerance,
            "{what} ({isa}) at {i}: got {got}, expected {want}, error {error:e} > {tolerance:e}"
        );
    }
}

//! The split of a dataset into a training part and a held-out part.

use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;

use super::shuffle::shuffle;
use crate::error::{Error, Result};

/// Splits `0..len` into a training part and a held-out part (`docs/data.md`: the control validation
/// split), and returns both in this order, each sorted. Does not wait.
///
/// `held_out` is the held-out share, such as 0.1: `round(len · held_out)` samples are held out.
/// They are the first ones after a shuffle of `0..len` as in the documentation of the order, with
/// the generator `ChaCha8Rng::seed_from_u64(seed)` and `set_stream(u64::MAX)`, a stream that no
/// epoch reaches.
///
/// # Errors
/// [`Error::Argument`] if `held_out` is not in 0..=1 or `len` is above 2^32 − 1.
pub fn split_by_seed(len: usize, held_out: f64, seed: u64) -> Result<(Vec<u32>, Vec<u32>)> {
    let wrong = |argument, expected: &str, got: String| Error::Argument {
        operation: "split_by_seed",
        argument,
        expected: expected.into(),
        got,
        remedy: "0.1 holds out every tenth sample".into(),
    };
    if !(0.0..=1.0).contains(&held_out) {
        return Err(wrong("held_out", "a share from 0 to 1", held_out.to_string()));
    }
    let count = u32::try_from(len)
        .map_err(|_| wrong("len", "at most 4294967295 samples", len.to_string()))?;
    let mut indices: Vec<u32> = (0..count).collect();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(u64::MAX);
    shuffle(&mut random, &mut indices);
    let mut train = indices.split_off((len as f64 * held_out).round() as usize);
    let mut held_out = indices;
    train.sort_unstable();
    held_out.sort_unstable();
    Ok((train, held_out))
}

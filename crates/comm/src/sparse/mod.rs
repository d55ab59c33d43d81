//! Exchanges of only the largest elements.

pub(crate) mod feedback;
pub(crate) mod gather;
pub(crate) mod gtopk;
pub(crate) mod lists;
pub(crate) mod ok_topk;
mod pieces;
pub(crate) mod select;
pub(crate) mod sum;
pub(crate) mod topk;

use crate::error::{Error, Result};

/// Number of elements selected from `len` at a density: `density * len`, rounded to the nearest
/// integer, halves up; at least one unless `len` is 0, at most `len`.
pub fn picks(density: f64, len: usize) -> usize {
    ((density * len as f64).round() as usize).clamp(usize::from(len > 0), len)
}

/// Checks that a density is above 0 and at most 1.
pub(crate) fn check_density(operation: &'static str, density: f64) -> Result<f64> {
    if density > 0.0 && density <= 1.0 {
        return Ok(density);
    }
    Err(Error::argument(operation, "density", "above 0, at most 1", density))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_density_is_rounded_and_selects_at_least_one() {
        let of = |density: f64| [0, 1, 149, 150, 250, 1000].map(|len| picks(density, len));
        assert_eq!(of(0.01), [0, 1, 1, 2, 3, 10]);
        assert_eq!(of(1.0), [0, 1, 149, 150, 250, 1000]);
        assert_eq!(of(1e-9), [0, 1, 1, 1, 1, 1]);
        for density in [0.0, -1.0, 1.1, f64::NAN, f64::INFINITY] {
            let error = check_density("test", density).unwrap_err();
            assert!(matches!(error, Error::BadArgument { .. }), "{error:?}");
            let text = format!("`test`: `density` must be above 0, at most 1, got {density}");
            assert_eq!(error.to_string(), text);
        }
    }
}

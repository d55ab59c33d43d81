//! Linear trends of the latest measurements.

/// Least-squares line through equally spaced values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trend {
    /// Change per step.
    pub(crate) slope: f64,
    /// Standard error of the slope, from the residuals; `None` for two values, which have none.
    pub(crate) standard_error: Option<f64>,
}

impl Trend {
    /// Fits a line to `values`; `None` for fewer than two values, or for a value that is not
    /// finite.
    pub(crate) fn fit(values: &[f32]) -> Option<Self> {
        let n = values.len() as f64;
        if values.len() < 2 || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let points = || values.iter().enumerate().map(|(x, y)| (x as f64, f64::from(*y)));
        let middle = (n - 1.0) / 2.0;
        let mean = points().map(|(_, y)| y).sum::<f64>() / n;
        let spread: f64 = points().map(|(x, _)| (x - middle).powi(2)).sum();
        let slope = points().map(|(x, y)| (x - middle) * (y - mean)).sum::<f64>() / spread;
        let rest: f64 = points().map(|(x, y)| (y - mean - slope * (x - middle)).powi(2)).sum();
        let standard_error =
            (values.len() > 2).then(|| (rest / (n - 2.0) / spread).max(0.0).sqrt());
        Some(Self { slope, standard_error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worked out by hand: x̄ = 1.5, ȳ = 4, Σ(x − x̄)² = 5, slope 2, residuals 0, 1, −2, 1.
    #[test]
    fn slopes_have_standard_errors() {
        let trend = Trend::fit(&[1.0, 4.0, 3.0, 8.0]).unwrap();
        assert!((trend.slope - 2.0).abs() < 1e-12);
        // √(Σ residual² / (n − 2) / 5) = √(6/2/5).
        assert!((trend.standard_error.unwrap() - 0.6f64.sqrt()).abs() < 1e-12, "{trend:?}");
        let line = Trend::fit(&[5.0, 4.5, 4.0]).unwrap();
        assert_eq!((line.slope, line.standard_error), (-0.5, Some(0.0)));
        assert_eq!(Trend::fit(&[1.0, 3.0]), Some(Trend { slope: 2.0, standard_error: None }));
        for none in [&[][..], &[1.0], &[1.0, f32::NAN, 2.0]] {
            assert_eq!(Trend::fit(none), None);
        }
    }
}

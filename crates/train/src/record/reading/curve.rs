//! Curves of bounded length.

/// Number of points at which a curve merges its points in pairs.
pub(super) const POINTS_MAX: usize = 1024;

/// A curve of at most 1,024 points, fewer if many envs share the memory. A longer series is stored
/// as the means of 2, 4, … neighbouring values.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    points: Vec<[f64; 2]>,
    /// Points of a full curve.
    points_max: usize,
    /// Values per point.
    merged: usize,
    /// Sum and number of the values after the last point, and the x of the newest value.
    pending: (f64, usize, f64),
}

impl Default for Curve {
    fn default() -> Self {
        Self { points: vec![], points_max: POINTS_MAX, merged: 1, pending: (0.0, 0, 0.0) }
    }
}

impl Curve {
    /// Appends a value; one that is not finite is left out.
    pub fn push(&mut self, x: f64, y: f64) {
        if !y.is_finite() {
            return;
        }
        let (sum, count, _) = self.pending;
        self.pending = (sum + y, count + 1, x);
        if self.pending.1 < self.merged {
            return;
        }
        self.points.extend(self.last_part());
        self.pending = (0.0, 0, x);
        self.merge();
    }

    /// Limits the curve to fewer than `points_max` points, a power of two of at least 2.
    pub(super) fn limit(&mut self, points_max: usize) {
        self.points_max = points_max;
        self.merge();
    }

    /// Merges pairs of points as long as the curve is full.
    fn merge(&mut self) {
        while self.points.len() >= self.points_max {
            // If their number is odd, the last point becomes pending values.
            if self.points.len() % 2 == 1
                && let Some([x, y]) = self.points.pop()
            {
                let (sum, count, last) = self.pending;
                let x = if count > 0 { last } else { x };
                self.pending = (sum + y * self.merged as f64, count + self.merged, x);
            }
            let pairs = self.points.chunks_exact(2);
            self.points = pairs.map(|p| [p[1][0], (p[0][1] + p[1][1]) / 2.0]).collect();
            self.merged *= 2;
        }
    }

    /// The mean of the pending values, as a point.
    fn last_part(&self) -> Option<[f64; 2]> {
        let (sum, count, x) = self.pending;
        (count > 0).then(|| [x, sum / count as f64])
    }

    /// The points in order of x.
    pub fn points(&self) -> Vec<[f64; 2]> {
        self.points.iter().copied().chain(self.last_part()).collect()
    }

    /// Number of points, without the pending values.
    pub(super) fn points_kept(&self) -> usize {
        self.points.len()
    }

    /// The value of the last point.
    pub fn last(&self) -> Option<f64> {
        self.last_part().or(self.points.last().copied()).map(|[_, y]| y)
    }

    /// Whether it has no points.
    pub fn is_empty(&self) -> bool {
        self.last().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_ends_and_its_mean() {
        let mut curve = Curve::default();
        (0..100_001).for_each(|i| curve.push(f64::from(i), f64::from(i % 7)));
        let points = curve.points();
        assert!((512..=1025).contains(&points.len()), "{}", points.len());
        assert_eq!(points[points.len() - 1][0], 100_000.0);
        assert!(points.windows(2).all(|pair| pair[0][0] < pair[1][0]));
        // A point is the mean of 128 values, 18 periods and at most 6 more.
        assert!(points[..500].iter().all(|[_, y]| (y - 3.0).abs() < 0.2), "{points:?}");
    }

    #[test]
    fn a_curve_is_limited_at_any_length() {
        for len in 0..70 {
            let mut curve = Curve::default();
            (0..len).for_each(|i| curve.push(f64::from(i), 1.0));
            curve.limit(16);
            (len..200).for_each(|i| curve.push(f64::from(i), 1.0));
            let points = curve.points();
            assert!(points.len() <= 16, "{len}: {points:?}");
            assert!(points.iter().all(|[_, y]| *y == 1.0), "{len}: {points:?}");
            assert!(points.windows(2).all(|pair| pair[0][0] < pair[1][0]), "{len}: {points:?}");
            assert_eq!(points[points.len() - 1][0], 199.0);
        }
    }

    #[test]
    fn values_that_are_not_finite_leave_no_point() {
        let mut curve = Curve::default();
        [f64::NAN, 2.0, f64::INFINITY].iter().for_each(|y| curve.push(1.0, *y));
        assert_eq!((curve.points(), curve.last()), (vec![[1.0, 2.0]], Some(2.0)));
        assert!(Curve::default().is_empty());
    }
}

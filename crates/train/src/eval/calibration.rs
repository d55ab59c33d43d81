//! Score, loss and calibration of predictions: those of each network, and of the mean of all.

use meristem_nn::{Score, ScoreSums};
use serde::Serialize;

/// Bins of the calibration error, of equal width; as in Guo et al. 2017.
const BINS: usize = 15;

/// Quality of predictions on a split.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Score: the share of samples classified correctly, micro-F1, or R².
    #[serde(rename = "accuracy")]
    pub score: f64,
    /// Mean loss: for classes and labels the negative log-likelihood in nats, of a sample or of a
    /// label; for numbers the mean squared difference of standardised numbers.
    pub loss: f64,
    /// Expected calibration error, 0..1 (Guo et al. 2017, equation 3): with the predictions in 15
    /// bins of equal width by their confidence, the mean over predictions of
    /// `|accuracy − mean confidence|` of their bin. The confidence is the probability of the
    /// predicted class; with several labels each label is a prediction of one of two classes,
    /// present or absent. `None` for numbers.
    pub calibration_error: Option<f64>,
}

/// Predictions whose confidences are in one bin.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    correct: u64,
    /// Sum of the confidences.
    confidence: f64,
}

/// Sums over the predictions of one predictor.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    samples: u64,
    /// Samples whose class was predicted correctly.
    correct: u64,
    sums: ScoreSums,
    /// Sum of the losses, and number of predictions in it.
    loss: (f64, u64),
    bins: [Bin; BINS],
    /// Predictions in `bins`.
    binned: u64,
}

/// The prediction of a class or a label, compared with its target.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassPrediction {
    /// Probability of the predicted class, or of the predicted value of the label, 0..1.
    pub(super) confidence: f64,
    /// Whether the prediction is the target.
    pub(super) correct: bool,
    /// Natural logarithm of the predicted probability of the target.
    pub(super) ln_target: f64,
}

impl Tally {
    /// Begins a sample.
    pub(super) fn begin_sample(&mut self) {
        self.samples += 1;
    }

    /// Adds the class of a sample.
    pub(super) fn add_class(&mut self, class: ClassPrediction) {
        self.correct += u64::from(class.correct);
        self.add_prediction(class);
    }

    /// Adds a label of a sample; `present` is whether the target has the label.
    pub(super) fn add_label(&mut self, label: ClassPrediction, present: bool) {
        self.sums.true_positives += u64::from(label.correct && present);
        self.sums.false_negatives += u64::from(!label.correct && present);
        self.sums.false_positives += u64::from(!label.correct && !present);
        self.add_prediction(label);
    }

    /// Adds a standardised number of a sample.
    pub(super) fn add_number(&mut self, predicted: f64, target: f64) {
        let square = (predicted - target) * (predicted - target);
        self.sums.residual_squares += square;
        self.loss = (self.loss.0 + square, self.loss.1 + 1);
    }

    fn add_prediction(
        &mut self,
        ClassPrediction { confidence, correct, ln_target }: ClassPrediction,
    ) {
        self.loss = (self.loss.0 - ln_target, self.loss.1 + 1);
        // Bin m has the confidences above (m − 1)/15, up to m/15; a NaN is in the first.
        let bin = (confidence * BINS as f64).ceil() as usize;
        let bin = &mut self.bins[bin.saturating_sub(1).min(BINS - 1)];
        bin.correct += u64::from(correct);
        bin.confidence += confidence;
        self.binned += 1;
    }

    /// The quality of all predictions; NaN where it is not defined.
    pub(super) fn quality(&self, score: Score) -> Quality {
        let gap = |bin: &Bin| (bin.correct as f64 - bin.confidence).abs();
        let gaps: f64 = self.bins.iter().map(gap).sum();
        Quality {
            score: score.of(self.correct, self.samples, &self.sums).unwrap_or(f64::NAN),
            loss: self.loss.0 / self.loss.1 as f64,
            calibration_error: (self.binned > 0).then(|| gaps / self.binned as f64),
        }
    }
}

impl Quality {
    /// The mean of each figure.
    pub(super) fn mean(all: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| all.iter().map(figure).sum::<f64>() / all.len() as f64;
        let errors: Option<Vec<f64>> = all.iter().map(|own| own.calibration_error).collect();
        Self {
            score: of(|own| own.score),
            loss: of(|own| own.loss),
            calibration_error: errors.map(|errors| errors.iter().sum::<f64>() / all.len() as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(confidence: f64, correct: bool, of_target: f64) -> ClassPrediction {
        ClassPrediction { confidence, correct, ln_target: of_target.ln() }
    }

    /// By hand. Bin 9 is (8/15, 9/15], bin 15 is (14/15, 1], bin 12 is (11/15, 12/15].
    #[test]
    fn the_calibration_error_is_the_mean_gap_of_the_bins() {
        let mut tally = Tally::default();
        // Bin 9: confidences 0.55 and 0.6, one of two correct: |1 − 1.15| = 0.15. 0.6 is its bound.
        // Bin 12: 0.8, its bound, wrong: 0.8. Bin 15: 0.95 and 1, both correct: |2 − 1.95| = 0.05.
        let all = [(0.55, true), (0.6, false), (0.8, false), (0.95, true), (1.0, true)];
        for (confidence, correct) in all {
            tally.begin_sample();
            tally.add_class(judged(confidence, correct, if correct { confidence } else { 0.1 }));
        }
        let found = tally.quality(Score::Accuracy);
        // (0.15 + 0.8 + 0.05)/5. Five sums with errors below 1e-15.
        assert!((found.calibration_error.unwrap() - 0.2).abs() < 1e-14, "{found:?}");
        assert_eq!(found.score, 0.6);
        // −ln(0.55·0.1·0.1·0.95·1)/5.
        assert!((found.loss + (0.0055 * 0.95_f64).ln() / 5.0).abs() < 1e-14, "{found:?}");
    }

    /// By hand: labels 1, 1, 0, 0 with probabilities 0.9, 0.4, 0.3, 0.6 of being present.
    #[test]
    fn a_label_is_a_prediction_of_two_classes() {
        let mut tally = Tally::default();
        tally.begin_sample();
        tally.add_label(judged(0.9, true, 0.9), true);
        tally.add_label(judged(0.6, false, 0.4), true);
        tally.begin_sample();
        tally.add_label(judged(0.7, true, 0.7), false);
        tally.add_label(judged(0.6, false, 0.4), false);
        let found = tally.quality(Score::F1);
        // One of each: 2/(2 + 1 + 1).
        assert_eq!(found.score, 0.5);
        assert!((found.loss + (0.9 * 0.7 * 0.16_f64).ln() / 4.0).abs() < 1e-14, "{found:?}");
        // Three bins: |1 − 0.9| + |1 − 0.7| + |0 − 1.2|, of four predictions.
        assert!((found.calibration_error.unwrap() - 0.4).abs() < 1e-14, "{found:?}");
    }

    /// By hand: predictions 1 and 3 of targets 0 and 4, whose variance is 4.
    #[test]
    fn numbers_have_no_calibration_error() {
        let mut tally = Tally::default();
        for (predicted, target) in [(1.0, 0.0), (3.0, 4.0)] {
            tally.begin_sample();
            tally.add_number(predicted, target);
        }
        let found = tally.quality(Score::R2 { variance: 4.0 });
        assert_eq!(found, Quality { score: 0.75, loss: 1.0, calibration_error: None });
    }

    #[test]
    fn nan_is_not_hidden() {
        let mut tally = Tally::default();
        tally.begin_sample();
        tally.add_class(judged(f64::NAN, false, f64::NAN));
        let found = tally.quality(Score::Accuracy);
        assert!(found.loss.is_nan() && found.calibration_error.unwrap().is_nan(), "{found:?}");
    }
}

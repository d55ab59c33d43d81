//! The PPO loss: properties for any logits and masks, and its gradient by differences. PyTorch's
//! numbers are in `control/tests/golden_ppo.rs`.

use meristem_kernels::ppo::{
    PpoBatch, PpoHead, PpoLoss, PpoReport, Reference, floored_probabilities, report_len,
};
use proptest::prelude::*;

fn loss() -> PpoLoss {
    let head = |choices, used_by, floor| PpoHead {
        choices,
        used_by,
        floor,
        entropy_coefficient: 0.05,
        entropy_floor: 0.9,
    };
    PpoLoss {
        heads: vec![head(3, 0b111, 0.15), head(4, 0b110, 0.05), head(2, 0b100, 0.12)],
        clip: 0.2,
        value_coefficient: 0.5,
        entropy_floor_coefficient: 1.0,
    }
}

struct Rows {
    outputs: Vec<f32>,
    choices: Vec<u32>,
    legal: Vec<u8>,
    advantages: Vec<f32>,
    returns: Vec<f32>,
    reference: Vec<f32>,
}

impl Rows {
    /// Six rows: all ops; two ops; only WAIT; no op; two rows that use every head.
    fn new() -> Self {
        let mut values = super::support::Values::new(3);
        let legal = [
            [1, 1, 1, 1, 1, 0, 1, 1, 0],
            [1, 1, 0, 0, 1, 0, 0, 1, 0],
            [1, 0, 0, 1, 0, 0, 0, 1, 0],
            [0, 0, 0, 1, 0, 0, 0, 1, 0],
            [1, 0, 1, 1, 1, 1, 1, 1, 1],
            [0, 1, 1, 1, 0, 0, 1, 1, 1],
        ];
        let choices = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [2, 2, 1], [2, 3, 0]];
        Self {
            outputs: values.vec(6 * 10).iter().map(|v| 2.0 * v).collect(),
            choices: choices.concat(),
            legal: legal.concat(),
            advantages: values.vec(6),
            returns: values.vec(6),
            reference: values.vec(18).iter().map(|v| v * 0.3 - 1.0).collect(),
        }
    }

    fn run(&self) -> (PpoReport, Vec<f32>) {
        let batch = PpoBatch {
            choices: &self.choices,
            legal: &self.legal,
            advantages: &self.advantages,
            returns: &self.returns,
        };
        let mut gradient = vec![f32::NAN; self.outputs.len()];
        let mut report = vec![f64::NAN; report_len(3)];
        let reference = Reference::Given(&self.reference);
        loss().gradient(&batch, reference, &self.outputs, &mut gradient, &mut report);
        (PpoReport::parse(&report), gradient)
    }
}

#[test]
fn the_gradient_is_the_slope_of_the_loss() {
    let rows = Rows::new();
    let (report, gradient) = rows.run();
    assert_eq!((report.rows, report.decisions), (5, 4));
    assert_eq!(report.heads.iter().map(|h| h.count).collect::<Vec<_>>(), [4, 4, 2]);
    assert!(report.heads.iter().any(|h| h.clipped > 0.0), "{report:?}");
    for (i, g) in gradient.iter().enumerate() {
        const STEP: f32 = 1e-2;
        let at = |d: f32| {
            let mut outputs = rows.outputs.clone();
            outputs[i] += d;
            Rows { outputs, ..Rows::new() }.run().0.loss
        };
        // The difference cuts off STEP²/6 of the third derivative (some 5e-5 here), and
        // probabilities in f32 add 1e-7/STEP.
        let slope = (at(STEP) - at(-STEP)) / f64::from(2.0 * STEP);
        assert!((f64::from(*g) - slope).abs() < 2e-4, "{i}: {g} {slope}");
    }
    // The gradient is zero for the row without a legal op, for illegal choices and for unused
    // heads.
    assert!(gradient[30..40].iter().all(|g| *g == 0.0));
    assert!(gradient[20..29].iter().all(|g| *g == 0.0) && gradient[29] != 0.0);
    for (i, legal) in rows.legal.iter().enumerate().filter(|(_, legal)| **legal == 0) {
        assert_eq!(gradient[i / 9 * 10 + i % 9], 0.0, "{legal}");
    }
}

#[test]
fn what_masked_logits_hold_does_not_matter() {
    let rows = Rows::new();
    let mut other = Rows::new();
    for i in (0..rows.legal.len()).filter(|i| rows.legal[*i] == 0) {
        other.outputs[i / 9 * 10 + i % 9] = 1e30;
    }
    assert_eq!(rows.run(), other.run());
}

proptest! {
    #[test]
    fn probabilities_are_floored_and_sum_to_one(
        logits in proptest::collection::vec(-50f32..50.0, 1..9),
        bits in 1u32..512,
        floor in 0f32..0.5,
    ) {
        let legal: Vec<u8> = (0..logits.len()).map(|i| (bits >> i & 1) as u8).collect();
        let mut p = vec![f32::NAN; logits.len()];
        floored_probabilities(&logits, &legal, floor, &mut p);
        let n = legal.iter().filter(|l| **l == 1).count();
        for (p, legal) in p.iter().zip(&legal) {
            match (legal, n) {
                (0, _) => prop_assert_eq!(*p, 0.0),
                (_, 1) => prop_assert_eq!(*p, 1.0),
                _ => prop_assert!(*p >= floor.min(0.99 / n as f32) && *p <= 1.0),
            }
        }
        // Nine sums and quotients of 6e-8.
        let sum: f32 = p.iter().sum();
        prop_assert!(n == 0 || (sum - 1.0).abs() < 2e-6, "{}", sum);
    }
}

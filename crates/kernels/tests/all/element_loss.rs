//! Losses of numbers against f64, and their gradients against differences of the loss.

use meristem_kernels::Isa;
use meristem_kernels::loss::{ElementLoss, ElementSums, Elements, element_loss};

use super::support::{Guarded, ROUNDING, Values, compare_within};

const LOSSES: [ElementLoss; 4] = [
    ElementLoss::BinaryCrossEntropy,
    ElementLoss::Square,
    ElementLoss::Huber { delta: 0.75 },
    ElementLoss::Absolute,
];

/// Loss of an output, by another formula, in f64.
fn slow(loss: ElementLoss, y: f64, t: f64) -> f64 {
    let d = (y - t).abs();
    match loss {
        ElementLoss::BinaryCrossEntropy => {
            // −t·ln σ(y) − (1 − t)·ln σ(−y), ln σ(x) = −ln(1 + e⁻ˣ); |y| is below 700.
            t * (-y).exp().ln_1p() + (1.0 - t) * y.exp().ln_1p()
        }
        ElementLoss::Square => d.powi(2),
        ElementLoss::Huber { delta } => {
            let delta = f64::from(delta);
            // The integral of min(x, delta) from 0 to d.
            let square = d.min(delta);
            0.5 * square * square + (d - square) * delta
        }
        ElementLoss::Absolute => d,
    }
}

/// Derivative by the output.
fn slow_slope(loss: ElementLoss, y: f64, t: f64) -> f64 {
    let d = y - t;
    match loss {
        ElementLoss::BinaryCrossEntropy => 1.0 / (1.0 + (-y).exp()) - t,
        ElementLoss::Square => 2.0 * d,
        ElementLoss::Huber { delta } => d.clamp(-f64::from(delta), f64::from(delta)),
        ElementLoss::Absolute if d == 0.0 => 0.0,
        ElementLoss::Absolute => d.signum(),
    }
}

#[test]
fn losses_of_numbers_agree_with_f64() {
    for (n, outputs) in [(1, 1), (3, 2), (130, 10), (7, 33)] {
        for (loss, scale) in LOSSES.into_iter().flat_map(|loss| [(loss, 1.0), (loss, 40.0)]) {
            let mut random = Values::new((n * outputs) as u64);
            let values: Vec<f32> = random.vec(n * outputs).iter().map(|v| v * scale).collect();
            let targets: Vec<f32> = random.vec(n * outputs).iter().map(|v| v.abs()).collect();
            let pairs: Vec<(f64, f64)> =
                values.iter().zip(&targets).map(|(y, t)| ((*y).into(), (*t).into())).collect();
            let total = (n * outputs) as f64;
            let each: Vec<f64> = pairs
                .chunks(outputs)
                .map(|of| of.iter().map(|(y, t)| slow(loss, *y, *t)).sum::<f64>() / outputs as f64)
                .collect();
            let slopes: Vec<f64> =
                pairs.iter().map(|(y, t)| slow_slope(loss, *y, *t) / total).collect();
            let mut expected = ElementSums::default();
            for (y, t) in &pairs {
                if loss == ElementLoss::BinaryCrossEntropy {
                    expected.true_positives += u64::from(*y > 0.0 && *t > 0.5);
                    expected.false_positives += u64::from(*y > 0.0 && *t <= 0.5);
                    expected.false_negatives += u64::from(*y <= 0.0 && *t > 0.5);
                } else {
                    expected.residual_squares += (y - t).powi(2);
                }
            }
            for isa in Isa::available() {
                let of = Elements { loss, outputs };
                let mut d = Guarded::poisoned(values.len());
                let mut losses = vec![f32::NAN; n];
                let sums = element_loss(isa, of, &values, &targets, d.get(), &mut losses);
                let alone = element_loss(isa, of, &values, &targets, &mut [], &mut []);
                assert_eq!(sums, alone);
                // `ln(1 + e^(−|z|))`, at most ln 2, is good to 4 ulps; all else is f64, and a
                // sample's loss is rounded once.
                let bound = 8.0 * ROUNDING;
                for (own, expected) in losses.iter().zip(&each) {
                    let apart = (f64::from(*own) - expected).abs();
                    assert!(apart <= bound + ROUNDING * expected, "{loss:?} {isa}");
                }
                let sum: f64 = each.iter().sum();
                assert!((sums.loss - sum).abs() <= bound * n as f64, "{loss:?} {isa}");
                // A difference, a product and the factor, or a sigmoid good to 7 roundings, a
                // difference and the factor.
                let most = slopes.iter().fold(1.0 / total, |most, slope| slope.abs().max(most));
                let within = 10.0 * ROUNDING * most;
                compare_within("gradient", isa, (d.check("gradient"), &slopes), within);
                assert_eq!(
                    ElementSums { loss: 0.0, residual_squares: 0.0, ..sums },
                    ElementSums { loss: 0.0, residual_squares: 0.0, ..expected }
                );
                let apart = (sums.residual_squares - expected.residual_squares).abs();
                assert!(apart <= 1e-12 * expected.residual_squares, "{loss:?} {isa}");
            }
        }
    }
}

/// Central differences with h = 2⁻⁷: an error of h²/6 times the third derivative, which is below
/// 0.1 for a sigmoid and 0 for the others, and of 8·2⁻²⁴/h from the loss in f32. Kinks are left
/// out.
#[test]
fn gradients_of_numbers_are_differences_of_the_loss() {
    let h = 1.0 / 128.0;
    let limit = h * h / 60.0 + 8.0 * f64::from(f32::EPSILON) / h;
    for loss in LOSSES {
        let of = Elements { loss, outputs: 1 };
        let at = |value: f64, target: f32| {
            let values = [value as f32];
            element_loss(Isa::portable(), of, &values, &[target], &mut [], &mut []).loss
        };
        let mut checked = 0;
        for step in -40..40 {
            // Exact in f32, as is h.
            let (value, target) = (f64::from(step) / 16.0 + 1.0 / 32.0, 0.25f32);
            let apart = (value - 0.25).abs();
            let is_kink = match loss {
                ElementLoss::Huber { delta } => (apart - f64::from(delta)).abs() <= h,
                ElementLoss::Absolute => apart <= h,
                _ => false,
            };
            if is_kink {
                continue;
            }
            let mut gradient = [f32::NAN];
            let isa = Isa::portable();
            element_loss(isa, of, &[value as f32], &[target], &mut gradient, &mut []);
            let difference = (at(value + h, target) - at(value - h, target)) / (2.0 * h);
            let slope = f64::from(gradient[0]);
            assert!((slope - difference).abs() <= limit, "{loss:?} at {value}: {slope}");
            checked += 1;
        }
        assert!(checked >= 70, "{loss:?}");
    }
}

#[test]
fn losses_of_numbers_pass_nan_and_infinity() {
    for isa in Isa::available() {
        for loss in LOSSES {
            let of = Elements { loss, outputs: 2 };
            let mut d = [0.0; 4];
            let mut losses = [0.0; 2];
            let values = [0.5, f32::NAN, 1.0, 1.0];
            let sums = element_loss(isa, of, &values, &[1.0; 4], &mut d, &mut losses);
            assert!(sums.loss.is_nan() && losses[0].is_nan() && losses[1].is_finite(), "{loss:?}");
            assert!(d[1].is_nan() && [d[0], d[2], d[3]].iter().all(|d| d.is_finite()), "{loss:?}");
            let sums = element_loss(isa, of, &[f32::NEG_INFINITY; 2], &[0.5; 2], &mut [], &mut []);
            assert!(!sums.loss.is_finite(), "{loss:?}");
            let none = element_loss(isa, of, &[], &[], &mut [], &mut []);
            assert_eq!(none, Default::default());
        }
        // No larger logit predicts the wrong label.
        let of = Elements { loss: ElementLoss::BinaryCrossEntropy, outputs: 1 };
        let certain = element_loss(isa, of, &[1000.0, -1000.0], &[1.0, 0.0], &mut [], &mut []);
        assert_eq!((certain.loss, certain.true_positives), (0.0, 1));
        assert_eq!((certain.false_positives, certain.false_negatives), (0, 0));
    }
}

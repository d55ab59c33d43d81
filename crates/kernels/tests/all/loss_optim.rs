//! Loss and optimiser.

use meristem_kernels::Isa;
use meristem_kernels::loss::{ClassTargets, smoothed_cross_entropy, softmax_cross_entropy};
use meristem_kernels::optim::SgdConfig;
use meristem_kernels::optim::{clip_coefficient, grad_norm_sq, sgd_step};

use super::support::{Guarded, ROUNDING, Values, compare_within};

#[test]
fn cross_entropy_agrees_with_f64() {
    for (n, classes) in [(1, 1), (1, 2), (3, 10), (128, 10), (5, 100), (7, 17)] {
        // Includes large logits: subtracting the maximum must prevent overflow.
        for size in [1.0f32, 90.0, 1000.0] {
            let mut values = Values::new((n * classes) as u64);
            let logits: Vec<f32> = values.vec(n * classes).iter().map(|v| v * size).collect();
            let targets: Vec<u32> = (0..n).map(|i| (i * 7 % classes) as u32).collect();
            let (mut loss, mut correct, mut gradient) = (0f64, 0u64, Vec::new());
            for (z, &target) in logits.chunks_exact(classes).zip(&targets) {
                let z: Vec<f64> = z.iter().map(|&z| z.into()).collect();
                let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = z.iter().map(|z| (z - max).exp()).sum();
                loss += sum.ln() + max - z[target as usize];
                correct += u64::from(z.iter().position(|&z| z == max) == Some(target as usize));
                for (c, z) in z.iter().enumerate() {
                    let onehot = f64::from(c == target as usize);
                    gradient.push(((z - max).exp() / sum - onehot) / n as f64);
                }
            }
            for isa in Isa::available() {
                let mut d = Guarded::poisoned(logits.len());
                let mut each = vec![f32::NAN; n];
                let sums =
                    softmax_cross_entropy(isa, classes, &logits, &targets, d.get(), &mut each);
                let none = (&mut [][..], &mut [][..]);
                let alone = softmax_cross_entropy(isa, classes, &logits, &targets, none.0, none.1);
                assert_eq!(sums, alone);
                let total: f64 = each.iter().copied().map(f64::from).sum();
                assert!((total - sums.loss).abs() <= 2.0 * ROUNDING * sums.loss.abs(), "{isa}");
                assert_eq!(sums.correct, correct);
                // Each exponential is exact to 3 ulp, and so are their sum and quotient. Its
                // argument is rounded once, an error in proportion to its size (up to 88; beyond
                // that the exponential is 0).
                let bound = 8.0 * ROUNDING * 100.0;
                assert!(
                    (sums.loss - loss).abs() <= bound * n as f64 + 4.0 * ROUNDING * loss,
                    "{isa}"
                );
                compare_within("dlogits", isa, (d.check("dlogits"), &gradient), bound / n as f64);
            }
        }
    }
}

/// Loss and gradient against f64, and the gradient against differences of the loss, for which the
/// loss in f64 suffices. The bounds are those of plain cross-entropy times the largest weight.
#[test]
fn smoothed_and_weighted_cross_entropy_agrees_with_f64() {
    for (n, classes) in [(1, 2), (3, 10), (64, 10), (5, 100)] {
        let forms = [(0.0f32, true), (0.25, false), (0.5, true), (1.0, true)];
        for (label_smoothing, is_weighted) in forms {
            let mut values = Values::new((n * classes) as u64);
            let logits: Vec<f32> = values.vec(n * classes).iter().map(|v| v * 20.0).collect();
            let targets: Vec<u32> = (0..n).map(|i| (i * 7 % classes) as u32).collect();
            let weights: Vec<f32> = (0..classes).map(|c| (c % 4) as f32).collect();
            let weights = if is_weighted { &weights[..] } else { &[] };
            let weight = |c: usize| weights.get(c).map_or(1.0, |w| f64::from(*w));
            let s = f64::from(label_smoothing);
            // Targets of a sample, times weights.
            let share = |c: usize, target: u32| {
                let own = if c == target as usize { 1.0 - s } else { 0.0 };
                weight(c) * (own + s / classes as f64)
            };
            let slow = |z: &[f64], target: u32| {
                let sum: f64 = z.iter().map(|z| z.exp()).sum();
                (0..classes).map(|c| share(c, target) * (sum.ln() - z[c])).sum::<f64>()
            };
            let (mut each, mut gradient) = (vec![], vec![]);
            for (z, &target) in logits.chunks_exact(classes).zip(&targets) {
                let mut z: Vec<f64> = z.iter().map(|&z| z.into()).collect();
                each.push(slow(&z, target));
                for c in 0..classes {
                    let (at, h) = (z[c], 1e-4);
                    z[c] = at + h;
                    let above = slow(&z, target);
                    z[c] = at - h;
                    gradient.push((above - slow(&z, target)) / (2.0 * h) / n as f64);
                    z[c] = at;
                }
            }
            let total: f64 = each.iter().sum();
            for isa in Isa::available() {
                let of = ClassTargets { classes, label_smoothing, weights };
                let mut d = Guarded::poisoned(logits.len());
                let mut losses = vec![f32::NAN; n];
                let sums = smoothed_cross_entropy(isa, of, &logits, &targets, d.get(), &mut losses);
                let alone = smoothed_cross_entropy(isa, of, &logits, &targets, &mut [], &mut []);
                assert_eq!(sums, alone);
                let plain =
                    softmax_cross_entropy(isa, classes, &logits, &targets, &mut [], &mut []);
                assert_eq!(sums.correct, plain.correct);
                let bound = 3.0 * 8.0 * ROUNDING * 100.0;
                let near = |a: f64, b: f64| (a - b).abs() <= bound + 4.0 * ROUNDING * b;
                assert!((sums.loss - total).abs() <= n as f64 * bound + 4.0 * ROUNDING * total);
                assert!(losses.iter().zip(&each).all(|(a, b)| near(f64::from(*a), *b)), "{isa}");
                // Differences have errors of h²/6 and of 2⁻⁵³·100/h.
                let bound = bound / n as f64 + 1e-8;
                compare_within("dlogits", isa, (d.check("dlogits"), &gradient), bound);
            }
        }
    }
}

#[test]
fn cross_entropy_counts_first_of_equals_and_passes_nan() {
    for isa in Isa::available() {
        let logits = [1.0, 1.0, 0.0, 2.0, 2.0, 2.0];
        assert_eq!(softmax_cross_entropy(isa, 3, &logits, &[0, 1], &mut [], &mut []).correct, 1);
        let logits = [1.0, f32::NAN, 0.0];
        let mut d = [0.0; 3];
        let sums = softmax_cross_entropy(isa, 3, &logits, &[1], &mut d, &mut []);
        assert!(sums.loss.is_nan() && sums.correct == 1 && d.iter().all(|d| d.is_nan()));
        let logits = [f32::NEG_INFINITY, 0.0];
        let sums = softmax_cross_entropy(isa, 2, &logits, &[0], &mut [], &mut []);
        assert_eq!((sums.loss, sums.correct), (f64::INFINITY, 0));
        assert_eq!(softmax_cross_entropy(isa, 4, &[], &[], &mut [], &mut []), Default::default());
    }
}

#[test]
fn norms_are_f64() {
    for n in [0, 1, 15, 16, 17, 5000] {
        let g = Values::new(n as u64).vec(n);
        let want: f64 = g.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        for isa in Isa::available() {
            let got = grad_norm_sq(isa, &g);
            assert!((got - want).abs() <= 1e-12 * want, "{isa} {n}: {got} {want}");
            // Squares that overflow f32.
            assert!((grad_norm_sq(isa, &[1e30, -1e30]) / 2e60 - 1.0).abs() < 1e-6);
            assert!(grad_norm_sq(isa, &[1.0, f32::NAN]).is_nan());
        }
    }
}

#[test]
fn sgd_follows_pytorch() {
    for n in [0, 1, 17, 1000] {
        let mut values = Values::new(n as u64 + 9);
        let (p0, g) = (values.vec(n), values.vec(n));
        for m0 in [vec![0.0; n], values.vec(n)] {
            let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.01, clip_norm: 1.0 };
            let [lr, mu, decay] = [sgd.lr, sgd.momentum, sgd.weight_decay].map(f64::from);
            let buffer: Vec<f64> = (0..n)
                .map(|i| {
                    let g = 0.5 * f64::from(g[i]) + decay * f64::from(p0[i]);
                    mu * f64::from(m0[i]) + g
                })
                .collect();
            let want: Vec<f64> = (0..n).map(|i| f64::from(p0[i]) - lr * buffer[i]).collect();
            for isa in Isa::available() {
                let (mut p, mut m) = (Guarded::new(&p0), Guarded::new(&m0));
                sgd_step(isa, &sgd, 0.5, p.get(), &g, m.get());
                compare_within("momentum", isa, (m.check("momentum"), &buffer), 8.0 * ROUNDING);
                compare_within("parameter", isa, (p.check("parameter"), &want), 8.0 * ROUNDING);
            }
        }
    }
}

#[test]
fn clipping_is_that_of_pytorch() {
    assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
    assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
    assert!((clip_coefficient(4.0, 1.0) - 0.25).abs() < 1e-6);
    assert_eq!(clip_coefficient(f64::INFINITY, 1.0), 0.0);
    assert!(clip_coefficient(f64::NAN, 1.0).is_nan());
}

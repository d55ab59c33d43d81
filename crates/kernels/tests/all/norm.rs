//! Batch norm and group norm.

use meristem_kernels::norm::batch::{BLOCKED, output, scratch_len};
use meristem_kernels::norm::{
    self, Activation, BatchNormBackward, BatchNormForward, BatchStats, GroupNormBackward,
    GroupNormForward, GroupNormGrads, GroupNormSaved,
};
use meristem_kernels::{BatchShape, GradOut, Isa};

use super::support::{Exact, Guarded, ROUNDING, Values, compare, scratch};

/// [`check_stats`] of moments, `[mean, variance][c]`.
pub(crate) fn check_moments(name: &str, isa: Isa, of: (&[f32], usize), moments: &[f64]) {
    let moments: Vec<f32> = moments.iter().map(|&v| v as f32).collect();
    check_stats(name, isa, of, moments.split_at(of.1));
}

/// Checks mean and biased variance of `x` `[pixels][c]`. The kernel sums distances from the first
/// image's mean, at most twice the largest distance D from the mean, in f32 runs of 64 pixels:
/// the mean is off by at most 70 roundings of 2·D and its own rounding, the variance by 70 of
/// (2·D)².
pub(crate) fn check_stats(
    name: &str,
    isa: Isa,
    (x, c): (&[f32], usize),
    (mean, var): (&[f32], &[f32]),
) {
    for channel in 0..c {
        let values = || x[channel..].iter().step_by(c).map(|&v| f64::from(v));
        let count = values().count() as f64;
        let exact = values().sum::<f64>() / count;
        let exact_var = values().map(|v| (v - exact).powi(2)).sum::<f64>() / count;
        let spread = values().map(|v| (v - exact).abs()).fold(0.0, f64::max);
        let bound = 70.0 * ROUNDING * 2.0 * spread + 2.0 * ROUNDING * exact.abs() + 1e-37;
        let error = (f64::from(mean[channel]) - exact).abs();
        assert!(error <= bound, "{name} ({isa}) mean {channel}: {error:e} > {bound:e}");
        let bound = 70.0 * ROUNDING * (2.0 * spread).powi(2) + 1e-37;
        let error = (f64::from(var[channel]) - exact_var).abs();
        assert!(error <= bound, "{name} ({isa}) variance {channel}: {error:e} > {bound:e}");
    }
}

fn shapes() -> Vec<BatchShape> {
    let mut shapes = vec![
        BatchShape { batch: 2, h: 1, w: 1, c: 5 },
        BatchShape { batch: 1, h: 40, w: 34, c: 8 },
        BatchShape { batch: 3, h: 32, w: 32, c: 3 },
        // With pooling, a register holds two adjacent pixels: in forward, and in both passes.
        BatchShape { batch: 2, h: 7, w: 13, c: 8 },
        BatchShape { batch: 2, h: 6, w: 12, c: 8 },
        // A batch in several parts, the last one smaller, more than the caches hold: some passes go
        // backwards.
        BatchShape { batch: 67, h: 31, w: 32, c: 16 },
    ];
    for c in [1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 31, 32, 33, 64, 100] {
        for (batch, h, w) in [(1, 5, 4), (3, 8, 6), (5, 3, 7), (2, 2, 2), (2, 1, 4)] {
            shapes.push(BatchShape { batch, h, w, c });
        }
    }
    shapes
}

#[test]
fn statistics_survive_a_mean_far_from_zero() {
    for shape in shapes() {
        let mut values = Values::new(5);
        let x: Vec<f32> = values.vec(shape.len()).iter().map(|v| v + 1000.0).collect();
        for isa in Isa::available() {
            let (mut mean, mut var) = (vec![f32::NAN; shape.c], vec![f32::NAN; shape.c]);
            let to = BatchStats { mean: &mut mean, var: &mut var };
            let mut room = scratch(norm::batch::scratch_len(shape.c));
            norm::batch_stats(isa, &shape, &x, to, &mut room);
            check_stats(&format!("{shape:?}"), isa, (&x, shape.c), (&mean, &var));
        }
    }
}

struct Case {
    shape: BatchShape,
    x: Vec<f32>,
    mean: Vec<f32>,
    var: Vec<f32>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
}

impl Case {
    fn new(shape: BatchShape, seed: u64) -> Self {
        let mut values = Values::new(seed);
        let positive = |v: Vec<f32>| v.iter().map(|v| v.abs() + 0.1).collect();
        Self {
            shape,
            x: values.vec(shape.len()),
            mean: values.vec(shape.c),
            var: positive(values.vec(shape.c)),
            gamma: values.vec(shape.c),
            beta: values.vec(shape.c),
        }
    }

    fn inputs(&self, act: Activation, pool: bool) -> BatchNormForward<'_> {
        BatchNormForward {
            x: &self.x,
            mean: &self.mean,
            var: &self.var,
            gamma: &self.gamma,
            beta: &self.beta,
            eps: 1e-5,
            act,
            pool,
        }
    }

    /// Normalised input `i`, before scale and shift.
    fn hat(&self, i: usize) -> f64 {
        let c = i % self.shape.c;
        (f64::from(self.x[i]) - f64::from(self.mean[c]))
            / (f64::from(self.var[c]) + 1e-5f32 as f64).sqrt()
    }

    fn z(&self, i: usize) -> f64 {
        let c = i % self.shape.c;
        self.hat(i) * f64::from(self.gamma[c]) + f64::from(self.beta[c])
    }

    /// Five roundings of a sum of the terms `x̂γ` (with the rounding of x − mean) and β.
    fn bound(&self, i: usize) -> f64 {
        let c = i % self.shape.c;
        6.0 * ROUNDING
            * ((self.hat(i) * f64::from(self.gamma[c])).abs() + f64::from(self.beta[c]).abs())
    }
}

/// Inputs of the window of pooled output `i`, in row-major order.
fn window(shape: &BatchShape, i: usize) -> [usize; 4] {
    let o = output(shape, true);
    let (pixel, c) = (i / o.c, i % o.c);
    let (x, y, n) = (pixel % o.w, pixel / o.w % o.h, pixel / o.pixels());
    let at = |ky, kx| ((n * shape.h + 2 * y + ky) * shape.w + 2 * x + kx) * shape.c + c;
    [at(0, 0), at(0, 1), at(1, 0), at(1, 1)]
}

fn forward(case: &Case, isa: Isa, act: Activation, pool: bool) -> (Vec<f32>, Vec<u8>) {
    let name = format!("batch norm {act:?} pool {pool} {:?}", case.shape);
    let n = output(&case.shape, pool).len();
    let mut out = Guarded::poisoned(n);
    let mut codes = vec![99u8; if pool { n } else { 0 }];
    let mut room = scratch(scratch_len(case.shape.c));
    let of = case.inputs(act, pool);
    norm::batch_norm_act_forward(isa, &case.shape, &of, out.get(), &mut codes, &mut room);
    let out = out.check(&name).to_vec();
    if pool {
        let mut plain = vec![f32::NAN; n];
        norm::batch_norm_act_forward(isa, &case.shape, &of, &mut plain, &mut [], &mut room);
        assert_eq!(out, plain, "{name}: with and without codes");
    }
    for (i, &got) in out.iter().enumerate() {
        let at = if pool { window(&case.shape, i).to_vec() } else { vec![i] };
        let raw = at.iter().map(|&i| case.z(i)).fold(f64::NEG_INFINITY, f64::max);
        let want = if act == Activation::Relu { raw.max(0.0) } else { raw };
        let bound = at.iter().map(|&i| case.bound(i)).fold(0.0, f64::max);
        assert!((f64::from(got) - want).abs() <= bound, "{name} ({isa}) {i}: {got} {want}");
        if pool {
            match codes[i] {
                BLOCKED => assert!(act == Activation::Relu && raw <= bound, "{name} {i}"),
                k => assert!((case.z(at[usize::from(k)]) - raw).abs() <= 2.0 * bound, "{name} {i}"),
            }
        }
    }
    (out, codes)
}

/// The gradients, computed with or without the output of a pooled forward pass.
fn backward(case: &Case, isa: Isa, act: Activation, codes: &[u8], out: &[f32]) {
    let pool = !codes.is_empty();
    let name = format!("batch norm backward {act:?} pool {pool} {:?}", case.shape);
    let shape = case.shape;
    let mut values = Values::new(11);
    let dout = values.vec(output(&shape, pool).len());
    let before = values.vec(shape.len());
    // Route the gradient.
    let mut dz = vec![0f64; shape.len()];
    for (i, &d) in dout.iter().enumerate() {
        if pool {
            if codes[i] != BLOCKED {
                dz[window(&shape, i)[usize::from(codes[i])]] = d.into();
            }
        } else if act == Activation::None || case.z(i) > 0.0 {
            dz[i] = d.into();
        }
    }
    let (mut dgamma, mut dbeta) =
        (vec![Exact::default(); shape.c], vec![Exact::default(); shape.c]);
    for (i, &d) in dz.iter().enumerate() {
        dbeta[i % shape.c].add(d);
        dgamma[i % shape.c].add(d * case.hat(i));
    }
    let m = (shape.batch * shape.pixels()) as f64;
    let dx: Vec<Exact> = (0..shape.len())
        .map(|i| {
            let (c, hat) = (i % shape.c, case.hat(i));
            let scale = f64::from(case.gamma[c]) / (f64::from(case.var[c]) + 1e-5f32 as f64).sqrt();
            let mut dx = Exact::default();
            dx.add(scale * dz[i]);
            dx.add(-scale * dbeta[c].value / m);
            dx.add(-scale * hat * dgamma[c].value / m);
            dx.magnitude +=
                scale.abs() * (dbeta[c].magnitude + hat.abs() * dgamma[c].magnitude) / m;
            // The roundings of one f32 run of the sums, plus the roundings of the formula.
            dx.roundings = 300;
            dx
        })
        .collect();
    let of = BatchNormBackward { forward: case.inputs(act, pool), dout: &dout, codes, out };
    for accumulate in [false, true] {
        let start = if accumulate { before.clone() } else { vec![f32::NAN; shape.len()] };
        let mut got = Guarded::new(&start);
        let (mut dg, mut db) = (case.gamma.clone(), case.beta.clone());
        let (mut room, mut coefficients) = (scratch(scratch_len(shape.c)), scratch(3 * shape.c));
        let parameters = [&mut dg[..], &mut db];
        let with = &mut coefficients;
        norm::batch_norm_gradient_sums(isa, &shape, &of, parameters, with, &mut room);
        let to = GradOut { values: got.get(), accumulate };
        norm::batch_norm_input_gradient(isa, &shape, &of, with, to);
        let mut want = dx.clone();
        if accumulate {
            want.iter_mut().zip(&before).for_each(|(w, &b)| w.add(b.into()));
        }
        compare(&name, isa, got.check(&name), &want);
        for (grads, got, old) in [(&dgamma, &dg, &case.gamma), (&dbeta, &db, &case.beta)] {
            let mut want = grads.clone();
            want.iter_mut().zip(old).for_each(|(w, &o)| w.add(o.into()));
            want.iter_mut().for_each(|w| w.roundings += 8);
            compare(&name, isa, got, &want);
        }
    }
}

#[test]
fn batch_norm_agrees_with_f64() {
    for (seed, shape) in shapes().into_iter().enumerate() {
        let case = Case::new(shape, seed as u64 + 1);
        for isa in Isa::available() {
            for act in [Activation::None, Activation::Relu] {
                forward(&case, isa, act, false);
                backward(&case, isa, act, &[], &[]);
                let (out, codes) = forward(&case, isa, act, true);
                if !codes.is_empty() {
                    backward(&case, isa, act, &codes, &[]);
                    backward(&case, isa, act, &codes, &out);
                }
            }
        }
    }
}

#[test]
fn ties_and_nan_are_those_of_pytorch() {
    // Statistics that leave the values unchanged: z = x exactly.
    let shape = BatchShape { batch: 1, h: 2, w: 2, c: 9 };
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    let windows: [([f32; 4], f32, u8); 9] = [
        ([1.0, 1.0, 1.0, 1.0], 1.0, 0),
        ([0.0, 2.0, 2.0, 1.0], 2.0, 1),
        ([-1.0, -2.0, -3.0, 3.0], 3.0, 3),
        ([-1.0, -2.0, -3.0, -4.0], 0.0, BLOCKED),
        ([0.0, 0.0, -1.0, 0.0], 0.0, BLOCKED),
        ([1.0, nan, 2.0, 0.0], nan, 1),
        ([nan, nan, 2.0, 3.0], nan, 1),
        ([-inf, -inf, -inf, -inf], 0.0, BLOCKED),
        ([5.0, inf, 2.0, inf], inf, 1),
    ];
    let x: Vec<f32> = (0..4).flat_map(|k| windows.iter().map(move |w| w.0[k])).collect();
    let (zeros, ones) = ([0.0; 9], [1.0; 9]);
    let of = BatchNormForward {
        x: &x,
        mean: &zeros,
        var: &ones,
        gamma: &ones,
        beta: &zeros,
        eps: 0.0,
        act: Activation::Relu,
        pool: true,
    };
    for isa in Isa::available() {
        let (mut out, mut codes) = (vec![-1.0; 9], vec![99; 9]);
        let mut room = scratch(scratch_len(9));
        norm::batch_norm_act_forward(isa, &shape, &of, &mut out, &mut codes, &mut room);
        for (c, (window, value, code)) in windows.iter().enumerate() {
            let same = out[c] == *value || out[c].is_nan() && value.is_nan();
            assert!(same && codes[c] == *code, "{isa} {window:?}: {} {}", out[c], codes[c]);
        }
        let plain = BatchNormForward { pool: false, ..of };
        let mut out = vec![-1.0; x.len()];
        norm::batch_norm_act_forward(isa, &shape, &plain, &mut out, &mut [], &mut room);
        for (&x, &y) in x.iter().zip(&out) {
            assert!(y == x.max(0.0) && !x.is_nan() || x.is_nan() && y.is_nan(), "{isa}: {x} {y}");
        }
    }
}

#[test]
fn running_statistics_follow_pytorch() {
    let (mut mean, mut var) = ([1.0f32], [2.0f32]);
    let running = BatchStats { mean: &mut mean, var: &mut var };
    norm::update_running(0.1, 5, &[3.0], &[4.0], running);
    assert!((mean[0] - 1.2).abs() < 1e-6);
    // Unbiased: 4·5/4 = 5.
    assert!((var[0] - (0.9 * 2.0 + 0.1 * 5.0)).abs() < 1e-6);
}

#[test]
fn group_norm_agrees_with_f64() {
    for (seed, shape) in shapes().into_iter().enumerate() {
        for groups in [1, 2, 4, 8, shape.c] {
            if shape.c % groups == 0 && shape.pixels() * shape.c / groups > 1 {
                let case = Case::new(shape, seed as u64 + 1);
                for isa in Isa::available() {
                    group_norm(&case, isa, groups);
                }
            }
        }
    }
}

fn group_norm(case: &Case, isa: Isa, groups: usize) {
    const EPS: f32 = 1e-5;
    let (shape, each) = (case.shape, case.shape.c / groups);
    let name = format!("group norm {groups} {shape:?}");
    let statistic = |i: usize| i / (shape.pixels() * shape.c) * groups + i % shape.c / each;
    let count = (shape.pixels() * each) as f64;
    let (mut mean, mut var) = (vec![0f64; shape.batch * groups], vec![0f64; shape.batch * groups]);
    for (i, &x) in case.x.iter().enumerate() {
        mean[statistic(i)] += f64::from(x) / count;
    }
    for (i, &x) in case.x.iter().enumerate() {
        var[statistic(i)] += (f64::from(x) - mean[statistic(i)]).powi(2) / count;
    }
    let invstd: Vec<f64> = var.iter().map(|v| 1.0 / (v + f64::from(EPS)).sqrt()).collect();
    let hat = |i: usize| (f64::from(case.x[i]) - mean[statistic(i)]) * invstd[statistic(i)];
    // Inputs are in [−1, 1): statistics are exact to 70 roundings of 4. This error enters x̂ times
    // invstd (mean), and relative times invstd²/2 (variance).
    let slack = |i: usize| {
        let s = invstd[statistic(i)];
        ROUNDING * (300.0 * s + 140.0 * s * s * hat(i).abs())
    };
    let gamma = |i: usize| f64::from(case.gamma[i % shape.c]);
    let mut out = Guarded::poisoned(shape.len());
    let (mut got_mean, mut got_invstd) = (vec![f32::NAN; mean.len()], vec![f32::NAN; mean.len()]);
    let of =
        GroupNormForward { x: &case.x, gamma: &case.gamma, beta: &case.beta, groups, eps: EPS };
    let saved = GroupNormSaved { mean: &mut got_mean, invstd: &mut got_invstd };
    let mut room = scratch(norm::group::scratch_len(shape.c));
    norm::group_norm_forward(isa, &shape, &of, out.get(), saved, &mut room);
    for (i, &got) in out.check(&name).iter().enumerate() {
        let want = hat(i) * gamma(i) + f64::from(case.beta[i % shape.c]);
        let bound = slack(i) + 6.0 * ROUNDING * ((hat(i) * gamma(i)).abs() + 1.0);
        assert!((f64::from(got) - want).abs() <= bound, "{name} ({isa}) {i}: {got} {want}");
    }

    let mut values = Values::new(3);
    let (dout, before) = (values.vec(shape.len()), values.vec(shape.len()));
    let (mut sum, mut dot) = (vec![0f64; mean.len()], vec![0f64; mean.len()]);
    let (mut dgamma, mut dbeta) = (vec![0f64; shape.c], vec![0f64; shape.c]);
    for (i, &d) in dout.iter().enumerate() {
        sum[statistic(i)] += f64::from(d) * gamma(i) / count;
        dot[statistic(i)] += f64::from(d) * gamma(i) * hat(i) / count;
        dbeta[i % shape.c] += f64::from(d);
        dgamma[i % shape.c] += f64::from(d) * hat(i);
    }
    for accumulate in [false, true] {
        let start = if accumulate { before.clone() } else { vec![f32::NAN; shape.len()] };
        let mut dx = Guarded::new(&start);
        let (mut dg, mut db) = (vec![0.5; shape.c], vec![0.25; shape.c]);
        let of = GroupNormBackward {
            x: &case.x,
            gamma: &case.gamma,
            groups,
            mean: &got_mean,
            invstd: &got_invstd,
            dout: &dout,
        };
        let to = GroupNormGrads {
            dx: GradOut { values: dx.get(), accumulate },
            dgamma: &mut dg,
            dbeta: &mut db,
        };
        norm::group_norm_backward(isa, &shape, &of, to, &mut room);
        for (i, &got) in dx.check(&name).iter().enumerate() {
            let (s, old) = (statistic(i), if accumulate { f64::from(before[i]) } else { 0.0 });
            let want = invstd[s] * (gamma(i) * f64::from(dout[i]) - sum[s] - hat(i) * dot[s]) + old;
            // Relative errors of invstd and x̂, and a run of sums of at most 1 (|x̂| for the dots).
            let size = invstd[s] * (1.0 + (1.0 + hat(i).abs()) * 4.0) + 1.0;
            let bound = size * (ROUNDING * 300.0 + 4.0 * slack(i) * (1.0 + hat(i).abs()));
            assert!((f64::from(got) - want).abs() <= bound, "{name} ({isa}) {i}: {got} {want}");
        }
        let n = (shape.batch * shape.pixels()) as f64;
        let worst = (0..shape.len()).map(slack).fold(0.0, f64::max);
        for c in 0..shape.c {
            let error = (f64::from(db[c]) - 0.25 - dbeta[c]).abs();
            assert!(error <= ROUNDING * 300.0 * n, "{name} ({isa}) dbeta {c}: {error:e}");
            let error = (f64::from(dg[c]) - 0.5 - dgamma[c]).abs();
            assert!(
                error <= (worst + ROUNDING * 1200.0) * n,
                "{name} ({isa}) dgamma {c}: {error:e}"
            );
        }
    }
}

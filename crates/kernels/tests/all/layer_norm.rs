//! Layer norm and RMS norm.

use meristem_kernels::norm::{
    self, LayerNormBackward, LayerNormForward, LayerNormGrads, LayerNormSaved,
};
use meristem_kernels::{BatchShape, GradOut, Isa};

use super::support::{Guarded, ROUNDING, Values, scratch};

const EPS: f32 = 1e-5;

struct Case {
    shape: BatchShape,
    centred: bool,
    x: Vec<f32>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
    /// Mean of each row, 0 for an RMS norm.
    mean: Vec<f64>,
    /// Inverse deviation of each row.
    invstd: Vec<f64>,
}

impl Case {
    fn new(shape: BatchShape, centred: bool) -> Self {
        let mut values = Values::new(shape.len() as u64 + 1);
        let x = values.vec(shape.len());
        let gamma = values.vec(shape.c);
        let beta = if centred { values.vec(shape.c) } else { vec![] };
        let average = |row: &[f32], f: &dyn Fn(f64) -> f64| {
            row.iter().map(|&x| f(f64::from(x))).sum::<f64>() / row.len() as f64
        };
        let (mut mean, mut invstd) = (vec![], vec![]);
        for row in x.chunks(shape.c) {
            let centre = if centred { average(row, &|x| x) } else { 0.0 };
            mean.push(centre);
            let var = average(row, &|x| (x - centre).powi(2));
            invstd.push(1.0 / (var + f64::from(EPS)).sqrt());
        }
        Self { shape, centred, x, gamma, beta, mean, invstd }
    }

    fn name(&self, isa: Isa) -> String {
        format!("{} norm {:?} ({isa})", if self.centred { "layer" } else { "RMS" }, self.shape)
    }

    fn gamma(&self, i: usize) -> f64 {
        f64::from(self.gamma[i % self.shape.c])
    }

    fn hat(&self, i: usize) -> f64 {
        let row = i / self.shape.c;
        (f64::from(self.x[i]) - self.mean[row]) * self.invstd[row]
    }

    /// Error of x̂. Inputs are in [−1, 1): sums are exact to 70 roundings of 4. This error enters
    /// x̂ times invstd (mean), and relative times invstd²/2 (variance).
    fn slack(&self, i: usize) -> f64 {
        let s = self.invstd[i / self.shape.c];
        ROUNDING * (300.0 * s + 140.0 * s * s * self.hat(i).abs())
    }
}

#[test]
fn layer_norm_agrees_with_f64() {
    // A block of f32 sums is 1024 elements, a run of rows is 64.
    for c in [1, 2, 5, 8, 16, 17, 33, 64, 2100] {
        for (batch, h, w) in [(1, 1, 1), (3, 4, 5), (70, 1, 2)] {
            for centred in [true, false] {
                let case = Case::new(BatchShape { batch, h, w, c }, centred);
                for isa in Isa::available() {
                    let saved = forward(&case, isa);
                    for accumulate in [false, true] {
                        backward(&case, isa, &saved, accumulate);
                    }
                }
            }
        }
    }
}

/// Mean and inverse deviation that the forward pass saves.
fn forward(case: &Case, isa: Isa) -> [Vec<f32>; 2] {
    let (rows, name) = (case.invstd.len(), case.name(isa));
    let mut out = Guarded::poisoned(case.x.len());
    let mut mean = Guarded::poisoned(if case.centred { rows } else { 0 });
    let mut invstd = Guarded::poisoned(rows);
    let of = LayerNormForward { x: &case.x, gamma: &case.gamma, beta: &case.beta, eps: EPS };
    let saved = LayerNormSaved { mean: mean.get(), invstd: invstd.get() };
    norm::layer_norm_forward(isa, &case.shape, &of, out.get(), saved);
    for (i, &got) in out.check(&name).iter().enumerate() {
        let scaled = case.hat(i) * case.gamma(i);
        let want = scaled + case.beta.get(i % case.shape.c).map_or(0.0, |&beta| f64::from(beta));
        let bound = case.slack(i) + 6.0 * ROUNDING * (scaled.abs() + 1.0);
        assert!((f64::from(got) - want).abs() <= bound, "{name} {i}: {got} {want}");
    }
    [mean.check(&name).to_vec(), invstd.check(&name).to_vec()]
}

fn backward(case: &Case, isa: Isa, [mean, invstd]: &[Vec<f32>; 2], accumulate: bool) {
    let (c, name) = (case.shape.c, case.name(isa));
    let mut values = Values::new(3);
    let (dout, before) = (values.vec(case.x.len()), values.vec(case.x.len()));
    let start = if accumulate { before.clone() } else { vec![f32::NAN; before.len()] };
    let mut dx = Guarded::new(&start);
    let (mut dgamma, mut dbeta) = (vec![0.5; c], vec![0.25; case.beta.len()]);
    let of = LayerNormBackward { x: &case.x, gamma: &case.gamma, mean, invstd, dout: &dout };
    let to = LayerNormGrads {
        dx: GradOut { values: dx.get(), accumulate },
        dgamma: &mut dgamma,
        dbeta: &mut dbeta,
    };
    let mut room = scratch(norm::layer::scratch_len(c));
    norm::layer_norm_backward(isa, &case.shape, &of, to, &mut room);
    let terms = |i: usize| f64::from(dout[i]) * case.gamma(i);
    let share = 1.0 / c as f64;
    let row_means = |f: &dyn Fn(usize) -> f64| -> Vec<f64> {
        let row = |row: usize| (row * c..(row + 1) * c).map(f).sum::<f64>() * share;
        (0..case.invstd.len()).map(row).collect()
    };
    let sums = row_means(&|i| if case.centred { terms(i) } else { 0.0 });
    let dots = row_means(&|i| terms(i) * case.hat(i));
    for (i, &got) in dx.check(&name).iter().enumerate() {
        let (sum, dot) = (sums[i / c], dots[i / c]);
        let old = if accumulate { f64::from(before[i]) } else { 0.0 };
        let (s, hat) = (case.invstd[i / c], case.hat(i));
        let want = s * (terms(i) - sum - hat * dot) + old;
        // Relative errors of invstd and x̂, and sums of terms of at most 1 (|x̂| for the dots).
        let size = s * (1.0 + (1.0 + hat.abs()) * 4.0) + 1.0;
        let bound = size * (ROUNDING * 300.0 + 4.0 * case.slack(i) * (1.0 + hat.abs()));
        assert!((f64::from(got) - want).abs() <= bound, "{name} {i}: {got} {want}");
    }
    let worst = (0..dout.len()).map(|i| case.slack(i)).fold(0.0, f64::max);
    let n = case.invstd.len() as f64;
    for (channel, got) in dgamma.iter().enumerate() {
        let rows = || (channel..dout.len()).step_by(c);
        let want = rows().map(|i| f64::from(dout[i]) * case.hat(i)).sum::<f64>();
        let error = (f64::from(*got) - 0.5 - want).abs();
        assert!(error <= (worst + ROUNDING * 300.0) * n, "{name} dγ {channel}: {error:e}");
        let Some(got) = dbeta.get(channel) else { continue };
        let error =
            (f64::from(*got) - 0.25 - rows().map(|i| f64::from(dout[i])).sum::<f64>()).abs();
        assert!(error <= ROUNDING * 300.0 * n, "{name} dβ {channel}: {error:e}");
    }
}

/// A mean of 1000 times the deviation: the sums are about the mean.
#[test]
fn layer_norm_survives_a_mean_far_from_zero() {
    let (rows, c) = (9, 50);
    let x: Vec<f32> = Values::new(5).vec(rows * c).iter().map(|v| v + 1000.0).collect();
    for isa in Isa::available() {
        let (mut y, mut mean, mut invstd) = (vec![0.0; x.len()], vec![0.0; rows], vec![0.0; rows]);
        let ones = vec![1.0; c];
        let of = LayerNormForward { x: &x, gamma: &ones, beta: &ones, eps: EPS };
        let saved = LayerNormSaved { mean: &mut mean, invstd: &mut invstd };
        let shape = BatchShape { batch: rows, h: 1, w: 1, c };
        norm::layer_norm_forward(isa, &shape, &of, &mut y, saved);
        for (row, x) in x.chunks(c).enumerate() {
            let centre = x.iter().map(|&x| f64::from(x)).sum::<f64>() / c as f64;
            let var = x.iter().map(|&x| (f64::from(x) - centre).powi(2)).sum::<f64>() / c as f64;
            assert!((f64::from(mean[row]) - centre).abs() <= ROUNDING * 1000.0, "{isa} {row}");
            let relative = f64::from(invstd[row]) * (var + f64::from(EPS)).sqrt() - 1.0;
            assert!(relative.abs() <= 140.0 * ROUNDING, "{isa} {row}: {relative:e}");
        }
    }
}

//! Elementwise kernels and blends.

use meristem_kernels::blend::BlendMode;
use meristem_kernels::blend::{self, BlendGrads, BlendInputs, TanhMixGrads};
use meristem_kernels::elementwise::{self, ScaleChannels, UnaryFunction};
use meristem_kernels::{BatchShape, GradOut, Isa};

use super::support::{Exact, Guarded, ROUNDING, Values, compare, compare_within};

/// Lengths around the register widths.
pub(super) const LENGTHS: [usize; 8] = [0, 1, 3, 7, 16, 17, 63, 1000];

/// Units in the last place between `got` and the exact `want`, which must be a normal number.
fn ulps(got: f32, want: f64) -> f64 {
    let exponent = want.abs().log2().floor().max(-126.0) as i32;
    (f64::from(got) - want).abs() / 2f64.powi(exponent - 23)
}

#[test]
fn tanh_and_sigmoid_are_within_a_few_ulp() {
    // Every 997th f32 up to 100, both signs.
    let x: Vec<f32> = (0..100f32.to_bits()).step_by(997).map(f32::from_bits).collect();
    for sign in [1.0, -1.0] {
        let x: Vec<f32> = x.iter().map(|x| sign * x).collect();
        for isa in Isa::available() {
            let mut y = vec![0.0; x.len()];
            elementwise::apply(isa, UnaryFunction::Tanh, &x, &mut y);
            for (&x, &y) in x.iter().zip(&y) {
                let want = f64::from(x).tanh();
                assert!(ulps(y, want) <= 3.0, "{isa} tanh {x:e}: {y:e} {want:e}");
            }
            elementwise::apply(isa, UnaryFunction::Sigmoid, &x, &mut y);
            for (&x, &y) in x.iter().zip(&y) {
                let want = 1.0 / (1.0 + (-f64::from(x)).exp());
                // Below the normal numbers the result may be flushed to zero.
                let fine = ulps(y, want) <= 4.0 || want < 1.3e-38 && f64::from(y) <= want;
                assert!(fine, "{isa} sigmoid {x:e}: {y:e} {want:e}");
            }
        }
    }
}

#[test]
fn special_values_pass_as_in_pytorch() {
    let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e30, -1e30];
    for isa in Isa::available() {
        let mut y = [9.0; 6];
        elementwise::apply(isa, UnaryFunction::Relu, &x, &mut y);
        assert!(y[0].is_nan());
        assert_eq!(y[1..], [f32::INFINITY, 0.0, 0.0, 1e30, 0.0]);
        elementwise::apply(isa, UnaryFunction::Tanh, &x, &mut y);
        assert!(y[0].is_nan());
        assert_eq!(y[1..], [1.0, -1.0, 0.0, 1.0, -1.0]);
        elementwise::apply(isa, UnaryFunction::Sigmoid, &x, &mut y);
        assert!(y[0].is_nan());
        assert_eq!(y[1..], [1.0, 0.0, 0.5, 1.0, 0.0]);
        // A NaN output passes the gradient, a zero output blocks it.
        let mut dx = [9.0; 6];
        elementwise::apply(isa, UnaryFunction::Relu, &x, &mut y);
        elementwise::apply_backward(
            isa,
            UnaryFunction::Relu,
            &y,
            &[5.0; 6],
            GradOut::overwrite(&mut dx),
        );
        assert_eq!(dx, [5.0, 5.0, 0.0, 0.0, 5.0, 0.0]);
    }
}

/// Checks a gradient kernel with and without accumulation against exact values.
pub(super) fn check_gradient(name: &str, isa: Isa, want: &[Exact], kernel: impl Fn(GradOut<'_>)) {
    let before = Values::new(77).vec(want.len());
    let mut dx = Guarded::poisoned(want.len());
    kernel(GradOut::overwrite(dx.get()));
    compare(name, isa, dx.check(name), want);
    let mut dx = Guarded::new(&before);
    kernel(GradOut::add(dx.get()));
    let mut sum = want.to_vec();
    sum.iter_mut().zip(&before).for_each(|(s, &b)| s.add(b.into()));
    compare(name, isa, dx.check(name), &sum);
}

/// The value of a formula with `roundings` roundings and intermediates of at most `magnitude`.
fn exact(value: f64, magnitude: f64, roundings: usize) -> Exact {
    Exact { value, magnitude, roundings }
}

#[test]
fn elementwise_kernels_agree_with_f64() {
    for n in LENGTHS {
        let mut values = Values::new(n as u64 + 1);
        let (a, b) = (values.vec(n), values.vec(n));
        let each = |f: &dyn Fn(f64, f64) -> f64| -> Vec<Exact> {
            let of = a.iter().zip(&b).map(|(&a, &b)| f(a.into(), b.into()));
            of.map(|v| exact(v, 2.0, 4)).collect()
        };
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(n);
            elementwise::add(isa, &a, &b, y.get());
            compare("add", isa, y.check("add"), &each(&|a, b| a + b));
            check_gradient("pass", isa, &each(&|a, _| a), |to| elementwise::pass(isa, &a, to));
            let want = each(&|a, b| if a > 0.0 { b } else { 0.0 });
            check_gradient("relu", isa, &want, |to| {
                elementwise::apply_backward(isa, UnaryFunction::Relu, &a, &b, to);
            });
            let want = each(&|a, b| b * a * (1.0 - a));
            check_gradient("sigmoid", isa, &want, |to| {
                elementwise::apply_backward(isa, UnaryFunction::Sigmoid, &a, &b, to);
            });
            let want = each(&|a, b| b * (1.0 - a * a));
            check_gradient("tanh", isa, &want, |to| {
                elementwise::apply_backward(isa, UnaryFunction::Tanh, &a, &b, to);
            });
        }
    }
}

#[test]
fn scale_channels_agrees_with_f64() {
    for (batch, h, w, c) in [(1, 1, 1, 1), (3, 5, 4, 7), (2, 9, 7, 16), (5, 2, 3, 33)] {
        let shape = BatchShape { batch, h, w, c };
        let mut values = Values::new(c as u64);
        let (x, dy) = (values.vec(shape.len()), values.vec(shape.len()));
        let scale = values.vec(batch * c);
        let at = |i: usize| i / (shape.pixels() * c) * c + i % c;
        let product = |v: &[f32]| -> Vec<Exact> {
            let of =
                v.iter().enumerate().map(|(i, &v)| 2.0 * f64::from(v) * f64::from(scale[at(i)]));
            of.map(|v| exact(v, v.abs(), 3)).collect()
        };
        let mut dscale = vec![Exact::default(); scale.len()];
        for i in 0..x.len() {
            dscale[at(i)].add(2.0 * f64::from(x[i]) * f64::from(dy[i]));
        }
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(shape.len());
            elementwise::scale_channels(isa, &shape, &x, &scale, 2.0, y.get());
            compare("scale", isa, y.check("scale"), &product(&x));
            let of = ScaleChannels { x: &x, scale: &scale, factor: 2.0 };
            check_gradient("scale dx", isa, &product(&dy), |to| {
                elementwise::scale_channels_backward(isa, &shape, &of, &dy, to, GradOut::default());
            });
            check_gradient("scale dscale", isa, &dscale, |to| {
                elementwise::scale_channels_backward(isa, &shape, &of, &dy, GradOut::default(), to);
            });
        }
    }
}

#[test]
fn blends_agree_with_f64() {
    for (samples, each) in [(1, 1), (3, 5), (2, 64), (5, 37)] {
        for alpha in [0.0, 0.3, 1.0] {
            for mode in [BlendMode::Add, BlendMode::Multiply, BlendMode::Gate] {
                for isa in Isa::available() {
                    check_blend(isa, mode, (samples, each), alpha);
                }
            }
        }
    }
}

fn check_blend(isa: Isa, mode: BlendMode, (samples, each): (usize, usize), alpha: f32) {
    let n = samples * each;
    let mut values = Values::new(n as u64);
    let [h, m, x, dout] = std::array::from_fn(|_| values.vec(n));
    let gate = if mode == BlendMode::Gate { values.vec(samples) } else { vec![] };
    let a = f64::from(alpha);
    let all = |i: usize| (f64::from(h[i]), f64::from(m[i]), f64::from(x[i]), f64::from(dout[i]));
    let g = |i: usize| gate.get(i / each).map_or(1.0, |&g| f64::from(g));
    let out = (0..n).map(|i| {
        let (h, m, x, _) = all(i);
        match mode {
            BlendMode::Add | BlendMode::Gate => h + a * g(i) * (m - h),
            BlendMode::Multiply => h * (1.0 + a * (m - x).tanh()),
        }
    });
    let grads: Vec<[f64; 3]> = (0..n)
        .map(|i| {
            let (h, m, x, d) = all(i);
            match mode {
                BlendMode::Add | BlendMode::Gate => [d * (1.0 - a * g(i)), d * a * g(i), 0.0],
                BlendMode::Multiply => {
                    let t = (m - x).tanh();
                    let slope = d * h * a * (1.0 - t * t);
                    [d * (1.0 + a * t), slope, -slope]
                }
            }
        })
        .collect();
    let of = BlendInputs { h: &h, m: &m, x: &x, gate: &gate, alpha };
    let mut y = Guarded::poisoned(n);
    blend::forward(isa, mode, &of, y.get());
    let want: Vec<Exact> = out.map(|v| exact(v, 4.0, 6)).collect();
    compare("blend", isa, y.check("blend"), &want);
    if alpha == 0.0 {
        assert_eq!(y.check("blend"), h, "alpha 0 is the host, bit for bit");
    }
    for (which, name) in ["dh", "dm", "dx"].into_iter().enumerate() {
        let want: Vec<Exact> = grads.iter().map(|g| exact(g[which], 2.0, 8)).collect();
        check_gradient(name, isa, &want, |grad| {
            let mut to = BlendGrads::default();
            *[&mut to.h, &mut to.m, &mut to.x][which] = grad;
            blend::backward(isa, mode, &of, &dout, to);
        });
    }
    if mode == BlendMode::Gate {
        let mut dgate = vec![Exact::default(); samples];
        for i in 0..n {
            let (h, m, _, d) = all(i);
            dgate[i / each].add(a * d * (m - h));
        }
        check_gradient("dgate", isa, &dgate, |gate| {
            blend::backward(isa, mode, &of, &dout, BlendGrads { gate, ..Default::default() });
        });
    }
}

#[test]
fn tanh_mix_agrees_with_f64() {
    for n in [1, 17, 3000] {
        let mut values = Values::new(n as u64);
        let [x, y, dout] = std::array::from_fn(|_| values.vec(n));
        for s in [0.0f32, -0.7, 2.0] {
            let t = f64::from(s).tanh();
            let mut ds = Exact::default();
            for i in 0..n {
                ds.add((1.0 - t * t) * f64::from(dout[i]) * (f64::from(y[i]) - f64::from(x[i])));
            }
            let out: Vec<f64> =
                (0..n).map(|i| f64::from(x[i]) + t * (f64::from(y[i]) - f64::from(x[i]))).collect();
            let scaled = |f: f64| -> Vec<Exact> {
                dout.iter().map(|&d| exact(f * f64::from(d), 1.0, 4)).collect()
            };
            for isa in Isa::available() {
                let mut got = Guarded::poisoned(n);
                blend::tanh_mix(isa, &x, &y, s, got.get());
                compare_within("mix", isa, (got.check("mix"), &out), 8.0 * ROUNDING * 2.0);
                let mut got = 0.0;
                let scalar = std::slice::from_mut(&mut got);
                let to = TanhMixGrads { s: scalar, ..TanhMixGrads::default() };
                blend::tanh_mix_backward(isa, &x, &y, s, &dout, to);
                compare("mix ds", isa, &[got], &[ds]);
                check_gradient("mix dx", isa, &scaled(1.0 - t), |to| {
                    let to = TanhMixGrads { x: to, ..TanhMixGrads::default() };
                    blend::tanh_mix_backward(isa, &x, &y, s, &dout, to);
                });
                check_gradient("mix dy", isa, &scaled(t), |to| {
                    let to = TanhMixGrads { y: to, ..TanhMixGrads::default() };
                    blend::tanh_mix_backward(isa, &x, &y, s, &dout, to);
                });
            }
        }
    }
}

//! Activation functions and their derivatives against f64.
//!
//! Bounds are multiples of 2⁻²⁴, the largest relative error of one rounding, as the comments of
//! [`value_bound`] and [`derivative`] derive. The exponential is good to 4 of them (2 ulp), and an
//! argument with the relative error ε makes it wrong by `|argument|·ε`.

use meristem_kernels::elementwise::{self, UnaryFunction};
use meristem_kernels::{GradOut, Isa};

use super::activation::{LENGTHS, check_gradient};
use super::exact_functions::{FUNCTIONS, gelu_inner, normal_cdf, normal_density, sigmoid, value};
use super::support::{Exact, Guarded, ROUNDING, Values};

/// Results below the normal numbers may be flushed to zero; a derivative of GELU by tanh has such a
/// factor, and others of at most 230.
const FLUSHED: f64 = 3e-36;

/// Relative error of a value, in roundings.
fn value_bound(function: UnaryFunction, x: f64) -> f64 {
    match function {
        UnaryFunction::Relu => 0.0,
        // `kernels::math`: 4 and 3 ulp.
        UnaryFunction::Sigmoid => 8.0,
        UnaryFunction::Tanh => 6.0,
        UnaryFunction::LeakyRelu { .. } => 1.0,
        // `e^x − 1` is good to 2 ulp.
        UnaryFunction::Elu => 4.0,
        // Φ, and the product.
        UnaryFunction::Gelu => 12.0 + x * x / 2.0 + 1.0,
        // The sum and the quotient, the exponential, and its argument: square, cubic coefficient,
        // its product, sum and outer product. Above 0 the exponential is a part of the denominator,
        // at most half of it, and its argument's error z·e^(−z) ≤ 0.37.
        UnaryFunction::GeluTanh => 2.0 + 4.0 + 5.0 * (-gelu_inner(x)).max(0.4),
        // The exponential, the sum and the quotient.
        UnaryFunction::Silu => 6.0,
        // The exponential, the logarithm of 2 ulp, the sum.
        UnaryFunction::Softplus => 4.0 + 4.0 + 1.0,
        // Sum, product, quotient.
        UnaryFunction::HardSwish => 3.0,
    }
}

/// A derivative at a saved value, and a bound of the error of computing it, in roundings of 1.
struct Derivative {
    value: f64,
    error: f64,
}

/// σ(z) from `e^(−|z|)`, whose relative error is 4, and `argument` more if z is rounded; quotient
/// and sum. Above 0 the exponential is at most half of the denominator, and `z·e^(−z) ≤ 0.37`.
fn sigmoid_error(z: f64, argument: f64) -> f64 {
    let below = 2.0 + 4.0 + 1.0 + argument * z.abs();
    sigmoid(z) * if z < 0.0 { below } else { 2.0 + 2.0 + 0.37 * argument }
}

fn derivative(function: UnaryFunction, saved: f64) -> Derivative {
    let (x, y) = (saved, saved);
    let (value, error) = match function {
        UnaryFunction::Relu => (f64::from(u8::from(y > 0.0)), 0.0),
        UnaryFunction::Sigmoid => (y * (1.0 - y), 2.0 * y * (1.0 - y)),
        UnaryFunction::Tanh => (1.0 - y * y, 2.0),
        UnaryFunction::LeakyRelu { slope } => (if y > 0.0 { 1.0 } else { slope.into() }, 0.0),
        UnaryFunction::Elu => (1.0 + y.min(0.0), 1.0 + y.min(0.0)),
        // 1 − e^(−y) is good to 2 ulp.
        UnaryFunction::Softplus => (-(-y).exp_m1(), 4.0 * (-y).exp_m1().abs()),
        // Φ, above 0 as 1 − Φ(−x); the bell, its factor and two products; the sum.
        UnaryFunction::Gelu => {
            let (tail, term) = (normal_cdf(-x.abs()), x * normal_density(x));
            let of_tail = (12.0 + x * x / 2.0) * tail + if x > 0.0 { 1.0 } else { 0.0 };
            let value = normal_cdf(x) + term;
            (value, of_tail + (4.0 + x * x / 2.0 + 3.0) * term.abs() + value.abs())
        }
        // σ; σ' (10) and a product; the sum.
        UnaryFunction::Silu => {
            let term = x * sigmoid(x) * sigmoid(-x);
            let value = sigmoid(x) + term;
            (value, sigmoid_error(x, 0.0) + 11.0 * term.abs() + value.abs())
        }
        // As of SiLU, with z rounded 5 times (see `value_bound`); z' with its square, two roundings
        // of its factor, product and sum, and its product.
        UnaryFunction::GeluTanh => {
            let (z, factor) = (gelu_inner(x), 2.0 * (2.0 / std::f64::consts::PI).sqrt());
            let inner = factor * (1.0 + 3.0 * 0.044715 * x * x);
            let term = x * sigmoid(z) * sigmoid(-z) * inner;
            let value = sigmoid(z) + term;
            let of_term = (11.0 + 5.0 * z.abs() + 6.0) * term.abs();
            (value, sigmoid_error(z, 5.0) + of_term + value.abs())
        }
        // Quotient and sum.
        UnaryFunction::HardSwish => match x {
            x if x <= -3.0 => (0.0, 0.0),
            x if x >= 3.0 => (1.0, 0.0),
            x => (x / 3.0 + 0.5, (x / 3.0).abs() + (x / 3.0 + 0.5).abs()),
        },
    };
    Derivative { value, error }
}

/// A case with each instruction set.
fn each_isa<T: Copy>(case: T) -> impl Iterator<Item = (T, Isa)> {
    Isa::available().into_iter().map(move |isa| (case, isa))
}

/// Every 997th f32 up to 100, both signs.
fn arguments() -> Vec<f32> {
    let above = (0..100f32.to_bits()).step_by(997).map(f32::from_bits);
    above.flat_map(|x| [x, -x]).collect()
}

#[test]
fn values_are_within_their_bounds() {
    let x = arguments();
    for (function, isa) in FUNCTIONS.into_iter().flat_map(each_isa) {
        let mut y = vec![0.0; x.len()];
        elementwise::apply(isa, function, &x, &mut y);
        for (&x, &y) in x.iter().zip(&y) {
            let (x, y) = (f64::from(x), f64::from(y));
            let (want, bound) = (value(function, x), value_bound(function, x));
            let error = (y - want).abs();
            let limit = bound * ROUNDING * want.abs() + FLUSHED;
            assert!(error <= limit, "{isa} {function:?}({x:e}) = {y:e}, expected {want:e}");
        }
    }
}

#[test]
fn derivatives_are_within_their_bounds() {
    for (function, isa) in FUNCTIONS.into_iter().flat_map(each_isa) {
        let saved: Vec<f32> = if function.saves_input() {
            arguments()
        } else {
            let (x, mut y) = (arguments(), vec![0.0; arguments().len()]);
            elementwise::apply(isa, function, &x, &mut y);
            y
        };
        let (dy, mut dx) = (vec![1.0; saved.len()], vec![0.0; saved.len()]);
        elementwise::apply_backward(isa, function, &saved, &dy, GradOut::overwrite(&mut dx));
        for (&saved, &got) in saved.iter().zip(&dx) {
            let Derivative { value: want, error } = derivative(function, f64::from(saved));
            let limit = error * ROUNDING + FLUSHED;
            let error = (f64::from(got) - want).abs();
            assert!(error <= limit, "{isa} {function:?}' at {saved:e}: {got:e}, expected {want:e}");
        }
    }
}

/// The derivatives of this file agree with central differences of the values in f64. The error of a
/// difference is below 1e-9.
#[test]
fn slopes_are_derivatives() {
    let step = 1e-6;
    for function in FUNCTIONS {
        for x in (-80..=80).map(|i| 0.1 * f64::from(i) + 0.013) {
            let saved = if function.saves_input() { x } else { value(function, x) };
            let difference = (value(function, x + step) - value(function, x - step)) / (2.0 * step);
            let want = derivative(function, saved).value;
            assert!((difference - want).abs() < 1e-8, "{function:?}' at {x}: {difference} {want}");
        }
    }
}

/// Every length, with and without accumulation.
#[test]
fn functions_write_their_destination_alone() {
    for (n, function) in LENGTHS.into_iter().flat_map(|n| FUNCTIONS.map(|f| (n, f))) {
        let mut values = Values::new(n as u64 + 3);
        let (x, dy) = (values.vec(n), values.vec(n));
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(n);
            elementwise::apply(isa, function, &x, y.get());
            let y = y.check("function").to_vec();
            assert!(y.iter().all(|y| y.is_finite()), "{isa} {function:?}");
            let saved = if function.saves_input() { &x } else { &y };
            let exact = |(&saved, &dy): (&f32, &f32)| {
                let Derivative { value, error } = derivative(function, saved.into());
                // Two roundings: the product with dy, and the sum with the gradient so far, both
                // below 2.
                let roundings = error.ceil() as usize + 2;
                Exact { value: value * f64::from(dy), magnitude: 2.0, roundings }
            };
            let want: Vec<Exact> = saved.iter().zip(&dy).map(exact).collect();
            check_gradient(&format!("{function:?}"), isa, &want, |dx| {
                elementwise::apply_backward(isa, function, saved, &dy, dx);
            });
        }
    }
}

/// NaN passes; infinities and large values have their limits, as in PyTorch. PyTorch's GELU is NaN
/// at infinity.
#[test]
fn special_values_have_their_limits() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let x = [NAN, INF, -INF, 1e30, -1e30, 20.5, 3.0, -3.0];
    let leaky = UnaryFunction::LeakyRelu { slope: 0.25 };
    let cases: [(UnaryFunction, [f32; 5], [f32; 5]); 7] = [
        (leaky, [NAN, INF, -INF, 1e30, -0.25e30], [NAN, 1.0, 0.25, 1.0, 0.25]),
        (UnaryFunction::Elu, [NAN, INF, -1.0, 1e30, -1.0], [NAN, 1.0, 0.0, 1.0, 0.0]),
        (UnaryFunction::Gelu, [NAN, INF, NAN, 1e30, 0.0], [NAN, NAN, NAN, 1.0, 0.0]),
        (UnaryFunction::GeluTanh, [NAN, INF, NAN, 1e30, 0.0], [NAN, 1.0, 0.0, 1.0, 0.0]),
        (UnaryFunction::Silu, [NAN, INF, NAN, 1e30, 0.0], [NAN, NAN, NAN, 1.0, 0.0]),
        (UnaryFunction::Softplus, [NAN, INF, 0.0, 1e30, 0.0], [NAN, 1.0, 0.0, 1.0, 0.0]),
        (UnaryFunction::HardSwish, [NAN, INF, NAN, 1e30, 0.0], [NAN, 1.0, 0.0, 1.0, 0.0]),
    ];
    let same = |a: &[f32], b: &[f32]| {
        // Within two roundings, or within 1e-34, because tiny values are flushed to zero.
        let near = |a: f32, b: f32| (a - b).abs() <= 1.2e-7 * b.abs() + 1e-34;
        a.iter().zip(b).all(|(&a, &b)| a == b || a.is_nan() && b.is_nan() || near(a, b))
    };
    for ((function, values, slopes), isa) in cases.into_iter().flat_map(each_isa) {
        let (mut y, mut dx) = ([9.0; 8], [9.0; 8]);
        elementwise::apply(isa, function, &x, &mut y);
        assert!(same(&y[..5], &values), "{isa} {function:?}: {y:?}");
        let saved = if function.saves_input() { &x } else { &y };
        let to = GradOut::overwrite(&mut dx);
        elementwise::apply_backward(isa, function, saved, &[1.0; 8], to);
        // Leaky ReLU of NaN has a slope, as in PyTorch.
        let from = usize::from(function == leaky);
        assert!(same(&dx[from..5], &slopes[from..]), "{isa} {function:?}': {dx:?}");
        match function {
            UnaryFunction::Softplus => assert_eq!([y[5], dx[5]], [20.5, 1.0], "{isa}: threshold"),
            UnaryFunction::HardSwish => {
                assert_eq!([y[6], y[7], dx[6], dx[7]], [3.0, 0.0, 1.0, 0.0], "{isa}: kinks");
            }
            _ => {}
        }
    }
}

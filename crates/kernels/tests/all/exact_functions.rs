//! Functions of one element in f64: slow, obvious versions.

use meristem_kernels::elementwise::UnaryFunction;

/// Every function.
pub(crate) const FUNCTIONS: [UnaryFunction; 11] = [
    UnaryFunction::Relu,
    UnaryFunction::Sigmoid,
    UnaryFunction::Tanh,
    UnaryFunction::LeakyRelu { slope: 0.01 },
    UnaryFunction::LeakyRelu { slope: 0.3 },
    UnaryFunction::Elu,
    UnaryFunction::Gelu,
    UnaryFunction::GeluTanh,
    UnaryFunction::Silu,
    UnaryFunction::Softplus,
    UnaryFunction::HardSwish,
];

/// The complementary error function, within some 1e-14 of it: up to 2 by the series of erf with
/// terms of one sign, above by the continued fraction.
fn erfc(x: f64) -> f64 {
    let root_pi = std::f64::consts::PI.sqrt();
    let bell = (-x * x).exp();
    if x < 0.0 {
        2.0 - erfc(-x)
    } else if x < 2.0 {
        let terms = (1..80).scan(x, |term, n| {
            let now = *term;
            *term *= 2.0 * x * x / f64::from(2 * n + 1);
            Some(now)
        });
        1.0 - 2.0 / root_pi * bell * terms.sum::<f64>()
    } else {
        let fraction = (1..=200).rev().fold(x, |below, k| x + f64::from(k) / 2.0 / below);
        bell / (root_pi * fraction)
    }
}

/// The standard normal distribution.
pub(crate) fn normal_cdf(x: f64) -> f64 {
    0.5 * erfc(-x / 2f64.sqrt())
}

/// Density of the standard normal distribution.
pub(crate) fn normal_density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Argument of the sigmoid in GELU by tanh.
pub(crate) fn gelu_inner(x: f64) -> f64 {
    2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
}

/// The value of a function.
pub(crate) fn value(function: UnaryFunction, x: f64) -> f64 {
    match function {
        UnaryFunction::Relu => x.max(0.0),
        UnaryFunction::Sigmoid => sigmoid(x),
        UnaryFunction::Tanh => x.tanh(),
        UnaryFunction::LeakyRelu { slope } => x.max(0.0) + f64::from(slope) * x.min(0.0),
        UnaryFunction::Elu => x.max(0.0) + x.min(0.0).exp_m1(),
        UnaryFunction::Gelu => x * normal_cdf(x),
        UnaryFunction::GeluTanh => x * sigmoid(gelu_inner(x)),
        UnaryFunction::Silu => x * sigmoid(x),
        UnaryFunction::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        UnaryFunction::HardSwish => x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
    }
}

#[test]
fn the_normal_distribution_has_known_values() {
    // From scipy.stats.norm.cdf.
    let known = [
        (-6.0, 9.865_876_450_376_946e-10),
        (-3.0, 1.349_898_031_630_094_5e-3),
        (-2.5, 6.209_665_325_776_132e-3),
        (-1.0, 0.158_655_253_931_457_05),
        (1.0, 0.841_344_746_068_542_9),
    ];
    for (x, phi) in known {
        assert!((normal_cdf(x) / phi - 1.0).abs() < 1e-12, "{x}: {} {phi}", normal_cdf(x));
    }
}

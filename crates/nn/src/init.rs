//! First values of parameters, from a counter-based generator keyed by (seed, env, name).
//!
//! A parameter's numbers do not depend on other parameters. So growing a module does not change the
//! host, and a module's initial weights do not depend on other modules.

use meristem_device::random::{Purpose, Rng};

use crate::graph::{Init, ParamSpec};
use crate::name_key::name_key;

/// The elements of a new parameter, in PyTorch's layout.
pub(crate) fn values(param: &ParamSpec, seed: u64, env: u64) -> Vec<f32> {
    let len = param.shape.iter().product();
    let mut rng = random(&param.name, seed, env);
    match param.init {
        Init::Constant(value) => vec![value; len],
        Init::Uniform { bound } => (0..len).map(|_| (2.0 * rng.uniform() - 1.0) * bound).collect(),
        Init::Normal => (0..len).map(|_| normal(&mut rng) as f32).collect(),
        Init::Orthogonal { gain } => {
            let rows = param.shape.first().copied().unwrap_or(1).max(1);
            orthogonal(&mut rng, rows, len / rows, f64::from(gain))
        }
        Init::ForgetBias => (0..len).map(|i| f32::from(u8::from(i / (len / 4) == 1))).collect(),
    }
}

/// The generator with a name.
pub(crate) fn random(name: &str, seed: u64, env: u64) -> Rng {
    Rng::new(seed, Purpose::Init, env, name_key(name))
}

/// Standard normal, from two words (Box and Muller, 1958).
fn normal(rng: &mut Rng) -> f64 {
    let unit = |word: u32| (f64::from(word) + 0.5) / 4_294_967_296.0;
    let (radius, angle) = (unit(rng.next_u32()), unit(rng.next_u32()));
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// A `rows × cols` matrix. The vectors along its shorter side are orthogonal and have length
/// `gain`. It is the Q of a QR decomposition of a normal matrix, with a positive diagonal of R,
/// which is uniform over all such matrices (Mezzadri, "How to generate random matrices from the
/// classical compact groups", 2007). The Gram-Schmidt process in f64 gives such an R: the
/// components along earlier vectors are subtracted from each random vector one by one, and the
/// remainder is normalised.
fn orthogonal(rng: &mut Rng, rows: usize, cols: usize, gain: f64) -> Vec<f32> {
    let (count, len) = (rows.min(cols), rows.max(cols));
    let mut vectors: Vec<Vec<f64>> = vec![];
    for _ in 0..count {
        let mut v: Vec<f64> = (0..len).map(|_| normal(rng)).collect();
        for q in &vectors {
            let along = dot(q, &v);
            v.iter_mut().zip(q).for_each(|(v, q)| *v -= along * q);
        }
        let norm = dot(&v, &v).sqrt();
        v.iter_mut().for_each(|v| *v /= norm);
        vectors.push(v);
    }
    let at = |i: usize| {
        if rows <= cols { vectors[i / cols][i % cols] } else { vectors[i % cols][i / cols] }
    };
    (0..rows * cols).map(|i| (gain * at(i)) as f32).collect()
}

/// Eight sums, which the compiler keeps in vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a_parts, b_parts) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a_parts.remainder().iter().zip(b_parts.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0f64; 8];
    for (a, b) in a_parts.zip(b_parts) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GroupId, ParamKind};

    fn param(name: &str) -> ParamSpec {
        let init = Init::torch_default(4);
        ParamSpec {
            name: name.into(),
            shape: vec![100, 40],
            kind: ParamKind::LinearWeight,
            init,
            group: GroupId(0),
            variant: 0,
        }
    }

    #[test]
    fn uniform_within_its_bound_with_the_right_spread() {
        let values = values(&param("a"), 1, 0);
        assert!(values.iter().all(|v| (-0.5..0.5).contains(v)));
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / 4000.0;
        let var = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 4000.0;
        // U(±1/2): variance 1/12; standard errors .0046 and .0012.
        assert!(mean.abs() < 0.02 && (var - 1.0 / 12.0).abs() < 0.006, "{mean} {var}");
    }

    #[test]
    fn keyed_by_name_seed_and_env() {
        let first = values(&param("a"), 1, 0);
        assert_eq!(first, values(&param("a"), 1, 0));
        for other in
            [values(&param("b"), 1, 0), values(&param("a"), 2, 0), values(&param("a"), 1, 1)]
        {
            assert!(first.iter().zip(&other).filter(|(a, b)| a == b).count() < 10);
        }
    }

    fn drawn(shape: &[usize], init: Init) -> Vec<f32> {
        values(&ParamSpec { shape: shape.to_vec(), init, ..param("a") }, 5, 0)
    }

    #[test]
    fn the_shorter_side_is_orthogonal() {
        for [rows, cols] in [[1, 1], [3, 7], [7, 3], [16, 16], [40, 10], [1, 5]] {
            let q = drawn(&[rows, cols], Init::Orthogonal { gain: 2.0 });
            let at = |v: usize, i: usize| -> f64 {
                f64::from(if rows <= cols { q[v * cols + i] } else { q[i * cols + v] })
            };
            for (a, b) in (0..rows.min(cols)).flat_map(|a| (0..=a).map(move |b| (a, b))) {
                let dot: f64 = (0..rows.max(cols)).map(|i| at(a, i) * at(b, i)).sum();
                let expected = if a == b { 4.0 } else { 0.0 };
                // Elements are rounded to f32: 6e-8 of 2, times up to 40 of them.
                assert!((dot - expected).abs() < 1e-5, "{rows} x {cols}: {a} {b} {dot}");
            }
        }
        // Signs are not fixed by the process: over matrices of one element both come about evenly.
        let one = |seed| {
            let init = Init::Orthogonal { gain: 1.0 };
            values(&ParamSpec { shape: vec![1, 1], init, ..param("a") }, seed, 0)[0]
        };
        assert!((10..54).contains(&(0..64).filter(|s| one(*s) > 0.0).count()));
    }

    #[test]
    fn normals_have_their_moments_and_the_forget_gate_its_bias() {
        let values = drawn(&[100, 40], Init::Normal);
        let moment = |p: i32| values.iter().map(|v| f64::from(*v).powi(p)).sum::<f64>() / 4000.0;
        // Standard errors .016, .022, .15.
        assert!(moment(1).abs() < 0.08 && (moment(2) - 1.0).abs() < 0.11);
        assert!((moment(4) - 3.0).abs() < 0.75, "{}", moment(4));
        assert_eq!(drawn(&[8], Init::ForgetBias), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn fnv_known_answers() {
        assert_eq!(name_key(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(name_key("a"), 0xAF63_DC4C_8601_EC8C);
    }
}

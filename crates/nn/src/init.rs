//! First values of parameters, from a counter-based generator keyed by (seed, env, name).
//!
//! A parameter's numbers depend on no other parameter: growing a module leaves the host as it is,
//! and a module starts the same whatever else has grown.

use meristem_device::random::{Purpose, Rng};

use crate::graph::{Init, ParamSpec};

/// The elements of a new parameter, in PyTorch's layout.
pub(crate) fn values(param: &ParamSpec, seed: u64, env: u64) -> Vec<f32> {
    let len = param.shape.iter().product();
    match param.init {
        Init::Constant(value) => vec![value; len],
        Init::Uniform { bound } => {
            let mut rng = Rng::new(seed, Purpose::Init, env, name_key(&param.name));
            (0..len).map(|_| (2.0 * rng.uniform() - 1.0) * bound).collect()
        }
    }
}

/// FNV-1a, 64 bits: part of what makes runs repeatable, so written out here.
fn name_key(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
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

    #[test]
    fn fnv_known_answers() {
        assert_eq!(name_key(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(name_key("a"), 0xAF63_DC4C_8601_EC8C);
    }
}

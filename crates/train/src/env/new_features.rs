//! Learning rates of features that layers got in this episode.

use std::collections::BTreeMap;
use std::ops::Range;

use meristem_nn::StateDict;
use meristem_nn::graph::{Graph, GroupId, ParamSpec, StepFactors};
use serde::{Deserialize, Serialize};

use crate::config::types::GrowthLr;

/// Limits of the factor of [`GrowthLr::Norm`]. With most initialisations outgoing weights begin at
/// 0, and without the lower limit their factor would stay 0.
const NORM_FACTORS: [f64; 2] = [0.1, 10.0];

/// Features that a layer got by one widening.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NewFeatures {
    /// First step of the env that trains them.
    step: usize,
    /// Rows (first dimension) and columns (second dimension) that each larger parameter had before.
    before: BTreeMap<String, [usize; 2]>,
}

/// Rows and columns of a parameter; 1 for a dimension that it does not have.
fn size(param: &ParamSpec) -> [usize; 2] {
    [0, 1].map(|axis| param.shape.get(axis).copied().unwrap_or(1))
}

impl NewFeatures {
    /// The features of `wide` that `narrow` lacks, which train from step `step` of the env on.
    pub(crate) fn new(narrow: &Graph, wide: &Graph, step: usize) -> Self {
        let before: BTreeMap<&str, [usize; 2]> =
            narrow.params.iter().map(|param| (param.name.as_str(), size(param))).collect();
        let larger = wide.params.iter().filter_map(|param| {
            let before = before.get(param.name.as_str())?;
            (*before != size(param)).then(|| (param.name.clone(), *before))
        });
        Self { step, before: larger.collect() }
    }

    /// Whether the element in this row and column of a parameter was absent before these features:
    /// they added it, or later features did.
    fn has(&self, name: &str, [row, column]: [usize; 2]) -> bool {
        self.before.get(name).is_some_and(|[rows, columns]| row >= *rows || column >= *columns)
    }
}

/// Factors of the learning rates of all elements that `all` added to a network, in step `step` of
/// the env. `weights` are the parameters of the network, for [`GrowthLr::Norm`]. `None` if all
/// factors are 1.
pub(crate) fn step_factors(
    graph: &Graph,
    all: &[NewFeatures],
    rule: GrowthLr,
    (step, weights): (usize, Option<&StateDict>),
) -> Option<StepFactors> {
    let mut found = StepFactors::new();
    let grown = |param: &&ParamSpec| {
        param.group == GroupId::HOST && all.iter().any(|of| of.before.contains_key(&param.name))
    };
    for param in graph.params.iter().filter(grown) {
        let origins = origins(param, all);
        let factor_of_origin = match weights {
            None => all.iter().map(|of| rule.of_age(step.saturating_sub(of.step))).collect(),
            Some(weights) => {
                let values = weights.get(&param.name).and_then(|tensor| tensor.as_f32());
                norm_factors(values.unwrap_or_default(), &origins, all.len())
            }
        };
        let factor = |origin: &usize| match *origin {
            0 => 1.0,
            added => factor_of_origin[added - 1] as f32,
        };
        let factors: Vec<f32> = origins.iter().map(factor).collect();
        if factors.iter().any(|factor| *factor != 1.0) {
            found.insert(param.name.clone(), factors);
        }
    }
    (!found.is_empty()).then_some(found)
}

/// Origin of each element of a parameter: 0 for an element of the first network, or 1 + i for an
/// element that `all[i]` added. Added rows and columns come after the earlier ones.
fn origins(param: &ParamSpec, all: &[NewFeatures]) -> Vec<usize> {
    let [rows, columns] = size(param);
    let len: usize = param.shape.iter().product();
    let kernel = len / (rows * columns).max(1);
    let of = |row: usize, column: usize| {
        all.iter().rposition(|of| of.has(&param.name, [row, column])).map_or(0, |at| at + 1)
    };
    let each: Range<usize> = 0..rows * columns;
    each.flat_map(|at| std::iter::repeat_n(of(at / columns, at % columns), kernel)).collect()
}

/// For each origin except 0, the norm of its elements divided by the norm of the elements of origin
/// 0, which the first network had; both of the present `values`. The quotient is clamped to
/// [`NORM_FACTORS`], and 1 if it is not finite.
fn norm_factors(values: &[f32], origins: &[usize], count: usize) -> Vec<f64> {
    let mut squares = vec![0f64; count + 1];
    for (value, origin) in values.iter().zip(origins) {
        squares[*origin] += f64::from(*value).powi(2);
    }
    let [least, most] = NORM_FACTORS;
    let factor = |square: &f64| {
        let factor = (square / squares[0]).sqrt();
        if factor.is_finite() { factor.clamp(least, most) } else { 1.0 }
    };
    squares[1..].iter().map(factor).collect()
}

#[cfg(test)]
mod tests {
    use meristem_nn::HostTensor;
    use meristem_nn::graph::{Dims, GraphBuilder, SgdConfig};

    use super::*;

    fn graph(widths: [usize; 2]) -> Graph {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
        let mut b = GraphBuilder::new(Dims { c: 3, h: 1, w: 1 }, sgd);
        let x = b.linear(b.input(), "one", widths[0], true, None).unwrap();
        let x = b.relu(x);
        let x = b.linear(x, "two", widths[1], true, None).unwrap();
        let x = b.relu(x);
        let x = b.linear(x, "out", 2, false, None).unwrap();
        b.finish(x).unwrap()
    }

    /// `one` gets a feature before step 2, `two` before step 5, `one` before step 6.
    fn grown() -> (Graph, Vec<NewFeatures>) {
        let all = [[2, 2], [3, 2], [3, 3], [4, 3]].map(graph);
        let steps = [2, 5, 6];
        let pairs = all.windows(2).zip(steps);
        let features = pairs.map(|(pair, step)| NewFeatures::new(&pair[0], &pair[1], step));
        (all[3].clone(), features.collect())
    }

    #[test]
    fn an_element_is_as_old_as_the_younger_of_its_row_and_column() {
        let (graph, all) = grown();
        let rule = GrowthLr::Age { factor: 11.0, steps: 10 };
        let factors = step_factors(&graph, &all, rule, (6, None)).unwrap();
        // Ages 4, 1 and 0.
        let [first, second, third] = [7.0, 10.0, 11.0];
        assert_eq!(
            factors["one.weight"],
            [[1.0; 3], [1.0; 3], [first; 3], [third; 3]].concat(),
            "rows"
        );
        assert_eq!(factors["one.bias"], [1.0, 1.0, first, third]);
        let rows =
            [[1.0, 1.0, first, third], [1.0, 1.0, first, third], [second, second, second, third]];
        assert_eq!(factors["two.weight"], rows.concat());
        assert_eq!(factors["out.weight"], [[1.0, 1.0, second], [1.0, 1.0, second]].concat());
        assert_eq!(step_factors(&graph, &all, rule, (16, None)), None, "nothing is young");
        assert_eq!(step_factors(&graph, &[], rule, (6, None)), None);
    }

    #[test]
    fn norms_are_those_of_the_parts_of_a_parameter() {
        let (graph, all) = grown();
        let mut weights = StateDict::default();
        weights.insert("one.bias", HostTensor::f32(&[4], vec![3.0, 4.0, 2.5, 0.0]));
        let two = [[1.0, 0.0, 2.0, -0.5], [0.0, 1.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]].concat();
        weights.insert("two.weight", HostTensor::f32(&[3, 4], two));
        let factors = step_factors(&graph, &all, GrowthLr::Norm, (6, Some(&weights))).unwrap();
        assert_eq!(factors["one.bias"], [1.0, 1.0, 0.5, 0.1], "at least a tenth");
        let [first, second, third] = [2f64.sqrt() as f32, 10.0, (0.5 / 2f64.sqrt()) as f32];
        let rows =
            [[1.0, 1.0, first, third], [1.0, 1.0, first, third], [second, second, second, third]];
        assert_eq!(factors["two.weight"], rows.concat());
        assert!(!factors.contains_key("one.weight"), "unknown weights have the factor 1");
    }
}

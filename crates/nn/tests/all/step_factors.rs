//! Factors of the optimiser's steps of single elements.

use std::sync::Arc;

use crate::common::host;
use crate::network::{MODULE, network, train};
use crate::widen::{BATCH, convolutions, f32s};
use meristem_nn::graph::{
    AdamConfig, Graph, LionConfig, MuonConfig, Optimiser, SgdConfig, StepFactors,
};
use meristem_nn::{Network, StateDict};

const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 1e-3, clip_norm: 1.0 };

fn optimisers() -> [Optimiser; 6] {
    let adam =
        AdamConfig { lr: 0.01, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, clip_norm: 1.0 };
    let lion = LionConfig { lr: 0.001, betas: [0.9, 0.99], weight_decay: 0.1, clip_norm: 1.0 };
    [
        SGD.into(),
        Optimiser::Nesterov(SGD),
        Optimiser::Adam(adam),
        Optimiser::AdamW(adam),
        lion.into(),
        MuonConfig { lr: 0.02, momentum: 0.95, others: adam }.into(),
    ]
}

/// `convolutions` with factors of one parameter.
pub(crate) fn with_factors(optimiser: Optimiser, name: &str, factors: Vec<f32>) -> Arc<Graph> {
    let graph = Graph::clone(&convolutions(optimiser, [5, 6]));
    let factors = StepFactors::from([(name.into(), factors)]);
    Arc::new(graph.with_step_factors(Some(Arc::new(factors))).unwrap())
}

fn states(it: &Network) -> (StateDict, StateDict) {
    (it.state_dict().unwrap(), it.momentum_dict().unwrap())
}

#[test]
fn factors_of_one_change_nothing_and_factors_of_zero_hold_an_element() {
    let stream = host::stream(2);
    for optimiser in optimisers() {
        let mut usual = network(&stream, &convolutions(optimiser, [5, 6]), BATCH);
        let before = f32s(&usual.state_dict().unwrap(), "two.weight").to_vec();
        let ones = with_factors(optimiser, "two.weight", vec![1.0; before.len()]);
        let mut same = network(&stream, &ones, BATCH);
        let [zero, one] = [0.0, 1.0];
        let some: Vec<f32> =
            (0..before.len()).map(|at| if at % 3 == 0 { zero } else { one }).collect();
        let mut held = network(&stream, &with_factors(optimiser, "two.weight", some), BATCH);
        for it in [&mut usual, &mut same, &mut held] {
            train(it, 0..5, BATCH);
        }
        assert_eq!(states(&usual), states(&same), "{optimiser:?}");
        let after = held.state_dict().unwrap();
        for (at, (before, after)) in before.iter().zip(f32s(&after, "two.weight")).enumerate() {
            assert_eq!(before == after, at % 3 == 0, "{optimiser:?}, element {at}");
        }
        assert_ne!(after.get("one.weight"), None);
    }
}

/// The first step with a factor f is f times as long: of `p − s` and `(1 − f)p + f(p − s)`, the
/// latter rounds five numbers of at most the size of p and s by 2⁻²⁴ each.
#[test]
fn a_factor_is_that_of_the_step() {
    let stream = host::stream(2);
    for optimiser in optimisers() {
        let mut usual = network(&stream, &convolutions(optimiser, [5, 6]), BATCH);
        let before = usual.state_dict().unwrap();
        let p = f32s(&before, "two.weight");
        let factors: Vec<f32> = (0..p.len()).map(|at| 0.25 * (at % 9) as f32).collect();
        let mut it =
            network(&stream, &with_factors(optimiser, "two.weight", factors.clone()), BATCH);
        [&mut usual, &mut it].into_iter().for_each(|it| train(it, 0..1, BATCH));
        let (plain, scaled) = (usual.state_dict().unwrap(), it.state_dict().unwrap());
        let (plain, scaled) = (f32s(&plain, "two.weight"), f32s(&scaled, "two.weight"));
        let all = p.iter().zip(plain).zip(scaled).zip(&factors);
        for (((p, plain), scaled), factor) in all {
            let [p, plain, scaled, f] = [p, plain, scaled, factor].map(|x| f64::from(*x));
            let expected = p + f * (plain - p);
            let limit = 5.0 * 2f64.powi(-24) * (1.0 + 2.0 * f) * (p.abs() + plain.abs());
            assert!((scaled - expected).abs() <= limit, "{optimiser:?}: {scaled} {expected}");
        }
    }
}

/// New values of factors are copied to the device; without factors the network is as before.
#[test]
fn factors_come_change_and_go_with_the_state() {
    let stream = host::stream(2);
    let usual = convolutions(SGD.into(), [5, 6]);
    let len = 6 * 5 * 9;
    let of = |factor: f32| with_factors(SGD.into(), "two.weight", vec![factor; len]);
    let mut it = network(&stream, &usual, BATCH);
    let mut other = network(&stream, &of(0.5), BATCH);
    train(&mut other, 0..2, BATCH);
    it.set_graph(of(0.0)).unwrap();
    let before = it.state_dict().unwrap();
    train(&mut it, 0..2, BATCH);
    assert_eq!(it.state_dict().unwrap().get("two.weight"), before.get("two.weight"));
    it.follow(&other).unwrap();
    [&mut it, &mut other].into_iter().for_each(|it| train(it, 2..4, BATCH));
    assert_eq!(states(&it), states(&other));
    it.set_graph(of(1.0)).unwrap();
    other.set_graph(usual).unwrap();
    [&mut it, &mut other].into_iter().for_each(|it| train(it, 4..6, BATCH));
    assert_eq!(states(&it), states(&other));
}

#[test]
fn wrong_factors_say_what_is_wrong() {
    let graph = || Graph::clone(&convolutions(MODULE.into(), [5, 6]));
    for (name, factors, problem) in [
        ("three.weight", vec![1.0], "`three.weight`"),
        ("two.weight", vec![1.0], "270 for `two.weight`"),
        ("one.bias", vec![1.0, 0.0, -1.0, 0.0, 0.0], "at least 0"),
        ("one.bias", vec![1.0, 0.0, f32::NAN, 0.0, 0.0], "at least 0"),
    ] {
        let factors = StepFactors::from([(name.into(), factors)]);
        let error = graph().with_step_factors(Some(Arc::new(factors))).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
    }
}

//! Growth in width by variance transfer: the formula, the function, the optimiser's state.

use std::sync::Arc;

use crate::common::host;
use crate::network::{network, train};
use crate::widen::{BATCH, convolutions, f32s, flattened, outputs};
use meristem_nn::graph::{AdamConfig, Graph, NodeOp, Optimiser, SgdConfig, WidthInit};
use meristem_nn::{Network, StateDict};

const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
const ADAM: AdamConfig =
    AdamConfig { lr: 0.01, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, clip_norm: 1.0 };

/// ε of batch norm.
const EPS: f64 = 1e-5;

/// √(5/8), for a layer of 5 features that gets 3.
fn factor() -> f64 {
    (5f64 / 8.0).sqrt()
}

fn trained(graph: &Arc<Graph>) -> Network {
    let mut it = network(&host::stream(2), graph, BATCH);
    train(&mut it, 0..5, BATCH);
    it
}

/// Elements that were multiplied by the f32 nearest to a factor in f64: two roundings, and a third
/// for the square of a factor, each of 2⁻²⁴.
fn assert_scaled(old: impl Iterator<Item = f32>, new: impl Iterator<Item = f32>, factor: f64) {
    let mut count = 0;
    for (old, new) in old.zip(new) {
        let expected = f64::from(old) * factor;
        assert!((f64::from(new) - expected).abs() <= 4.0 * 2f64.powi(-24) * expected.abs());
        count += 1;
    }
    assert!(count > 0);
}

fn assert_rows_scaled(old: &StateDict, new: &StateDict, name: &str, factor: f64) {
    assert_scaled(f32s(old, name).iter().copied(), f32s(new, name).iter().copied(), factor);
}

/// Kernels `[rows][from..to]` of `two.weight`, with `columns` columns.
fn columns(values: &[f32], columns: usize, of: std::ops::Range<usize>) -> Vec<f32> {
    let rows = values.chunks(columns * 9);
    rows.flat_map(|row| row[of.start * 9..of.end * 9].to_vec()).collect()
}

/// Features 5 and 6 are a pair; 7 has no partner.
#[test]
fn weights_and_statistics_follow_the_formula() {
    for optimiser in [SGD.into(), Optimiser::Adam(ADAM)] {
        let mut it = trained(&convolutions(optimiser, [5, 6]));
        let (old, moments) = (it.state_dict().unwrap(), it.momentum_dict().unwrap());
        it.widen(convolutions(optimiser, [8, 6]), WidthInit::VarianceTransfer).unwrap();
        let (new, now) = (it.state_dict().unwrap(), it.momentum_dict().unwrap());
        for name in ["one.weight", "one.bias", "norm.weight", "norm.bias", "depthwise.weight"] {
            let (before, after) = (f32s(&old, name), f32s(&new, name));
            assert_eq!(&after[..before.len()], before, "{name}");
            let row = before.len() / 5;
            assert_eq!(after[5 * row..6 * row], after[6 * row..7 * row], "{name}");
        }
        let one = f32s(&new, "one.weight");
        assert_ne!(one[5 * 27..6 * 27], one[7 * 27..], "the third feature is another one");
        let (before, after) = (f32s(&old, "two.weight"), f32s(&new, "two.weight"));
        assert_scaled(
            columns(before, 5, 0..5).into_iter(),
            columns(after, 8, 0..5).into_iter(),
            factor(),
        );
        let [z, minus_z, last] = [5..6, 6..7, 7..8].map(|of| columns(after, 8, of));
        let negative: Vec<f32> = z.iter().map(|x| -x).collect();
        assert_eq!((minus_z, last), (negative, vec![0.0; z.len()]));
        // Uniform between ±1/√fan-in at the new width: variance 1/(3 · 8 · 9). The mean square of
        // 54 draws is within a half of it: its deviation is √(4/5 / 54) of it, an eighth.
        let square = z.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / z.len() as f64;
        assert!((square * 216.0 - 1.0).abs() < 0.5, "{square}");
        assert_rows_scaled(&old, &new, "norm_two.running_mean", factor());
        assert_rows_scaled(&old, &new, "norm_two.running_var", factor().powi(2));
        for name in ["norm_two.weight", "norm_two.bias", "classifier.weight"] {
            assert_eq!(old.get(name), new.get(name), "{name}");
        }
        let state = |suffix: &str| {
            let name = format!("two.weight{suffix}");
            let old = columns(f32s(&moments, &name), 5, 0..5);
            (old.into_iter(), columns(f32s(&now, &name), 8, 0..5).into_iter())
        };
        if optimiser == SGD.into() {
            let (before, after) = state("");
            assert_scaled(before, after, factor());
        } else {
            let (before, after) = state(".exp_avg");
            assert_scaled(before, after, factor());
            let (before, after) = state(".exp_avg_sq");
            assert_scaled(before, after, factor().powi(-2));
        }
    }
}

/// A batch norm with ε of inputs scaled by c is one with ε/c² of the inputs, and this is all that
/// changes. The tolerance is that of the other initialisations: regrouped sums.
#[test]
fn the_function_changes_by_the_epsilon_of_batch_norm_only() {
    let graph = convolutions(SGD.into(), [5, 6]);
    let mut it = trained(&graph);
    let state = it.state_dict().unwrap();
    let mut other = Graph::clone(&graph);
    let norms = other.nodes.iter_mut().filter_map(|node| match &mut node.op {
        NodeOp::BatchNorm { eps, .. } => Some(eps),
        _ => None,
    });
    *norms.last().unwrap() = (EPS / factor().powi(2)) as f32;
    let mut expected = network(&host::stream(1), &Arc::new(other), BATCH);
    expected.load_state_dict(&state, true).unwrap();
    it.widen(convolutions(SGD.into(), [8, 6]), WidthInit::VarianceTransfer).unwrap();
    let (expected, got) = (outputs(&mut expected), outputs(&mut it));
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (one, other) in expected.iter().zip(&got) {
        assert!((one - other).abs() <= 2e-5 * largest, "{one} {other}");
    }
}

/// Without batch norm after the reader no old weight changes, so the function is kept; a pair parts
/// in the first step.
#[test]
fn without_batch_norm_old_weights_stay_and_pairs_part() {
    for at in [0, 1] {
        let wide = |by: usize| {
            let mut widths = [5, 6];
            widths[at] += by;
            flattened(SGD.into(), widths)
        };
        let mut it = trained(&wide(0));
        let (before, state) = (outputs(&mut it), it.state_dict().unwrap());
        it.widen(wide(2), WidthInit::VarianceTransfer).unwrap();
        let largest = before.iter().fold(0f32, |most, x| most.max(x.abs()));
        for (old, new) in before.iter().zip(outputs(&mut it)) {
            assert!((old - new).abs() <= 2e-5 * largest, "{old} {new}");
        }
        let name = ["one.weight", "two.weight"][at];
        let pair = |it: &Network| {
            let state = it.state_dict().unwrap();
            let rows = f32s(&state, name).to_vec();
            let row = rows.len() / ([5, 6][at] + 2);
            (
                rows[rows.len() - 2 * row..rows.len() - row].to_vec(),
                rows[rows.len() - row..].to_vec(),
            )
        };
        assert_eq!(
            f32s(&it.state_dict().unwrap(), "classifier.bias"),
            f32s(&state, "classifier.bias")
        );
        let (one, other) = pair(&it);
        assert_eq!(one, other);
        train(&mut it, 5..6, BATCH);
        let (one, other) = pair(&it);
        assert_ne!(one, other);
    }
}

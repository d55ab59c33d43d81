//! Growth in width: the function, the optimiser's state and the statistics are carried over.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{Random, host};
use crate::network::{DIMS, network, train};
use meristem_nn::graph::{
    AdamConfig, ConvGeometry, Graph, GraphBuilder, Optimiser, SgdConfig, WidthInit,
};
use meristem_nn::{Error, Network, StateDict};

/// Samples of a batch.
pub(crate) const BATCH: usize = 8;

const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 1e-3, clip_norm: 1.0 };

/// Initialisations without a probe.
pub(crate) const WITHOUT_PROBE: [WidthInit; 2] = [WidthInit::Zero, WidthInit::Net2wider];

/// Widths of the layers of a network.
pub(crate) type Widths = [usize; 2];

/// Convolutions with batch norm, a depthwise one and a pool between two of them; a classifier.
pub(crate) fn convolutions(optimiser: Optimiser, [first, second]: Widths) -> Arc<Graph> {
    let mut b = GraphBuilder::new(DIMS, optimiser);
    let x = b.conv2d(b.input(), "one", first, ConvGeometry::same(3), true).unwrap();
    let x = b.batch_norm(x, "norm").unwrap();
    let x = b.relu(x);
    let depthwise = ConvGeometry::same(3).groups(first);
    let x = b.conv2d(x, "depthwise", first, depthwise, false).unwrap();
    let x = b.max_pool2d(x, "pool", 2, 2).unwrap();
    let x = b.conv2d(x, "two", second, ConvGeometry::same(3), false).unwrap();
    let x = b.batch_norm(x, "norm_two").unwrap();
    let x = b.silu(x);
    let x = b.global_avg_pool(x);
    let x = b.linear(x, "classifier", 10, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

/// A convolution whose image is flattened, and a hidden layer.
pub(crate) fn flattened(optimiser: Optimiser, [first, second]: Widths) -> Arc<Graph> {
    let mut b = GraphBuilder::new(DIMS, optimiser);
    let x = b.conv2d(b.input(), "one", first, ConvGeometry::same(3), true).unwrap();
    let x = b.gelu(x);
    let x = b.flatten(x);
    let x = b.linear(x, "two", second, true, None).unwrap();
    let x = b.relu(x);
    let x = b.linear(x, "classifier", 10, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

pub(crate) fn outputs(network: &mut Network) -> Vec<f32> {
    let x = Random(77).normals(BATCH * DIMS.numel());
    let x = host::images(network.stream(), &x, DIMS);
    network.infer(&x, 0).unwrap().to_vec().unwrap()
}

fn optimisers() -> [Optimiser; 2] {
    [
        SGD.into(),
        Optimiser::Adam(AdamConfig {
            lr: 0.01,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            clip_norm: 1.0,
        }),
    ]
}

pub(crate) fn f32s<'a>(state: &'a StateDict, name: &str) -> &'a [f32] {
    state.get(name).and_then(|tensor| tensor.as_f32()).unwrap()
}

/// The sums of a layer get at most 9 · 8 further products. With `Zero` these are zeros, which at
/// most regroup the sum; with `Net2wider` each copied product is split in two. Either moves a sum
/// of n products of size 1 by n · 2⁻²⁴, and three layers by less than 2e-5 of the largest output.
#[test]
fn a_wider_network_computes_the_same_function_and_then_learns_another() {
    let stream = host::stream(2);
    for build in [convolutions, flattened] {
        for (optimiser, init) in
            optimisers().iter().flat_map(|o| WITHOUT_PROBE.map(|init| (*o, init)))
        {
            let mut narrow = network(&stream, &build(optimiser, [5, 6]), BATCH);
            let mut wide = network(&stream, &build(optimiser, [5, 6]), BATCH);
            [&mut narrow, &mut wide].into_iter().for_each(|network| train(network, 0..5, BATCH));
            let before = outputs(&mut wide);
            let largest = before.iter().fold(0f32, |most, x| most.max(x.abs()));
            wide.widen(build(optimiser, [8, 6]), init).unwrap();
            wide.widen(build(optimiser, [8, 13]), init).unwrap();
            for (old, new) in before.iter().zip(outputs(&mut wide)) {
                assert!((old - new).abs() <= 2e-5 * largest, "{init:?}: {old} and {new}");
            }
            assert_eq!(outputs(&mut narrow), before);
            [&mut narrow, &mut wide].into_iter().for_each(|network| train(network, 0..5, BATCH));
            let moved = outputs(&mut narrow)
                .iter()
                .zip(outputs(&mut wide))
                .any(|(a, b)| (a - b).abs() > 1e-3 * largest);
            assert!(moved, "{init:?}: the new features do not learn");
        }
    }
}

/// Rows and columns of the narrower network are where they were, with momentum, squared gradients
/// and running statistics; copies have the state of their originals.
#[test]
fn optimiser_and_statistics_are_carried_over_with_the_features() {
    let stream = host::stream(2);
    for init in WITHOUT_PROBE {
        let [_, adam] = optimisers();
        let mut it = network(&stream, &convolutions(adam, [5, 6]), BATCH);
        train(&mut it, 0..5, BATCH);
        let (values, moments) = (it.state_dict().unwrap(), it.momentum_dict().unwrap());
        it.widen(convolutions(adam, [7, 6]), init).unwrap();
        let (wide, wide_moments) = (it.state_dict().unwrap(), it.momentum_dict().unwrap());
        assert_eq!(wide.get("classifier.weight"), values.get("classifier.weight"));
        for name in ["norm.num_batches_tracked", "norm_two.running_mean"] {
            assert_eq!(wide.get(name), values.get(name), "{name}");
        }
        assert_eq!(wide_moments.get("one.weight.step"), moments.get("one.weight.step"));
        // Rows.
        let rows =
            ["one.weight", "one.bias", "norm.weight", "norm.running_var", "depthwise.weight"];
        for name in rows {
            let (old, new) = (f32s(&values, name), f32s(&wide, name));
            assert_eq!(&new[..old.len()], old, "{name}");
        }
        let name = "one.weight.exp_avg";
        let (old, new) = (f32s(&moments, name), f32s(&wide_moments, name));
        assert_eq!(&new[..old.len()], old, "{name}");
        let zero = new[old.len()..].iter().all(|x| *x == 0.0);
        assert_eq!(zero, init == WidthInit::Zero, "{name} of new features");
        // Columns of `two`: [6, 5, 3, 3] and [6, 7, 3, 3].
        let (old, new) = (f32s(&values, "two.weight"), f32s(&wide, "two.weight"));
        let (old_square, new_square) =
            (f32s(&moments, "two.weight.exp_avg_sq"), f32s(&wide_moments, "two.weight.exp_avg_sq"));
        let one = f32s(&wide, "one.weight");
        let feature = |c: usize| one[c * 27..(c + 1) * 27].to_vec();
        for out in 0..6 {
            for k in 0..9 {
                let of =
                    |values: &[f32], columns: usize, c: usize| values[(out * columns + c) * 9 + k];
                let mut sums: BTreeMap<Vec<u32>, f32> = BTreeMap::new();
                for c in 0..7 {
                    let bits = feature(c).iter().map(|x| x.to_bits()).collect();
                    *sums.entry(bits).or_default() += of(new, 7, c);
                }
                for c in 0..5 {
                    let bits: Vec<u32> = feature(c).iter().map(|x| x.to_bits()).collect();
                    let sum = sums[&bits];
                    assert!((sum - of(old, 5, c)).abs() <= 1e-6 * sum.abs(), "the shares of {c}");
                    // The gradient of outgoing weights is that of the original, the gradient of
                    // incoming ones is the share of it.
                    assert_eq!(of(new_square, 7, c), of(old_square, 5, c));
                    let share = of(new, 7, c) / of(old, 5, c);
                    let [before, now] = [&moments, &wide_moments]
                        .map(|state| f32s(state, "one.weight.exp_avg_sq")[c * 27 + k]);
                    let square = before * share * share;
                    assert!((now - square).abs() <= 1e-5 * square, "{now} {square}");
                }
                for c in (5..7).filter(|_| init == WidthInit::Zero) {
                    assert_eq!(of(new, 7, c), 0.0);
                }
            }
        }
    }
}

#[test]
fn other_layers_and_mixed_features_are_refused_and_the_network_stays() {
    let stream = host::stream(1);
    let normed = |width| {
        let mut b = GraphBuilder::new(DIMS, SGD);
        let x = b.conv2d(b.input(), "one", width, ConvGeometry::same(3), true).unwrap();
        let x = b.group_norm(x, "norm", 2, 1.0).unwrap();
        let x = b.global_avg_pool(x);
        let x = b.linear(x, "classifier", 10, true, None).unwrap();
        Arc::new(b.finish(x).unwrap())
    };
    let mut it = network(&stream, &normed(4), BATCH);
    let before = (it.state_dict().unwrap(), outputs(&mut it));
    for (graph, problem) in [
        (normed(6), "each feature is computed by itself"),
        (flattened(SGD.into(), [4, 4]), "the same layers with more features"),
    ] {
        let error = it.widen(graph, WidthInit::Zero).unwrap_err();
        assert!(matches!(&error, Error::Argument { .. }), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
    }
    assert_eq!((it.state_dict().unwrap(), outputs(&mut it)), before);
    let mut wide = network(&stream, &convolutions(SGD.into(), [5, 6]), BATCH);
    assert!(wide.widen(convolutions(SGD.into(), [4, 6]), WidthInit::Zero).is_err(), "narrower");
}

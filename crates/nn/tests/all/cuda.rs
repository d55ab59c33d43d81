//! Networks on a GPU, or on the stand-in driver: they learn the same as networks on the processor,
//! and every way to run them gives the same bits.

use std::sync::Arc;

use crate::branches;
use crate::common::host::{self, BASELINE, DEEP, MINIMAL};
use crate::common::{Random, cuda};
use crate::golden_optimisers;
use crate::network::{DIMS, Stage, batch, grown, metrics, network, sharing, state_bits, train};
use crate::step_factors::with_factors;
use crate::widen::{WITHOUT_PROBE, convolutions, flattened};
use crate::width_probes::{Build, batches, measure, strided};
use meristem_device::{Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};
use meristem_nn::graph::{BlendMode, Graph, WidthInit};
use meristem_nn::{
    HostData, Isa, LabelledBatch, Metrics, Network, NetworkFleet, Plans, Snapshot, StateDict,
};

const BATCH: usize = 6;
const STEPS: u64 = 3;

fn graphs() -> Vec<Arc<Graph>> {
    let slots = ["r0c0", "r1c1"];
    let mut graphs = vec![host::bare(BASELINE, DIMS), host::bare(MINIMAL, DIMS)];
    graphs.push(host::bare(DEEP, meristem_nn::graph::Dims { c: 3, h: 32, w: 32 }));
    let stages = [
        Stage::Training,
        Stage::Blending(BlendMode::Add),
        Stage::Blending(BlendMode::Multiply),
        Stage::Blending(BlendMode::Gate),
        Stage::Fossilized,
    ];
    graphs.extend(stages.map(|stage| grown(BASELINE, DIMS, &slots, stage)));
    graphs.extend([false, true].map(branches::graph));
    graphs
}

/// All results of a few training steps.
fn trained(stream: &Stream, graph: &Arc<Graph>) -> (StateDict, StateDict, Metrics) {
    let mut network = network(stream, graph, BATCH);
    network.set_alphas(&[vec![0.3; graph.alphas]]).unwrap();
    train(&mut network, 0..STEPS, BATCH);
    let dicts = (network.state_dict().unwrap(), network.momentum_dict().unwrap());
    (dicts.0, dicts.1, metrics(&network))
}

/// Largest difference of two dictionaries' f32 values; other types and names must be equal.
fn apart(a: &StateDict, b: &StateDict) -> f32 {
    let mut most = 0.0f32;
    for ((name, a), (other, b)) in a.iter().zip(b.iter()) {
        assert_eq!(name, other);
        match (&a.data, &b.data) {
            (HostData::F32(a), HostData::F32(b)) => {
                assert_eq!(a.len(), b.len());
                let pairs = a.iter().zip(b);
                most = pairs.map(|(a, b)| (a - b).abs()).fold(most, f32::max);
                assert!(a.iter().all(|a| a.is_finite()), "{name}");
            }
            (a, b) => assert_eq!(a, b, "{name}"),
        }
    }
    most
}

/// Every optimiser against PyTorch, with parameters that are new after ten steps.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn optimisers_follow_pytorch() {
    golden_optimisers::check_all(&cuda().stream("env 0"), Isa::detect());
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn optimisers_are_the_same_in_fleets_and_in_halves() {
    golden_optimisers::check_fleet(&cuda());
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn parameters_have_the_numbers_of_their_variants() {
    golden_optimisers::check_variants(&cuda().stream("env 0"));
}

/// Rounding makes a relative difference of about 2⁻²⁴ per term of a gradient's sum, which has at
/// most 6·32·32 terms. Clipped gradients have norms of at most 1, and three steps of rate 0.01 with
/// momentum 0.9 move a weight by at most 0.06 of a gradient. Batch norm's division by the deviation
/// can multiply the difference by ten per layer; 1e-4 leaves room for two. Momenta are the
/// gradients themselves.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn training_follows_the_processors() {
    let (gpu, cpu) = (cuda().stream("env 0"), host::stream(1));
    for graph in graphs() {
        let (ours, theirs) = (trained(&gpu, &graph), trained(&cpu, &graph));
        let (weights, momenta) = (apart(&ours.0, &theirs.0), apart(&ours.1, &theirs.1));
        assert!(weights < 1e-4 && momenta < 5e-3, "{weights} {momenta}");
        let (ours, theirs) = (ours.2, theirs.2);
        assert_eq!((ours.samples, ours.steps), (theirs.samples, theirs.steps));
        assert!((ours.loss_sum - theirs.loss_sum).abs() < 1e-3 * theirs.loss_sum);
        assert_eq!(ours.batch_losses.len(), STEPS as usize);
        for (ours, theirs) in ours.groups.iter().zip(&theirs.groups) {
            assert_eq!((ours.tensors, ours.steps), (theirs.tensors, theirs.steps));
            assert!((ours.norm_sum - theirs.norm_sum).abs() < 1e-3 * theirs.norm_sum.max(1e-3));
        }
    }
}

/// After growth in width both devices go on alike. With SGD: Adam would turn the rounding of a
/// gradient that is 0, that of a bias before batch norm, into whole steps.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_wider_network_follows_the_processors() {
    let (gpu, cpu) = (cuda().stream("env 0"), host::stream(1));
    for init in WITHOUT_PROBE.into_iter().chain([WidthInit::VarianceTransfer]) {
        let [ours, theirs] = [&gpu, &cpu].map(|stream| {
            let mut it = network(stream, &convolutions(host::SGD.into(), [5, 6]), BATCH);
            train(&mut it, 0..STEPS, BATCH);
            for widths in [[8, 6], [8, 13]] {
                it.widen(convolutions(host::SGD.into(), widths), init).unwrap();
            }
            train(&mut it, STEPS..2 * STEPS, BATCH);
            (it.state_dict().unwrap(), it.momentum_dict().unwrap())
        });
        let (weights, momenta) = (apart(&ours.0, &theirs.0), apart(&ours.1, &theirs.1));
        assert!(weights < 1e-4 && momenta < 5e-3, "{init:?}: {weights} {momenta}");
    }
}

/// Steps that are shortened and lengthened element by element.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn factors_of_steps_follow_the_processors() {
    let (gpu, cpu) = (cuda().stream("env 0"), host::stream(1));
    let factors: Vec<f32> = (0..270).map(|at| 0.25 * (at % 9) as f32).collect();
    let graph = with_factors(host::SGD.into(), "two.weight", factors);
    let [ours, theirs] = [&gpu, &cpu].map(|stream| {
        let mut it = network(stream, &graph, BATCH);
        train(&mut it, 0..STEPS, BATCH);
        (it.state_dict().unwrap(), it.momentum_dict().unwrap())
    });
    let (weights, momenta) = (apart(&ours.0, &theirs.0), apart(&ours.1, &theirs.1));
    assert!(weights < 1e-4 && momenta < 5e-3, "{weights} {momenta}");
}

/// Further features that are found by measuring gradients on both devices. Gradients differ by
/// their rounding, so the features do by a little more than that; the choice of `firefly`, and the
/// amplitude of `tiny`, are the same.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn measured_features_are_the_processors() {
    let (gpu, cpu) = (cuda().stream("env 0"), host::stream(1));
    let with_flatten = |width| flattened(host::SGD.into(), [width, 6]);
    let cases: [(WidthInit, Build<'_>); 3] = [
        (WidthInit::Firefly, &with_flatten),
        (WidthInit::Gradmax, &with_flatten),
        (WidthInit::Tiny, &strided),
    ];
    for (init, build) in cases {
        let dims = build(5).input_dims();
        let [ours, theirs] = [&gpu, &cpu].map(|stream| {
            let mut it = network(stream, &build(5), crate::widen::BATCH);
            let batches = batches(stream, dims);
            for (inputs, labels) in &batches {
                it.train_step(inputs, labels).unwrap();
            }
            let further = measure(&it, (build, 5, 3), init, &batches);
            it.widen_with(build(8), &further).unwrap();
            it.state_dict().unwrap()
        });
        let apart = apart(&ours, &theirs);
        assert!(apart < 1e-3, "{init:?}: {apart}");
    }
}

/// Three training steps in three calls, from the same gradients of the outputs on every device, the
/// second from two backward passes. Inference comes in between if `busy`.
fn three_calls(networks: &mut [Network], busy: bool) {
    for step in 0..STEPS {
        let batches: Vec<_> =
            networks.iter().map(|network| batch(network.stream(), BATCH, DIMS, step)).collect();
        let inputs: Vec<&Tensor> = batches.iter().map(|(inputs, _)| inputs).collect();
        let mut random = Random(step);
        let values: Vec<f32> = random.normals(BATCH * 10).iter().map(|v| 0.02 * v).collect();
        let given = |network: &Network| {
            Tensor::from_slice(network.stream(), &values, [BATCH, 10], Owner::Batches).unwrap()
        };
        let gradients: Vec<Tensor> = networks.iter().map(given).collect();
        let gradients: Vec<&Tensor> = gradients.iter().collect();
        let mut fleet = NetworkFleet::new(networks.iter_mut());
        for _ in 0..if step == 1 { 2 } else { 1 } {
            let outputs = fleet.forward(&inputs).unwrap();
            if busy {
                let inferred = fleet.infer(&inputs, 0).unwrap();
                assert_eq!(inferred[0].dims(), outputs[0].dims());
            }
            fleet.backward(&gradients).unwrap();
            if busy {
                fleet.infer(&inputs, 0).unwrap();
            }
        }
        fleet.update().unwrap();
    }
}

/// The tolerances are those of [`training_follows_the_processors`].
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn training_in_three_calls_follows_the_processors() {
    let (device, cpu) = (cuda(), host::stream(1));
    for graph in graphs().into_iter().filter(|graph| graph.input_dims() == DIMS) {
        let ready = |stream: &Stream| {
            let mut network = network(stream, &graph, BATCH);
            network.set_alphas(&[vec![0.3; graph.alphas]]).unwrap();
            network
        };
        let mut theirs = [ready(&cpu)];
        three_calls(&mut theirs, false);
        let mut alone = [ready(&device.stream("alone"))];
        three_calls(&mut alone, false);
        let streams = ["env 0", "env 1"].map(|name| device.stream(name));
        let mut fleet: Vec<Network> = streams.iter().map(ready).collect();
        three_calls(&mut fleet, true);
        for network in &fleet {
            assert!(state_bits(network) == state_bits(&alone[0]), "in a fleet, with inference");
        }
        let dicts =
            |network: &Network| (network.state_dict().unwrap(), network.momentum_dict().unwrap());
        let (ours, theirs) = (dicts(&alone[0]), dicts(&theirs[0]));
        let (weights, momenta) = (apart(&ours.0, &theirs.0), apart(&ours.1, &theirs.1));
        assert!(weights < 1e-4 && momenta < 5e-3, "{weights} {momenta}");
    }
}

/// A network has the same bits alone, in a fleet on several CUDA streams, and after a rollback.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn company_lanes_and_rollbacks_change_no_bit() {
    let graph = grown(BASELINE, DIMS, &["r0c1"], Stage::Blending(BlendMode::Add));
    let stream = cuda().stream("alone");
    let mut alone = network(&stream, &graph, BATCH);
    alone.set_alphas(&[vec![0.5; graph.alphas]]).unwrap();
    train(&mut alone, 0..1, BATCH);
    let snapshot = Snapshot::new(&alone, &graph).unwrap();
    train(&mut alone, 1..STEPS, BATCH);
    let expected = state_bits(&alone);
    alone.restore(&snapshot).unwrap();
    train(&mut alone, 1..STEPS, BATCH);
    // The rollback has reset the optimiser.
    let rolled_back = state_bits(&alone);
    assert!(rolled_back != expected);
    for lanes in [1, 3] {
        let options = DeviceOptions { threads: lanes, ..DeviceOptions::default() };
        let device = Device::open(DeviceId::Cuda(0), &options).unwrap();
        let streams: Vec<Stream> = (0..3).map(|i| device.stream(&format!("env {i}"))).collect();
        let mut networks: Vec<Network> =
            streams.iter().map(|stream| network(stream, &graph, BATCH)).collect();
        let alphas = vec![vec![vec![0.5; graph.alphas]]; 3];
        NetworkFleet::new(&mut networks).set_alphas(&alphas).unwrap();
        let mut snapshot = None;
        for step in 0..STEPS {
            let batches: Vec<_> =
                streams.iter().map(|stream| batch(stream, BATCH, DIMS, step)).collect();
            let labelled: Vec<LabelledBatch<'_>> =
                batches.iter().map(|(inputs, targets)| (inputs, targets)).collect();
            NetworkFleet::new(&mut networks).train_step(&labelled).unwrap();
            if step == 0 {
                snapshot = Some(Snapshot::new(&networks[2], &graph).unwrap());
            }
        }
        for network in &networks {
            assert!(state_bits(network) == expected, "{lanes} lanes");
        }
        networks[2].restore(&snapshot.unwrap()).unwrap();
        train(&mut networks[2], 1..STEPS, BATCH);
        assert!(state_bits(&networks[2]) == rolled_back, "{lanes} lanes, after a rollback");
    }
}

/// Networks of three topologies in one fleet, five steps over a ring of two batches, the last step
/// for some networks only. Each step is one launch, and each network has the bits that it has
/// alone.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_mixed_fleet_is_one_launch_and_has_the_bits_of_each_network_alone() {
    let device = cuda();
    let graphs = [
        host::bare(BASELINE, DIMS),
        grown(BASELINE, DIMS, &["r0c0"], Stage::Training),
        grown(BASELINE, DIMS, &["r0c1", "r1c1"], Stage::Blending(BlendMode::Gate)),
    ];
    let graphs: Vec<&Arc<Graph>> = [0, 1, 0, 2, 1, 0].map(|i| &graphs[i]).into();
    let streams: Vec<Stream> = (0..6).map(|i| device.stream(&format!("env {i}"))).collect();
    let plans = Plans::default();
    let make = |alone: bool| -> Vec<Network> {
        let pairs = streams.iter().zip(&graphs);
        let networks = pairs.map(|(stream, graph)| {
            let mut network = if alone {
                network(stream, graph, BATCH)
            } else {
                sharing(stream, graph, BATCH, &plans)
            };
            network.set_alphas(&[vec![0.5; graph.alphas], vec![0.0; graph.alphas]]).unwrap();
            network
        });
        networks.collect()
    };
    let (mut alone, mut fleet) = (make(true), make(false));
    let ring: Vec<Vec<_>> = (0..2)
        .map(|seed| streams.iter().map(|stream| batch(stream, BATCH, DIMS, seed)).collect())
        .collect();
    for step in 0..5 {
        let count = if step == 4 { 4 } else { 6 };
        let batches: Vec<LabelledBatch<'_>> =
            ring[step % 2].iter().take(count).map(|(inputs, targets)| (inputs, targets)).collect();
        let before = device.counts();
        NetworkFleet::new(&mut fleet).train_step(&batches).unwrap();
        assert_eq!((device.counts() - before).launches, 1, "step {step}");
        NetworkFleet::new(&mut fleet).eval_rows(&batches, &vec![0..2; count]).unwrap();
        assert_eq!((device.counts() - before).launches, 2, "step {step}");
        for (network, (inputs, targets)) in alone.iter_mut().zip(batches) {
            network.train_step(inputs, targets).unwrap();
            network.eval_rows(inputs, targets, 0..2).unwrap();
        }
    }
    for (i, (alone, fleet)) in alone.iter().zip(&fleet).enumerate() {
        assert!(state_bits(alone) == state_bits(fleet), "network {i}");
        assert_eq!(metrics(alone), metrics(fleet), "network {i}");
    }
}

/// Scores of many rows of alphas in one plan equal the scores of a separate evaluation for each
/// row.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn rows_of_alphas_are_scored_alike_at_once_and_one_by_one() {
    let graph = grown(BASELINE, DIMS, &["r0c0", "r1c1"], Stage::Blending(BlendMode::Add));
    let (gpu, cpu) = (cuda().stream("env 0"), host::stream(1));
    let rows = [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.5, 0.25]];
    let rows: Vec<Vec<f32>> =
        rows.iter().map(|row| row.iter().copied().cycle().take(graph.alphas).collect()).collect();
    let scores = |stream: &Stream, at_once: bool| {
        let mut network = network(stream, &graph, 40);
        network.set_alphas(&rows).unwrap();
        network.reset_metrics().unwrap();
        for seed in [1, 2] {
            let (x, y) = batch(stream, 20 * seed as usize, DIMS, seed);
            if at_once {
                network.eval_rows(&x, &y, 0..rows.len()).unwrap()
            } else {
                (0..rows.len()).for_each(|row| network.eval_step(&x, &y, row).unwrap())
            }
        }
        metrics(&network).eval
    };
    let (at_once, one_by_one) = (scores(&gpu, true), scores(&gpu, false));
    assert_eq!(at_once, one_by_one);
    for (ours, theirs) in at_once.iter().zip(scores(&cpu, true)) {
        assert_eq!(ours.samples, theirs.samples);
        assert!((ours.loss_sum - theirs.loss_sum).abs() <= 1e-4 * theirs.loss_sum, "{ours:?}");
    }
}

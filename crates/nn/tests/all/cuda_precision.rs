//! Networks at each precision, on a GPU or on the stand-in driver.

use std::sync::Arc;

use crate::common::cuda;
use crate::common::host::{self, BASELINE};
use crate::network::{DIMS, Stage, batch, grown, metrics, state_bits};
use meristem_device::Stream;
use meristem_nn::graph::{BlendMode, Graph};
use meristem_nn::{
    Error, Isa, LabelledBatch, Network, NetworkFleet, NetworkOptions, Plans, Precision,
};

const BATCH: usize = 6;

fn network(stream: &Stream, graph: &Arc<Graph>, precision: Precision, plans: &Plans) -> Network {
    let options = NetworkOptions { precision, ..NetworkOptions::new(5, 0, Isa::detect(), BATCH) };
    let mut network = Network::with_plans(stream, Arc::clone(graph), options, plans).unwrap();
    network.set_alphas(&[vec![0.5; graph.alphas], vec![0.0; graph.alphas]]).unwrap();
    network
}

/// Two networks of each precision in one fleet, with the same graph and the same shared plans. Each
/// has the bits of a network of its precision that runs alone; precisions differ.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn precisions_beside_each_other_have_plans_of_their_own() {
    let device = cuda();
    let graph = grown(BASELINE, DIMS, &["r0c0", "r1c1"], Stage::Blending(BlendMode::Gate));
    let streams: Vec<Stream> = (0..6).map(|i| device.stream(&format!("env {i}"))).collect();
    let data: Vec<_> = streams.iter().map(|stream| batch(stream, BATCH, DIMS, 1)).collect();
    let labelled: Vec<LabelledBatch<'_>> = data.iter().map(|(x, y)| (x, y)).collect();
    let plans = Plans::default();
    let both = Precision::ALL.into_iter().chain(Precision::ALL);
    let pairs: Vec<_> = streams.iter().zip(both).collect();
    let mut fleet: Vec<Network> = pairs
        .iter()
        .map(|(stream, precision)| network(stream, &graph, *precision, &plans))
        .collect();
    for _ in 0..2 {
        NetworkFleet::new(&mut fleet).train_step(&labelled).unwrap();
        NetworkFleet::new(&mut fleet).eval_rows(&labelled, &[const { 0..2 }; 6]).unwrap();
    }
    for (i, (stream, precision)) in pairs.into_iter().enumerate().take(3) {
        let mut alone = network(stream, &graph, precision, &Plans::default());
        for _ in 0..2 {
            alone.train_step(labelled[i].0, labelled[i].1).unwrap();
            alone.eval_rows(labelled[i].0, labelled[i].1, 0..2).unwrap();
        }
        for together in [&fleet[i], &fleet[i + 3]] {
            assert!(state_bits(together) == state_bits(&alone), "{precision}");
            assert_eq!(metrics(together), metrics(&alone), "{precision}");
        }
        assert!(state_bits(&alone) != state_bits(&fleet[(i + 1) % 3]), "{precision} and the next");
    }
}

/// A network of every precision learns one repeated batch.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn networks_learn_at_every_precision() {
    let (stream, graph) = (cuda().stream("env 0"), host::bare(BASELINE, DIMS));
    let (x, y) = batch(&stream, BATCH, DIMS, 1);
    for precision in Precision::ALL {
        let mut network = network(&stream, &graph, precision, &Plans::default());
        (0..12).for_each(|_| network.train_step(&x, &y).unwrap());
        let losses = metrics(&network).batch_losses;
        assert!(losses[11] < 0.7 * losses[0], "{precision}: {losses:?}");
    }
}

/// The error comes before any allocation or compilation.
#[test]
fn a_processor_refuses_all_but_f32() {
    let (stream, graph) = (host::stream(1), host::bare(BASELINE, DIMS));
    let before = stream.device().counts();
    for precision in [Precision::Tf32, Precision::Bf16] {
        let options =
            NetworkOptions { precision, ..NetworkOptions::new(5, 0, Isa::detect(), BATCH) };
        let error = Network::new(&stream, Arc::clone(&graph), options).unwrap_err();
        assert!(matches!(error, Error::Precision { .. }), "{error:?}");
        let expected = format!(
            "cpu computes in f32 only, got the precision {precision}; use f32, or a CUDA device"
        );
        assert_eq!(error.to_string(), expected);
    }
    assert_eq!(stream.device().counts(), before);
}

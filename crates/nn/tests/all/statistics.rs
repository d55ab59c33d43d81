//! Recomputed running statistics of batch norm.

use std::sync::Arc;

use crate::common::Random;
use crate::common::host::{self, MINIMAL};
use meristem_device::{Stream, Tensor};
use meristem_nn::graph::{Dims, GraphBuilder};
use meristem_nn::{Isa, Network, NetworkFleet, NetworkOptions, observed_weight};

const DIMS: Dims = Dims { c: 3, h: 8, w: 8 };

fn network(stream: &Stream) -> Network {
    let graph = host::graph(MINIMAL, DIMS, |_, _, x| x);
    Network::new(stream, graph, NetworkOptions::new(5, 0, Isa::detect(), 8)).unwrap()
}

/// Three batches, the last of which is smaller.
fn batches(stream: &Stream) -> [Tensor; 3] {
    let mut random = Random(7);
    [8, 8, 5].map(|n| host::images(stream, &random.normals(n * DIMS.numel()), DIMS))
}

fn statistics(network: &Network) -> Vec<f32> {
    network.statistics().flat_map(|(state, _)| state.to_vec::<f32>().unwrap()).collect()
}

fn recomputed(network: &mut Network, batches: &[Tensor]) -> Vec<f32> {
    network.begin_statistics().unwrap();
    batches.iter().for_each(|batch| network.observe(batch).unwrap());
    network.finish_statistics(observed_weight(batches.len())).unwrap();
    statistics(network)
}

/// The averages are means with the weights of the batches, and contain nothing that was there
/// before.
#[test]
fn statistics_are_weighted_means_of_the_observed_batches_alone() {
    let stream = host::stream(1);
    let mut network = network(&stream);
    let batches = batches(&stream);
    for (state, _) in network.statistics() {
        state.copy_from_slice(&vec![f32::NAN; state.numel()]).unwrap();
    }
    let alone = [0, 1, 2].map(|i| recomputed(&mut network, &batches[i..=i]));
    let weights = [0.81, 0.9, 1.0].map(|weight| 0.1 * weight);
    let together = recomputed(&mut network, &batches);
    assert!(!together.is_empty());
    for (i, got) in together.into_iter().enumerate() {
        let terms = || alone.iter().zip(weights).map(|(of, weight)| f64::from(of[i]) * weight);
        let expected = terms().sum::<f64>() / weights.iter().sum::<f64>();
        // Three updates and a division, each rounded a few times, of terms of this size.
        let size = terms().map(f64::abs).sum::<f64>() / weights.iter().sum::<f64>();
        let error = (f64::from(got) - expected).abs();
        assert!(error <= 16.0 * f64::from(f32::EPSILON) * size, "{i}: {got}, not {expected}");
    }
}

/// Networks of a fleet have the bits of networks alone, also where some observe a batch less.
#[test]
fn a_fleet_has_the_statistics_of_its_networks() {
    let stream = host::stream(1);
    let batches = batches(&stream);
    let mut alone = [network(&stream), network(&stream)];
    let expected = [3, 2].map(|count| recomputed(&mut alone[3 - count], &batches[..count]));
    let mut together = [network(&stream), network(&stream)];
    let mut fleet = NetworkFleet::new(&mut together);
    fleet.prepare_statistics(&[8, 8]).unwrap();
    fleet.begin_statistics().unwrap();
    let [first, second, last] = &batches;
    for inputs in [&[first, first][..], &[second, second], &[last]] {
        fleet.observe(inputs).unwrap();
    }
    fleet.finish_statistics(&[3, 2].map(observed_weight)).unwrap();
    assert!(fleet.finish_statistics(&[1.0]).unwrap_err().to_string().contains("one per network"));
    assert_eq!([0, 1].map(|i| statistics(&together[i])), expected);
}

/// A network without batch norm makes no pass, also between two networks that make one.
#[test]
fn networks_without_statistics_make_no_pass() {
    let stream = host::stream(1);
    let batches = batches(&stream);
    let [first, second, last] = &batches;
    let mut builder = GraphBuilder::new(DIMS, host::SGD);
    let pooled = builder.global_avg_pool(builder.input());
    let logits = builder.linear(pooled, "classifier", 10, true, None).unwrap();
    let options = NetworkOptions::new(5, 0, Isa::detect(), 8);
    let linear = Arc::new(builder.finish(logits).unwrap());
    let linear = Network::new(&stream, linear, options).unwrap();
    let mut alone = network(&stream);
    let expected = recomputed(&mut alone, &batches);
    let mut together = [network(&stream), linear, network(&stream)];
    let device = stream.device();
    let mut fleet = NetworkFleet::new(&mut together);
    fleet.prepare_statistics(&[8, 8, 8]).unwrap();
    fleet.begin_statistics().unwrap();
    let before = device.counts().launches;
    for inputs in [first, second, last] {
        fleet.observe(&[inputs, inputs, inputs]).unwrap();
    }
    assert_eq!(device.counts().launches - before, 2 * 3);
    fleet.finish_statistics(&[3; 3].map(observed_weight)).unwrap();
    assert!(!together[1].has_statistics());
    assert_eq!([0, 2].map(|i| statistics(&together[i])), [expected.clone(), expected]);
}

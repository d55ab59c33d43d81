//! Replicas compared with one network on the whole batch, and with a slow reference
//! implementation.

use std::sync::Arc;

use meristem_comm::{CommOptions, Communicator};
use meristem_data::{Batch, Dataset, GatherBatches, GatherConfig, SampleShape};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{Counts, DeviceId, ScopePolicy, Stream, Tensor};
use meristem_nn::graph::{ConvGeometry, Dims, Graph, GraphBuilder, SgdConfig};
use meristem_nn::{Isa, Metrics, Network, NetworkOptions, StateDict};

use super::{Epoch, Replicas, SharedEpoch, first_cause};
use crate::config::devices::Devices;
use crate::config::{ConfigLayer, TrainConfig};
use crate::error::Error;
use crate::resources::OpenDevices;
use crate::settings::{ControllerKind, ExchangeKind, ExchangeMethod};

const SAMPLES: usize = 40;
const BATCH: usize = 12;
const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 1e-4, clip_norm: 0.5 };

/// Two convolutions, of which the second has more than a thousand weights, and a classifier,
/// with batch norm or without.
fn graph(normed: bool) -> Arc<Graph> {
    let mut b = GraphBuilder::new(Dims { c: 1, h: 6, w: 6 }, SGD);
    let mut x = b.conv2d(b.input(), "a", 8, ConvGeometry::same(3), true).unwrap();
    if normed {
        x = b.batch_norm(x, "bn").unwrap();
    }
    x = b.relu(x);
    x = b.conv2d(x, "b", 16, ConvGeometry::same(3), true).unwrap();
    x = b.relu(x);
    x = b.global_avg_pool(x);
    let logits = b.linear(x, "c", 4, true, None).unwrap();
    Arc::new(b.finish(logits).unwrap())
}

/// A machine with data and settings.
struct ReplicasFixture {
    devices: OpenDevices,
    data: Vec<Arc<Dataset>>,
    ranks: usize,
    config: TrainConfig,
    /// Number of epochs; with a sparse exchange, enough to reach the requested density.
    epochs: u64,
}

impl ReplicasFixture {
    fn new(ranks: usize, exchange: impl Into<ExchangeKind>, threads: usize) -> Self {
        let exchange = exchange.into();
        let flags = ConfigLayer {
            threads: Some(threads),
            data_parallel: Some(true),
            ranks: Some(Some(ranks)),
            exchange: Some(exchange),
            batch: Some(BATCH),
            controller: Some(ControllerKind::None),
            ..ConfigLayer::default()
        };
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        let (placed, options) = (Devices::one(DeviceId::Cpu(0)), config.device_options(None));
        let devices = OpenDevices::open(&placed, 0..1, &options).unwrap();
        let epochs = if exchange.sends_whole_gradients() { 2 } else { 4 };
        let mut random = Rng::new(1, Purpose::Test, 0, 0);
        let images: Vec<u8> = (0..SAMPLES * 36).map(|_| random.below(256) as u8).collect();
        let labels: Vec<u32> = images.chunks(36).map(|image| u32::from(image[0] / 64)).collect();
        let shape = SampleShape { channels: 1, height: 6, width: 6 };
        let classes = (0..4).map(|class| class.to_string()).collect();
        let data = Dataset::from_slices(&devices.distinct()[0], shape, &images, &labels, classes);
        Self { devices, data: vec![data.unwrap()], ranks, config, epochs }
    }

    /// 40 = 12 + 12 + 12 + 4. The last batch is distributed unevenly over three ranks, and does
    /// not reach all of six.
    fn gather(&self) -> GatherConfig {
        GatherConfig {
            seed: 7,
            ..GatherConfig::new(BATCH / self.ranks, vec![DeviceId::Cpu(0); self.ranks])
        }
    }

    fn network(&self, stream: &Stream, normed: bool) -> Network {
        let options =
            NetworkOptions { batch_log: 8, ..NetworkOptions::new(3, 0, Isa::detect(), BATCH) };
        Network::new(stream, graph(normed), options).unwrap()
    }

    /// Trains all epochs with replicas. Returns weights and optimiser, and the metrics of the
    /// last epoch.
    fn replicas(&self, normed: bool) -> ([StateDict; 2], Metrics) {
        let stream = &self.devices.streams()[0];
        let mut network = self.network(stream, normed);
        let members = Communicator::threads(self.ranks, &CommOptions::default()).unwrap();
        let mut replicas =
            Replicas::new(&self.config, &self.devices, &self.gather(), &self.data, members)
                .unwrap();
        let leads = GatherConfig { served: Some(0..1), ..self.gather() };
        let mut gather =
            GatherBatches::new(&leads, &self.data, std::slice::from_ref(stream)).unwrap();
        let mut metrics = Metrics::default();
        let mut seen = 0u64;
        for epoch in 0..self.epochs {
            network.reset_metrics().unwrap();
            replicas.open(&mut network, &[], 4).unwrap();
            let deny = |name, permitted: Counts| {
                self.devices.hot_scopes(name, ScopePolicy::Deny, move |_| permitted)
            };
            // The passes for the statistics copy the order of their epoch.
            let order = Counts { copies_to_device: 1, ..Counts::default() };
            let shared = SharedEpoch {
                train_scopes: &|| deny("train_step", Counts::default()),
                statistics_scopes: &|_| deny("statistics", order),
                loss: None,
            };
            let mut observed = |_: &Network| {
                seen += 1;
                Ok(())
            };
            let done =
                replicas.train_epoch(epoch, &mut gather, &mut network, &shared, &mut observed);
            let done = done.unwrap();
            assert_eq!((done.batches, done.counts.len()), (4, self.ranks));
            metrics = replicas.read(&self.devices, gather.order(), &network).unwrap();
        }
        assert_eq!(seen, 4 * self.epochs);
        (state(&network), metrics)
    }

    /// Trains all epochs with one network on whole batches.
    fn alone(&self) -> ([StateDict; 2], Metrics) {
        let stream = &self.devices.streams()[0];
        let mut network = self.network(stream, false);
        let config = GatherConfig { seed: 7, ..GatherConfig::new(BATCH, vec![DeviceId::Cpu(0)]) };
        let mut gather =
            GatherBatches::new(&config, &self.data, std::slice::from_ref(stream)).unwrap();
        for epoch in 0..self.epochs {
            network.reset_metrics().unwrap();
            gather.start_epoch(epoch).unwrap();
            while let Some(batches) = gather.next().unwrap() {
                network.train_step(&batches[0].inputs, &batches[0].targets).unwrap();
            }
        }
        (state(&network), Metrics::parse(&network.metrics().to_vec().unwrap()))
    }

    /// Trains all epochs with one network per rank, and averages gradients on the host in rank
    /// order. With a sparse exchange, only the largest elements of each rank are sent of the
    /// one large tensor.
    fn slow(&self, normed: bool) -> [StateDict; 2] {
        let streams: Vec<Stream> =
            (0..self.ranks).map(|_| self.devices.distinct()[0].stream("slow")).collect();
        let mut networks: Vec<Network> =
            streams.iter().map(|stream| self.network(stream, normed)).collect();
        let mut gather = GatherBatches::new(&self.gather(), &self.data, &streams).unwrap();
        let mut kept = vec![vec![]; self.ranks];
        for epoch in 0..self.epochs {
            let share = match self.config.exchange.method {
                ExchangeMethod::TopK(density) => Some(0.25f64.powi(epoch as i32 + 1).max(density)),
                _ => None,
            };
            gather.start_epoch(epoch).unwrap();
            while let Some(batches) = gather.next().unwrap() {
                slow_batch(&mut networks, &batches, share.map(|share| (share, &mut kept[..])));
            }
            self.slow_statistics(&mut networks, &mut gather);
        }
        state(&networks[0])
    }

    /// Recomputes the running statistics, and averages them on the host.
    fn slow_statistics(&self, networks: &mut [Network], gather: &mut GatherBatches) {
        // The epoch is short, so the statistics are recomputed from all of its batches.
        gather.start_epoch(0).unwrap();
        networks.iter().for_each(|network| network.begin_statistics().unwrap());
        let (mut weights, momentum) = (vec![0.0; self.ranks], f64::from(0.1f32));
        while let Some(batches) = gather.next().unwrap() {
            for ((network, weight), batch) in networks.iter_mut().zip(&mut weights).zip(batches) {
                network.observe(&batch.inputs).unwrap();
                *weight = (1.0 - momentum) * *weight + momentum;
            }
        }
        let factor = (self.ranks as f64 / weights.iter().sum::<f64>()) as f32;
        let statistics =
            |n: &Network| n.statistics().map(|(s, c)| [s.clone(), c.clone()]).collect();
        let all: Vec<Vec<[Tensor; 2]>> = networks.iter().map(statistics).collect();
        for group in 0..all[0].len() {
            mean(&all.iter().map(|rank| &rank[group][0]).collect::<Vec<_>>());
            for rank in &all {
                let sums: Vec<f32> = rank[group][0].to_vec().unwrap();
                let means: Vec<f32> = sums.iter().map(|sum| sum * factor).collect();
                rank[group][0].copy_from_slice(&means).unwrap();
            }
            let counters: Vec<i64> = all[0][group][1].to_vec().unwrap();
            all.iter().for_each(|rank| rank[group][1].copy_from_slice(&counters).unwrap());
        }
    }

    /// Trains all epochs with local steps: a network per rank, each with an optimiser of its own,
    /// and outer steps on the host, operation by operation.
    fn slow_local(&self, steps: usize) -> [StateDict; 2] {
        let streams: Vec<Stream> =
            (0..self.ranks).map(|_| self.devices.distinct()[0].stream("slow")).collect();
        let mut networks: Vec<Network> =
            streams.iter().map(|stream| self.network(stream, true)).collect();
        let mut gather = GatherBatches::new(&self.gather(), &self.data, &streams).unwrap();
        let mut synchronised = weights(&mut networks[0]);
        let mut velocity: Vec<f32> = vec![0.0; synchronised.len()];
        for epoch in 0..self.epochs {
            gather.start_epoch(epoch).unwrap();
            let mut done = 0;
            while let Some(batches) = gather.next().unwrap() {
                for (rank, network) in networks.iter_mut().enumerate() {
                    match batches.get(rank) {
                        Some(Batch { inputs, targets, .. }) => {
                            network.train_step(inputs, targets).unwrap();
                        }
                        None => {
                            network.differentiate_nothing().unwrap();
                            network.apply().unwrap();
                        }
                    }
                }
                done += 1;
                if done % steps != 0 && done != 4 {
                    continue;
                }
                let all: Vec<Vec<f32>> = networks.iter_mut().map(weights).collect();
                for (at, (synchronised, velocity)) in
                    synchronised.iter_mut().zip(&mut velocity).enumerate()
                {
                    let moved = |rank: &Vec<f32>| *synchronised - rank[at];
                    let sum = all[1..].iter().fold(moved(&all[0]), |sum, rank| sum + moved(rank));
                    let mean = sum / self.ranks as f32;
                    *velocity = 0.9 * *velocity + mean;
                    *synchronised -= 0.7 * (mean + 0.9 * *velocity);
                }
                networks.iter_mut().for_each(|network| set_weights(network, &synchronised));
            }
            self.slow_statistics(&mut networks, &mut gather);
        }
        state(&networks[0])
    }
}

/// All weights that training changes, in order.
fn weights(network: &mut Network) -> Vec<f32> {
    let all = network.trained_parameters().unwrap();
    all.iter().flat_map(|(_, tensor)| tensor.to_vec::<f32>().unwrap()).collect()
}

fn set_weights(network: &mut Network, mut values: &[f32]) {
    for (_, tensor) in network.trained_parameters().unwrap() {
        let (own, rest) = values.split_at(tensor.numel());
        tensor.copy_from_slice(own).unwrap();
        values = rest;
    }
}

/// Trains one batch. With a sparse exchange, `part` has the share and the elements that each
/// rank keeps.
fn slow_batch(networks: &mut [Network], batches: &[Batch], part: Option<(f64, &mut [Vec<f32>])>) {
    let all: usize = batches.iter().map(|batch| batch.targets.numel()).sum();
    let ranks = networks.len();
    for (rank, network) in networks.iter_mut().enumerate() {
        match batches.get(rank) {
            Some(Batch { inputs, targets, .. }) => {
                let weight = (targets.numel() * ranks) as f64 / all as f64;
                network.differentiate(inputs, targets, weight as f32).unwrap();
            }
            None => network.differentiate_nothing().unwrap(),
        }
        if part.is_some() {
            network.clip((ranks as f32).sqrt()).unwrap();
        }
    }
    let gradients: Vec<Vec<Tensor>> = networks
        .iter()
        .map(|network| network.gradients().unwrap().into_iter().map(|(_, tensor)| tensor).collect())
        .collect();
    if let Some((share, kept)) = part {
        for (rank, gradients) in gradients.iter().enumerate() {
            let large = gradients.iter().find(|gradient| gradient.numel() > 1000).unwrap();
            send_a_part(large, &mut kept[rank], share);
        }
    }
    for i in 0..gradients[0].len() {
        mean(&gradients.iter().map(|rank| &rank[i]).collect::<Vec<_>>());
    }
    networks.iter_mut().for_each(|network| network.apply().unwrap());
}

/// Adds the kept elements to the gradient, leaves the largest there and keeps the rest.
fn send_a_part(gradient: &Tensor, kept: &mut Vec<f32>, share: f64) {
    let new: Vec<f32> = gradient.to_vec().unwrap();
    kept.resize(new.len(), 0.0);
    kept.iter_mut().zip(&new).for_each(|(kept, new)| *kept += new);
    let mut order: Vec<usize> = (0..new.len()).collect();
    order.sort_by(|&a, &b| kept[b].abs().total_cmp(&kept[a].abs()));
    let mut sent = vec![0.0; new.len()];
    for &at in &order[..(share * new.len() as f64).round() as usize] {
        sent[at] = std::mem::take(&mut kept[at]);
    }
    gradient.copy_from_slice(&sent).unwrap();
}

/// Sets all tensors to their mean, summed from left to right.
fn mean(tensors: &[&Tensor]) {
    let values: Vec<Vec<f32>> = tensors.iter().map(|tensor| tensor.to_vec().unwrap()).collect();
    let mean = |at: usize| {
        let sum = values[1..].iter().fold(values[0][at], |sum, rank| sum + rank[at]);
        sum / values.len() as f32
    };
    let mean: Vec<f32> = (0..values[0].len()).map(mean).collect();
    tensors.iter().for_each(|tensor| tensor.copy_from_slice(&mean).unwrap());
}

fn state(network: &Network) -> [StateDict; 2] {
    [network.state_dict().unwrap(), network.momentum_dict().unwrap()]
}

/// Text with every bit, including the sign of zero.
fn text(state: &[StateDict; 2]) -> String {
    format!("{state:?}")
}

#[test]
fn replicas_equal_the_slow_reference() {
    for exchange in [ExchangeMethod::Dense, ExchangeMethod::TopK(0.01)] {
        for (normed, ranks) in [(false, 2), (false, 3), (true, 2), (true, 3), (true, 6)] {
            let fixture = ReplicasFixture::new(ranks, exchange, 2);
            let (got, _) = fixture.replicas(normed);
            let slow = fixture.slow(normed);
            assert_eq!(text(&got), text(&slow), "{exchange} {ranks} ranks, norm: {normed}");
        }
    }
}

/// Without batch norm samples are independent, so any number of ranks gives the result of one
/// rank, up to rounding.
#[test]
fn ranks_train_as_one_does_on_the_whole_batch() {
    for ranks in [2, 3, 6] {
        let fixture = ReplicasFixture::new(ranks, ExchangeMethod::Dense, 2);
        let ((got, metrics), (expected, alone)) = (fixture.replicas(false), fixture.alone());
        for (name, expected) in expected[0].iter() {
            let [got, expected] =
                [got[0].get(name).unwrap(), expected].map(|t| t.as_f32().unwrap());
            let distance = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // Each element of a gradient is a sum of up to 12 x 36 products. Another order of
            // additions gives 432 roundings of 2^-24, of a norm that clipping keeps below 0.5,
            // times a rate of .05 and up to 10 by momentum, in 8 steps: 5e-5 at most, and most
            // roundings cancel. A missing step of weight decay moves weights by 1e-6, a batch
            // with wrong weights by 1e-3.
            assert!(distance <= 2e-5, "{ranks} ranks: {name} is off by {distance}");
        }
        assert_eq!((metrics.samples, metrics.steps), (alone.samples, alone.steps));
        assert!(metrics.samples == SAMPLES as u64 && metrics.correct.abs_diff(alone.correct) <= 1);
        assert!((metrics.loss_sum - alone.loss_sum).abs() < 1e-3, "{metrics:?} {alone:?}");
        for (got, expected) in metrics.batch_losses.iter().zip(&alone.batch_losses) {
            assert!((got - expected).abs() < 1e-4, "{metrics:?} {alone:?}");
        }
        assert_eq!(metrics.batch_losses.len(), 4);
    }
}

/// Sending the whole gradient equals the dense exchange, with every method and number of
/// workers.
#[test]
fn sending_everything_equals_the_dense_exchange() {
    let dense = ReplicasFixture::new(3, ExchangeMethod::Dense, 1).replicas(true);
    for (exchange, threads) in [
        (ExchangeMethod::Dense, 3),
        (ExchangeMethod::TopK(1.0), 2),
        (ExchangeMethod::GTopK(1.0), 2),
        (ExchangeMethod::OkTopK(1.0), 2),
    ] {
        let got = ReplicasFixture::new(3, exchange, threads).replicas(true);
        assert_eq!(text(&got.0), text(&dense.0), "{exchange}");
    }
    let sparse =
        |threads| ReplicasFixture::new(3, ExchangeMethod::TopK(0.01), threads).replicas(true);
    let (one, three) = (sparse(1), sparse(3));
    assert_eq!((text(&one.0), one.1), (text(&three.0), three.1));
    assert_ne!(text(&one.0), text(&dense.0));
}

/// Rounds that divide the four batches of an epoch or not, one batch each, or the whole epoch. The
/// last batch does not reach all of six ranks.
#[test]
fn local_steps_equal_the_slow_reference() {
    for (ranks, steps) in [(2, 1), (2, 2), (3, 3), (2, 4), (6, 3)] {
        let kind: ExchangeKind = format!("diloco:{steps}").parse().unwrap();
        let fixture = ReplicasFixture::new(ranks, kind, 2);
        let (got, metrics) = fixture.replicas(true);
        assert_eq!(text(&got), text(&fixture.slow_local(steps)), "{ranks} ranks, {steps} steps");
        assert_eq!((metrics.samples, metrics.steps), (SAMPLES as u64, 4));
    }
}

/// Any number of workers gives the same bits, by any method; and methods differ.
#[test]
fn local_steps_do_not_depend_on_workers() {
    let of = |text: &str, threads| {
        ReplicasFixture::new(3, text.parse::<ExchangeKind>().unwrap(), threads).replicas(true)
    };
    let dense = of("diloco:2", 2);
    assert_eq!(text(&of("diloco:2:topk:1", 2).0), text(&dense.0));
    for exchange in ["diloco:2:int8", "diloco:2:topk:0.01", "int8"] {
        let (one, three) = (of(exchange, 1), of(exchange, 3));
        assert_eq!((text(&one.0), &one.1), (text(&three.0), &three.1), "{exchange}");
        assert_ne!(text(&one.0), text(&dense.0), "{exchange}");
    }
}

#[test]
fn the_original_error_is_reported() {
    let gone =
        || Error::from(meristem_comm::Error::RankGone { operation: "x", rank: 1, reason: "left" });
    let cause = || Error::value("a", "b", "c");
    for all in [vec![Err(gone()), Err(cause())], vec![Err(cause()), Err(gone())]] {
        assert!(matches!(first_cause(all), Err(Error::Value { .. })));
    }
    assert!(matches!(first_cause(vec![Err(gone())]), Err(Error::Ranks(_))));
    let fine = || Ok(Epoch { batches: 1, counts: vec![], sent_bytes: 0 });
    assert_eq!(first_cause(vec![fine(), fine()]).map(|all| all.len()).unwrap_or(0), 2);
}

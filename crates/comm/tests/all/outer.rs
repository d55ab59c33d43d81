//! The outer step of local training.

use meristem_comm::{
    Communicator, ExchangeOptions, ExchangeState, Method, OuterOptions, OuterStep, SparseMethod,
};
use meristem_device::{Device, DeviceId, DeviceOptions, Stream, Tensor};
use proptest::prelude::*;

use crate::common::{noise, on, options as comm_options, ranks, upload};
use crate::exchange::refused;

const MODEL: [(&str, usize); 4] = [("a", 300), ("b", 7), ("c", 900), ("d", 40)];
const LEN: usize = 300 + 7 + 900 + 40;

fn exchange(method: Method) -> ExchangeOptions {
    ExchangeOptions { method, density: 0.1, small: 50, ..ExchangeOptions::default() }
}

fn methods() -> [Method; 5] {
    [
        Method::Dense,
        Method::Int8,
        Method::Sparse(SparseMethod::TopK),
        Method::Sparse(SparseMethod::GTopK),
        Method::Sparse(SparseMethod::OkTopK { refresh: 2 }),
    ]
}

/// The weights of a model in one buffer, with gaps.
struct Weights {
    tensors: Vec<Tensor>,
}

impl Weights {
    fn new(stream: &Stream, model: &[(&str, usize)], seed: usize) -> Weights {
        let all: usize = model.iter().map(|(_, len)| len + 3).sum();
        let buffer = upload(stream, &noise(all, 99, seed));
        let mut start = 0;
        let view = |(_, len): &(&str, usize)| {
            let view = buffer.view(start, [*len]).unwrap();
            start += len + if *len == 300 { 0 } else { 3 };
            view
        };
        Weights { tensors: model.iter().map(view).collect() }
    }

    fn refs(&self) -> Vec<&Tensor> {
        self.tensors.iter().collect()
    }

    fn values(&self) -> Vec<f32> {
        self.tensors.iter().flat_map(|tensor| tensor.to_vec::<f32>().unwrap()).collect()
    }

    fn outer(&self, model: &[(&str, usize)], method: Method, options: OuterOptions) -> OuterStep {
        let named: Vec<_> = model.iter().map(|(name, _)| *name).zip(&self.tensors).collect();
        OuterStep::new(options, &exchange(method), &named).unwrap()
    }

    /// Local steps of a rank: adds noise to the weights.
    fn wander(&self, rank: usize, round: usize) {
        for (i, tensor) in self.tensors.iter().enumerate() {
            let moved = noise(tensor.numel(), rank, 1000 * round + i);
            let now: Vec<f32> = tensor.to_vec().unwrap();
            let now: Vec<f32> = now.iter().zip(moved).map(|(w, by)| w + 0.1 * by).collect();
            tensor.copy_from_slice(&now).unwrap();
        }
    }
}

/// Weights of every rank after each round.
fn rounds(n: usize, method: Method, options: OuterOptions, count: usize) -> Vec<Vec<Vec<f32>>> {
    ranks(n, |mut comm, stream| {
        let weights = Weights::new(stream, &MODEL, 0);
        let mut outer = weights.outer(&MODEL, method, options);
        outer.begin(&weights.refs()).unwrap();
        let round = |round| {
            weights.wander(comm.rank(), round);
            outer.run(&mut comm, &weights.refs()).unwrap();
            weights.values()
        };
        (0..count).map(round).collect()
    })
}

/// The ranks on one thread, in f64, with dense sums or the largest elements of each rank.
struct Slow {
    synchronised: Vec<f64>,
    velocity: Vec<f64>,
    residuals: Vec<Vec<f64>>,
}

impl Slow {
    fn round(&mut self, weights: &[Vec<f64>], sparse: bool, options: OuterOptions) {
        let n = weights.len() as f64;
        let mut mean = vec![0.0; LEN];
        for (residual, weights) in self.residuals.iter_mut().zip(weights) {
            let moved = self.synchronised.iter().zip(weights).map(|(s, w)| s - w);
            residual.iter_mut().zip(moved).for_each(|(residual, moved)| *residual += moved);
            let mut sent: Vec<usize> = (0..LEN).collect();
            if sparse {
                // The large tensors are one bucket, of which a tenth is sent.
                let large: Vec<usize> = (0..300).chain(307..1207).collect();
                let mut order = large.clone();
                order.sort_by(|a, b| residual[*b].abs().total_cmp(&residual[*a].abs()));
                sent.retain(|i| !large.contains(i));
                sent.extend(&order[..120]);
            }
            for i in sent {
                mean[i] += std::mem::take(&mut residual[i]) / n;
            }
        }
        for (i, mean) in mean.into_iter().enumerate() {
            self.velocity[i] = options.momentum * self.velocity[i] + mean;
            self.synchronised[i] -= options.lr * (mean + options.momentum * self.velocity[i]);
        }
    }
}

#[test]
fn outer_steps_equal_a_slow_f64_version() {
    let count = 5;
    for (method, sparse) in [(Method::Dense, false), (Method::Sparse(SparseMethod::TopK), true)] {
        for (n, options) in [
            (2, OuterOptions::default()),
            (3, OuterOptions { lr: 0.3, momentum: 0.5 }),
            (1, OuterOptions::default()),
        ] {
            // With one rank the exchange adds nothing up, but selects all the same.
            let seen = rounds(n, method, options, count);
            let start =
                on(&device(1), Communicator::threads(1, &comm_options()).unwrap(), |_, s| {
                    Weights::new(s, &MODEL, 0).values()
                });
            let wide = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            let mut slow = Slow {
                synchronised: wide(&start[0]),
                velocity: vec![0.0; LEN],
                residuals: vec![vec![0.0; LEN]; n],
            };
            for round in 0..count {
                let local = |rank: usize| {
                    let moved = MODEL.iter().enumerate();
                    let moved = moved.flat_map(|(i, (_, len))| noise(*len, rank, 1000 * round + i));
                    let both = slow.synchronised.iter().zip(moved);
                    both.map(|(w, by)| w + 0.1 * f64::from(by)).collect::<Vec<f64>>()
                };
                let weights: Vec<Vec<f64>> = (0..n).map(local).collect();
                slow.round(&weights, sparse, options);
                for rank in &seen {
                    assert_eq!(rank[round], seen[0][round], "{method:?}, the same on all ranks");
                    for (got, expected) in rank[round].iter().zip(&slow.synchronised) {
                        // Weights are below 4 and differences below 1. A round has at most 2 n + 8
                        // roundings of 2^-24 of numbers below 4, and momentum repeats an error up
                        // to ten times: 5 rounds, 14 roundings, 2.4e-7, 10 give 1.7e-4 at most, and
                        // most roundings are of far smaller numbers. A wrong factor is wrong by
                        // 1e-2.
                        let difference = (f64::from(*got) - expected).abs();
                        assert!(difference < 2e-5, "{method:?}, round {round}: {difference}");
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    /// With learning rate 1 and no momentum the weights are averaged.
    #[test]
    fn a_plain_outer_step_averages(n in 1usize..5, seed in 0usize..1000) {
        let plain = OuterOptions { lr: 1.0, momentum: 0.0 };
        let seen = ranks(n, |mut comm, stream| {
            let weights = Weights::new(stream, &MODEL, seed);
            let mut outer = weights.outer(&MODEL, Method::Dense, plain);
            outer.begin(&weights.refs()).unwrap();
            weights.wander(comm.rank(), seed);
            let local = weights.values();
            outer.run(&mut comm, &weights.refs()).unwrap();
            (local, weights.values())
        });
        for i in 0..LEN {
            let mean = seen.iter().map(|(local, _)| f64::from(local[i])).sum::<f64>() / n as f64;
            // Three roundings and n of numbers below 4, of 2^-24 each.
            let tolerance = (3 + n) as f64 * 4.0 * 2f64.powi(-24);
            for (_, averaged) in &seen {
                prop_assert!((f64::from(averaged[i]) - mean).abs() <= tolerance);
            }
        }
    }
}

fn device(threads: usize) -> Device {
    Device::open(DeviceId::Cpu(0), &DeviceOptions { threads, ..DeviceOptions::default() }).unwrap()
}

/// Any method, any number of workers: all ranks have one model.
#[test]
fn results_do_not_depend_on_workers() {
    for method in methods() {
        let of = |threads| {
            let group = Communicator::threads(3, &comm_options()).unwrap();
            on(&device(threads), group, |mut comm, stream| {
                let weights = Weights::new(stream, &MODEL, 0);
                let mut outer = weights.outer(&MODEL, method, OuterOptions::default());
                outer.begin(&weights.refs()).unwrap();
                for round in 0..3 {
                    weights.wander(comm.rank(), round);
                    outer.run(&mut comm, &weights.refs()).unwrap();
                }
                weights.values()
            })
        };
        let (one, four) = (of(1), of(4));
        assert_eq!(one, four, "{method:?}");
        assert!(one.iter().all(|rank| *rank == one[0]), "{method:?}");
    }
}

/// Momentum and residuals are the state between rounds; a grown model keeps them by name.
#[test]
fn a_checkpoint_restores_an_outer_step_also_of_a_grown_model() {
    let grown = [("a", 300), ("new", 60), ("c", 900), ("d", 40)];
    for method in methods() {
        let seen = ranks(2, |mut comm, stream| {
            let weights = Weights::new(stream, &MODEL, 0);
            let new = || weights.outer(&MODEL, method, OuterOptions::default());
            let mut whole = new();
            whole.begin(&weights.refs()).unwrap();
            for round in 0..2 {
                weights.wander(comm.rank(), round);
                whole.run(&mut comm, &weights.refs()).unwrap();
            }
            let state = whole.export().unwrap();
            let round = |outer: &mut OuterStep, comm: &mut Communicator| {
                weights.wander(comm.rank(), 2);
                outer.run(comm, &weights.refs()).unwrap();
                weights.values()
            };
            let saved: Vec<Vec<f32>> =
                weights.tensors.iter().map(|tensor| tensor.to_vec().unwrap()).collect();
            let expected = round(&mut whole, &mut comm);
            for (tensor, saved) in weights.tensors.iter().zip(&saved) {
                tensor.copy_from_slice(saved).unwrap();
            }
            let mut resumed = new();
            resumed.import(&comm, &state).unwrap();
            assert_eq!(resumed.export().unwrap(), state, "{method:?}");
            resumed.begin(&weights.refs()).unwrap();
            assert_eq!(round(&mut resumed, &mut comm), expected, "{method:?}");

            let larger = Weights::new(stream, &grown, 1);
            let mut outer = larger.outer(&grown, method, OuterOptions::default());
            outer.import(&comm, &state).unwrap();
            let kept = outer.export().unwrap().kept;
            for name in ["a", "c", "d"] {
                assert_eq!(kept[name].outer, state.kept[name].outer);
                assert_eq!(kept[name].residual, state.kept[name].residual);
            }
            assert_eq!(kept["new"].outer, [0; 240]);
            let other = [("a", 200)];
            let mut other =
                Weights::new(stream, &other, 1).outer(&other, method, OuterOptions::default());
            let error = other.import(&comm, &state).unwrap_err();
            refused(&error, "`a` must be 800 bytes, as it is now, got 1200");
            other.import(&comm, &ExchangeState::default()).unwrap();
            state.kept["c"].outer.clone()
        });
        assert_eq!(seen[0], seen[1], "momentum is the same on all ranks");
    }
}

#[test]
fn bad_options_and_weights_are_named() {
    ranks(1, |mut comm, stream| {
        let weights = Weights::new(stream, &MODEL, 0);
        let named: Vec<_> = MODEL.iter().map(|(name, _)| *name).zip(&weights.tensors).collect();
        let usual = OuterOptions::default();
        let new = |options| {
            let made = OuterStep::new(options, &exchange(Method::Dense), &named);
            made.err().unwrap()
        };
        for lr in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let words = format!("`lr` must be finite, above 0, got {lr}");
            refused(&new(OuterOptions { lr, ..usual }), &words);
        }
        for momentum in [-0.1, 1.0, f64::NAN] {
            let error = new(OuterOptions { momentum, ..usual });
            refused(&error, "`momentum` must be at least 0, below 1");
        }
        let none = OuterStep::new(usual, &exchange(Method::Dense), &[]).err().unwrap();
        refused(&none, "at least one");
        let mut outer = weights.outer(&MODEL, Method::Dense, usual);
        let refs = weights.refs();
        refused(&outer.begin(&refs[..2]).unwrap_err(), "`weights` must be 4 tensors, got 2");
        let mut swapped = refs.clone();
        swapped.swap(0, 1);
        let error = outer.run(&mut comm, &swapped).unwrap_err();
        refused(&error, "`a` must be of 300 elements, got 7");
    });
}

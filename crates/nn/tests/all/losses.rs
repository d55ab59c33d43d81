//! Networks with each loss: training, metrics, evaluation of several rows, bad input.

use std::sync::Arc;

use crate::common::Random;
use crate::common::host::{self, BASELINE};
use crate::network::{DIMS, MODULE, Stage, grown, metrics};
use meristem_device::{DType, Error as DeviceError, Owner, Stream, Tensor};
use meristem_nn::graph::{BlendMode, Dims, Graph, GraphBuilder};
use meristem_nn::{
    Error, HostTensor, Isa, Loss, Network, NetworkOptions, ScoreSums, target_squares,
};
#[cfg(feature = "cuda")]
use meristem_nn::{LabelledBatch, NetworkFleet, StateDict};

const OUTPUTS: usize = 10;

/// Losses of numbers.
fn of_numbers() -> [Loss; 4] {
    let huber = Loss::Huber { delta: 0.5 };
    [Loss::BinaryCrossEntropy, Loss::MeanSquaredError, huber, Loss::L1]
}

fn network(stream: &Stream, graph: &Arc<Graph>, loss: &Loss) -> Network {
    let loss = loss.clone();
    let options = NetworkOptions { loss, ..NetworkOptions::new(5, 0, Isa::detect(), 8) };
    Network::new(stream, Arc::clone(graph), options).unwrap()
}

fn numbers(stream: &Stream, y: &[f32], outputs: usize) -> Tensor {
    Tensor::from_slice(stream, y, [y.len() / outputs, outputs], Owner::Batches).unwrap()
}

/// Targets of `n` samples: labels of 0 or 1, or numbers.
fn targets(loss: &Loss, n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed + 100);
    match loss {
        Loss::BinaryCrossEntropy => (0..n * OUTPUTS).map(|_| random.below(2) as f32).collect(),
        _ => random.normals(n * OUTPUTS),
    }
}

fn batch(stream: &Stream, loss: &Loss, n: usize, seed: u64) -> (Tensor, Tensor) {
    let x = Random(seed).normals(n * DIMS.numel());
    let y = if loss.target_dtype() == DType::U32 {
        let mut random = Random(seed + 100);
        let labels: Vec<u32> = (0..n).map(|_| random.below(OUTPUTS) as u32).collect();
        host::labels(stream, &labels)
    } else {
        numbers(stream, &targets(loss, n, seed), OUTPUTS)
    };
    (host::images(stream, &x, DIMS), y)
}

/// Loss and sums of the score of outputs, in f64.
fn slow(loss: &Loss, values: &[f32], targets: &[f32]) -> (f64, ScoreSums) {
    let mut sums = ScoreSums::default();
    let mut total = 0.0;
    for (y, t) in values.iter().zip(targets).map(|(y, t)| (f64::from(*y), f64::from(*t))) {
        total += of_output(loss, y, t);
        if *loss == Loss::BinaryCrossEntropy {
            let (predicted, present) = (y > 0.0, t > 0.5);
            sums.true_positives += u64::from(predicted && present);
            sums.false_positives += u64::from(predicted && !present);
            sums.false_negatives += u64::from(!predicted && present);
        } else {
            sums.residual_squares += (y - t).powi(2);
        }
    }
    (total / OUTPUTS as f64, sums)
}

fn of_output(loss: &Loss, y: f64, t: f64) -> f64 {
    let d = (y - t).abs();
    match loss {
        Loss::BinaryCrossEntropy => t * (-y).exp().ln_1p() + (1.0 - t) * y.exp().ln_1p(),
        Loss::MeanSquaredError => d * d,
        Loss::Huber { .. } if d <= 0.5 => 0.5 * d * d,
        Loss::Huber { .. } => 0.5 * (d - 0.25),
        _ => d,
    }
}

/// Sums of f64, of outputs that `infer` gives bit for bit; ln(1 + eˣ) in f32 is good to 1e-6.
#[track_caller]
fn assert_sums(got: (f64, ScoreSums), expected: (f64, ScoreSums)) {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
    assert!(near(got.0, expected.0), "{got:?} {expected:?}");
    assert!(near(got.1.residual_squares, expected.1.residual_squares), "{got:?} {expected:?}");
    let counts = |s: ScoreSums| [s.true_positives, s.false_positives, s.false_negatives];
    assert_eq!(counts(got.1), counts(expected.1));
}

#[test]
fn every_row_of_an_evaluation_has_its_score() {
    let stream = host::stream(1);
    let graph = grown(BASELINE, DIMS, &["r0c0"], Stage::Blending(BlendMode::Add));
    for loss in of_numbers() {
        let mut network = network(&stream, &graph, &loss);
        // Away from the identity, so that alpha matters.
        let mut state = network.state_dict().unwrap();
        state.insert("slots.r0c0.layers.1.weight", HostTensor::f32(&[8], vec![3.0; 8]));
        network.load_state_dict(&state, true).unwrap();
        network.set_alphas(&[vec![0.0], vec![0.5], vec![1.0], vec![0.5]]).unwrap();
        let mut expected = [(0.0, ScoreSums::default()); 4];
        for (seed, n) in [(1, 8), (2, 3)] {
            let (x, y) = batch(&stream, &loss, n, seed);
            network.eval_rows(&x, &y, 0..4).unwrap();
            for (row, sums) in expected.iter_mut().enumerate() {
                let values = network.infer(&x, row).unwrap().to_vec::<f32>().unwrap();
                let of_batch = slow(&loss, &values, &targets(&loss, n, seed));
                sums.0 += of_batch.0;
                sums.1 += of_batch.1;
            }
        }
        let together = metrics(&network).eval;
        for (row, expected) in together.iter().zip(expected) {
            assert_sums((row.loss_sum, row.sums), expected);
            assert_eq!((row.samples, row.correct), (11, 0));
        }
        assert_ne!(together[0].loss_sum, together[1].loss_sum);
        assert_eq!((together[0].squares, together[1].squares > 0.0), (0.0, true));
        assert_eq!(together[1], together[3], "rows of equal alphas");
        assert_eq!(together[4], Default::default());
        network.reset_metrics().unwrap();
        for (seed, n) in [(1, 8), (2, 3)] {
            let (x, y) = batch(&stream, &loss, n, seed);
            (0..4).for_each(|row| network.eval_step(&x, &y, row).unwrap());
        }
        for (alone, row) in metrics(&network).eval.iter().zip(&together) {
            let sums = |of: &meristem_nn::EvalMetrics| (of.loss_sum, of.samples, of.sums);
            assert_eq!(sums(alone), sums(row), "a pass for each row");
        }
    }
}

/// Rows of `[x, 1, targets]` of a linear problem, and the network of one linear layer.
fn linear(stream: &Stream, loss: &Loss) -> (Network, Vec<f32>, Vec<f32>) {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 1, w: 1 }, MODULE);
    let y = b.linear(b.input(), "fc", OUTPUTS, true, None).unwrap();
    let graph = Arc::new(b.finish(y).unwrap());
    (network(stream, &graph, loss), Random(1).normals(8 * 3), targets(loss, 8, 1))
}

/// The gradient of the bias is the sum over samples of the gradient of the loss, which is the mean
/// over outputs and batch; sums of 8 terms in f32, each rounded, of values below 1: 1e-6.
#[test]
fn a_training_step_has_the_gradient_of_the_mean() {
    let stream = host::stream(1);
    for loss in of_numbers() {
        let (mut network, x, y) = linear(&stream, &loss);
        let inputs = Tensor::from_slice(&stream, &x, [8, 3], Owner::Batches).unwrap();
        let values = network.infer(&inputs, 0).unwrap().to_vec::<f32>().unwrap();
        let labels = numbers(&stream, &y, OUTPUTS);
        network.differentiate(&inputs, &labels, 1.0).unwrap();
        let gradients = network.gradients().unwrap();
        let (_, bias) = gradients.iter().find(|(name, _)| *name == "fc.bias").unwrap();
        let bias = bias.to_vec::<f32>().unwrap();
        // Differences of the loss as a function of one output's bias.
        let h = 1e-4;
        for (output, slope) in bias.iter().enumerate().take(OUTPUTS) {
            let moved = |by: f64| {
                let column = values.iter().zip(&y).skip(output).step_by(OUTPUTS);
                let losses = column.map(|(value, target)| {
                    let (value, target) = (f64::from(*value) + by, f64::from(*target));
                    of_output(&loss, value, target)
                });
                losses.sum::<f64>() / (8 * OUTPUTS) as f64
            };
            let difference = (moved(h) - moved(-h)) / (2.0 * h);
            let apart = (f64::from(*slope) - difference).abs();
            assert!(apart < 1e-6, "{loss:?} {output}: {slope} {difference}");
        }
        let metrics = metrics(&network);
        assert_sums((metrics.loss_sum, metrics.sums), slow(&loss, &values, &y));
        assert_eq!((metrics.samples, metrics.steps, metrics.correct), (8, 1, 0));
        assert_eq!(metrics.batch_losses, [metrics.loss_sum / 8.0]);
    }
}

/// A linear layer learns a linear function, and its R² approaches 1 from that of the mean, 0.
#[test]
fn regression_learns_and_its_score_says_so() {
    let stream = host::stream(1);
    for loss in [Loss::MeanSquaredError, Loss::Huber { delta: 0.5 }, Loss::L1] {
        let (mut network, x, _) = linear(&stream, &loss);
        let weights = Random(3).normals(3 * OUTPUTS);
        let function = |x: &[f32], output: usize| {
            let products = x.iter().zip(&weights[3 * output..]).map(|(x, w)| x * w);
            5.0 + products.sum::<f32>()
        };
        let of_sample = |x: &[f32]| (0..OUTPUTS).map(|k| function(x, k)).collect::<Vec<_>>();
        let y: Vec<f32> = x.chunks(3).flat_map(of_sample).collect();
        let inputs = Tensor::from_slice(&stream, &x, [8, 3], Owner::Batches).unwrap();
        let labels = numbers(&stream, &y, OUTPUTS);
        let squares = target_squares(&y, OUTPUTS);
        let mut r2 = vec![];
        for steps in [0, 4000] {
            (0..steps).for_each(|_| network.train_step(&inputs, &labels).unwrap());
            network.reset_metrics().unwrap();
            network.eval_step(&inputs, &labels, 0).unwrap();
            r2.push(metrics(&network).eval[0].sums.r2(squares).unwrap());
        }
        // At the start the bias of 5 is missing.
        assert!(r2[0] < 0.0 && r2[1] > 0.95 && r2[1] <= 1.0, "{loss:?}: {r2:?}");
    }
}

/// Smoothed labels, and weights of classes; one of both.
fn of_classes() -> [Loss; 3] {
    let weights = || Some((0..OUTPUTS).map(|c| (c % 4) as f32 / 2.0).collect());
    [(0.1, None), (0.0, weights()), (0.3, weights())].map(|(label_smoothing, class_weights)| {
        Loss::CrossEntropy { label_smoothing, class_weights }
    })
}

/// Class weights reach the kernels; the network keeps them while it grows.
#[test]
fn smoothed_and_weighted_labels_have_the_loss_of_their_formula() {
    let stream = host::stream(1);
    for loss in of_classes() {
        let Loss::CrossEntropy { label_smoothing, ref class_weights } = loss else { panic!() };
        let weight = |c: usize| class_weights.as_ref().map_or(1.0, |weights| f64::from(weights[c]));
        let mut network = network(&stream, &host::bare(BASELINE, DIMS), &loss);
        for stage in [Stage::Training, Stage::Fossilized] {
            network.set_graph(grown(BASELINE, DIMS, &["r0c0"], stage)).unwrap();
            let (x, _) = batch(&stream, &loss, 8, 1);
            let labels: Vec<u32> = (0..8).map(|i| i % OUTPUTS as u32).collect();
            let y = host::labels(&stream, &labels);
            let logits = network.infer(&x, 0).unwrap().to_vec::<f32>().unwrap();
            let s = f64::from(label_smoothing);
            let losses = logits.chunks(OUTPUTS).zip(&labels).map(|(z, label)| {
                let z: Vec<f64> = z.iter().map(|z| f64::from(*z)).collect();
                let sum: f64 = z.iter().map(|z| z.exp()).sum();
                let share = |c: usize| {
                    let own = if c == *label as usize { 1.0 - s } else { 0.0 };
                    weight(c) * (own + s / OUTPUTS as f64)
                };
                (0..OUTPUTS).map(|c| share(c) * (sum.ln() - z[c])).sum::<f64>()
            });
            let expected: f64 = losses.sum();
            network.eval_rows(&x, &y, 0..2).unwrap();
            let rows = metrics(&network).eval;
            assert!((rows[0].loss_sum - expected).abs() < 1e-5 * expected, "{loss:?}");
            assert_eq!((rows[0], rows[0].samples), (rows[1], 8));
            assert_eq!(rows[0].sums, ScoreSums::default());
            network.train_step(&x, &y).unwrap();
            assert!(metrics(&network).loss_sum > 0.0);
        }
    }
}

#[test]
fn targets_of_another_type_or_shape_are_refused() {
    let stream = host::stream(1);
    let graph = host::bare(BASELINE, DIMS);
    let mismatch = |result: meristem_nn::Result<()>, words: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Device(DeviceError::Mismatch { .. })), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let (x, y) = batch(&stream, &Loss::L1, 4, 1);
    let labels = host::labels(&stream, &[0, 1, 2, 3]);
    let flat = Tensor::zeros(&stream, [4], DType::F32, Owner::Batches).unwrap();
    let few = Tensor::zeros(&stream, [4, 9], DType::F32, Owner::Batches).unwrap();
    for loss in of_numbers() {
        let mut network = network(&stream, &graph, &loss);
        mismatch(network.train_step(&x, &labels), "u32");
        mismatch(network.eval_step(&x, &flat, 0), "of shape [4, 10], got [4]");
        mismatch(network.eval_rows(&x, &few, 0..2), "of shape [4, 10], got [4, 9]");
        network.train_step(&x, &y).unwrap();
        assert_eq!(metrics(&network).steps, 1);
    }
    let mut classifier = network(&stream, &graph, &Loss::default());
    mismatch(classifier.train_step(&x, &y), "u32");
    let refused = |loss: Loss, words: &str| {
        let options = NetworkOptions { loss, ..NetworkOptions::new(5, 0, Isa::detect(), 8) };
        let error = Network::new(&stream, Arc::clone(&graph), options).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    for delta in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(Loss::Huber { delta }, "`delta` must be a finite number above 0");
    }
    let classes = |label_smoothing, weights: Option<Vec<f32>>| Loss::CrossEntropy {
        label_smoothing,
        class_weights: weights.map(Into::into),
    };
    for smoothing in [-0.1, 1.5, f32::NAN] {
        refused(classes(smoothing, None), "`label_smoothing` must be 0 to 1");
    }
    let words = "`class_weights` must be one weight for each of 10 classes, got 9 weights";
    refused(classes(0.0, Some(vec![1.0; 9])), words);
    refused(classes(0.0, Some(vec![-1.0; 10])), "finite and at least 0, got a weight of -1");
    refused(classes(0.1, Some(vec![f32::NAN; 10])), "got a weight of NaN");
}

/// Growth and replicas keep the loss.
#[test]
fn the_loss_stays_with_the_network() {
    let stream = host::stream(1);
    let loss = Loss::BinaryCrossEntropy;
    let mut network = network(&stream, &host::bare(BASELINE, DIMS), &loss);
    let (x, y) = batch(&stream, &loss, 8, 1);
    network.train_step(&x, &y).unwrap();
    network.set_graph(grown(BASELINE, DIMS, &["r0c0"], Stage::Training)).unwrap();
    network.train_step(&x, &y).unwrap();
    let mut replica = network.replica(&stream).unwrap();
    replica.follow(&network).unwrap();
    for of in [&mut network, &mut replica] {
        of.reset_metrics().unwrap();
        of.train_step(&x, &y).unwrap();
    }
    let both = [&network, &replica].map(metrics);
    assert_eq!(both[0], both[1]);
    assert!(both[0].sums.f1().is_some());
}

/// Weights, and metrics of a training step and an evaluation.
#[cfg(feature = "cuda")]
type Results = (StateDict, Vec<(f64, f64, ScoreSums)>);

/// Trains in a fleet of two for a few steps, then evaluates.
#[cfg(feature = "cuda")]
fn trained(streams: [&Stream; 2], graph: &Arc<Graph>, loss: &Loss) -> Results {
    let mut networks = streams.map(|stream| network(stream, graph, loss));
    for step in 0..3 {
        let batches = streams.map(|stream| batch(stream, loss, 6, step));
        let batches: Vec<LabelledBatch<'_>> = batches.iter().map(|(x, y)| (x, y)).collect();
        let mut fleet = NetworkFleet::new(&mut networks);
        fleet.train_step(&batches).unwrap();
        fleet.eval_rows(&batches, &[0..1, 0..1]).unwrap();
    }
    let metrics = metrics(&networks[1]);
    let eval = &metrics.eval[0];
    let sums = vec![
        (metrics.loss_sum, metrics.batch_losses[2], metrics.sums),
        (eval.loss_sum, eval.squares, eval.sums),
    ];
    (networks[1].state_dict().unwrap(), sums)
}

/// As `cuda::training_follows_the_processors`, which derives the tolerance of weights, for fused
/// convolutions and a fused head. Counts may differ by a label whose logit is near 0.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn cuda_learns_every_loss_as_a_processor_does() {
    let device = crate::common::cuda();
    let gpu = [0, 1].map(|i| device.stream(&format!("env {i}")));
    let cpu = [0, 1].map(|_| host::stream(1));
    let graph = host::bare(BASELINE, DIMS);
    for loss in of_numbers().into_iter().chain(of_classes()) {
        let ours = trained([&gpu[0], &gpu[1]], &graph, &loss);
        let theirs = trained([&cpu[0], &cpu[1]], &graph, &loss);
        for ((name, ours), (_, theirs)) in ours.0.iter().zip(theirs.0.iter()) {
            if let (Some(ours), Some(theirs)) = (ours.as_f32(), theirs.as_f32()) {
                let pairs = ours.iter().zip(theirs);
                let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < 1e-4, "{loss:?} {name}: {apart}");
            }
        }
        for (ours, theirs) in ours.1.iter().zip(&theirs.1) {
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-3 * b.abs();
            assert!(near(ours.0, theirs.0) && near(ours.1, theirs.1), "{ours:?} {theirs:?}");
            let (ours, theirs) = (ours.2, theirs.2);
            assert!(near(ours.residual_squares, theirs.residual_squares), "{ours:?} {theirs:?}");
            let counts = |s: &ScoreSums| [s.true_positives, s.false_positives, s.false_negatives];
            for (ours, theirs) in counts(&ours).into_iter().zip(counts(&theirs)) {
                assert!(ours.abs_diff(theirs) <= 1, "{ours:?} {theirs:?}");
            }
        }
    }
}

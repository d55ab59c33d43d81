//! Networks at each precision, on a GPU or on the stand-in driver.

use std::sync::Arc;

use crate::common::cuda;
use crate::common::host::{self, BASELINE};
use crate::network::{DIMS, Stage, batch, grown, metrics, state_bits};
use meristem_device::{Owner, Stream, Tensor};
use meristem_nn::graph::{BlendMode, Dims, Graph, GraphBuilder};
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

/// The outputs of a network of four layers at bf16 are within the bound that follows, element by
/// element, from one rounding for each stored value and each weight. With u = 2⁻⁸, the relative
/// error of a rounding to bf16, an input x that is off by at most e, and y = W·x + b:
///
/// ```text
/// stored input     e = u·|x|
/// linear layer     e' = |W|·(e + u·(|x| + e)) + u·(|y| + …)
/// ReLU             e' = e      it is exact, and its slope is at most 1
/// ```
///
/// where … is the error before the rounding. Sums in f32 add at most 16 roundings of 2⁻²³ of the
/// sum of magnitudes. The bound of f32, u = 0, does not hold: values are bf16 indeed.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn stored_values_are_off_by_one_rounding_each() {
    const WIDTHS: [usize; 5] = [12, 16, 16, 16, 5];
    let mut b = GraphBuilder::new(Dims { c: WIDTHS[0], h: 1, w: 1 }, host::SGD);
    let mut x = b.input();
    for (layer, width) in WIDTHS[1..].iter().enumerate() {
        x = b.linear(x, &format!("layers.{layer}"), *width, true, None).unwrap();
        x = if layer < 3 { b.relu(x) } else { x };
    }
    let (graph, stream) = (Arc::new(b.finish(x).unwrap()), cuda().stream("env 0"));
    let samples = BATCH;
    let inputs: Vec<f32> = (0..samples * WIDTHS[0])
        .map(|i| (i as u32).wrapping_mul(2_654_435_761) as f32 / 2f32.powi(31) - 1.0)
        .collect();
    let shape = [samples, WIDTHS[0], 1, 1];
    let tensor = Tensor::from_slice(&stream, &inputs, shape, Owner::Other).unwrap();
    let mut network = network(&stream, &graph, Precision::Bf16, &Plans::default());
    let got = network.infer(&tensor, 0).unwrap().to_vec::<f32>().unwrap();
    let weights = network.state_dict().unwrap();
    let bounded = |u: f64| {
        let within = |(sample, got): (&[f32], &[f32])| {
            let mut x: Vec<f64> = sample.iter().map(|x| f64::from(*x)).collect();
            let mut e: Vec<f64> = x.iter().map(|x| u * x.abs()).collect();
            for layer in 0..4 {
                let of = |name| weights.get(&format!("layers.{layer}.{name}")).unwrap();
                let (w, bias) = (of("weight").as_f32().unwrap(), of("bias").as_f32().unwrap());
                let rows = w.chunks(x.len()).zip(bias);
                let (y, off): (Vec<f64>, Vec<f64>) = rows
                    .map(|(row, bias)| {
                        let (mut sum, mut off, mut size) =
                            (f64::from(*bias), 0.0, f64::from(bias.abs()));
                        for ((w, x), e) in row.iter().zip(&x).zip(&e) {
                            let w = f64::from(*w);
                            sum += w * x;
                            off += w.abs() * (e + u * (x.abs() + e));
                            size += w.abs() * x.abs();
                        }
                        off += 16.0 * 2f64.powi(-23) * size;
                        let stored = off + u * (sum.abs() + off);
                        if layer < 3 { (sum.max(0.0), stored) } else { (sum, stored) }
                    })
                    .unzip();
                (x, e) = (y, off);
            }
            got.iter().zip(&x).zip(&e).all(|((got, x), e)| (f64::from(*got) - x).abs() <= *e)
        };
        inputs.chunks(WIDTHS[0]).zip(got.chunks(WIDTHS[4])).all(within)
    };
    assert!(bounded(1.0 / 256.0));
    assert!(!bounded(0.0), "values are not bf16");
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

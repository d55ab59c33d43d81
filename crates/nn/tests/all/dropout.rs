//! Dropout: masks against a slow version word by word, values and gradients against f64, and the
//! same bits for any number of workers, in calls, after a restart, and with a rate of 0.

use std::sync::Arc;

use crate::common::{Random, assert_close, host, to_nchw};
use crate::network::{DIMS, batch, metrics, sharing, state_bits, train};
use meristem_device::random::{Purpose, Rng, philox};
use meristem_device::{Owner, Stream, Tensor};
use meristem_nn::graph::{
    ConvGeometry, Dims, Graph, GraphBuilder, GroupId, NodeId, SgdConfig, WidthInit,
};
use meristem_nn::kernels::dropout::{MaskDraw, draw};
use meristem_nn::{
    Error, Isa, Network, NetworkOptions, Plans, Snapshot, StateDict, observed_weight,
};

const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 1e-3, clip_norm: 1.0 };
const BATCH: usize = 6;
const CLASSES: usize = 10;

/// FNV-1a, 64 bits.
fn fnv(name: &str) -> u64 {
    let next = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    name.bytes().fold(0xCBF2_9CE4_8422_2325, next)
}

/// The mask of `len` elements from number `first` on, one word at a time.
fn slow_mask(of: &MaskDraw, len: usize) -> Vec<u8> {
    let word = |n: u64| {
        let block = n / 64 * 16 + n % 16;
        let counter = [block, of.batch].map(|x| [x as u32, (x >> 32) as u32]);
        philox(of.key, counter.concat().try_into().unwrap())[(n / 16 % 4) as usize]
    };
    (0..len as u64).map(|i| u8::from(word(of.first + i) >= of.threshold)).collect()
}

/// The mask of a layer of a network with seed 5 and env 0, as `network` makes it.
fn layer_mask(name: &str, rate: f64, batch: u64, len: usize) -> Vec<f64> {
    let mut key = Rng::new(5, Purpose::Dropout, 0, fnv(name));
    let key = [key.next_u32(), key.next_u32()];
    let threshold = (rate * 2f64.powi(32)).round() as u32;
    let mask = slow_mask(&MaskDraw { key, threshold, batch, first: 0 }, len);
    mask.into_iter().map(|kept| f64::from(kept) / (1.0 - rate)).collect()
}

#[test]
fn masks_are_the_words_of_the_generator_on_every_instruction_set() {
    let base = MaskDraw { key: [7, 9], threshold: 1 << 30, batch: 3 << 33, first: 0 };
    for (first, len) in [(0, 1), (0, 64), (5, 59), (63, 130), (1 << 35, 4000), (70, 300_001)] {
        let of = MaskDraw { first, ..base };
        let expected = slow_mask(&of, len);
        for isa in Isa::available() {
            let mut mask = vec![2; len];
            draw(isa, &of, &mut mask);
            assert!(mask == expected, "{isa}: {len} elements from {first}");
        }
    }
}

/// A share of n draws with probability q has the standard error √(q(1 − q)/n); five of them are
/// exceeded once in 1.7 million cases, and the draws are always the same.
#[test]
fn the_share_of_kept_elements_is_that_of_the_rate() {
    let n = 1 << 20;
    let mut before: Option<Vec<u8>> = None;
    for (batch, rate) in [(0, 0.5), (1, 0.5), (2, 0.1), (3, 0.9)] {
        let threshold = (rate * 2f64.powi(32)) as u32;
        let mut mask = vec![0; n];
        draw(Isa::detect(), &MaskDraw { key: [1, 2], threshold, batch, first: 0 }, &mut mask);
        let share = |of: &[u8]| of.iter().map(|x| f64::from(*x)).sum::<f64>() / of.len() as f64;
        let limit = |n: usize, q: f64| 5.0 * (q * (1.0 - q) / n as f64).sqrt();
        let kept = 1.0 - rate;
        assert!((share(&mask) - kept).abs() < limit(n, kept), "{batch}");
        // Neighbours, and the next batch, are independent: both are kept with probability q².
        let both = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| a * b).collect::<Vec<_>>();
        for distance in [1, 16, 64] {
            let pairs = both(&mask[distance..], &mask);
            assert!(
                (share(&pairs) - kept * kept).abs() < 2.0 * limit(n, kept * kept),
                "{distance}"
            );
        }
        if let Some(before) = before.filter(|_| batch == 1) {
            assert!((share(&both(&mask, &before)) - 0.25).abs() < limit(n, 0.25));
        }
        before = Some(mask);
    }
}

/// Vectors: linear, tanh, dropout, classifier.
fn perceptron(rate: Option<f32>, features: usize) -> Arc<Graph> {
    let mut b = GraphBuilder::new(Dims { c: 12, h: 1, w: 1 }, SGD);
    let x = b.linear(b.input(), "hidden", features, true, None).unwrap();
    let mut x = b.tanh(x);
    if let Some(rate) = rate {
        x = b.dropout(x, "drop", rate).unwrap();
    }
    let x = b.linear(x, "classifier", CLASSES, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

/// Images: blocks of convolution, batch norm, relu and pool with dropout between all of them.
fn convolutions(rate: Option<f32>) -> Arc<Graph> {
    let mut b = GraphBuilder::new(DIMS, SGD);
    let drop = |b: &mut GraphBuilder, x: NodeId, name: &str| {
        rate.map_or(x, |rate| b.dropout(x, name, rate).unwrap())
    };
    let mut x = b.input();
    for (i, out) in [8, 16].into_iter().enumerate() {
        x = b.conv2d(x, &format!("{i}.conv"), out, ConvGeometry::same(3), false).unwrap();
        x = drop(&mut b, x, &format!("{i}.raw"));
        x = b.batch_norm(x, &format!("{i}.norm")).unwrap();
        x = drop(&mut b, x, &format!("{i}.normed"));
        x = b.relu(x);
        x = drop(&mut b, x, &format!("{i}.before"));
        x = b.max_pool2d(x, "pool", 2, 2).unwrap();
        x = drop(&mut b, x, &format!("{i}.after"));
    }
    let x = b.global_avg_pool(x);
    let x = drop(&mut b, x, "last");
    let x = b.linear(x, "classifier", CLASSES, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

fn network(stream: &Stream, graph: &Arc<Graph>) -> Network {
    sharing(stream, graph, BATCH, &Plans::default())
}

/// Loss gradient `(softmax − one-hot)/N` of logits.
fn loss_gradient(logits: &[f64], labels: &[u32]) -> Vec<f64> {
    let mut all = vec![];
    for (row, label) in logits.chunks(CLASSES).zip(labels) {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        let class = |(c, x): (usize, &f64)| x.exp() / sum - f64::from(c as u32 == *label);
        all.extend(row.iter().enumerate().map(class).map(|x| x / labels.len() as f64));
    }
    all
}

/// `[rows][inner] × [columns][inner]ᵀ`.
fn times(a: &[f64], b: &[f64], inner: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
    a.chunks(inner).flat_map(|a| b.chunks(inner).map(move |b| dot(a, b))).collect()
}

fn transposed(a: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|c| a.iter().skip(c).step_by(columns).copied()).collect()
}

fn f64s(state: &StateDict, name: &str) -> Vec<f64> {
    state.get(name).unwrap().as_f32().unwrap().iter().map(|x| f64::from(*x)).collect()
}

fn gradients(network: &mut Network, x: &Tensor, y: &Tensor) -> StateDict {
    network.differentiate(x, y, 1.0).unwrap();
    network.gradient_dict().unwrap()
}

/// Sums of up to 33 products in f32: 33 · 6e-8 of the largest, and tanh's 1e-7.
const RELATIVE: f64 = 1e-5;
const ABSOLUTE: f64 = 1e-6;

/// The mask is that of the batch's number, in the forward and in the backward pass.
#[test]
fn values_and_gradients_are_those_of_the_mask() {
    let (rate, features, inputs) = (0.3f32, 33, 12);
    let stream = host::stream(2);
    let mut network = network(&stream, &perceptron(Some(rate), features));
    for number in 0..3 {
        let (x, y) = batch(&stream, BATCH, network.graph().input_dims(), number);
        let labels: Vec<u32> = y.to_vec().unwrap();
        let samples: Vec<f64> = x.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect();
        let state = network.state_dict().unwrap();
        let got = gradients(&mut network, &x, &y);
        let biased = |product: Vec<f64>, bias: &str| {
            let bias = f64s(&state, bias);
            product.iter().zip(bias.iter().cycle()).map(|(x, b)| x + b).collect::<Vec<_>>()
        };
        let hidden = times(&samples, &f64s(&state, "hidden.weight"), inputs);
        let hidden: Vec<f64> = biased(hidden, "hidden.bias").iter().map(|x| x.tanh()).collect();
        let mask = layer_mask("drop", f64::from(rate), number, hidden.len());
        let dropped: Vec<f64> = hidden.iter().zip(&mask).map(|(x, m)| x * m).collect();
        let weight = f64s(&state, "classifier.weight");
        let logits = biased(times(&dropped, &weight, features), "classifier.bias");
        let by_logits = loss_gradient(&logits, &labels);
        let by_dropped = times(&by_logits, &transposed(&weight, features), CLASSES);
        let by_hidden: Vec<f64> = by_dropped.iter().zip(&mask).map(|(g, m)| g * m).collect();
        let by_sum: Vec<f64> =
            by_hidden.iter().zip(&hidden).map(|(g, h)| g * (1.0 - h * h)).collect();
        let outer = |rows: &[f64], n: usize, columns: &[f64], m: usize| {
            times(&transposed(rows, n), &transposed(columns, m), BATCH)
        };
        for (name, expected) in [
            ("classifier.weight", outer(&by_logits, CLASSES, &dropped, features)),
            ("hidden.weight", outer(&by_sum, features, &samples, inputs)),
        ] {
            let got = got.get(name).unwrap().as_f32().unwrap();
            assert_close(&format!("{name}, batch {number}"), got, &expected, RELATIVE, ABSOLUTE);
        }
        network.apply().unwrap();
    }
}

/// Elements of images are numbered as they lie in memory, channels last, over the whole batch.
#[test]
fn images_have_one_mask_element_for_each_pixel_and_channel() {
    let rate = 0.25f32;
    let stream = host::stream(1);
    let mut b = GraphBuilder::new(DIMS, SGD);
    let x = b.dropout(b.input(), "drop", rate).unwrap();
    let x = b.flatten(x);
    let x = b.linear(x, "classifier", CLASSES, true, None).unwrap();
    let mut network = network(&stream, &Arc::new(b.finish(x).unwrap()));
    let samples = Random(3).normals(BATCH * DIMS.numel());
    let (x, labels) = (host::images(&stream, &samples, DIMS), [1, 5, 0, 9, 3, 3]);
    let got = gradients(&mut network, &x, &host::labels(&stream, &labels));
    let mask = layer_mask("drop", f64::from(rate), 0, samples.len());
    let mask: Vec<f32> = mask.into_iter().map(|x| x as f32).collect();
    let mask = to_nchw(&mask, DIMS);
    let dropped: Vec<f64> =
        samples.iter().zip(&mask).map(|(x, m)| f64::from(*x) * f64::from(*m)).collect();
    let state = network.state_dict().unwrap();
    let bias = f64s(&state, "classifier.bias");
    let logits = times(&dropped, &f64s(&state, "classifier.weight"), DIMS.numel());
    let logits: Vec<f64> = logits.iter().zip(bias.iter().cycle()).map(|(x, b)| x + b).collect();
    let by_logits = loss_gradient(&logits, &labels);
    let expected =
        times(&transposed(&by_logits, CLASSES), &transposed(&dropped, DIMS.numel()), BATCH);
    let got = got.get("classifier.weight").unwrap().as_f32().unwrap();
    // Logits are sums of 768 products.
    assert_close("classifier.weight", got, &expected, 10.0 * RELATIVE, ABSOLUTE);
}

#[test]
fn a_rate_of_0_has_the_bits_of_the_network_without_dropout() {
    let stream = host::stream(2);
    let pairs: [[Arc<Graph>; 2]; 2] =
        [[Some(0.0), None].map(|rate| perceptron(rate, 70)), [Some(0.0), None].map(convolutions)];
    for graphs in pairs {
        let [with, without] = graphs.map(|graph| {
            let mut network = network(&stream, &graph);
            train(&mut network, 0..4, BATCH);
            network
        });
        assert!(state_bits(&with) == state_bits(&without), "{:?}", with.graph().nodes);
        // Layers whose rate becomes 0 are left out.
        let none = Graph::clone(with.graph()).with_dropout(0.0).unwrap();
        assert_eq!(*with.graph().as_ref(), none);
        assert_eq!(metrics(&with).loss_sum.to_bits(), metrics(&without).loss_sum.to_bits());
    }
}

/// A large batch, so that masks have several parts and steps are chains.
#[test]
fn workers_and_instruction_sets_draw_the_same() {
    let run = |threads, isa| {
        let stream = host::stream(threads);
        let options = NetworkOptions::new(5, 0, isa, 96);
        let mut network = Network::new(&stream, convolutions(Some(0.2)), options).unwrap();
        train(&mut network, 0..2, 96);
        network.train_step(&batch(&stream, 17, DIMS, 9).0, &batch(&stream, 17, DIMS, 9).1).unwrap();
        state_bits(&network)
    };
    let one = run(1, Isa::detect());
    assert!(run(4, Isa::detect()) == one);
    let without = {
        let mut network = network(&host::stream(1), &convolutions(None));
        train(&mut network, 0..2, BATCH);
        state_bits(&network)
    };
    assert!(one != without, "it does something");
}

/// Every batch that is differentiated has its masks; a forward pass that is dropped has none.
#[test]
fn calls_of_ones_own_loop_have_the_masks_of_a_step() {
    let stream = host::stream(2);
    let graph = convolutions(Some(0.4));
    let [mut whole, mut calls] = [(); 2].map(|()| network(&stream, &graph));
    for number in 0..3 {
        let (x, y) = batch(&stream, BATCH, DIMS, number);
        let labels: Vec<u32> = y.to_vec().unwrap();
        whole.differentiate(&x, &y, 1.0).unwrap();
        whole.apply().unwrap();
        let [_, outputs] = [(); 2].map(|()| calls.forward(&x).unwrap());
        let logits = outputs.to_vec::<f32>().unwrap();
        let logits: Vec<f64> = logits.into_iter().map(f64::from).collect();
        let gradient: Vec<f32> =
            loss_gradient(&logits, &labels).into_iter().map(|x| x as f32).collect();
        let shape = [BATCH, CLASSES];
        let gradient = Tensor::from_slice(&stream, &gradient, shape, Owner::Batches).unwrap();
        calls.backward(&gradient).unwrap();
        calls.update().unwrap();
        let counted = |network: &Network| batches(&network.momentum_dict().unwrap());
        assert_eq!([&whole, &calls].map(counted), [number as i64 + 1; 2]);
    }
    // The gradients of the loss differ by roundings, which three steps amplify; running statistics
    // differ, because of the forward passes that were dropped.
    let weights = |network: &Network| f64s(&network.state_dict().unwrap(), "0.conv.weight");
    let got: Vec<f32> = weights(&calls).into_iter().map(|x| x as f32).collect();
    assert_close("weights", &got, &weights(&whole), 1e-3, 1e-5);
}

/// The count in the optimiser's state.
fn batches(state: &StateDict) -> i64 {
    use meristem_nn::HostData::I64;
    let Some(I64(values)) = state.get("dropout.batches").map(|tensor| &tensor.data) else {
        panic!("no count of batches")
    };
    values[0]
}

#[test]
fn the_state_of_the_optimiser_has_the_count_of_batches() {
    let stream = host::stream(1);
    let graph = perceptron(Some(0.5), 40);
    let mut whole = network(&stream, &graph);
    train(&mut whole, 0..3, BATCH);
    let (weights, optimiser) = (whole.state_dict().unwrap(), whole.momentum_dict().unwrap());
    assert_eq!(batches(&optimiser), 3);
    let [mut resumed, mut wrong] = [(); 2].map(|()| network(&stream, &graph));
    for network in [&mut resumed, &mut wrong] {
        network.load_state_dict(&weights, true).unwrap();
    }
    resumed.load_momentum_dict(&optimiser).unwrap();
    for network in [&mut whole, &mut resumed, &mut wrong] {
        train(network, 3..5, BATCH);
    }
    assert!(state_bits(&resumed) == state_bits(&whole));
    assert!(state_bits(&wrong) != state_bits(&whole), "other masks");
    // A network without dropout has no count.
    let plain = network(&stream, &perceptron(None, 40));
    assert!(plain.momentum_dict().unwrap().get("dropout.batches").is_none());
}

/// After a rollback no mask is drawn twice, and the network draws those of its twin.
#[test]
fn a_restored_snapshot_goes_on_counting() {
    let stream = host::stream(1);
    let mut network = network(&stream, &perceptron(Some(0.5), 40));
    train(&mut network, 0..2, BATCH);
    let snapshot = Snapshot::new(&network, &Arc::clone(network.graph())).unwrap();
    train(&mut network, 2..5, BATCH);
    network.restore(&snapshot).unwrap();
    assert_eq!(batches(&network.momentum_dict().unwrap()), 5);
}

/// A module's layers count the batches since the module is there, the host's since the network is
/// new; a snapshot without the module, or with it, and the optimiser's state keep both counts.
#[test]
fn a_module_counts_batches_of_its_own() {
    let stream = host::stream(1);
    let graph = |host_drops: bool, grown: bool| {
        let mut b = GraphBuilder::new(Dims { c: 12, h: 1, w: 1 }, SGD);
        let mut x = b.linear(b.input(), "hidden", 40, true, None).unwrap();
        if host_drops {
            x = b.dropout(x, "drop", 0.5).unwrap();
        }
        if grown {
            b.group("a", SGD);
            let y = b.linear(x, "slots.a.layers.0", 40, true, None).unwrap();
            let y = b.dropout(y, "slots.a.layers.1", 0.25).unwrap();
            x = b.add(x, y).unwrap();
            b.resume_group(GroupId::HOST);
        }
        let x = b.linear(x, "classifier", CLASSES, true, None).unwrap();
        Arc::new(b.finish(x).unwrap())
    };
    let counts = |network: &Network| {
        let state = network.momentum_dict().unwrap();
        ["dropout.batches", "a.dropout.batches"].map(|name| {
            let meristem_nn::HostData::I64(values) = &state.get(name)?.data else { panic!() };
            Some(values[0])
        })
    };
    for host_drops in [false, true] {
        let [bare, grown] = [false, true].map(|grown| graph(host_drops, grown));
        let mut network = network(&stream, &bare);
        train(&mut network, 0..2, BATCH);
        let host = |count: i64| host_drops.then_some(count);
        assert_eq!(counts(&network), [host(2), None]);
        network.set_graph(Arc::clone(&grown)).unwrap();
        train(&mut network, 2..5, BATCH);
        assert_eq!(counts(&network), [host(5), Some(3)]);
        let [with, without] = [&grown, &bare].map(|graph| Snapshot::new(&network, graph).unwrap());
        // Another run goes on from the optimiser's state.
        let mut resumed = crate::dropout::network(&stream, &grown);
        resumed.load_state_dict(&network.state_dict().unwrap(), true).unwrap();
        resumed.load_momentum_dict(&network.momentum_dict().unwrap()).unwrap();
        for network in [&mut network, &mut resumed] {
            train(network, 5..6, BATCH);
        }
        assert!(state_bits(&resumed) == state_bits(&network));
        network.restore(&with).unwrap();
        assert_eq!(counts(&network), [host(6), Some(4)]);
        network.restore(&without).unwrap();
        assert_eq!(counts(&network), [host(6), None]);
        network.set_graph(grown).unwrap();
        assert_eq!(counts(&network), [host(6), Some(0)]);
    }
}

/// Rates are in device memory: they change without a new topology, and evaluation has none.
#[test]
fn rates_are_numbers_in_device_memory() {
    let stream = host::stream(1);
    let [low, high] = [0.1, 0.6].map(|rate| perceptron(Some(rate), 40));
    assert!(low.has_topology_of(&high) && low != high);
    let run = |graphs: [&Arc<Graph>; 2]| {
        let mut network = network(&stream, graphs[0]);
        train(&mut network, 0..2, BATCH);
        network.set_graph(Arc::clone(graphs[1])).unwrap();
        train(&mut network, 2..4, BATCH);
        state_bits(&network)
    };
    let all = [[&low, &low], [&low, &high], [&high, &high], [&high, &low]].map(run);
    assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])));
    let changed = Arc::new(Graph::clone(&low).with_dropout(0.6).unwrap());
    assert!(run([&low, &changed]) == all[1]);
    let outputs = [Some(0.6), None].map(|rate| {
        let mut network = network(&stream, &perceptron(rate, 40));
        let x = batch(&stream, BATCH, network.graph().input_dims(), 1).0;
        network.infer(&x, 0).unwrap().to_vec::<f32>().unwrap()
    });
    assert_eq!(outputs[0], outputs[1]);
    let problem = Graph::clone(&low).with_dropout(1.0).unwrap_err().to_string();
    assert!(problem.contains("from 0 to below 1") && problem.contains('1'), "{problem}");
}

/// Common random numbers: a layer draws the same in a network with other layers. Ranks with parts
/// of one batch draw what one network draws for their samples.
#[test]
fn draws_depend_on_layer_and_sample_and_not_on_others() {
    let stream = host::stream(1);
    let dropped = |others: bool, first: usize, samples: std::ops::Range<usize>| {
        let mut b = GraphBuilder::new(Dims { c: 40, h: 1, w: 1 }, SGD);
        let mut x = b.input();
        if others {
            x = b.linear(x, "before", 40, false, None).unwrap();
            x = b.dropout(x, "other", 0.0).unwrap();
        }
        let x = b.dropout(x, "drop", 0.5).unwrap();
        let x = b.linear(x, "classifier", CLASSES, true, None).unwrap();
        let mut network = network(&stream, &Arc::new(b.finish(x).unwrap()));
        network.set_first_sample(first).unwrap();
        let eye: Vec<f32> = (0..1600).map(|i| f32::from(u8::from(i % 41 == 0))).collect();
        let mut state = network.state_dict().unwrap();
        if others {
            state.insert("before.weight", meristem_nn::HostTensor::f32(&[40, 40], eye));
        }
        let first: Vec<f32> = vec![1.0; CLASSES * 40];
        state.insert("classifier.weight", meristem_nn::HostTensor::f32(&[CLASSES, 40], first));
        network.load_state_dict(&state, true).unwrap();
        let x = Random(8).normals(BATCH * 40);
        let x = &x[samples.start * 40..samples.end * 40];
        let x = host::images(&stream, x, Dims { c: 40, h: 1, w: 1 });
        network.forward(&x).unwrap().to_vec::<f32>().unwrap()
    };
    let whole = dropped(false, 0, 0..BATCH);
    assert_eq!(dropped(true, 0, 0..BATCH), whole);
    let parts = [dropped(false, 0, 0..2), dropped(false, 2, 2..BATCH)].concat();
    assert_eq!(parts, whole);
    assert_ne!(dropped(false, 0, 2..BATCH), whole[2 * CLASSES..]);
}

/// Recomputed statistics are those of the network that is evaluated, and count no batch.
#[test]
fn observations_do_not_drop() {
    let stream = host::stream(2);
    let run = |rate| {
        let mut network = network(&stream, &convolutions(Some(rate)));
        network.begin_statistics().unwrap();
        for number in 0..3 {
            network.observe(&batch(&stream, BATCH, DIMS, number).0).unwrap();
        }
        network.finish_statistics(observed_weight(3)).unwrap();
        assert_eq!(batches(&network.momentum_dict().unwrap()), 0);
        f64s(&network.state_dict().unwrap(), "1.norm.running_var")
    };
    let dropping: Vec<f32> = run(0.5).into_iter().map(|x| x as f32).collect();
    // With a rate of 0 the plan is another, whose sums have another order.
    assert_close("variances", &dropping, &run(0.0), RELATIVE, ABSOLUTE);
}

/// The function is kept, and training goes on. (Elements have other numbers then, so other draws.)
#[test]
fn a_layer_before_dropout_becomes_wider() {
    let stream = host::stream(1);
    for init in [WidthInit::Zero, WidthInit::Net2wider] {
        let mut network = network(&stream, &perceptron(Some(0.3), 40));
        train(&mut network, 0..2, BATCH);
        let x = batch(&stream, BATCH, network.graph().input_dims(), 7).0;
        let outputs =
            |network: &mut Network| network.infer(&x, 0).unwrap().to_vec::<f32>().unwrap();
        let before: Vec<f64> = outputs(&mut network).into_iter().map(f64::from).collect();
        network.widen(perceptron(Some(0.3), 50), init).unwrap();
        assert_close(init.name(), &outputs(&mut network), &before, RELATIVE, ABSOLUTE);
        assert_eq!(batches(&network.momentum_dict().unwrap()), 2);
        train(&mut network, 2..4, BATCH);
    }
}

#[test]
fn rates_and_names_are_checked() {
    let mut b = GraphBuilder::new(DIMS, SGD);
    for rate in [-0.1, 1.0, f32::NAN] {
        let problem = b.dropout(b.input(), "drop", rate).unwrap_err().to_string();
        assert!(problem.contains("`drop`") && problem.contains("from 0 to below 1"), "{problem}");
    }
    b.dropout(b.input(), "drop", 0.1).unwrap();
    let again = b.dropout(b.input(), "drop", 0.1).unwrap_err();
    assert!(matches!(again, Error::DuplicateName { .. }));
}

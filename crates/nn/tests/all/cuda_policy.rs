//! A policy over sequences on a GPU, or on the stand-in driver: it draws the same actions and
//! learns the same as on the processor.

use std::sync::Arc;

use crate::common::cuda;
use crate::common::host;
use meristem_device::{DType, Element, Owner, Stream, Tensor};
use meristem_nn::graph::{AdamConfig, Dims, Graph, GraphBuilder, LstmNodes};
use meristem_nn::kernels::ppo::{PpoHead, PpoLoss, PpoReport, report_len};
use meristem_nn::kernels::sample::{SampleStep, Sampler};
use meristem_nn::ops::ppo::PpoPass;
use meristem_nn::{
    HostData, Isa, SequenceDraw, SequenceNetwork, SequenceOptions, SequenceRun, ValueType,
};

const FEATURES: usize = 6;
const HIDDEN: usize = 12;
const STEPS: usize = 5;
const SEQUENCES: usize = 7;
const ROWS: usize = STEPS * SEQUENCES;
const HEADS: [(usize, u32); 3] = [(3, 0b111), (4, 0b110), (2, 0b010)];
const LOGITS: usize = 9;
/// Elements of a set, one for each choice of the second head, and their features.
const ELEMENTS: usize = 4;
const OF_ELEMENT: usize = 3;

/// The second head's logits are the network's, or point at the elements of a set.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Vector,
    Set,
}

fn graph(form: Form) -> Arc<Graph> {
    let adam =
        AdamConfig { lr: 3e-3, betas: [0.9, 0.999], eps: 1e-5, weight_decay: 0.0, clip_norm: 0.5 };
    let vector = |c| Dims { c, h: 1, w: 1 };
    let mut b = GraphBuilder::new(vector(FEATURES), adam);
    let keep = b.another_input(vector(1));
    let state = b.lstm_state(HIDDEN);
    let set =
        (form == Form::Set).then(|| b.another_input(Dims { c: OF_ELEMENT, h: 1, w: ELEMENTS }));
    let encoded = set.map(|set| {
        let x = b.linear_of_pixels(set, "set", 8, true, None).unwrap();
        b.relu(x)
    });
    let mut x = b.input();
    if let Some(encoded) = encoded {
        let mean = b.global_avg_pool(encoded);
        let scale = b.linear(keep, "scale", 8, true, None).unwrap();
        let mean = b.scale_channels(mean, scale, 1.0).unwrap();
        let largest = b.global_max_pool(encoded);
        x = b.concat(&[x, mean, largest]).unwrap();
    }
    let x = b.linear(x, "in", 10, true, None).unwrap();
    let x = b.layer_norm(x, "norm").unwrap();
    let h = b.lstm(LstmNodes { x, keep, state }, "lstm").unwrap();
    let y = match encoded {
        None => b.linear(h, "out", LOGITS + 1, true, None).unwrap(),
        Some(encoded) => {
            let own = b.linear_of_pixels(encoded, "own", 6, false, None).unwrap();
            let context = b.linear(h, "context", 6, false, None).unwrap();
            let places = b.linear_of_pixels(encoded, "places", 6, true, None).unwrap();
            let context = b.scale_channels(places, context, 1.0).unwrap();
            let both = b.add(own, context).unwrap();
            let both = b.relu(both);
            let logits = b.linear_of_pixels(both, "logit", 1, true, None).unwrap();
            let logits = b.flatten(logits);
            let [front, back] = [("front", 3), ("back", 3)]
                .map(|(name, n)| b.linear(h, name, n, true, None).unwrap());
            b.concat(&[front, logits, back]).unwrap()
        }
    };
    Arc::new(b.finish(y).unwrap())
}

fn heads() -> Vec<PpoHead> {
    let head = |(choices, used_by)| PpoHead {
        choices,
        used_by,
        floor: 0.02,
        entropy_coefficient: 0.05,
        entropy_floor: 0.3,
    };
    HEADS.into_iter().map(head).collect()
}

fn tensor<T: Element>(stream: &Stream, shape: [usize; 2], of: impl Fn(usize) -> T) -> Tensor {
    let elements: Vec<T> = (0..shape[0] * shape[1]).map(of).collect();
    Tensor::from_slice(stream, &elements, shape, Owner::Policy).unwrap()
}

/// A number in [−1, 1) that depends only on the index.
fn value(i: usize) -> f32 {
    (i as u32).wrapping_mul(2_654_435_761) as f32 / 2f32.powi(31) - 1.0
}

/// Draws, and all results of four gradients and steps: choices, masks, other numbers.
fn ran(stream: &Stream, form: Form, values: ValueType) -> (Vec<u32>, Vec<u8>, Vec<Vec<f32>>) {
    let options = SequenceOptions { seed: 5, isa: Isa::portable(), owner: Owner::Policy, values };
    let mut network = SequenceNetwork::new(stream, graph(form), options).unwrap();
    let empty = |shape, dtype| Tensor::zeros(stream, shape, dtype, Owner::Policy).unwrap();
    let (x, keep) = (
        tensor(stream, [ROWS, FEATURES], value),
        tensor(stream, [ROWS, 1], |i| (i % 9 != 4) as u8 as f32),
    );
    let state = tensor(stream, [SEQUENCES, 2 * HIDDEN], |i| value(i + 99));
    let set = tensor(stream, [ROWS, ELEMENTS * OF_ELEMENT], |i| value(i + 55));
    let inputs = [&x, &keep, &state, &set];
    let inputs = if form == Form::Set { &inputs[..] } else { &inputs[..3] };
    let run = SequenceRun { steps: STEPS, inputs };
    let sampler = Arc::new(Sampler { heads: heads(), seed: 3, greedy: false });
    // For each of four places, a word of ops and a word of kinds.
    let legality = tensor(stream, [ROWS, 4 * 2], |i| match i % 2 {
        0 => (value(i).to_bits() >> 9) & 0b110,
        _ => value(i).to_bits() >> 9 | 1,
    });
    let words = SampleStep { step: 5, first_env: 2, value_scale: 0.5 }.to_words();
    let step = tensor(stream, [1, 4], |i| words[i]).view(0, [4]).unwrap();
    let (choices, legal) = (empty([ROWS, 3], DType::U32), empty([ROWS, LOGITS], DType::U8));
    let of_heads = [0; 2].map(|_| empty([ROWS, 3], DType::F32));
    let values = Tensor::zeros(stream, [ROWS], DType::F32, Owner::Policy).unwrap();
    let last = empty([SEQUENCES, 2 * HIDDEN], DType::F32);
    let seen = [FEATURES, 1, ELEMENTS * OF_ELEMENT].map(|c| empty([ROWS, c], DType::F32));
    let seen: Vec<&Tensor> = seen.iter().take(inputs.len() - 1).collect();
    let draw = SequenceDraw {
        sampler: &sampler,
        from: [&legality, &step],
        to: [&choices, &legal, &of_heads[0], &of_heads[1], &values],
        seen: &seen,
    };
    network.act(&run, &draw, &[&last]).unwrap();
    let mut floats: Vec<Vec<f32>> =
        [&of_heads[0], &of_heads[1], &values, &last].map(|of| of.to_vec().unwrap()).into();
    let loss = Arc::new(PpoLoss {
        heads: heads(),
        clip: 0.2,
        value_coefficient: 0.5,
        entropy_floor_coefficient: 1.0,
    });
    let row = |n: usize| tensor(stream, [ROWS, 1], |i| value(i + n));
    let data = [&choices, &legal, &row(1000), &row(2000)];
    let report = Tensor::zeros(stream, [report_len(3)], DType::F64, Owner::Policy).unwrap();
    let results = [&empty([ROWS, 3], DType::F32), &report];
    for pass in [PpoPass::First, PpoPass::Later, PpoPass::Later, PpoPass::First] {
        network.differentiate(&run, &loss, pass, &data, &results).unwrap();
        let raw = report.to_vec::<f64>().unwrap();
        assert_eq!(PpoReport::parse(&raw).rows, ROWS as u64);
        floats.push(raw.into_iter().map(|v| v as f32).collect());
        floats.push(results[0].to_vec().unwrap());
        let gradients = network.gradient_dict().unwrap();
        floats.extend(gradients.iter().filter_map(|(_, of)| of.as_f32().map(<[f32]>::to_vec)));
        network.apply().unwrap();
    }
    for state in [network.state_dict().unwrap(), network.momentum_dict().unwrap()] {
        for (name, of) in state.iter() {
            match &of.data {
                HostData::F32(of) => floats.push(of.clone()),
                HostData::I64(steps) => assert_eq!(steps, &[4], "{name}"),
                HostData::U8(_) => {}
            }
        }
    }
    (choices.to_vec().unwrap(), legal.to_vec().unwrap(), floats)
}

/// Choices and masks are the same: no drawn number lies within rounding of the bound between two
/// choices. Other numbers are below 4, and are sums of at most 48 smaller terms; 16 units in the
/// last place of the largest are 4e-6. Adam divides a gradient by its own size, which is far above
/// its ε here: a step is as exact as the gradient.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn policies_act_and_learn_as_on_a_processor() {
    agree(Form::Vector, usize::MAX);
}

/// As above, up to the first step: some weights of a set have gradients as small as Adam's ε.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn policies_of_sets_act_and_differentiate_as_on_a_processor() {
    let parameters = graph(Form::Set).params.len();
    // The draw, the report and the reference of the first pass, its gradients.
    agree(Form::Set, 4 + 2 + parameters);
}

/// A policy with values of bf16 has the same bits in each run, other bits than with f32, and about
/// the same results: on the way from the inputs to an output at most 12 values are stored, each of
/// them off by at most 2⁻⁸ of its size. In the norm of a result that is 12 · 2⁻⁸ = 5 %, if no layer
/// makes errors larger relative to its values. The bound is twice that for sums whose terms cancel.
/// Gradients are finite.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn policies_act_and_differentiate_at_bf16() {
    for form in [Form::Vector, Form::Set] {
        let of = |values| ran(&cuda().stream("policy"), form, values);
        let (exact, stored) = (of(ValueType::F32), of(ValueType::Bf16));
        assert!(stored == of(ValueType::Bf16), "the same bits");
        assert!(stored.2 != exact.2, "values are not bf16");
        assert_eq!(stored.1, exact.1, "masks");
        // Log-probabilities depend on the choices; entropies, values and the last state do not.
        for (n, (a, b)) in stored.2.iter().zip(&exact.2).enumerate().take(4).skip(1) {
            let norm = |of: &mut dyn Iterator<Item = f32>| of.map(|v| v * v).sum::<f32>().sqrt();
            let apart = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
            let size = norm(&mut b.iter().copied());
            assert!(apart < 0.1 * size, "result {n}: {apart} of {size}");
        }
        assert!(stored.2.iter().flatten().all(|of| of.is_finite()));
    }
}

/// Compares the first `results` results.
fn agree(form: Form, results: usize) {
    let values = ValueType::F32;
    let (ours, theirs) =
        (ran(&cuda().stream("policy"), form, values), ran(&host::stream(1), form, values));
    assert_eq!((&ours.0, &ours.1), (&theirs.0, &theirs.1));
    assert!(ours.0.iter().any(|choice| *choice > 0));
    assert_eq!(ours.2.len(), theirs.2.len());
    for (n, (ours, theirs)) in ours.2.iter().zip(&theirs.2).take(results).enumerate() {
        assert_eq!(ours.len(), theirs.len());
        let apart = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 4e-6 && ours.iter().all(|of| of.is_finite()), "{n}: {apart}");
    }
}

//! A policy of sets: padding, order of the elements, gradients, and hosts of different sizes.

use meristem_control::policy::{
    LayerSet, LossConfig, Policy, PolicyBatch, PolicyConfig, PolicyForm, PolicyInputs, PolicyShape,
    PpoPass,
};
use meristem_control::{
    Controller, HEADS, HeadSize, Learning, PolicyDomain, Ppo, PpoConfig, PpoOptions,
    policy_is_of_sets,
};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};
use meristem_nn::{Isa, StateDict, ValueType};

use crate::common::toy::{STEPS, Toy, play};
use crate::common::{quick, tiny};

const SLOT: usize = 5;
const BLUEPRINT: usize = 4;
const SHAPE: PolicyShape = PolicyShape {
    form: PolicyForm::Set { slot_features: SLOT, blueprint_features: BLUEPRINT, layers: None },
    features: 6,
    slots: 3,
    blueprints: 4,
    hidden: 24,
};
/// Layers, and floats of each, in the form with WIDEN.
const LAYERS: usize = 2;
const LAYER: usize = 3;

/// [`SHAPE`] with layers, in `places` places.
fn with_layers(places: usize) -> PolicyShape {
    let layers = Some(LayerSet { places, features: LAYER });
    let (slot_features, blueprint_features) = (SLOT, BLUEPRINT);
    PolicyShape { form: PolicyForm::Set { slot_features, blueprint_features, layers }, ..SHAPE }
}

/// Choices of a head that are not padding.
fn own_choices(head: usize, shape: &PolicyShape) -> Vec<usize> {
    let layers = shape.layers().map_or(0, |_| LAYERS);
    match HEADS[head].size {
        HeadSize::Slots => (0..3).chain(shape.slots..shape.slots + layers).collect(),
        HeadSize::Blueprints => (0..4).collect(),
        HeadSize::Fixed(_) => (0..shape.heads()[head]).collect(),
    }
}
const ENVS: usize = 3;
const ROWS: usize = 5 * ENVS;

fn stream() -> Stream {
    Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().stream("policy")
}

fn policy(stream: &Stream, shape: PolicyShape) -> Policy {
    Policy::new(stream, shape, &PolicyConfig::new(3), &LossConfig::default(), Isa::detect())
        .unwrap()
}

/// Observations of hosts with three slots, four blueprints and two layers, in host memory.
struct Seen {
    observations: Vec<f32>,
    /// `[rows][slots][features]`.
    slots: Vec<[[f32; SLOT]; 3]>,
    blueprints: Vec<[[f32; BLUEPRINT]; 4]>,
    layers: Vec<[[f32; LAYER]; LAYERS]>,
}

impl Seen {
    fn new() -> Self {
        let mut rng = Rng::new(5, Purpose::Test, 0, 0);
        let mut number = || 2.0 * rng.uniform() - 1.0;
        Self {
            observations: (0..ROWS * SHAPE.features).map(|_| number()).collect(),
            slots: (0..ROWS).map(|_| [(); 3].map(|()| [(); SLOT].map(|()| number()))).collect(),
            blueprints: (0..ROWS)
                .map(|_| [(); 4].map(|()| [(); BLUEPRINT].map(|()| number())))
                .collect(),
            layers: (0..ROWS)
                .map(|_| [(); LAYERS].map(|()| [(); LAYER].map(|()| number())))
                .collect(),
        }
    }

    /// The inputs with padding up to the places of a shape.
    fn upload(&self, stream: &Stream, shape: &PolicyShape) -> Vec<Tensor> {
        let f32s = |values: Vec<f32>| {
            let dims = [ROWS, values.len() / ROWS];
            Tensor::from_slice(stream, &values, dims, Owner::Policy).unwrap()
        };
        let padded = |row: &[f32], len: usize| {
            let mut row = row.to_vec();
            row.resize(len, 0.0);
            row
        };
        let of_rows = |row: Vec<f32>| f32s((0..ROWS).flat_map(|_| row.clone()).collect());
        let (s, b) = (shape.slots, shape.blueprints);
        let slots = self.slots.iter().flat_map(|row| padded(row.as_flattened(), s * SLOT));
        let blueprints =
            self.blueprints.iter().flat_map(|row| padded(row.as_flattened(), b * BLUEPRINT));
        let mut inputs = vec![
            f32s(self.observations.clone()),
            f32s(slots.collect()),
            of_rows(padded(&[1.0; 3], s)),
            of_rows(vec![s as f32 / 3.0]),
            f32s(blueprints.collect()),
            of_rows(padded(&[1.0; 4], b)),
            of_rows(vec![b as f32 / 4.0]),
        ];
        if let Some(LayerSet { places, .. }) = shape.layers() {
            let layers = self.layers.iter();
            let layers = layers.flat_map(|row| padded(row.as_flattened(), places * LAYER));
            inputs.push(f32s(layers.collect()));
            inputs.push(of_rows(padded(&[1.0; LAYERS], places)));
            inputs.push(of_rows(vec![places as f32 / LAYERS as f32]));
        }
        inputs.push(of_rows(vec![1.0]));
        inputs
    }

    /// Logits of each head without those of padding, and V, row by row.
    fn forward(&self, policy: &mut Policy) -> Vec<Vec<Vec<f32>>> {
        let (shape, stream) = (*policy.shape(), policy.stream().clone());
        let inputs = self.upload(&stream, &shape);
        let width = shape.logits() + 1;
        let empty =
            |dims: [usize; 2]| Tensor::empty(&stream, dims, DType::F32, Owner::Policy).unwrap();
        let (output, next) = (empty([ROWS, width]), empty([ENVS, 2 * shape.hidden]));
        let state = policy.initial_state(ENVS).unwrap();
        let inputs = PolicyInputs { rows: inputs.iter().collect(), state: &state };
        policy.forward(ROWS / ENVS, &inputs, &output, &next).unwrap();
        let output = output.to_vec::<f32>().unwrap();
        let rows = output.chunks_exact(width).map(|row| {
            let (mut rest, mut heads) = (row, vec![]);
            for (index, size) in shape.heads().into_iter().enumerate() {
                let (head, others) = rest.split_at(size);
                heads.push(own_choices(index, &shape).into_iter().map(|i| head[i]).collect());
                rest = others;
            }
            heads.push(rest.to_vec());
            heads
        });
        rows.collect()
    }
}

/// Largest difference between two results.
fn apart(one: &[Vec<Vec<f32>>], other: &[Vec<Vec<f32>>]) -> f32 {
    let flat = |all: &[Vec<Vec<f32>>]| all.concat().concat();
    flat(one).iter().zip(flat(other)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Logits are below 1 in size, and pass through a sum over all elements and six layers of at most
/// 90 products: each changes by a few roundings of 6e-8 when its sum has another order.
const TOLERANCE: f32 = 1e-5;

fn weights(policy: &Policy) -> StateDict {
    policy.state_dict().unwrap()
}

#[test]
fn weights_do_not_depend_on_the_numbers_of_elements_and_padding_changes_nothing() {
    let (stream, seen) = (stream(), Seen::new());
    for of in [|_| SHAPE, with_layers] {
        let mut own = policy(&stream, of(LAYERS));
        let expected = seen.forward(&mut own);
        for (slots, blueprints, layers) in [(4, 4, 2), (8, 11, 3), (3, 40, 9)] {
            let mut padded = policy(&stream, PolicyShape { slots, blueprints, ..of(layers) });
            assert_eq!(weights(&padded), weights(&own), "the same initial weights");
            let difference = apart(&seen.forward(&mut padded), &expected);
            assert!(difference < TOLERANCE, "{slots} slots: {difference}");
        }
        let sizes = expected[0].iter().flatten().map(|logit| logit.abs());
        assert!(sizes.fold(0.0, f32::max) > 100.0 * TOLERANCE, "the logits are not all 0");
    }
}

#[test]
fn elements_in_another_order_have_their_logits_in_that_order() {
    let (stream, mut seen) = (stream(), Seen::new());
    let mut policy = policy(&stream, with_layers(LAYERS));
    let mut expected = seen.forward(&mut policy);
    seen.slots.iter_mut().for_each(|row| row.rotate_left(1));
    seen.blueprints.iter_mut().for_each(|row| row.swap(0, 3));
    seen.layers.iter_mut().for_each(|row| row.swap(0, 1));
    let unordered = apart(&seen.forward(&mut policy), &expected);
    for row in &mut expected {
        row[1][..3].rotate_left(1);
        row[1].swap(3, 4);
        row[2].swap(0, 3);
    }
    let difference = apart(&seen.forward(&mut policy), &expected);
    assert!(difference < TOLERANCE && unordered > 10.0 * TOLERANCE, "{difference} {unordered}");
}

/// The derivative of the loss along each tensor's gradient is the norm of the gradient. The loss
/// has an error of some 1e-7, which is 2e-4 of a difference over .0005; ReLUs that a step switches,
/// a few in 2,000, are below 2 % of the norm. Such a ReLU disturbs the longer step, and rounding
/// the shorter one, so the better of the two counts. `stride`: between the choices of two rows.
fn assert_gradients(shape: PolicyShape, stride: usize, parts: &[&str]) {
    const STEPS_BY: [f32; 2] = [0.001, 0.00025];
    let (stream, seen) = (stream(), Seen::new());
    let config = LossConfig { floors: [0.0; HEADS.len()], ..LossConfig::default() };
    let mut policy =
        Policy::new(&stream, shape, &PolicyConfig::new(3), &config, Isa::detect()).unwrap();
    let inputs = seen.upload(&stream, &shape);
    let state = policy.initial_state(ENVS).unwrap();
    let mut rng = Rng::new(8, Purpose::Test, 0, 0);
    let mut numbers = || -> Vec<f32> { (0..ROWS).map(|_| rng.uniform() - 0.5).collect() };
    let [advantages, returns] =
        [(); 2].map(|()| Tensor::from_slice(&stream, &numbers(), [ROWS], Owner::Policy).unwrap());
    let own: Vec<Vec<usize>> = (0..HEADS.len()).map(|head| own_choices(head, &shape)).collect();
    let choice = |row: usize, own: &Vec<usize>| own[row * stride % own.len()] as u32;
    let choices = (0..ROWS).flat_map(|row| own.iter().map(move |own| choice(row, own)));
    let choices: Vec<u32> = choices.collect();
    let legal = (0..ROWS).flat_map(|_| {
        let heads = shape.heads().into_iter().zip(&own);
        heads.flat_map(|(all, own)| (0..all).map(|i| u8::from(own.contains(&i))))
    });
    let legal: Vec<u8> = legal.collect();
    let choices =
        Tensor::from_slice(&stream, &choices, [ROWS, HEADS.len()], Owner::Policy).unwrap();
    let legal = Tensor::from_slice(&stream, &legal, [ROWS, shape.logits()], Owner::Policy).unwrap();
    let batch = PolicyBatch {
        steps: ROWS / ENVS,
        inputs: PolicyInputs { rows: inputs.iter().collect(), state: &state },
        choices: &choices,
        legal: &legal,
        advantages: &advantages,
        returns: &returns,
    };
    policy.differentiate(&batch, PpoPass::First).unwrap();
    let gradients = policy.gradient_dict().unwrap();
    let start = policy.state_dict().unwrap();
    let mut seen_parts = vec![];
    for (name, gradient) in gradients.iter() {
        let gradient = gradient.as_f32().unwrap();
        let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        if norm < 1e-3 {
            continue;
        }
        let mut loss = |by: f32| {
            let mut moved = start.clone();
            let tensor = moved.0.get_mut(name).unwrap();
            let values = tensor.as_f32().unwrap().iter().zip(gradient);
            let values = values.map(|(w, g)| w + by * g / norm as f32).collect();
            *tensor = meristem_nn::HostTensor::f32(&tensor.shape.clone(), values);
            policy.load_state_dict(&moved).unwrap();
            policy.differentiate(&batch, PpoPass::Later).unwrap();
            policy.report().unwrap().0.loss
        };
        let apart = STEPS_BY.map(|step| {
            let slope = (loss(step) - loss(-step)) / f64::from(2.0 * step);
            (slope - norm).abs()
        });
        let apart = apart.into_iter().fold(f64::INFINITY, f64::min);
        assert!(apart < 0.02 * norm + 2e-4, "{name}: apart by {apart}, gradient {norm}");
        seen_parts.push(name.to_string());
    }
    for part in parts {
        assert!(seen_parts.iter().any(|seen| seen.starts_with(part)), "{part}: {seen_parts:?}");
    }
}

/// Padded, so that the gradient passes by the padding as well.
#[test]
fn gradients_agree_with_finite_differences() {
    let padded = |shape| PolicyShape { slots: 5, blueprints: 6, ..shape };
    let parts = ["slots", "blueprints", "encoder", "lstm", "heads", "value"];
    assert_gradients(padded(SHAPE), 7, &parts);
    assert_gradients(padded(with_layers(4)), 5, &[&parts[..], &["layers", "heads.layer"]].concat());
}

fn of_sets(slots: usize, learning: Learning) -> Ppo {
    let config = PpoConfig { hidden: 8, ..PpoConfig::default() };
    let (steps, isa) = (STEPS as usize, Isa::detect());
    let options = PpoOptions { envs: 3, steps, seed: 7, isa, learning, values: ValueType::F32 };
    let domain = PolicyDomain::from_hosts(&[tiny(slots, quick())]);
    Ppo::of_sets(&stream(), config, domain, options).unwrap()
}

/// Hosts with one and two slots.
fn mixed() -> Vec<Toy> {
    [1, 2, 1].into_iter().enumerate().map(|(env, slots)| Toy::with_slots(env, slots)).collect()
}

/// `play` asserts that every action is legal.
#[test]
fn hosts_of_different_sizes_learn_together_and_go_on_from_a_checkpoint() {
    let mut original = of_sets(2, Learning::On);
    let report = play(&mut original, &mut mixed()).1.unwrap();
    assert_eq!((report.epochs, report.skipped), (4, 0));
    let saved = original.save().unwrap();
    let mut restored = of_sets(2, Learning::On);
    restored.restore(&saved).unwrap();
    assert_eq!(restored.save().unwrap(), saved);
    let play = |it: &mut Ppo| play(it, &mut mixed());
    assert_eq!(play(&mut restored), play(&mut original));
    assert_eq!(restored.save().unwrap(), original.save().unwrap());
}

#[test]
fn what_was_learned_goes_on_with_other_numbers_of_slots_and_envs() {
    let mut small = of_sets(2, Learning::On);
    play(&mut small, &mut mixed());
    let learned = small.save_learned().unwrap();
    let mut large = of_sets(3, Learning::On);
    large.restore(&learned).unwrap();
    assert_eq!(large.save_learned().unwrap().tensors, learned.tensors);
    let (one, other) = (play(&mut large, &mut mixed()).1, play(&mut small, &mut mixed()).1);
    let (one, other) = (one.unwrap(), other.unwrap());
    // The padding changes sums by roundings, which no action of these rounds depends on.
    assert_eq!((one.ops, one.mean_return), (other.ops, other.mean_return));
    assert!((one.explained_variance - other.explained_variance).abs() < 1e-3);
    let mut within = mixed();
    within.iter_mut().for_each(Toy::epoch);
    let views: Vec<_> = within.iter().map(|toy| toy.env.view()).collect();
    large.decide_all(&views).unwrap();
    let error = large.save_learned().unwrap_err().to_string();
    assert!(error.contains("the end of a round"), "{error}");
}

#[test]
fn a_file_serves_hosts_of_any_size_and_says_its_form() {
    let mut learned = of_sets(2, Learning::On);
    play(&mut learned, &mut mixed());
    let (weights, metadata) = learned.export().unwrap();
    assert!(policy_is_of_sets(&metadata).unwrap());
    assert_eq!(metadata["meristem_policy"], "2", "older programs refuse it");
    let mut acting = of_sets(3, Learning::Greedy);
    acting.import(&weights, &metadata).unwrap();
    let mut three: Vec<Toy> = (0..3).map(|env| Toy::with_slots(env, 2)).collect();
    play(&mut acting, &mut three);
    let config = PpoConfig { hidden: 8, ..PpoConfig::default() };
    let options = PpoOptions {
        envs: 3,
        steps: STEPS as usize,
        seed: 7,
        isa: Isa::detect(),
        learning: Learning::Off,
        values: ValueType::F32,
    };
    let mut vector = Ppo::new(&stream(), config, &tiny(2, quick()), options).unwrap();
    let error = vector.import(&weights, &metadata).unwrap_err().to_string();
    assert!(error.contains("a policy for any number of slots"), "{error}");
    let (weights, metadata) = vector.export().unwrap();
    assert!(!policy_is_of_sets(&metadata).unwrap());
    let error = acting.import(&weights, &metadata).unwrap_err().to_string();
    assert!(error.contains("a policy for one number of slots"), "{error}");
    let mut too_many = of_sets(1, Learning::Off);
    let views: Vec<_> = three.iter().map(|toy| toy.env.view()).collect();
    let error = too_many.decide_all(&views).unwrap_err().to_string();
    assert!(error.contains("at most 1 slots"), "{error}");
}

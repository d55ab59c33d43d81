//! The policy on a stream: acting and unrolling with the same parameters, updates, saved state.

use meristem_control::policy::{
    LossConfig, Policy, PolicyBatch, PolicyConfig, PolicyForm, PolicyInputs, PolicyShape, PpoPass,
};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, Error as DeviceError, Owner, Stream, Tensor,
};
use meristem_nn::kernels::ppo::PpoReport;
use meristem_nn::{Error, Isa, Result, StateDict};

const SHAPE: PolicyShape =
    PolicyShape { form: PolicyForm::Vector, features: 19, slots: 3, blueprints: 7, hidden: 24 };
const STEPS: usize = 7;
const ENVS: usize = 3;
const ROWS: usize = STEPS * ENVS;

fn stream() -> Stream {
    Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().stream("policy")
}

fn policy(stream: &Stream, seed: u64) -> Policy {
    let config = PolicyConfig::new(seed);
    Policy::new(stream, SHAPE, &config, &LossConfig::default(), Isa::detect()).unwrap()
}

/// A round in host memory; every head is used in some row.
struct Round {
    observations: Vec<f32>,
    blueprints: Vec<u32>,
    keep: Vec<f32>,
    choices: Vec<u32>,
    legal: Vec<u8>,
    advantages: Vec<f32>,
    returns: Vec<f32>,
}

impl Round {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed, Purpose::Test, 0, 0);
        let mut numbers = |n: usize| -> Vec<f32> { (0..n).map(|_| rng.uniform() - 0.5).collect() };
        let (observations, advantages, returns) =
            (numbers(ROWS * SHAPE.features), numbers(ROWS), numbers(ROWS));
        let below = |rng: &mut Rng, n: usize| rng.below(n as u32);
        let blueprints = (0..ROWS * SHAPE.slots).map(|_| below(&mut rng, 8)).collect();
        let keep = (0..ROWS).map(|row| if row % 8 == 5 { 0.0 } else { 1.0 }).collect();
        let heads = SHAPE.heads();
        let choices = (0..ROWS).flat_map(|_| heads).map(|n| below(&mut rng, n)).collect();
        let legal = vec![1; ROWS * SHAPE.logits()];
        Self { observations, blueprints, keep, choices, legal, advantages, returns }
    }

    fn upload(&self, stream: &Stream) -> OnDevice {
        let f32s = |v: &[f32], shape: &[usize]| {
            Tensor::from_slice(stream, v, shape, Owner::Policy).unwrap()
        };
        let u32s = |v: &[u32]| {
            Tensor::from_slice(stream, v, [ROWS, v.len() / ROWS], Owner::Policy).unwrap()
        };
        OnDevice {
            observations: f32s(&self.observations, &[ROWS, SHAPE.features]),
            blueprints: u32s(&self.blueprints),
            keep: f32s(&self.keep, &[ROWS]),
            state: f32s(&vec![0.0; ENVS * 2 * SHAPE.hidden], &[ENVS, 2 * SHAPE.hidden]),
            choices: u32s(&self.choices),
            legal: {
                let shape = [ROWS, SHAPE.logits()];
                Tensor::from_slice(stream, &self.legal, shape, Owner::Policy).unwrap()
            },
            advantages: f32s(&self.advantages, &[ROWS]),
            returns: f32s(&self.returns, &[ROWS]),
        }
    }
}

struct OnDevice {
    observations: Tensor,
    blueprints: Tensor,
    keep: Tensor,
    state: Tensor,
    choices: Tensor,
    legal: Tensor,
    advantages: Tensor,
    returns: Tensor,
}

impl OnDevice {
    fn inputs(&self) -> PolicyInputs<'_> {
        let Self { observations, blueprints, keep, state, .. } = self;
        PolicyInputs { rows: vec![observations, blueprints, keep], state }
    }

    fn batch(&self) -> PolicyBatch<'_> {
        let Self { choices, legal, advantages, returns, .. } = self;
        PolicyBatch { steps: STEPS, inputs: self.inputs(), choices, legal, advantages, returns }
    }
}

fn update(policy: &mut Policy, round: &OnDevice, epochs: usize) -> Vec<(PpoReport, f64)> {
    (0..epochs)
        .map(|epoch| {
            let pass = if epoch == 0 { PpoPass::First } else { PpoPass::Later };
            policy.differentiate(&round.batch(), pass).unwrap();
            let report = policy.report().unwrap();
            policy.apply().unwrap();
            report
        })
        .collect()
}

fn bits(state: &StateDict) -> Vec<(String, Vec<u32>)> {
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect();
    state.iter().map(|(n, t)| (n.into(), t.as_f32().map_or(vec![], bits))).collect()
}

#[test]
fn width_512_has_four_million_parameters() {
    let shape = PolicyShape { features: 23 + 31 * 3, hidden: 512, ..SHAPE };
    let graph = shape.graph(&PolicyConfig::new(0)).unwrap();
    let parameters = graph.parameters(None) as f64 / 1e6;
    assert!((3.95..4.05).contains(&parameters), "{parameters} million");
}

/// Row by row with carried state, or all rows at once: the same numbers. The order of sums depends
/// on the number of rows: a few roundings of 6e-8 per layer, through seven layers and steps.
#[test]
fn steps_and_sequences_agree() {
    let stream = stream();
    let (mut policy, round) = (policy(&stream, 1), Round::new(2));
    let whole = round.upload(&stream);
    let width = SHAPE.logits() + 1;
    let empty = |rows: usize, c: usize| {
        Tensor::empty(&stream, [rows, c], DType::F32, Owner::Policy).unwrap()
    };
    let (all, last) = (empty(ROWS, width), empty(ENVS, 2 * SHAPE.hidden));
    policy.forward(STEPS, &whole.inputs(), &all, &last).unwrap();
    let all = all.to_vec::<f32>().unwrap();
    let mut states = [policy.initial_state(ENVS).unwrap(), policy.initial_state(ENVS).unwrap()];
    for step in 0..STEPS {
        let part = |t: &Tensor| {
            let c = t.numel() / ROWS;
            t.view(step * ENVS * c, [ENVS, c]).unwrap()
        };
        let (observations, blueprints, keep) =
            (part(&whole.observations), part(&whole.blueprints), part(&whole.keep));
        let output = empty(ENVS, width);
        let rows = vec![&observations, &blueprints, &keep];
        let inputs = PolicyInputs { rows, state: &states[0] };
        policy.forward(1, &inputs, &output, &states[1]).unwrap();
        states.swap(0, 1);
        let output = output.to_vec::<f32>().unwrap();
        for (a, b) in output.iter().zip(&all[step * ENVS * width..]) {
            assert!((a - b).abs() < 1e-5, "step {step}: {a} {b}");
        }
    }
    let (stepped, last) = (states[0].to_vec::<f32>().unwrap(), last.to_vec::<f32>().unwrap());
    assert!(stepped.iter().zip(&last).all(|(a, b)| (a - b).abs() < 1e-5));
    assert!(last.iter().any(|v| v.abs() > 0.01));
}

#[test]
fn the_first_pass_has_ratios_of_one_and_changes_no_parameters() {
    let stream = stream();
    let mut policy = policy(&stream, 3);
    let round = Round::new(4).upload(&stream);
    let before = bits(&policy.state_dict().unwrap());
    policy.differentiate(&round.batch(), PpoPass::First).unwrap();
    let (first, norm) = policy.report().unwrap();
    assert!(first.kl == 0.0 && first.heads.iter().all(|h| h.ratio == 1.0 && h.kl == 0.0));
    assert!(first.heads.iter().all(|h| h.count > 0 && h.clipped == 0.0 && h.entropy > 0.5));
    assert!(first.is_finite() && norm > 0.0 && (first.rows, first.decisions) == (21, 21));
    // The same code with the same parameters reproduces the reference exactly.
    policy.differentiate(&round.batch(), PpoPass::Later).unwrap();
    let (second, again) = policy.report().unwrap();
    assert_eq!((&second, again), (&first, norm));
    assert_eq!(bits(&policy.state_dict().unwrap()), before);
    policy.apply().unwrap();
    assert_ne!(bits(&policy.state_dict().unwrap()), before);
    policy.differentiate(&round.batch(), PpoPass::Later).unwrap();
    let (third, _) = policy.report().unwrap();
    assert!(third.kl > 0.0 && third.loss < first.loss, "{third:?}");
}

#[test]
fn same_seed_same_bits_also_after_a_restore() {
    let streams = [stream(), stream(), stream()];
    let round = Round::new(5);
    let mut whole = policy(&streams[0], 6);
    let on = round.upload(&streams[0]);
    update(&mut whole, &on, 3);
    let (state, adam) = (whole.state_dict().unwrap(), whole.optimiser_dict().unwrap());
    let reports = update(&mut whole, &on, 3);

    let mut again = policy(&streams[1], 6);
    update(&mut again, &round.upload(&streams[1]), 3);
    assert_eq!(bits(&again.state_dict().unwrap()), bits(&state));

    let mut resumed = policy(&streams[2], 7);
    assert_ne!(bits(&resumed.state_dict().unwrap()), bits(&state));
    resumed.load_state_dict(&state).unwrap();
    resumed.load_optimiser_dict(&adam).unwrap();
    assert_eq!(resumed.optimiser_dict().unwrap(), adam);
    assert_eq!(update(&mut resumed, &round.upload(&streams[2]), 3), reports);
    assert_eq!(bits(&resumed.state_dict().unwrap()), bits(&whole.state_dict().unwrap()));
    assert_eq!(resumed.optimiser_dict().unwrap(), whole.optimiser_dict().unwrap());
    let steps: Vec<_> = adam.iter().filter(|(name, _)| name.ends_with(".step")).collect();
    assert!(!steps.is_empty() && steps.iter().all(|(_, steps)| steps.form() == "i64 []"));
}

#[test]
fn a_loss_that_is_not_finite_is_reported_before_the_update() {
    let stream = stream();
    let mut policy = policy(&stream, 8);
    let mut round = Round::new(9);
    round.returns[3] = f32::NAN;
    policy.differentiate(&round.upload(&stream).batch(), PpoPass::First).unwrap();
    let (report, norm) = policy.report().unwrap();
    assert!(!report.is_finite() && !norm.is_finite());
    // The update was skipped, so the parameters are unchanged.
    let state = policy.state_dict().unwrap();
    assert!(state.iter().all(|(_, t)| t.as_f32().unwrap().iter().all(|v| v.is_finite())));
}

#[test]
fn arguments_that_do_not_fit_are_rejected() {
    let stream = stream();
    let mut policy = policy(&stream, 10);
    let round = Round::new(11).upload(&stream);
    let argument = |refused: Result<()>, words: &str| {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    argument(policy.apply(), "a gradient, from `differentiate`");
    argument(policy.differentiate(&round.batch(), PpoPass::Later), "a first pass of 21 rows");
    let wrong = PolicyBatch { legal: &round.choices, ..round.batch() };
    let words = "`legal` must be u8 [21, 35], got u32 [21, 8]";
    argument(policy.differentiate(&wrong, PpoPass::First), words);
    let wrong = PolicyBatch { steps: 4, ..round.batch() };
    argument(policy.differentiate(&wrong, PpoPass::First), "`steps` must be");
    let rows = vec![&round.observations, &round.observations, &round.keep];
    let inputs = PolicyInputs { rows, ..round.inputs() };
    let error = policy.forward(1, &inputs, &round.returns, &round.state).unwrap_err();
    assert!(matches!(error, Error::Device(DeviceError::Mismatch { .. })), "{error:?}");
    assert!(error.to_string().contains("`inputs` must be u32, got f32"), "{error}");
    let other = policy_of(&stream, PolicyShape { slots: 2, ..SHAPE });
    let error = policy.load_state_dict(&other.state_dict().unwrap()).unwrap_err();
    assert!(matches!(error, Error::State(_)), "{error:?}");
    let words = "heads.slot.2.weight (expected f32 [3, 18], got f32 [2, 18])";
    assert!(error.to_string().contains(words), "{error}");
    let loss = LossConfig { clip: -1.0, ..LossConfig::default() };
    let config = PolicyConfig::new(0);
    let refused = |shape, loss: &LossConfig, words: &str| {
        let made = Policy::new(&stream, shape, &config, loss, Isa::detect());
        argument(made.map(drop), words);
    };
    refused(SHAPE, &loss, "a number from 0 on");
    let none = PolicyShape { hidden: 0, ..SHAPE };
    refused(none, &LossConfig::default(), "at least one feature, slot and hidden number");
}

fn policy_of(stream: &Stream, shape: PolicyShape) -> Policy {
    let config = PolicyConfig::new(0);
    Policy::new(stream, shape, &config, &LossConfig::default(), Isa::detect()).unwrap()
}

//! The PPO controller: rollout, files, checkpoints, rejected calls.

use meristem_control::{
    Action, Controller, ControllerState, Error, Heuristic, Learning, Ppo, PpoConfig, PpoOptions,
    TeacherRules, policy_seeds, policy_width,
};
use meristem_device::{Device, DeviceId, DeviceOptions, Stream};
use meristem_nn::safetensors::Metadata;
use meristem_nn::{HostTensor, Isa, ValueType};

use crate::common::toy::{STEPS, Toy, play};
use crate::common::{FakeEnv, quick, quick_heuristic, tiny};

const ENVS: usize = 3;
const SEED: u64 = 7;

fn stream() -> Stream {
    Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().stream("policy")
}

fn small() -> PpoConfig {
    PpoConfig { hidden: 8, ..PpoConfig::default() }
}

fn ppo(config: PpoConfig, slots: usize, learning: Learning) -> Ppo {
    let (steps, isa) = (STEPS as usize, Isa::detect());
    let options =
        PpoOptions { envs: ENVS, steps, seed: SEED, isa, learning, values: ValueType::F32 };
    let host = tiny(slots, quick());
    Ppo::new(&stream(), config, &host, options).unwrap()
}

fn fleet() -> Vec<Toy> {
    (0..ENVS).map(Toy::new).collect()
}

/// A step of all envs. Returns the actions and their rewards.
fn step(ppo: &mut Ppo, fleet: &mut [Toy]) -> (Vec<Action>, Vec<f32>) {
    fleet.iter_mut().for_each(Toy::epoch);
    let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
    let actions = ppo.decide_all(&views).unwrap();
    let both = fleet.iter_mut().zip(&actions);
    let rewards: Vec<f32> = both.map(|(toy, action)| toy.act(action).1 as f32).collect();
    ppo.reward_all(&rewards).unwrap();
    (actions, rewards)
}

fn end(ppo: &mut Ppo, fleet: &[Toy]) -> meristem_control::RoundReport {
    let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
    ppo.end_round(&views).unwrap().unwrap()
}

fn buffer(state: &ControllerState, name: &str) -> Vec<f32> {
    state.tensors.get(name).unwrap().as_f32().unwrap().to_vec()
}

/// Plays a round and nine steps with one policy. Another policy, restored from its state, decides
/// and learns the same, bit for bit.
fn assert_restored_policy_continues(new: impl Fn() -> Ppo) {
    let mut original = new();
    play(&mut original, &mut fleet());
    let mut envs = fleet();
    for _ in 0..9 {
        step(&mut original, &mut envs);
    }
    original.roll_back(1, Some(4), -10.0).unwrap();
    let saved = original.save().unwrap();
    let mut restored = new();
    restored.restore(&saved).unwrap();
    assert_eq!(restored.save().unwrap(), saved);
    let mut copies = envs.clone();
    for _ in 9..STEPS {
        assert_eq!(step(&mut restored, &mut copies), step(&mut original, &mut envs));
    }
    assert_eq!(end(&mut restored, &copies), end(&mut original, &envs));
    let (one, other) = (restored.save().unwrap(), original.save().unwrap());
    assert_eq!(one.memory, other.memory);
    assert_eq!(
        restored.policy().state_dict().unwrap(),
        original.policy().state_dict().unwrap(),
        "the weights after the update"
    );
}

#[test]
fn a_restored_policy_continues_bit_for_bit() {
    assert_restored_policy_continues(|| ppo(small(), 2, Learning::On));
}

#[test]
fn a_policy_with_minibatches_continues_bit_for_bit() {
    let config = || PpoConfig { minibatches: 2, ..small() };
    assert_restored_policy_continues(|| ppo(config(), 2, Learning::On));
    // Minibatches of one env and of two: twice as many optimiser steps as passes.
    let weights = |config: PpoConfig| {
        let mut policy = ppo(PpoConfig { target_kl: 1e3, ..config }, 2, Learning::On);
        let report = play(&mut policy, &mut fleet()).1.unwrap();
        assert_eq!((report.epochs, report.skipped), (4, 0));
        policy.policy().optimiser_dict().unwrap()
    };
    let steps = |dict: &meristem_nn::StateDict| {
        let step = dict.iter().find(|(name, _)| name.ends_with(".step")).unwrap().1;
        step.as_f32().map(|step| step[0])
    };
    assert_eq!(steps(&weights(small())).map(|steps| 2.0 * steps), steps(&weights(config())));
}

#[test]
fn a_teacher_follows_the_rules_of_each_env() {
    let mut policy =
        ppo(small(), 2, Learning::On).with_teacher(Heuristic::new(quick_heuristic()), 1);
    let rules =
        |parameters_per_image| TeacherRules { heuristic: quick_heuristic(), parameters_per_image };
    // The second env may not grow.
    policy.set_teacher_rules(vec![rules(1e9), rules(0.0), rules(1e9)]);
    let (mut own, mut envs) = (Heuristic::new(quick_heuristic()), fleet());
    for _ in 0..STEPS {
        envs.iter_mut().for_each(Toy::epoch);
        let mut views: Vec<_> = envs.iter().map(|toy| toy.env.view()).collect();
        views.iter_mut().for_each(|view| view.facts.train_samples = 9);
        let expected = own.decide_all(&views).unwrap();
        let actions = policy.decide_all(&views).unwrap();
        assert_eq!((actions[0], actions[1], actions[2]), (expected[0], Action::Wait, expected[2]));
        let both = envs.iter_mut().zip(&actions);
        let rewards: Vec<f32> = both.map(|(toy, action)| toy.act(action).1 as f32).collect();
        policy.reward_all(&rewards).unwrap();
    }
    assert!(envs[0].env.host.slots().iter().any(|slot| slot.module.is_some()));
}

#[test]
fn a_policy_restored_during_demonstrations_continues_bit_for_bit() {
    let teacher = || Heuristic::new(quick_heuristic());
    assert_restored_policy_continues(|| ppo(small(), 2, Learning::On).with_teacher(teacher(), 2));
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let mut original = ppo(small(), 2, Learning::On);
    let mut envs = fleet();
    for _ in 0..9 {
        step(&mut original, &mut envs);
    }
    let saved = original.save().unwrap();
    let mut foreign = ppo(small(), 1, Learning::On);
    let before = foreign.save().unwrap();
    let error = foreign.restore(&saved).unwrap_err();
    assert!(matches!(error, Error::BadState { .. }), "{error}");
    let mut damaged = saved.clone();
    damaged.tensors.0.remove("rollout.legal");
    let error = original.restore(&damaged).unwrap_err();
    assert!(matches!(error, Error::BadState { .. }), "{error:?}");
    assert!(error.to_string().contains("rollout.legal"), "{error}");
    assert_eq!(foreign.save().unwrap(), before);
    assert_eq!(original.save().unwrap(), saved);
}

/// A state from before the draw moved to the device: no entropies, and one row less in each result
/// of the draw.
fn older(state: &ControllerState) -> ControllerState {
    let mut older = state.clone();
    older.tensors.0.remove("rollout.entropies").unwrap();
    for name in ["choices", "legal", "log_probs", "values"] {
        let tensor = older.tensors.0.get_mut(&format!("rollout.{name}")).unwrap();
        let mut shape = tensor.shape.clone();
        shape[0] -= 1;
        let values = tensor.as_f32().unwrap()[..shape.iter().product()].to_vec();
        *tensor = HostTensor::f32(&shape, values);
    }
    older
}

#[test]
fn a_state_in_the_older_format_continues_bit_for_bit() {
    let mut original = ppo(small(), 2, Learning::On);
    let mut envs = fleet();
    for _ in 0..9 {
        step(&mut original, &mut envs);
    }
    let saved = older(&original.save().unwrap());
    let mut restored = ppo(small(), 2, Learning::On);
    restored.restore(&saved).unwrap();
    let mut copies = envs.clone();
    for _ in 9..STEPS {
        assert_eq!(step(&mut restored, &mut copies), step(&mut original, &mut envs));
    }
    end(&mut restored, &copies);
    end(&mut original, &envs);
    assert_eq!(
        restored.policy().state_dict().unwrap(),
        original.policy().state_dict().unwrap(),
        "the weights after the update"
    );
}

#[test]
fn a_rollback_is_a_termination_and_penalises_its_cause() {
    let mut it = ppo(small(), 2, Learning::On);
    let mut envs = fleet();
    let mut paid = vec![];
    for _ in 0..6 {
        paid.extend(step(&mut it, &mut envs).1);
    }
    it.roll_back(1, Some(2), -10.0).unwrap();
    paid[2 * ENVS + 1] -= 10.0;
    paid.extend(step(&mut it, &mut envs).1);
    let state = it.save().unwrap();
    assert_eq!(buffer(&state, "rollout.rewards")[..7 * ENVS], paid);
    let ones = |name: &str, wanted: f32| -> Vec<usize> {
        let values = buffer(&state, name);
        (0..7 * ENVS).filter(|cell| values[*cell] == wanted).collect()
    };
    assert_eq!(
        ones("rollout.terminated", 1.0),
        [5 * ENVS + 1],
        "the last transition before the rollback"
    );
    assert_eq!(ones("rollout.keep", 0.0), [0, 1, 2, 6 * ENVS + 1], "starts of trajectories");
    assert_eq!(ones("rollout.truncated", 1.0), [0; 0]);
    let refused = |it: &mut Ppo, env, cause, words: &str| {
        let error = it.roll_back(env, cause, -10.0).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(&mut it, 1, Some(7), "one of the 7 steps of this round so far, got Some(7)");
    // The round has transitions, so a rollback needs a cause.
    refused(&mut it, 1, None, "one of the 7 steps of this round so far, got None");
    refused(&mut it, ENVS, Some(0), &format!("one of {ENVS} envs, got env {ENVS}"));
    // A rejected call changes nothing. Before the first transition there is nothing to end.
    assert_eq!(it.save().unwrap(), state);
    let mut early = ppo(small(), 2, Learning::On);
    early.roll_back(1, None, -10.0).unwrap();
    refused(&mut early, 1, Some(0), "one of the 0 steps of this round so far, got Some(0)");
    let rewards = buffer(&early.save().unwrap(), "rollout.rewards");
    assert!(rewards.iter().all(|reward| *reward == 0.0));
}

#[test]
fn bootstrap_decides_between_truncation_and_termination() {
    let learned = |bootstrap| {
        let mut it = ppo(PpoConfig { bootstrap, ..small() }, 2, Learning::On);
        play(&mut it, &mut fleet());
        it.policy().state_dict().unwrap()
    };
    assert_ne!(learned(true), learned(false), "the value after the last step counts");
}

#[test]
fn the_report_of_a_round_is_complete() {
    let mut it = ppo(small(), 2, Learning::On);
    let mut envs = fleet();
    let (mean_return, report) = play(&mut it, &mut envs);
    let report = report.unwrap();
    assert!((report.mean_return - mean_return).abs() < 1e-5 * (1.0 + mean_return.abs()));
    assert_eq!(report.transitions, ENVS * STEPS as usize);
    assert_eq!(report.ops.iter().sum::<u64>() as usize, report.transitions);
    assert_eq!((report.epochs, report.skipped, report.stopped_by_kl), (4, 0, false));
    assert!(report.entropies.iter().all(|e| (0.0..=1.0 + 1e-6).contains(e)), "{report:?}");
    assert!(report.entropies[0] > 0.9, "an untrained policy is nearly uniform: {report:?}");
    assert!(report.kl >= 0.0 && report.gradient_norm > 0.0 && report.return_scale > 0.0);
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<meristem_control::RoundReport>(&text).unwrap(), report);
}

#[test]
fn the_kl_limit_stops_before_the_step() {
    let config = PpoConfig { lr: 0.05, target_kl: 1e-4, ..small() };
    let mut it = ppo(config, 2, Learning::On);
    let report = play(&mut it, &mut fleet()).1.unwrap();
    assert!(report.stopped_by_kl && report.kl > 1.5e-4, "{report:?}");
    assert_eq!(report.epochs, 1, "the first pass has KL 0");
}

#[test]
fn three_consecutive_skipped_updates_end_the_run() {
    let mut it = ppo(PpoConfig { lr: 1e30, ..small() }, 2, Learning::On);
    let mut envs = fleet();
    let mut skipped = 0;
    for _ in 0..20 {
        envs.iter_mut().for_each(Toy::reset);
        (0..ENVS).for_each(|env| it.begin_episode(env));
        for _ in 0..STEPS {
            step(&mut it, &mut envs); // `act` asserts that the action is legal
        }
        let views: Vec<_> = envs.iter().map(|toy| toy.env.view()).collect();
        match it.end_round(&views) {
            Ok(report) => skipped += report.unwrap().skipped,
            Err(error) => {
                assert!(matches!(error, Error::Diverged { skipped: 3 }), "{error}");
                assert_eq!(skipped, 2, "the third skipped update fails");
                return;
            }
        }
    }
    panic!("no end after {skipped} skipped updates");
}

#[test]
fn a_policy_file_restores_the_same_policy() {
    let mut learned = ppo(small(), 2, Learning::On);
    for _ in 0..3 {
        play(&mut learned, &mut fleet());
    }
    let (weights, metadata) = learned.export().unwrap();
    assert_eq!(policy_width(&metadata).unwrap(), 8);
    assert_eq!(policy_seeds(&metadata).unwrap(), [SEED]);
    let earned = |it: &mut Ppo| {
        let mut envs = fleet();
        play(it, &mut envs);
        envs.iter().map(|toy| toy.total).collect::<Vec<_>>()
    };
    for learning in [Learning::Off, Learning::Greedy] {
        let mut judges = [0, 1].map(|_| ppo(small(), 2, learning));
        for judge in &mut judges {
            judge.import(&weights, &metadata).unwrap();
        }
        let [a, b] = &mut judges;
        // In a second episode a drawing policy differs; a greedy policy repeats its actions.
        let [first, second] = [0, 1].map(|_| earned(a));
        assert_eq!(first == second, learning == Learning::Greedy);
        assert_eq!([0, 1].map(|_| earned(b)), [first, second]);
        assert_eq!(
            a.export().unwrap(),
            (weights.clone(), metadata.clone()),
            "without learning nothing changes"
        );
    }

    let refused = |it: &mut Ppo, metadata: &Metadata| {
        let before = it.save().unwrap();
        let error = it.import(&weights, metadata).unwrap_err();
        assert_eq!(it.save().unwrap(), before, "a rejected file changes nothing");
        assert!(matches!(error, Error::Policy { .. }));
        error.to_string()
    };
    let text = refused(&mut ppo(small(), 3, Learning::On), &metadata);
    assert!(text.contains("for 2 slots (r0c0, r0c1), this run has 3"), "{text}");
    let text = refused(&mut ppo(PpoConfig { hidden: 16, ..small() }, 2, Learning::On), &metadata);
    assert!(text.contains("width is 8, this run needs 16"), "{text}");
    let with = |key: &str, value: &str| {
        let mut metadata = metadata.clone();
        metadata.insert(key.into(), value.into());
        metadata
    };
    let mut it = ppo(small(), 2, Learning::On);
    let cases = [
        ("meristem_policy", "9", "version 9"),
        ("blueprints", r#"["norm"]"#, "with the blueprints norm"),
        ("slots", "three", "`slots` is damaged"),
        ("normalizer", "{}", "`normalizer` is damaged"),
        ("seeds", "7", "`seeds` is damaged"),
        ("return_scale", r#"{"count":-1,"mean":0,"m2":0}"#, "normaliser is damaged"),
    ];
    for (key, value, expected) in cases {
        let text = refused(&mut it, &with(key, value));
        assert!(text.contains(expected), "{text}");
    }
    let text = refused(&mut it, &Metadata::default());
    assert!(text.contains("not a policy file"), "{text}");
    // A policy that continues from a file has the file's seeds, then its own, each once.
    for (before, after) in [("[3]", "[3,7]"), ("[7,3]", "[7,3]"), ("[]", "[7]")] {
        let mut it = ppo(small(), 2, Learning::On);
        it.import(&weights, &with("seeds", before)).unwrap();
        assert_eq!(it.export().unwrap().1["seeds"], after);
        let mut resumed = ppo(small(), 2, Learning::On);
        resumed.restore(&it.save().unwrap()).unwrap();
        assert_eq!(resumed.export().unwrap().1["seeds"], after);
    }
    let mut unknown = metadata.clone();
    unknown.remove("seeds");
    assert_eq!(policy_seeds(&unknown).unwrap(), [0; 0], "older files have no seeds");
    it.import(&weights, &unknown).unwrap();
}

#[test]
fn calls_in_another_order_are_refused() {
    let mut it = ppo(small(), 2, Learning::On);
    let mut envs = fleet();
    let refused = |error: Error| assert!(matches!(error, Error::Protocol { .. }), "{error}");
    refused(it.reward_all(&[0.0; ENVS]).unwrap_err());
    let views: Vec<_> = envs.iter().map(|toy| toy.env.view()).collect();
    refused(it.decide_all(&views[..2]).unwrap_err());
    let other = FakeEnv::new(2, tiny(1, quick()), STEPS);
    refused(it.decide_all(&[views[0], views[1], other.view()]).unwrap_err());
    assert!(it.end_round(&views).unwrap().is_none(), "a round without steps has no report");
    it.decide_all(&views).unwrap();
    refused(it.decide_all(&views).unwrap_err());
    refused(it.end_round(&views).unwrap_err());
    refused(it.reward_all(&[0.0; 2]).unwrap_err());
    it.reward_all(&[0.0; ENVS]).unwrap();
    for _ in 1..STEPS {
        step(&mut it, &mut envs);
    }
    let views: Vec<_> = envs.iter().map(|toy| toy.env.view()).collect();
    refused(it.decide_all(&views).unwrap_err());
    assert!(it.end_round(&views).unwrap().is_some());
}

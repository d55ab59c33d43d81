//! The heuristic on scripted histories.

use std::sync::Arc;

use crate::common::quick_heuristic;
use meristem_control::{
    Action, Controller, ControllerState, EnvView, Error, Heuristic, HeuristicConfig, NoController,
    Op, Outcome, apply, legal,
};
use meristem_grow::{
    BlueprintSet, GateInputs, Gates, GradientHealth, Host, HostSpec, ImageShape, Rules, Stage,
};
use proptest::prelude::*;

/// One env with a scripted accuracy and scripted measurements.
struct Env {
    index: usize,
    host: Host,
    accuracies_pp: Vec<f32>,
    measured: Vec<GateInputs>,
    step: u32,
}

impl Env {
    fn new(index: usize, slots: &str, rules: Rules) -> Self {
        let spec: HostSpec = "baseline".parse().unwrap();
        let image = ImageShape { channels: 1, height: 28, width: 28, classes: 10 };
        let (slots, set) = (spec.parse_slots(slots).unwrap(), Arc::new(BlueprintSet::standard()));
        let measured = vec![worth(None); slots.len()];
        let host = Host::new(spec, image, &slots, set, rules).unwrap();
        Self { index, host, accuracies_pp: vec![], measured, step: 0 }
    }

    /// A step: an epoch that ends in this accuracy, a decision, and the deed.
    fn step(&mut self, controller: &mut dyn Controller, accuracy_pp: f32) -> (Action, Outcome) {
        self.host.step();
        self.accuracies_pp.push(accuracy_pp);
        let view = EnvView {
            env: self.index,
            host: &self.host,
            step: self.step,
            episode_steps: 100,
            accuracies_pp: &self.accuracies_pp,
            losses: &[],
            measured: &self.measured,
            history: &[],
            last: None,
        };
        let action = controller.decide_all(&[view]).unwrap()[0];
        legal(&action, &self.host).unwrap();
        self.step += 1;
        (action, apply(&action, &mut self.host, &self.measured, Some(accuracy_pp)).unwrap())
    }

    fn op(&mut self, controller: &mut dyn Controller, accuracy_pp: f32) -> Op {
        self.step(controller, accuracy_pp).0.op()
    }

    /// Steps on a flat accuracy until an op other than WAIT is chosen.
    fn until_action(&mut self, controller: &mut dyn Controller, accuracy_pp: f32) -> (u32, Action) {
        for waited in 0..50 {
            let (action, _) = self.step(controller, accuracy_pp);
            if action != Action::Wait {
                return (waited, action);
            }
        }
        panic!("waits for ever");
    }
}

fn worth(contribution_pp: Option<f32>) -> GateInputs {
    GateInputs { gradient_health: GradientHealth::from_norms(&[1.0, 2.0]), contribution_pp }
}

fn quick() -> Rules {
    Rules { gates: Gates::default().quick(), ..Rules::default() }
}

fn blueprint_of(action: Action) -> usize {
    match action {
        Action::Germinate { blueprint, .. } => blueprint,
        other => panic!("{other:?}"),
    }
}

#[test]
fn it_germinates_on_the_third_step_of_a_plateau() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "all", quick());
    // Gains of 10, .5 (enough), .49, .49, .4: three in a row are small at the last.
    for accuracy in [10.0, 20.0, 20.5, 20.99, 21.48] {
        assert_eq!(env.op(&mut heuristic, accuracy), Op::Wait, "{accuracy}");
    }
    assert_eq!(env.op(&mut heuristic, 21.9), Op::Germinate);
    // A falling accuracy gains little too.
    let mut env = Env::new(0, "all", quick());
    for accuracy in [50.0, 49.0, 48.0] {
        assert_eq!(env.op(&mut heuristic, accuracy), Op::Wait);
    }
    assert_eq!(env.op(&mut heuristic, 47.0), Op::Germinate);
}

#[test]
fn it_leads_a_good_module_through_its_life() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c1,r0c0,r1c0", quick());
    let (waited, action) = env.until_action(&mut heuristic, 50.0);
    assert_eq!((waited, action.slot()), (3, Some(0)), "the first of the smallest slots");
    env.measured[0] = worth(Some(3.0));
    let mut seen = vec![];
    for _ in 0..20 {
        let (action, outcome) = env.step(&mut heuristic, 51.0);
        seen.push((action.op(), env.host.slots()[0].stage));
        assert!(outcome.succeeded, "it asks when the gate will pass");
        if env.host.slots()[0].stage == Stage::Fossilized {
            break;
        }
    }
    use Op::*;
    use Stage::*;
    let mut expected =
        vec![(Advance, Training), (Wait, Training), (Wait, Training), (Advance, Blending)];
    expected.extend([(Wait, Blending); 4]); // tempo 5
    expected.extend([(Advance, Holding), (Fossilize, Fossilized)]);
    assert_eq!(seen, expected);
}

#[test]
fn it_prunes_what_does_not_contribute_or_did_not_help() {
    // Contribution, accuracy at the end (50 at germination), kept or not.
    for (contribution, accuracy, kept) in [
        (Some(3.0), 51.0, true),
        (Some(0.5), 51.0, false),
        (Some(-2.0), 51.0, false),
        (Some(3.0), 50.0, false),
        (Some(3.0), 49.0, false),
    ] {
        let mut heuristic = Heuristic::default();
        let mut env = Env::new(0, "r0c0", quick());
        env.until_action(&mut heuristic, 50.0);
        env.measured[0] = worth(contribution);
        while env.host.slots()[0].stage != Stage::Holding {
            env.step(&mut heuristic, accuracy);
        }
        env.step(&mut heuristic, accuracy);
        let expected = if kept { Stage::Fossilized } else { Stage::Pruned };
        assert_eq!(env.host.slots()[0].stage, expected, "{contribution:?} {accuracy}");
    }
}

#[test]
fn a_gate_that_goes_on_refusing_does_not_block_the_env() {
    // Enough for the heuristic (.5), not for the gate (1.0).
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0", quick());
    env.until_action(&mut heuristic, 50.0);
    env.measured[0] = worth(Some(0.8));
    while env.host.slots()[0].stage != Stage::Holding {
        env.step(&mut heuristic, 51.0);
    }
    for _ in 0..4 {
        let (action, outcome) = env.step(&mut heuristic, 51.0);
        assert_eq!((action.op(), outcome.succeeded), (Op::Fossilize, false));
    }
    assert_eq!(env.op(&mut heuristic, 51.0), Op::Prune);

    // Gradients that are never measured: the gate to Blending never passes.
    let mut env = Env::new(0, "r0c0", quick());
    env.until_action(&mut heuristic, 50.0);
    env.measured[0] = GateInputs::default();
    assert_eq!(env.op(&mut heuristic, 50.0), Op::Advance);
    let (waited, action) = env.until_action(&mut heuristic, 50.0);
    assert_eq!((waited + 1, action.op()), (3 + 5, Op::Prune));
}

#[test]
fn training_is_given_up_when_accuracy_falls() {
    let fall = |to: f32| {
        let mut heuristic = Heuristic::default();
        let mut env = Env::new(0, "r0c0", Rules::default()); // 10 steps of Training
        env.until_action(&mut heuristic, 50.0);
        assert_eq!(env.op(&mut heuristic, to), Op::Advance);
        env.until_action(&mut heuristic, to)
    };
    let (waited, action) = fall(47.9);
    assert_eq!((waited + 1, action.op()), (5, Op::Prune));
    let (waited, action) = fall(48.0);
    assert_eq!((waited + 1, action.op()), (10, Op::Advance), "2 points are not more than 2");
}

/// Prunes whatever grows, until `count` blueprints were tried; returns them and the waits between.
fn tried(heuristic: &mut Heuristic, env: &mut Env, count: usize) -> Vec<(u32, usize)> {
    let mut tried = vec![];
    while tried.len() < count {
        let (waited, action) = env.until_action(heuristic, 50.0);
        tried.push((waited, blueprint_of(action)));
        env.measured[0] = worth(Some(-1.0));
        while env.host.slots()[0].stage != Stage::Pruned {
            env.step(heuristic, 50.0);
        }
    }
    tried
}

#[test]
fn blueprints_take_turns_and_pruned_ones_go_last() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(2, "r0c0", quick());
    let order: Vec<usize> = tried(&mut heuristic, &mut env, 9).iter().map(|t| t.1).collect();
    // After each was pruned once, the oldest penalty has decayed the furthest.
    assert_eq!(order, [2, 3, 4, 5, 6, 0, 1, 2, 3]);
}

#[test]
fn a_penalty_overrules_the_turn() {
    let config = HeuristicConfig { penalty_decay: 1.0, ..HeuristicConfig::default() };
    let mut heuristic = Heuristic::new(config);
    let mut env = Env::new(6, "r0c0", quick());
    assert_eq!(tried(&mut heuristic, &mut env, 1)[0].1, 6);
    // A new episode: the turn is at 0 and 6 keeps its penalty, so 0 to 5 come before it.
    heuristic.begin_episode(6);
    let mut env = Env::new(6, "r0c0", quick());
    let order: Vec<usize> = tried(&mut heuristic, &mut env, 8).iter().map(|t| t.1).collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 5, 6, 0]);
}

#[test]
fn a_penalty_halves_every_step() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0", quick());
    tried(&mut heuristic, &mut env, 1);
    for penalty in [2.0, 1.0, 0.5] {
        env.step(&mut heuristic, 50.0);
        let state = serde_json::to_value(&heuristic).unwrap();
        assert_eq!(state["memories"][0]["penalties"][0], penalty);
    }
}

#[test]
fn what_was_live_when_an_episode_ended_was_not_pruned() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0", quick());
    let (_, first) = env.until_action(&mut heuristic, 50.0);
    env.step(&mut heuristic, 50.0);
    heuristic.begin_episode(0);
    let mut env = Env::new(0, "r0c0", quick());
    let (waited, second) = env.until_action(&mut heuristic, 50.0);
    assert_eq!((waited, blueprint_of(first), blueprint_of(second)), (3, 0, 1), "no pause");
}

#[test]
fn it_waits_five_steps_after_a_prune_even_with_other_slots_free() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0,r0c1", quick());
    env.until_action(&mut heuristic, 50.0);
    env.measured = vec![worth(Some(-1.0)); 2];
    while env.host.slots()[0].stage != Stage::Pruned {
        env.step(&mut heuristic, 50.0);
    }
    let (waited, action) = env.until_action(&mut heuristic, 50.0);
    assert_eq!(waited + 1, 5, "on the fifth step after it");
    assert_eq!(action.slot(), Some(1), "the other is still embargoed");
}

#[test]
fn modules_go_to_the_smallest_free_slot() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r1c0,r0c1,r0c2", Rules { max_modules: 2, ..quick() });
    for expected in [2, 0] {
        // Slots in index order: r0c1 (16 channels), r0c2 (32), r1c0 (8).
        let (_, action) = env.until_action(&mut heuristic, 50.0);
        let slot = action.slot().unwrap();
        assert_eq!(slot, expected);
        env.measured[slot] = worth(Some(4.0));
        while env.host.slots()[slot].stage != Stage::Fossilized {
            env.step(&mut heuristic, 51.0);
        }
    }
    for _ in 0..20 {
        assert_eq!(env.op(&mut heuristic, 51.0), Op::Wait, "two modules are all it may have");
    }
}

#[test]
fn the_envs_of_a_fleet_begin_with_different_blueprints() {
    let mut heuristic = Heuristic::default();
    for env in 0..9 {
        let (_, action) = Env::new(env, "all", quick()).until_action(&mut heuristic, 50.0);
        assert_eq!(blueprint_of(action), env % 7);
    }
}

#[test]
fn none_does_nothing() {
    let mut env = Env::new(0, "all", quick());
    for _ in 0..30 {
        assert_eq!(env.step(&mut NoController, 50.0).0, Action::Wait);
    }
}

#[test]
fn its_constants_are_read_strictly() {
    let config: HeuristicConfig = serde_json::from_str(r#"{"plateau_gain_pp": 1.5}"#).unwrap();
    assert_eq!(config, HeuristicConfig { plateau_gain_pp: 1.5, ..HeuristicConfig::default() });
    let unknown = serde_json::from_str::<HeuristicConfig>(r#"{"plateau": 1}"#).unwrap_err();
    assert!(
        unknown.is_data() && unknown.to_string().contains("unknown field `plateau`"),
        "{unknown}"
    );
}

proptest! {
    /// Whatever the accuracies and contributions: legal (checked in `Env::step`), the same twice,
    /// the same after being written down in the middle, and no env affects another.
    #[test]
    fn it_is_legal_deterministic_and_resumable(
        script in prop::collection::vec(
            (0.0f32..100.0, prop::option::of(-5.0f32..5.0), 0u8..10), 1..120),
        pause in 0usize..120,
    ) {
        let run = |others: bool, resumed: bool| {
            let mut heuristic = Heuristic::default();
            let mut env = Env::new(1, "r0c0,r0c1,r1c2", quick());
            let mut other = Env::new(0, "all", quick());
            let mut actions = vec![];
            for (i, (accuracy, contribution, quirk)) in script.iter().enumerate() {
                let accuracy = if *quirk == 0 { f32::NAN } else { 50.0 + accuracy / 50.0 };
                env.measured = vec![worth(*contribution); if *quirk == 1 { 0 } else { 3 }];
                if others {
                    other.step(&mut heuristic, accuracy + 1.0);
                }
                actions.push(env.step(&mut heuristic, accuracy).0);
                if resumed && i == pause {
                    let text = serde_json::to_string(&heuristic).unwrap();
                    heuristic = serde_json::from_str(&text).unwrap();
                }
                if *quirk == 2 {
                    env.host.prune_live();
                }
            }
            actions
        };
        let first = run(false, false);
        prop_assert_eq!(&first, &run(false, false));
        prop_assert_eq!(&first, &run(true, false));
        prop_assert_eq!(&first, &run(false, true));
    }
}

/// A heuristic that is saved and restored decides as the one that went on.
#[test]
fn a_restored_heuristic_goes_on() {
    let mut original = Heuristic::new(quick_heuristic());
    let mut env = Env::new(1, "r0c0,r0c1", Rules::default());
    for _ in 0..12 {
        env.op(&mut original, 50.0);
    }
    let mut restored = Heuristic::new(quick_heuristic());
    restored.restore(&original.save().unwrap()).unwrap();
    assert_eq!(restored, original);
    let foreign = ControllerState { memory: vec![1, 2, 3], ..ControllerState::default() };
    let error = restored.restore(&foreign).unwrap_err();
    assert!(matches!(error, Error::BadState { .. }), "{error:?}");
    assert!(error.to_string().contains("`heuristic`"), "{error}");
    assert_eq!(restored, original, "a state that does not fit changes nothing");
}

//! The heuristic on scripted histories.

mod scripted_env;
mod width;

use meristem_control::{
    Action, ActionOp, Controller, ControllerState, Error, Heuristic, KeepRule, NoController,
};
use meristem_grow::{GateInputs, Rules, Stage};
use meristem_nn::PairedLoss;
use proptest::prelude::*;

use self::scripted_env::{Env, quick, with, worth};
use crate::common::quick_heuristic;

fn placed(action: Action) -> (usize, usize) {
    match action {
        Action::Germinate { slot, blueprint, .. } => (slot, blueprint),
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_a_required_plateau_it_germinates_at_once() {
    let mut env = Env::new(0, "all", quick());
    assert_eq!(env.op(&mut Heuristic::default(), 10.0), ActionOp::Germinate);
}

/// The slope of four scores against its standard error. A steady gain of 2 points a step is
/// significantly above .5; a mean gain of 2 with a scatter of 5 is not.
#[test]
fn a_plateau_has_no_significant_gain() {
    let germinates = |scores: &[f32]| {
        let mut heuristic = with(|config| config.plateau_steps = 3);
        let mut env = Env::new(0, "all", quick());
        let ops = scores.iter().map(|score| env.op(&mut heuristic, *score));
        ops.collect::<Vec<_>>().iter().position(|op| *op == ActionOp::Germinate)
    };
    assert_eq!(germinates(&[50.0, 52.1, 53.9, 56.0, 58.1, 60.0]), None);
    assert_eq!(germinates(&[50.0, 57.0, 52.0, 59.0]), Some(3), "too few steps for a plateau");
    assert_eq!(germinates(&[50.0, 50.1, 50.0, 50.1]), Some(3));
    assert_eq!(germinates(&[50.0, 49.0, 48.0, 47.0]), Some(3), "a falling score gains little");
    // The gain of one step has no standard error.
    let mut heuristic = with(|config| config.plateau_steps = 1);
    let mut env = Env::new(0, "all", quick());
    for score in [50.0, 50.6, 51.2] {
        assert_eq!(env.op(&mut heuristic, score), ActionOp::Wait);
    }
    assert_eq!(env.op(&mut heuristic, 51.6), ActionOp::Germinate);
}

#[test]
fn a_good_module_is_grown_to_fossilized() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c1", quick());
    assert_eq!(env.op(&mut heuristic, 50.0), ActionOp::Germinate);
    env.measured[0] = worth(Some(3.0));
    let mut seen = vec![];
    while env.host.slots()[0].stage != Stage::Fossilized {
        let (action, outcome) = env.step(&mut heuristic, 50.0);
        seen.push((action.op(), env.host.slots()[0].stage));
        assert!(outcome.succeeded && seen.len() < 20, "ADVANCE only when the gate passes");
    }
    use ActionOp::*;
    use Stage::*;
    let mut expected =
        vec![(Advance, Training), (Wait, Training), (Wait, Training), (Advance, Blending)];
    expected.extend([(Wait, Blending); 2]); // tempo 3
    expected.extend([(Advance, Holding), (Fossilize, Fossilized)]);
    assert_eq!(seen, expected);
}

/// Stage of a module after its first step in Holding, with this contribution in loss.
fn judged(contribution_loss: Option<PairedLoss>) -> Stage {
    judged_by(KeepRule::Significant, contribution_loss)
}

fn judged_by(rule: KeepRule, contribution_loss: Option<PairedLoss>) -> Stage {
    let mut heuristic = with(|config| config.keep_modules = rule);
    let mut env = Env::new(0, "r0c0", quick());
    env.step(&mut heuristic, 50.0);
    env.measured[0] = GateInputs { contribution_loss, ..worth(Some(3.0)) };
    while env.host.slots()[0].stage != Stage::Holding {
        env.step(&mut heuristic, 50.0);
    }
    env.step(&mut heuristic, 50.0);
    env.host.slots()[0].stage
}

/// The contribution in loss decides, relative to its standard error.
#[test]
fn a_significant_contribution_is_fossilized() {
    let loss = |difference, standard_error| Some(PairedLoss { difference, standard_error });
    assert_eq!(judged(loss(0.1, 0.049)), Stage::Fossilized);
    assert_eq!(judged(loss(0.1, 0.051)), Stage::Pruned);
    assert_eq!(judged(loss(-0.1, 0.01)), Stage::Pruned);
    assert_eq!(judged(None), Stage::Holding, "no measurement yet");
    use KeepRule::{All, Positive};
    assert_eq!(judged_by(Positive, loss(0.1, 0.2)), Stage::Fossilized);
    assert_eq!(judged_by(Positive, loss(-0.1, 0.2)), Stage::Pruned);
    assert_eq!(judged_by(Positive, None), Stage::Holding);
    assert_eq!(judged_by(All, loss(-0.1, 0.01)), Stage::Fossilized);
    assert_eq!(judged_by(All, None), Stage::Fossilized);
}

#[test]
fn a_gate_that_keeps_refusing_does_not_block_the_env() {
    // Enough for the heuristic, too little for the gate (1.0 points).
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0", quick());
    env.step(&mut heuristic, 50.0);
    env.measured[0] = worth(Some(0.8));
    while env.host.slots()[0].stage != Stage::Holding {
        env.step(&mut heuristic, 51.0);
    }
    for _ in 0..4 {
        let (action, outcome) = env.step(&mut heuristic, 51.0);
        assert_eq!((action.op(), outcome.succeeded), (ActionOp::Fossilize, false));
    }
    assert_eq!(env.op(&mut heuristic, 51.0), ActionOp::Prune);

    // Gradients are never measured, so the gate to Blending never passes.
    let mut env = Env::new(0, "r0c0", quick());
    heuristic = Heuristic::default();
    env.step(&mut heuristic, 50.0);
    env.measured[0] = GateInputs::default();
    assert_eq!(env.op(&mut heuristic, 50.0), ActionOp::Advance);
    let (waited, action) = env.until_action(&mut heuristic, 50.0);
    assert_eq!((waited + 1, action.op()), (3 + 5, ActionOp::Prune));
}

#[test]
fn nothing_is_blended_into_a_host_that_overfits() {
    let mut env = Env::new(0, "r0c0", quick());
    env.gap = 1.3;
    let mut heuristic = Heuristic::default();
    for _ in 0..5 {
        assert_eq!(env.op(&mut heuristic, 50.0), ActionOp::Wait);
    }
    // The mean over three steps decides: 1.3, 1.2 and 1.2 average below the limit of 1.25.
    env.gap = 1.2;
    assert_eq!(env.op(&mut heuristic, 50.0), ActionOp::Wait);
    assert_eq!(env.op(&mut heuristic, 50.0), ActionOp::Germinate);
    assert_eq!(env.op(&mut heuristic, 50.0), ActionOp::Advance);
    env.gap = 1.5;
    env.measured[0] = worth(Some(3.0));
    let (_, action) = env.until_action(&mut heuristic, 50.0);
    assert_eq!(action.op(), ActionOp::Prune);
    // A module that is blended in stays.
    let mut env = Env::new(0, "r0c0", quick());
    let mut heuristic = Heuristic::default();
    env.step(&mut heuristic, 50.0);
    env.measured[0] = worth(Some(3.0));
    while env.host.slots()[0].stage != Stage::Blending {
        env.step(&mut heuristic, 50.0);
    }
    env.gap = 1.5;
    while env.host.slots()[0].stage != Stage::Fossilized {
        assert_ne!(env.op(&mut heuristic, 50.0), ActionOp::Prune);
    }
}

/// conv_heavy (index 6) has the most parameters, in the slot with the most channels.
#[test]
fn the_largest_modules_come_first_and_the_next_while_one_blends() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0,r0c1,r0c2", Rules { max_modules: 2, ..quick() });
    for expected in [(2, 6), (1, 6)] {
        let action = loop {
            let (action, _) = env.step(&mut heuristic, 50.0);
            if action.op() == ActionOp::Germinate {
                break action;
            }
        };
        assert_eq!(placed(action), expected);
        env.measured = vec![worth(Some(4.0)); 3];
    }
    assert_eq!(env.host.slots()[2].stage, Stage::Blending);
    for _ in 0..30 {
        assert_ne!(env.op(&mut heuristic, 50.0), ActionOp::Germinate, "the limit is two modules");
    }
}

/// A baseline host for 28×28 images has 6,274 parameters; conv_heavy has 1,184, 4,672 and 18,560.
#[test]
fn the_budget_counts_host_and_modules() {
    for (budget, expected) in [
        (6_274 + 18_560, Some((2, 6))),
        (6_274 + 18_559, Some((2, 5))),
        (6_274 + 4_672, Some((1, 6))),
        (6_274 + 17, Some((0, 0))),
        (6_274 + 16, None),
        (100, None),
    ] {
        let mut heuristic = with(|config| config.max_parameters = Some(budget));
        let mut env = Env::new(0, "r0c0,r0c1,r0c2", quick());
        assert_eq!(heuristic.config().lacks_room(&env.host), expected.is_none(), "{budget}");
        let (action, _) = env.step(&mut heuristic, 50.0);
        let got = (action != Action::Wait).then(|| placed(action));
        assert_eq!(got, expected, "{budget}");
    }
    // A module counts as soon as it has germinated.
    let mut heuristic = with(|config| config.max_parameters = Some(6_274 + 4_672 + 100));
    let mut env = Env::new(0, "r0c0,r0c1,r0c2", quick());
    let mut germinated = vec![];
    for _ in 0..20 {
        env.measured = vec![worth(Some(4.0)); 3];
        let (action, _) = env.step(&mut heuristic, 50.0);
        if action.op() == ActionOp::Germinate {
            germinated.push(placed(action));
        }
    }
    assert_eq!(germinated, [(1, 6), (0, 4)], "conv_small with 80 fits into the rest");
}

#[test]
fn no_module_germinates_too_late_to_fossilize() {
    // 8 steps after this one: one to Training, three in Training, three of blending, one in
    // Holding.
    for (step, expected) in [(100 - 9, ActionOp::Germinate), (100 - 8, ActionOp::Wait)] {
        let mut env = Env::new(0, "r0c0,r0c1,r0c2", quick());
        env.step = step;
        assert_eq!(env.op(&mut Heuristic::default(), 50.0), expected, "{step}");
    }
}

/// Prunes every module until `count` blueprints were tried. Returns blueprints and waits.
fn tried(heuristic: &mut Heuristic, env: &mut Env, count: usize) -> Vec<(u32, usize)> {
    let mut tried = vec![];
    while tried.len() < count {
        let (waited, action) = env.until_action(heuristic, 50.0);
        tried.push((waited, placed(action).1));
        env.measured[0] = worth(Some(-1.0));
        while env.host.slots()[0].stage != Stage::Pruned {
            env.step(heuristic, 50.0);
        }
        env.step = 0;
    }
    tried
}

#[test]
fn pruned_blueprints_come_last() {
    let mut heuristic = with(|config| config.penalty_decay = 1.0);
    let mut env = Env::new(2, "r0c0", quick());
    let order: Vec<usize> = tried(&mut heuristic, &mut env, 8).iter().map(|t| t.1).collect();
    // In order of parameters: 1,184, 720, 592, 152, 80, 40, 17; then the first again.
    assert_eq!(order, [6, 3, 5, 2, 4, 1, 0, 6]);
}

#[test]
fn a_penalty_halves_every_step() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0", quick());
    tried(&mut heuristic, &mut env, 1);
    for penalty in [2.0, 1.0, 0.5] {
        env.step(&mut heuristic, 50.0);
        let state = serde_json::to_value(&heuristic).unwrap();
        assert_eq!(state["memories"][0]["penalties"][6], penalty);
    }
}

#[test]
fn the_end_of_an_episode_is_no_prune() {
    let mut heuristic = Heuristic::default();
    for _ in 0..2 {
        let mut env = Env::new(0, "r0c0", quick());
        heuristic.begin_episode(0);
        assert_eq!(placed(env.step(&mut heuristic, 50.0).0), (0, 6), "no pause and no penalty");
        env.step(&mut heuristic, 50.0);
    }
}

#[test]
fn no_germination_for_five_steps_after_a_prune() {
    let mut heuristic = Heuristic::default();
    let mut env = Env::new(0, "r0c0,r0c1", Rules { max_modules: 1, ..quick() });
    env.step(&mut heuristic, 50.0);
    env.measured = vec![worth(Some(-1.0)); 2];
    while env.host.slots()[1].stage != Stage::Pruned {
        env.step(&mut heuristic, 50.0);
    }
    let (waited, action) = env.until_action(&mut heuristic, 50.0);
    assert_eq!(waited + 1, 5, "five steps after the prune");
    assert_eq!(action.slot(), Some(0), "the other slot is still embargoed");
}

#[test]
fn no_controller_always_waits() {
    let mut env = Env::new(0, "all", quick());
    for _ in 0..30 {
        assert_eq!(env.step(&mut NoController, 50.0).0, Action::Wait);
    }
}

proptest! {
    /// For all scores and contributions the actions are legal (`Env::step` checks) and
    /// deterministic. A save and restore in the middle changes nothing, and no env affects another.
    #[test]
    fn the_heuristic_is_legal_deterministic_and_resumable(
        script in prop::collection::vec(
            (0.0f32..100.0, prop::option::of(-5.0f32..5.0), 0u8..10), 1..120),
        pause in 0usize..120,
    ) {
        let run = |others: bool, resumed: bool| {
            let mut heuristic = Heuristic::default();
            let mut env = Env::new(1, "r0c0,r0c1,r1c2", quick());
            let mut other = Env::new(0, "all", quick());
            let mut actions = vec![];
            for (i, (score, contribution, quirk)) in script.iter().enumerate() {
                let score = if *quirk == 0 { f32::NAN } else { 50.0 + score / 50.0 };
                env.measured = vec![worth(*contribution); if *quirk == 1 { 0 } else { 3 }];
                if others {
                    other.step(&mut heuristic, score + 1.0);
                }
                actions.push(env.step(&mut heuristic, score).0);
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

/// A restored heuristic decides as the original one.
#[test]
fn a_restored_heuristic_decides_the_same() {
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
    assert_eq!(restored, original, "a rejected state changes nothing");
}

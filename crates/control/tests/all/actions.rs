//! Actions and heads: the static table, both conversions, and legality against the actual
//! transitions.

use std::collections::HashSet;
use std::sync::Arc;

use meristem_control::{
    Action, ActionOp, HEADS, HeadKind, HeadSize, Illegal, PpoConfig, apply, legal, legal_ops,
    legal_slots,
};
use meristem_grow::{
    AlphaTarget, BlueprintSet, Curve, GateInputs, Gates, GradientHealth, Host, HostSpec, Rules,
    Speed, Stage, Style, TaskShape, Tempo,
};
use proptest::prelude::*;

fn host(rules: Rules) -> Host {
    let spec: HostSpec = "minimal".parse().unwrap();
    let image = TaskShape { channels: 1, height: 8, width: 8, classes: 3 };
    let set = Arc::new(BlueprintSet::standard());
    let slots = spec.slots()[..3].to_vec();
    Host::new(spec, image, &slots, set, rules).unwrap()
}

fn fine() -> GateInputs {
    let gradient_health = GradientHealth::from_norms(&[1.0]);
    GateInputs { gradient_health, contribution_pp: Some(2.0), ..GateInputs::default() }
}

#[test]
fn the_table_of_heads_matches_the_specification() {
    let names = HEADS.map(|head| head.name);
    let expected =
        ["op", "slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"];
    assert_eq!(names, expected);
    assert_eq!(HEADS.map(|head| head.size.choices(3, 7)), [6, 3, 7, 4, 3, 3, 4, 5]);
    assert_eq!(PpoConfig::default().floors, [0.02; 8]);
    let multipliers = HEADS.map(|head| head.entropy_multiplier);
    assert_eq!(multipliers, [1.0, 1.0, 1.3, 1.2, 1.3, 1.2, 1.2, 1.2]);
    for (i, head) in HEADS.iter().enumerate() {
        assert_eq!(head.kind as usize, i, "sampling order");
    }
    assert_eq!(HEADS[HeadKind::Slot as usize].size, HeadSize::Slots);
    let ops = ActionOp::OF_HEAD.map(ActionOp::name);
    assert_eq!(ops, ["WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE"]);
    let used = |op| {
        let heads = HEADS.iter().filter(|head| head.is_used_by(op));
        heads.map(|head| head.name).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(used(ActionOp::Wait), "op");
    assert_eq!(used(ActionOp::Germinate), "op slot blueprint style tempo alpha_target");
    assert_eq!(
        used(ActionOp::SetAlphaTarget),
        "op slot style alpha_target alpha_speed alpha_curve"
    );
    assert_eq!(used(ActionOp::Prune), "op slot alpha_speed alpha_curve");
    assert_eq!(used(ActionOp::Fossilize), "op slot");
    assert_eq!(used(ActionOp::Advance), "op slot");
}

/// Every combination of choices, unused heads included.
fn all_choices() -> Vec<[usize; 8]> {
    let mut all = vec![[0; 8]];
    for (i, head) in HEADS.iter().enumerate() {
        // Includes one choice beyond the range.
        let choices =
            0..head.size.choices(2, 2) + usize::from(matches!(head.size, HeadSize::Fixed(_)));
        all = choices
            .flat_map(|choice| {
                all.iter().map(move |so_far| {
                    let mut next = *so_far;
                    next[i] = choice;
                    next
                })
            })
            .collect();
    }
    all
}

#[test]
fn choices_and_actions_convert_both_ways() {
    let mut actions = HashSet::new();
    for choices in all_choices() {
        let Some(op) = ActionOp::OF_HEAD.get(choices[0]) else {
            assert_eq!(Action::from_choices(&choices), None);
            continue;
        };
        let in_range = HEADS
            .iter()
            .zip(choices)
            .all(|(head, choice)| !head.is_used_by(*op) || choice < head.size.choices(2, 2));
        let Some(action) = Action::from_choices(&choices) else {
            assert!(!in_range, "{choices:?}");
            continue;
        };
        assert!(in_range, "{choices:?}");
        assert_eq!(action.op(), *op);
        // Heads that the op does not use come back as 0; the others are unchanged.
        for (i, head) in HEADS.iter().enumerate() {
            let expected = if head.is_used_by(*op) { choices[i] } else { 0 };
            assert_eq!(action.choices()[i], expected, "{} of {choices:?}", head.name);
        }
        assert_eq!(Action::from_choices(&action.choices()), Some(action));
        actions.insert(action);
    }
    // One WAIT; s·b·style·tempo·target GERMINATE; s·style·target·speed·curve SET_ALPHA_TARGET;
    // s·speed·curve PRUNE; s FOSSILIZE; s ADVANCE.
    assert_eq!(actions.len(), 1 + 2 * 2 * 4 * 3 * 3 + 2 * 4 * 3 * 4 * 5 + 2 * 4 * 5 + 2 + 2);
}

#[test]
fn a_refusing_gate_is_no_error() {
    let mut host = host(Rules::default());
    let germinate = Action::Germinate {
        slot: 1,
        blueprint: 2,
        style: Style::LinearGate,
        tempo: Tempo::Slow,
        alpha_target: AlphaTarget::Most,
    };
    let outcome = apply(&germinate, &mut host, &[], Some(33.0)).unwrap();
    assert!(outcome.succeeded);
    let module = host.slots()[1].module.as_ref().unwrap();
    assert_eq!(module.score_at_germination_pp, Some(33.0));
    assert_eq!((module.style, module.tempo), (Style::LinearGate, Tempo::Slow));
    let advance = Action::Advance { slot: 1 };
    assert!(apply(&advance, &mut host, &[], None).unwrap().succeeded);
    let outcome = apply(&advance, &mut host, &[fine(), fine()], None).unwrap();
    assert!(!outcome.succeeded && outcome.change.is_none());
    let failed: Vec<_> = outcome.gate.as_ref().unwrap().failed().map(|c| &c.name).collect();
    assert_eq!(failed, ["training_steps"]);
    let error = apply(&Action::Fossilize { slot: 1 }, &mut host, &[], None).unwrap_err();
    assert!(matches!(error, Illegal::WrongStage { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("r0c1") && text.contains("FOSSILIZE") && text.contains("training"),
        "{text}"
    );
}

fn action() -> impl Strategy<Value = Action> {
    let choices =
        (0usize..6, 0usize..4, 0usize..8, 0usize..4, 0usize..3, 0usize..3, 0usize..4, 0usize..5);
    choices.prop_map(|(op, slot, blueprint, style, tempo, target, speed, curve)| {
        Action::from_choices(&[op, slot, blueprint, style, tempo, target, speed, curve]).unwrap()
    })
}

/// The legality rules of `docs/control.md`, implemented independently.
fn expected_legality(action: &Action, host: &Host) -> bool {
    use Stage::*;
    let slots = host.slots();
    let Some(slot) = action.slot().map(|index| slots.get(index)) else {
        return true; // WAIT
    };
    let Some(slot) = slot else {
        return false;
    };
    let rest = slot.module.as_ref().is_some_and(|m| m.alpha.is_at_rest());
    let stays = slot.module.as_ref().is_some_and(|m| !m.pruning);
    let age = slot.module.as_ref().map_or(0, |m| m.age_steps);
    match *action {
        Action::Wait => true,
        Action::Germinate { blueprint, .. } => {
            let occupied = slots.iter().filter(|s| s.module.is_some()).count();
            let early = slots.iter().any(|s| s.stage == Germinated || s.stage == Training);
            slot.stage == Dormant && occupied < host.rules().max_modules && !early && blueprint < 7
        }
        Action::Advance { .. } => stays && matches!(slot.stage, Germinated | Training | Blending),
        Action::Prune { .. } => {
            let live = matches!(slot.stage, Germinated | Training | Blending | Holding);
            live && stays && rest && age >= 5
        }
        Action::SetAlphaTarget { .. } => stays && rest && matches!(slot.stage, Blending | Holding),
        Action::Fossilize { .. } => slot.stage == Holding,
        Action::Widen { .. } => unreachable!("no choice of the heads"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn legal_actions_succeed_and_illegal_ones_fail(
        actions in prop::collection::vec((action(), any::<bool>(), 0u32..4), 1..80),
        max_modules in 0usize..4,
    ) {
        let rules = Rules { max_modules, gates: Gates::default().quick(), ..Rules::default() };
        let mut host = host(rules);
        for (action, measured, steps) in actions {
            let measured = if measured { vec![fine(); 3] } else { vec![] };
            let allowed = legal(&action, &host);
            prop_assert_eq!(allowed.is_ok(), expected_legality(&action, &host), "{:?}", action);
            // The slot masks agree with the legality of this op in every slot.
            let op = action.op();
            prop_assert!(legal_ops(&host)[ActionOp::Wait.index()]);
            if let Some(slot) = action.slot().filter(|slot| *slot < 3) {
                let known = !matches!(action, Action::Germinate { blueprint: 7, .. });
                prop_assert!(!known || legal_slots(op, &host)[slot] == allowed.is_ok());
            }
            prop_assert_eq!(
                legal_ops(&host)[op.index()],
                op == ActionOp::Wait || legal_slots(op, &host).contains(&true)
            );
            let before = host.clone();
            match apply(&action, &mut host, &measured, Some(50.0)) {
                Ok(outcome) => {
                    prop_assert!(allowed.is_ok());
                    prop_assert!(
                        outcome.succeeded || host == before, "a failed gate changes nothing");
                    let asks = matches!(op, ActionOp::Advance | ActionOp::Fossilize);
                    prop_assert_eq!(outcome.gate.is_some(), asks);
                }
                Err(error) => {
                    prop_assert_eq!(Err(error), allowed);
                    prop_assert_eq!(&host, &before);
                }
            }
            (0..steps).for_each(|_| drop(host.step()));
        }
    }
}

#[test]
fn events_have_the_specified_names_of_actions() {
    assert_eq!(serde_json::to_string(&Action::Wait).unwrap(), r#"{"op":"WAIT"}"#);
    let prune = Action::Prune { slot: 2, speed: Speed::Instant, curve: Curve::SigmoidSharp };
    let text = r#"{"op":"PRUNE","slot":2,"speed":"instant","curve":"sigmoid_sharp"}"#;
    assert_eq!(serde_json::to_string(&prune).unwrap(), text);
    assert_eq!(serde_json::from_str::<Action>(text).unwrap(), prune);
    for op in ActionOp::OF_HEAD {
        assert_eq!(serde_json::to_string(&op).unwrap(), format!("\"{op}\""));
    }
}

//! The lifecycle: every action in every stage, the duration of stages, gates, and random walks.

use meristem_grow::{
    AlphaMode, AlphaTarget, Birth, BlueprintSet, Comparison, Curve, Gate, GateInputs, Gates,
    GradientHealth, Host, LifecycleError, Optimisers, Retarget, Rules, Speed, Stage, StageChange,
    Style,
};
use proptest::prelude::*;

use crate::common::{CIFAR, aside, fine, germination, grow_to, host};

const SLOT: &str = "r0c0";

/// Rules that allow a prune at any age.
fn ageless() -> Rules {
    Rules { min_prune_age_steps: 0, gates: Gates::default().quick(), ..aside() }
}

/// A host whose slot `r0c0` (index 0) is in a stage, with alpha at rest.
fn in_stage(stage: Stage) -> Host {
    let mut host = host("baseline", CIFAR, ageless());
    match stage {
        Stage::Dormant => {}
        Stage::Pruned | Stage::Embargoed | Stage::Resetting => {
            grow_to(&mut host, SLOT, 0, Style::LinearAdd, Stage::Training);
            host.prune(0, Speed::Instant, Curve::Linear).unwrap();
            while host.slots()[0].stage != stage {
                host.step();
            }
        }
        Stage::Germinated => {
            host.germinate(0, germination(0, Style::LinearAdd)).unwrap();
        }
        _ => grow_to(&mut host, SLOT, 0, Style::LinearAdd, stage),
    }
    while host.slots()[0].module.as_ref().is_some_and(|m| !m.alpha.is_at_rest()) {
        host.step();
    }
    assert_eq!(host.slots()[0].stage, stage);
    host
}

fn retarget(speed: Speed) -> Retarget {
    let (target, curve) = (AlphaTarget::Half, Curve::Cosine);
    Retarget { style: Style::LinearMultiply, target, speed, curve }
}

/// Applies an action. Returns the next stage, or an error.
type Try = fn(&mut Host) -> Result<(), LifecycleError>;

/// Stages in which an action is legal, with the next stage.
type Allowed = &'static [(Stage, Stage)];

#[test]
fn each_action_is_legal_only_in_its_stages() {
    use Stage::*;
    let table: [(&str, Try, Allowed); 5] = [
        (
            "germinate",
            |h| h.germinate(0, germination(1, Style::LinearAdd)).map(drop),
            &[(Dormant, Germinated)],
        ),
        (
            "advance",
            |h| h.advance(0, &fine()).map(drop),
            &[(Germinated, Training), (Training, Blending), (Blending, Holding)],
        ),
        ("fossilize", |h| h.fossilize(0, &fine()).map(drop), &[(Holding, Fossilized)]),
        (
            "set_alpha_target",
            |h| h.set_alpha_target(0, retarget(Speed::Fast)).map(drop),
            &[(Blending, Blending), (Holding, Blending)],
        ),
        (
            "prune",
            |h| h.prune(0, Speed::Instant, Curve::Linear).map(drop),
            &[(Germinated, Pruned), (Training, Pruned), (Blending, Pruned), (Holding, Pruned)],
        ),
    ];
    for (name, action, allowed) in table {
        for stage in Stage::ALL {
            let mut host = in_stage(stage);
            for _ in 0..5 * u32::from(stage == Training) {
                host.step(); // past min_training_steps
            }
            let before = host.clone();
            let result = action(&mut host);
            match allowed.iter().find(|(from, _)| *from == stage) {
                Some((_, to)) => {
                    result.unwrap_or_else(|error| panic!("{name} in {stage}: {error}"));
                    assert_eq!(host.slots()[0].stage, *to, "{name} in {stage}");
                }
                None => {
                    let error = result.expect_err(&format!("{name} in {stage} was allowed"));
                    assert!(matches!(error, LifecycleError::WrongStage { .. }), "{name}: {error}");
                    assert_eq!(host, before, "an error changes nothing");
                }
            }
        }
    }
}

#[test]
fn indices_out_of_range_are_rejected() {
    let mut host = in_stage(Stage::Dormant);
    let slot = LifecycleError::NoSuchSlot { index: 6, slots: 6 };
    assert_eq!(host.germinate(6, germination(0, Style::LinearAdd)).unwrap_err(), slot);
    assert_eq!(host.prune(6, Speed::Fast, Curve::Linear).unwrap_err(), slot);
    assert_eq!(host.advance(6, &fine()).unwrap_err(), slot);
    assert_eq!(host.fossilize(6, &fine()).unwrap_err(), slot);
    assert_eq!(host.set_alpha_target(6, retarget(Speed::Fast)).unwrap_err(), slot);
    let error = host.germinate(0, germination(7, Style::LinearAdd)).unwrap_err();
    assert_eq!(error, LifecycleError::NoSuchBlueprint { index: 7, blueprints: 7 });
}

#[test]
fn germination_needs_a_free_place_and_no_young_module() {
    let mut host = in_stage(Stage::Germinated);
    let refused = host.check_germinate(1, 0).unwrap_err();
    assert_eq!(refused, LifecycleError::NotYet { slot: SLOT.into(), stage: Stage::Germinated });
    let host_in_training = in_stage(Stage::Training);
    assert!(matches!(host_in_training.check_germinate(1, 0), Err(LifecycleError::NotYet { .. })));
    in_stage(Stage::Blending).check_germinate(1, 0).unwrap();

    // Fossilized modules count.
    host = in_stage(Stage::Fossilized);
    for name in ["r0c1", "r0c2"] {
        grow_to(&mut host, name, 0, Style::LinearAdd, Stage::Fossilized);
    }
    assert_eq!(
        host.check_germinate(3, 0).unwrap_err(),
        LifecycleError::Full { modules: 3, limit: 3 }
    );
}

/// Sizes counted by hand. The host has 6,418 parameters; conv_heavy at 8 channels adds 1,184, and
/// its gate of widths 8, 8, 1 adds 81. MACs are those of the host's three convolutions and
/// classifier on 32×32 pixels, of two 3×3 convolutions in 8 channels, and of the gate.
#[test]
fn germination_keeps_a_host_within_its_limits() {
    let heavy = BlueprintSet::standard().find("conv_heavy").unwrap();
    let parameters = 6418 + 1184 + 81;
    let convolutions = 1024 * 8 * 27 + 256 * 16 * 72 + 64 * 32 * 144;
    let macs = convolutions + 320 + 2 * 1024 * 8 * 72 + 72;
    let of = |max_parameters, max_macs| {
        let rules = Rules { max_parameters, max_macs, ..Rules::default() };
        host("baseline", CIFAR, rules).check_germinate(0, heavy)
    };
    assert_eq!(of(Some(parameters), Some(macs)), Ok(()));
    let refused = of(Some(parameters - 1), Some(macs)).unwrap_err();
    let (slot, blueprint) = (SLOT.into(), "conv_heavy".to_string());
    let (needs, limit) = (parameters, parameters - 1);
    let what = "parameters";
    assert_eq!(refused, LifecycleError::TooLarge { slot, blueprint, what, needs, limit });
    assert_eq!(
        refused.to_string(),
        "slot r0c0: with conv_heavy the host has 7683 parameters, and its limit is 7682"
    );
    let refused = of(None, Some(macs - 1)).unwrap_err();
    assert!(matches!(refused, LifecycleError::TooLarge { what: "MACs", .. }), "{refused}");
    // A module counts with its largest later size, in every stage.
    let mut host = host("baseline", CIFAR, Rules::default());
    let bare = host.size().unwrap();
    host.germinate(0, germination(heavy, Style::LinearAdd)).unwrap();
    assert_eq!((bare.parameters, host.size().unwrap().parameters), (6418, parameters));
}

#[test]
fn a_module_can_be_pruned_from_its_fifth_step_on() {
    let mut host = host("baseline", CIFAR, Rules::default());
    host.germinate(0, germination(0, Style::LinearAdd)).unwrap();
    for age_steps in 0..5 {
        let error = host.check_prune(0).unwrap_err();
        assert_eq!(error, LifecycleError::TooYoung { slot: SLOT.into(), age_steps, min_steps: 5 });
        host.step();
    }
    host.check_prune(0).unwrap();
}

fn stages_over(host: &mut Host, steps: usize) -> Vec<Stage> {
    let step = |_| {
        host.step();
        host.slots()[0].stage
    };
    (0..steps).map(step).collect()
}

#[test]
fn a_prune_starts_an_embargo_and_a_reset() {
    use Stage::*;
    let mut host = in_stage(Training);
    host.prune(0, Speed::Slow, Curve::Linear).unwrap(); // not blended in, so at once
    assert_eq!(host.slots()[0].stage, Pruned);
    assert!(host.slots()[0].module.is_none());
    let stages = stages_over(&mut host, 8);
    let [e, r, d] = [Embargoed, Resetting, Dormant];
    assert_eq!(stages, [e, e, e, e, e, r, d, d]);
    host.germinate(0, germination(0, Style::LinearAdd)).unwrap();
}

#[test]
fn blending_lasts_its_tempo_and_ends_exactly_at_its_target() {
    for (target, style) in
        [(AlphaTarget::Half, Style::LinearAdd), (AlphaTarget::Most, Style::SigmoidAdd)]
    {
        let mut host = in_stage(Stage::Dormant);
        let what = germination(0, style);
        host.germinate(0, meristem_grow::Germination { alpha_target: target, ..what }).unwrap();
        host.advance(0, &fine()).unwrap();
        stages_over(&mut host, 3);
        assert_eq!(host.alphas()[0], 0.0, "alpha is 0 before Blending");
        host.advance(0, &fine()).unwrap();
        assert_eq!(host.slots()[0].stage, Stage::Blending);
        let mut alphas = vec![];
        for step in 1..=4 {
            let evaluated = host.advance(0, &fine());
            assert!(evaluated.unwrap().change.is_none(), "not there before step {step}");
            host.step();
            alphas.push(host.alphas()[0]);
            if step >= 3 {
                break;
            }
        }
        let curve = style.curve();
        let at = |t: f64| (f64::from(target.value()) * curve.at(t)) as f32;
        assert_eq!(alphas, [at(1.0 / 3.0), at(2.0 / 3.0), target.value()]);
        let change = host.advance(0, &fine()).unwrap().change.unwrap();
        assert_eq!(change.to, Stage::Holding);
        let fossil = host.fossilize(0, &fine()).unwrap().change.unwrap();
        assert_eq!(fossil.to, Stage::Fossilized);
        assert_eq!(host.alphas()[0], 1.0, "alpha of a fossilized module is 1");
    }
}

#[test]
fn a_slow_prune_lowers_alpha_and_forbids_other_actions() {
    let mut host = in_stage(Stage::Holding);
    let change = host.prune(0, Speed::Fast, Curve::Linear).unwrap().unwrap();
    assert_eq!((change.from, change.to), (Stage::Holding, Stage::Blending));
    let refused = LifecycleError::BeingPruned { slot: SLOT.into() };
    assert_eq!(host.check_advance(0).unwrap_err(), refused);
    assert_eq!(host.check_prune(0).unwrap_err(), refused);
    assert_eq!(host.check_set_alpha_target(0).unwrap_err(), refused);
    let mut alphas = vec![];
    for _ in 0..2 {
        assert_eq!(host.step(), []);
        alphas.push(host.alphas()[0]);
        assert_eq!(host.slots()[0].module.as_ref().unwrap().alpha.mode(), AlphaMode::Down);
        assert_eq!(host.check_advance(0).unwrap_err(), refused);
    }
    assert_eq!(alphas, [2.0 / 3.0, 1.0 / 3.0]);
    let (from, to) = (Stage::Blending, Stage::Pruned);
    assert_eq!(host.step(), [StageChange { index: 0, slot: SLOT.into(), from, to }]);
    assert_eq!((host.alphas()[0], host.modules()), (0.0, 0));
}

#[test]
fn a_new_target_requires_rest() {
    let mut host = in_stage(Stage::Holding);
    let change = host.set_alpha_target(0, retarget(Speed::Medium)).unwrap().unwrap();
    assert_eq!(change.to, Stage::Blending);
    host.step();
    let moving = host.clone();
    let error = host.set_alpha_target(0, retarget(Speed::Instant)).unwrap_err();
    assert!(matches!(error, LifecycleError::Alpha { .. }), "{error}");
    let error = host.prune(0, Speed::Instant, Curve::Linear).unwrap_err();
    assert!(matches!(error, LifecycleError::Alpha { .. }), "{error}");
    assert_eq!(host, moving);
    stages_over(&mut host, 4);
    assert_eq!(host.alphas()[0], 0.5);
    host.set_alpha_target(0, retarget(Speed::Instant)).unwrap();
    assert!(host.advance(0, &fine()).unwrap().report.passed);
}

#[test]
fn prune_live_removes_exactly_the_live_modules() {
    let mut host = in_stage(Stage::Fossilized);
    grow_to(&mut host, "r0c1", 1, Style::LinearGate, Stage::Blending);
    host.germinate(2, germination(2, Style::LinearAdd)).unwrap();
    let changes = host.prune_live();
    assert_eq!(
        changes.iter().map(|c| (c.index, c.to)).collect::<Vec<_>>(),
        [(1, Stage::Pruned), (2, Stage::Pruned)]
    );
    assert_eq!(host.slots()[0].stage, Stage::Fossilized);
    assert_eq!(host.live().count(), 0);
}

#[test]
fn missing_measurements_fail_a_gate() {
    let nothing = GateInputs::default();
    let evaluated = |stage, inputs: &GateInputs| {
        let mut host = in_stage(stage);
        if stage == Stage::Training {
            stages_over(&mut host, 5);
        }
        host.gate(0, inputs).unwrap()
    };
    assert!(evaluated(Stage::Germinated, &nothing).passed);
    let report = evaluated(Stage::Training, &nothing);
    let failed: Vec<_> = report.failed().map(|c| (c.name.as_str(), c.value)).collect();
    assert_eq!(failed, [("gradient_health", None), ("exploding_share", None)]);
    assert!(evaluated(Stage::Blending, &nothing).passed, "alpha is always known");
    let report = evaluated(Stage::Holding, &nothing);
    assert!(!report.passed);
    assert_eq!(report.failed().next().unwrap().value, None);
    let nan = GateInputs { contribution_pp: Some(f32::NAN), ..nothing };
    assert!(!evaluated(Stage::Holding, &nan).passed);
    // The other stages have no gate.
    for stage in
        [Stage::Dormant, Stage::Fossilized, Stage::Pruned, Stage::Embargoed, Stage::Resetting]
    {
        assert!(in_stage(stage).gate(0, &fine()).is_none(), "{stage}");
    }
}

#[test]
fn gates_pass_exactly_from_their_thresholds_on() {
    let norms = |norms: &[f64]| GateInputs {
        gradient_health: GradientHealth::from_norms(norms),
        ..GateInputs::default()
    };
    let gates = Gates::default();
    let mut host = host("baseline", CIFAR, aside());
    grow_to(&mut host, SLOT, 0, Style::LinearAdd, Stage::Training);
    let passes = |host: &Host, inputs: &GateInputs| {
        gates.evaluate(Gate::Blending, &host.slots()[0], inputs).passed
    };
    for _ in 0..9 {
        host.step();
        assert!(!passes(&host, &norms(&[1.0])));
    }
    host.step();
    assert!(passes(&host, &norms(&[1.0])), "in the tenth step of Training");
    // 1 − ½·⅗ = .7 passes, 1 − ½·⅔ does not; a large share of exploding tensors also fails.
    assert!(passes(&host, &norms(&[0.0, 0.0, 0.0, 1.0, 1.0])));
    assert!(!passes(&host, &norms(&[0.0, 0.0, 1.0])));
    let mut many = [1.0; 20];
    many[..2].fill(11.0);
    assert!(passes(&host, &norms(&many)));
    many[2] = 11.0;
    assert!(GradientHealth::from_norms(&many).unwrap().health > 0.8);
    assert!(!passes(&host, &norms(&many)));

    let mut holding = in_stage(Stage::Holding);
    let worth = |c| GateInputs { contribution_pp: Some(c), ..GateInputs::default() };
    assert!(holding.fossilize(0, &worth(0.99)).unwrap().change.is_none());
    assert_eq!(holding.slots()[0].stage, Stage::Holding, "a refusing gate changes nothing");
    let slot = &holding.slots()[0];
    assert!(gates.evaluate(Gate::Fossilized, slot, &worth(1.0)).passed);
    assert!(gates.permissive().evaluate(Gate::Fossilized, slot, &worth(0.0)).passed);
    assert!(!gates.permissive().evaluate(Gate::Fossilized, slot, &worth(-0.01)).passed);
}

#[test]
fn a_report_lists_all_conditions_and_requires_the_stage_before_the_gate() {
    for stage in Stage::ALL {
        let mut host = in_stage(stage);
        if stage == Stage::Training {
            stages_over(&mut host, 5);
        }
        for gate in [Gate::Training, Gate::Blending, Gate::Holding, Gate::Fossilized] {
            let report = ageless().gates.evaluate(gate, &host.slots()[0], &fine());
            assert_eq!(report.passed, gate.source() == stage, "{gate:?} from {stage}");
            assert_eq!(report.passed, report.failed().next().is_none());
            let json = serde_json::to_string(&report).unwrap();
            assert_eq!(serde_json::from_str::<meristem_grow::GateReport>(&json).unwrap(), report);
        }
    }
    let report = in_stage(Stage::Holding).gate(0, &fine()).unwrap();
    let last = report.conditions.last().unwrap();
    assert_eq!(
        (last.name.as_str(), last.value, last.threshold),
        ("contribution_pp", Some(3.0), 1.0)
    );
    assert_eq!(last.comparison, Comparison::AtLeast);
}

/// Invariants of a host, in every state.
fn check(host: &Host) {
    let early = |s: &&meristem_grow::Slot| matches!(s.stage, Stage::Germinated | Stage::Training);
    assert!(host.slots().iter().filter(early).count() <= 1);
    assert!(host.modules() <= host.rules().max_modules);
    for (slot, alpha) in host.slots().iter().zip(host.alphas()) {
        assert_eq!(slot.module.is_some(), slot.stage.is_occupied(), "{}", slot.stage);
        assert!((0.0..=1.0).contains(&alpha));
        let Some(module) = &slot.module else {
            assert_eq!(alpha, 0.0);
            continue;
        };
        match slot.stage {
            Stage::Germinated => assert_eq!(alpha, 0.0),
            Stage::Fossilized => assert_eq!(alpha, 1.0),
            Stage::Training | Stage::Holding if module.birth == Birth::Joint => {
                assert_eq!(alpha, 1.0);
            }
            Stage::Training => assert_eq!(alpha, 0.0),
            Stage::Holding => assert_eq!(alpha, module.alpha.target()),
            _ => {}
        }
        assert!(!module.pruning || slot.stage == Stage::Blending);
    }
    let graph = host.graph(&Optimisers::default()).unwrap();
    assert_eq!(graph.alphas, host.slots().len());
    let counts = host.parameters().unwrap();
    assert_eq!(counts.total(), graph.parameters(None));
    let topology = meristem_grow::Topology::from_host(host).to_json().unwrap();
    let set = meristem_grow::BlueprintSet::standard();
    let back = meristem_grow::Topology::from_json(&topology).unwrap().rebuild(&set, *host.rules());
    assert_eq!(back.unwrap(), *host);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_walks_stay_within_the_lifecycle(
        moves in prop::collection::vec((0u8..12, 0usize..7, any::<u16>()), 1..120),
        min_age in 0u32..6,
        birth in prop::sample::select(Birth::ALL.to_vec()),
    ) {
        let rules =
            Rules { birth, min_prune_age_steps: min_age, max_modules: 4, ..ageless() };
        let mut host = host("baseline", CIFAR, rules);
        for (what, slot, bits) in moves {
            let before = host.clone();
            let style = Style::ALL[usize::from(bits) % 4];
            let (speed, curve) =
                (Speed::ALL[usize::from(bits >> 2) % 4], Curve::ALL[usize::from(bits >> 4) % 5]);
            let target = AlphaTarget::ALL[usize::from(bits >> 7) % 3];
            let inputs = if bits & 0x8000 == 0 { fine() } else { GateInputs::default() };
            let result = match what {
                0 => host.germinate(slot, germination(usize::from(bits >> 9) % 8, style)).map(Some),
                1 => host.advance(slot, &inputs).map(|a| a.change),
                2 => host.fossilize(slot, &inputs).map(|a| a.change),
                3 => host.set_alpha_target(slot, Retarget { style, target, speed, curve }),
                4 => host.prune(slot, speed, curve),
                5 if bits < 300 => { host.prune_live(); Ok(None) }
                _ => { host.step(); Ok(None) }
            };
            if result.is_err() {
                prop_assert_eq!(&host, &before);
            }
            for (was, is) in before.slots().iter().zip(host.slots()) {
                prop_assert!(was.stage == is.stage || was.stage.can_become(is.stage));
            }
            if let Ok(Some(change)) = result {
                prop_assert_eq!(before.slots()[change.index].stage, change.from);
                prop_assert_eq!(host.slots()[change.index].stage, change.to);
            }
            if before.topology_key() == host.topology_key() {
                let optimisers = Optimisers::default();
                let graphs = [&before, &host].map(|host| host.graph(&optimisers).unwrap());
                prop_assert_eq!(&graphs[0], &graphs[1]);
            }
            check(&host);
        }
    }
}

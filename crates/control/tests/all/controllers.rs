//! The random controller and the script controller.

use std::sync::Arc;

use meristem_control::{
    Action, ActionOp, Controller, EnvController, EnvControllers, Error, Heuristic, HeuristicConfig,
    RandomController, Script, legal,
};
use meristem_grow::{AlphaTarget, Curve, Speed, Stage, Style, Tempo};

use crate::common::{FakeEnv, quick, tiny, worth};

/// Actions of an env under a controller.
fn run(controller: &mut dyn Controller, env: usize, steps: u32) -> Vec<Action> {
    let mut env = FakeEnv::new(env, tiny(2, quick()), steps);
    let mut actions = vec![];
    for _ in 0..steps {
        env.epoch(1.0, 50.0);
        env.measured = vec![worth(Some(1.0)); 2];
        let action = controller.decide_all(&[env.view()]).unwrap()[0];
        legal(&action, &env.host).unwrap();
        env.act(&action);
        actions.push(action);
    }
    actions
}

#[test]
fn random_depends_on_seed_and_env_and_resumes() {
    let of = |seed, env| run(&mut RandomController::new(seed), env, 200);
    let first = of(1, 0);
    assert_eq!(first, of(1, 0));
    assert_ne!(first, of(2, 0));
    assert_ne!(first, of(1, 1));
    for op in ActionOp::OF_HEAD {
        assert!(first.iter().any(|action| action.op() == op), "{op}");
    }
    let mut original = RandomController::new(3);
    run(&mut original, 0, 50);
    let mut restored = RandomController::new(3);
    restored.restore(&original.save().unwrap()).unwrap();
    assert_eq!(run(&mut restored, 0, 50), run(&mut original, 0, 50));
}

fn script(text: &str) -> Result<Script, Error> {
    Script::parse("fixed:test.jsonl", text, &tiny(2, quick()))
}

/// Each env acts as under its controller alone, and the memory of all kinds is restored.
#[test]
fn each_env_may_have_its_own_controller() {
    let text = r#"{"step": 2, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm"}"#;
    let script = Arc::new(script(text).unwrap());
    let quickly = HeuristicConfig { plateau_steps: 2, ..HeuristicConfig::default() };
    let own = || {
        [
            EnvController::None,
            EnvController::Random(7),
            EnvController::Heuristic(Box::new(quickly)),
            EnvController::Script(script.clone()),
        ]
    };
    let alone = |env: usize| -> Box<dyn Controller> {
        match env {
            0 => Box::new(Heuristic::default()),
            1 => Box::new(EnvControllers::new("none", EnvController::None)),
            2 => Box::new(RandomController::new(7)),
            3 => Box::new(Heuristic::new(quickly)),
            _ => Box::new((*script).clone()),
        }
    };
    let new = || {
        let usual = EnvController::Heuristic(Box::default());
        let mut all = EnvControllers::new("heuristic", usual);
        own().into_iter().zip(1..).for_each(|(own, env)| all.set_env(env, own));
        all
    };
    let mut all = new();
    for env in 0..5 {
        assert_eq!(run(&mut all, env, 40), run(&mut *alone(env), env, 40), "env {env}");
    }
    all.roll_back(4, None, 0.0).unwrap();
    let mut restored = new();
    restored.restore(&all.save().unwrap()).unwrap();
    assert_eq!(restored.save().unwrap(), all.save().unwrap());
    for env in 0..5 {
        assert_eq!(run(&mut restored, env, 40), run(&mut all, env, 40), "env {env}");
    }
}

/// With one kind of controllers the state is the one of this kind, as runs wrote it before envs had
/// controllers of their own.
#[test]
fn the_state_of_one_kind_is_the_usual_one() {
    let mut heuristic = Heuristic::default();
    run(&mut heuristic, 1, 30);
    let state = heuristic.save().unwrap();
    let mut all = EnvControllers::new("heuristic", EnvController::Heuristic(Box::default()));
    all.set_env(0, EnvController::None);
    all.restore(&state).unwrap();
    assert_eq!(all.save().unwrap(), state);
    assert_eq!(run(&mut all, 1, 30), run(&mut heuristic, 1, 30));
    all.set_env(0, EnvController::Random(1));
    assert_ne!(all.save().unwrap(), heuristic.save().unwrap());
}

#[test]
fn a_script_is_followed_line_by_line() {
    let text = r#"
# grows one module
{"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light", "tempo": "fast"}
{"step": 0, "env": 1, "op": "WAIT"}

{"step": 1, "op": "ADVANCE", "slot": "r0c1"}
{"step": 1, "env": 1, "op": "WAIT"}
{"step": 6, "env": 0, "op": "PRUNE", "slot": "r0c1", "alpha_speed": "slow", "alpha_curve": "cosine"}
"#;
    let mut script = script(text).unwrap();
    assert_eq!(script.name(), "fixed:test.jsonl");
    let actions = run(&mut script, 0, 8);
    let (style, tempo, alpha_target) = (Style::LinearAdd, Tempo::Fast, AlphaTarget::Full);
    let germinate = Action::Germinate { slot: 1, blueprint: 5, style, tempo, alpha_target };
    let prune = Action::Prune { slot: 1, speed: Speed::Slow, curve: Curve::Cosine };
    let wait = Action::Wait;
    let advance = Action::Advance { slot: 1 };
    assert_eq!(actions, [germinate, advance, wait, wait, wait, wait, prune, wait]);
    assert_eq!(run(&mut script, 1, 8), [wait; 8]);
}

/// A line with `then` grows a module until it is fossilized, advancing it as gates pass. The next
/// such line starts as soon as it is legal.
#[test]
fn then_advances_and_fossilizes_a_module() {
    let text = r#"
{"step": 1, "op": "GERMINATE", "slot": "r0c1", "blueprint": "norm", "then": "FOSSILIZE"}
{"step": 2, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm", "then": "FOSSILIZE"}
{"step": 3, "op": "WAIT"}
"#;
    let text = &text.replace("norm\"", "norm\", \"tempo\": \"fast\"");
    let ops = |env: usize, text: &str| {
        let actions = run(&mut script(text).unwrap(), env, 16);
        actions.iter().map(|a| (a.op(), a.slot().unwrap_or(9))).collect::<Vec<_>>()
    };
    use ActionOp::*;
    let w = (Wait, 9);
    let first = [w, (Germinate, 1), (Advance, 1), w, w, (Advance, 1)];
    // The second module germinates while the first blends.
    let second = [(Germinate, 0), (Advance, 0), (Advance, 1), (Fossilize, 1), (Advance, 0)];
    let end = [w, w, (Advance, 0), (Fossilize, 0), w];
    assert_eq!(ops(0, text), [&first[..], &second, &end].concat());
    let own = text.replace("{\"step\"", "{\"env\": 1, \"step\"");
    assert_eq!(ops(0, &own), [w; 16], "the lines are for another env");
    for (line, problem) in [
        (r#"{"step": 0, "op": "ADVANCE", "slot": "r0c1", "then": "FOSSILIZE"}"#, "ADVANCE has no"),
        (
            r#"{"step":0,"op":"GERMINATE","slot": "r0c1", "blueprint": "norm", "then": "PRUNE"}"#,
            "`then` is FOSSILIZE, not PRUNE",
        ),
    ] {
        let error = script(line).unwrap_err();
        assert!(matches!(error, Error::Script { line: 1, .. }), "{error:?}");
        assert!(error.to_string().contains(problem), "{error}");
    }
}

#[test]
fn errors_in_a_script_name_the_line() {
    let bad = [
        (r#"{"step": 1, "op": "JUMP"}"#, "JUMP"),
        (r#"{"step": 1, "op": "WAIT", "when": 3}"#, "when"),
        (r#"{"op": "WAIT"}"#, "step"),
        (r#"{"step": -1, "op": "WAIT"}"#, "-1"),
        (r#"{"step": 1, "op": "WAIT", "slot": "r0c0"}"#, "WAIT has no `slot`"),
        (r#"{"step": 1, "op": "ADVANCE"}"#, "ADVANCE needs a `slot`: one of r0c0, r0c1"),
        (r#"{"step": 1, "op": "ADVANCE", "slot": "r0c2"}"#, "did you mean `r0c0`"),
        (r#"{"step": 1, "op": "GERMINATE", "slot": "r0c0"}"#, "needs a `blueprint`"),
        (
            r#"{"step": 1, "op": "GERMINATE", "slot": "r0c0", "blueprint": "conv_lite"}"#,
            "did you mean `conv_light`",
        ),
        (r#"{"step": 1, "op": "PRUNE", "slot": "r0c0", "tempo": "fast"}"#, "no `tempo`"),
        (r#"{"step": 1, "op": "PRUNE", "slot": "r0c0", "alpha_speed": "warp"}"#, "warp"),
        (r#"{"step": 1, "op": "WAIT", "by": 3}"#, "WAIT has no `by`"),
        (r#"{"step": 1, "op": "WIDEN", "by": 3}"#, "WIDEN needs a `layer`"),
        (r#"{"step": 1, "op": "WIDEN", "layer": "blocks.0.conv"}"#, "needs `by`"),
        (r#"{"step": 1, "op": "WIDEN", "layer": "blocks.0.conv", "by": 0}"#, "from 1 on"),
        (r#"{"step": 1, "op": "WIDEN", "layer": "blocks.0.cnv", "by": 1}"#, "did you mean"),
        (
            r#"{"step": 1, "op": "WIDEN", "layer": "blocks.0.conv", "by": 1, "slot": "r0c0"}"#,
            "WIDEN has no `slot`",
        ),
        (r#"{"step": 0, "op": "WAIT"}"#, "line 1"),
        (r#"{"step": 1, "op": "WAIT"} {"#, "trailing"),
        ("step = 1", "expected"),
    ];
    for (line, expected) in bad {
        let text = format!("{{\"step\": 0, \"op\": \"WAIT\"}}\n\n{line}\n");
        let error = script(&text).unwrap_err();
        assert!(matches!(error, Error::Script { line: 3, .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("line 3") && text.contains(expected), "{text}");
    }
}

#[test]
fn after_a_rollback_illegal_lines_are_skipped() {
    let text = r#"{"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light"}
{"step": 1, "op": "ADVANCE", "slot": "r0c1"}
{"step": 2, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm"}"#;
    let mut script = script(text).unwrap();
    let mut env = FakeEnv::new(1, tiny(2, quick()), 9);
    let step = |script: &mut Script, env: &mut FakeEnv| {
        env.epoch(1.0, 50.0);
        let action = script.decide_all(&[env.view()]).unwrap()[0];
        env.act(&action);
        action.op()
    };
    assert_eq!(step(&mut script, &mut env), ActionOp::Germinate);
    env.host.prune_live();
    let mut other = script.clone();
    script.roll_back(1, Some(0), -10.0).unwrap();
    // The restored script still skips in the rolled-back env; in another env, or without the
    // rollback, the illegal action is an error.
    let saved = script.save().unwrap();
    let mut resumed = self::script(text).unwrap();
    resumed.restore(&saved).unwrap();
    assert_eq!(resumed, script);
    assert_eq!(step(&mut resumed, &mut env), ActionOp::Wait);
    assert_eq!(step(&mut resumed, &mut env), ActionOp::Germinate, "a legal action is executed");
    env.step = 1;
    env.host.prune_live();
    for script in [&mut other, &mut resumed] {
        script.begin_episode(1);
        let error = script.decide_all(&[env.view()]).unwrap_err();
        assert!(matches!(error, Error::ScriptIllegal { line: 2, .. }), "{error}");
    }
}

#[test]
fn an_illegal_line_fails_with_its_reason() {
    let mut script = script(r#"{"step": 2, "op": "ADVANCE", "slot": "r0c0"}"#).unwrap();
    let mut env = FakeEnv::new(0, tiny(2, quick()), 9);
    for step in 0..3 {
        env.epoch(1.0, 50.0);
        match script.decide_all(&[env.view()]) {
            Ok(actions) => env.act(&actions[0]),
            Err(error) => {
                let text = error.to_string();
                assert!(step == 2 && text.contains("line 1") && text.contains("r0c0"), "{text}");
                assert_eq!(env.host.slots()[0].stage, Stage::Dormant);
                return;
            }
        };
    }
    panic!("it was let through");
}

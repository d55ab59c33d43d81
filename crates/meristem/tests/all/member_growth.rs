//! Members with their own rules of growth, and members in which nothing grows (P1).

use std::fs;

use crate::common::Meristem;
use crate::common::runs::outcome;
use crate::resume::{Moment, killed_at};

const RUN: &str = "train --dataset mnist1d --host conv1d:4,8 --steps 9 --batch 32 --birth joint \
                   --max-batches 25 --control-split 0.2 --min-training-steps 1 --max-gap 50 \
                   --quiet";

/// Settings of the members, beside those of the run.
const MEMBERS: [&[(&str, &str)]; 11] = [
    &[],
    &[("controller", "none")],
    &[("plateau-steps", "2"), ("plateau-gain", "2")],
    &[("parameters-per-image", "0.05")],
    &[("widen-by", "0.5"), ("widen-pause", "1")],
    &[("widen-by", "1"), ("widen-up-to", "3")],
    &[("tempo", "slow")],
    &[("controller", "random")],
    &[("controller", "fixed:grow.jsonl"), ("train-share", "0.6")],
    &[("controller", "fixed:widen.jsonl"), ("host", "conv1d:4,4")],
    // Fewer samples allow fewer parameters.
    &[("train-share", "0.1")],
];

const SCRIPTS: [(&str, &str); 2] = [
    (
        "grow.jsonl",
        r#"{"step": 1, "op": "GERMINATE", "slot": "c1", "blueprint": "norm", "then": "FOSSILIZE"}"#,
    ),
    ("widen.jsonl", r#"{"step": 2, "op": "WIDEN", "layer": "blocks.0.conv", "by": 2}"#),
];

/// A project with the members in `members.json`.
fn with_members() -> Meristem {
    let m = Meristem::new();
    let member = |settings: &[(&str, &str)]| {
        let entries = settings.iter().map(|(key, value)| format!(r#""{key}": "{value}""#));
        format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
    };
    let all = MEMBERS.map(member).join(", ");
    fs::write(m.path("members.json"), format!(r#"{{"members": [{all}]}}"#)).unwrap();
    SCRIPTS.iter().for_each(|(name, text)| fs::write(m.path(name), text).unwrap());
    m
}

/// Each env has the bits of the env with its number in a run whose settings are the member's, also
/// when the run was killed and resumed.
#[test]
fn each_env_grows_by_rules_of_its_own() {
    let m = with_members();
    let run = format!("{RUN} --checkpoint-every 1 --config members.json");
    m.ok(&format!("{run} --run-dir fleet"));
    let fleet = outcome(&m, "fleet");
    for (env, settings) in MEMBERS.iter().enumerate() {
        let flags = settings.iter().map(|(key, value)| format!("--{key} {value}"));
        let flags = flags.collect::<Vec<_>>().join(" ");
        let has_host = flags.contains("--host");
        let run = if has_host { RUN.replace("--host conv1d:4,8 ", "") } else { RUN.into() };
        m.ok(&format!("{run} --envs 1 --env-numbers {env} {flags} --run-dir alone-{env}"));
        assert_eq!(outcome(&m, &format!("alone-{env}")).weights[0], fleet.weights[env], "{flags}");
    }
    m.ok(&format!("{RUN} --envs 11 --run-dir usual"));
    let usual = outcome(&m, "usual").weights;
    let like_usual: Vec<usize> = (0..11).filter(|env| usual[*env] == fleet.weights[*env]).collect();
    assert_eq!(like_usual, [0], "envs whose settings have no effect");
    let grown = |env: usize| &fleet.envs[env]["history"]["germinated"];
    assert!([7, 8].iter().all(|env| grown(*env).as_u64() > Some(0)), "{}", fleet.envs);
    let wider = &fleet.envs[9];
    assert!(wider["host_parameters"].as_u64() > wider["twin"]["parameters"].as_u64(), "{wider}");
    let lines = fleet.events.len();
    for (attempt, share) in [(0, 4), (1, 7)] {
        let name = format!("run-{attempt}");
        let moment = Moment::Events(lines * share / 10);
        assert!(killed_at(&m, &format!("{run} --run-dir {name}"), &name, moment));
        m.ok(&format!("train --resume {name} --quiet"));
        assert_eq!(outcome(&m, &name), fleet);
    }
    for member in [4, 7, 8] {
        m.ok(&format!("sweep replay fleet {member} --quiet --run-dir replayed-{member}"));
        let replayed = outcome(&m, &format!("replayed-{member}"));
        assert_eq!(replayed.weights, [fleet.weights[member].clone()]);
    }
    // The script is an input of the run.
    assert_eq!(m.run(&format!("{run} --run-dir other --stop-after 3")).code, Some(3));
    fs::write(m.path("grow.jsonl"), "").unwrap();
    m.fails("train --resume other --quiet", 2, &["grow.jsonl", "--controller"]);
}

/// Members have controllers in runs with any controller of theirs; the control split and the twins
/// are there if one has a controller.
#[test]
fn members_have_controllers_in_every_run() {
    let m = with_members();
    let run = "train --dataset mnist1d --host conv1d:4,8 --steps 5 --batch 64 --birth joint \
               --min-training-steps 1 --max-gap 50 --max-batches 6 --checkpoint-every 1 --quiet";
    let controllers = ["heuristic", "none", "random", "fixed:grow.jsonl"];
    let members = controllers.map(|own| format!(r#""controller={own}""#)).join(", ");
    let mut found = vec![];
    for (nth, own) in controllers.iter().enumerate() {
        let members = format!(r#"{{"controller": "{own}", "members": [{members}]}}"#);
        fs::write(m.path("all.json"), members).unwrap();
        m.ok(&format!("{run} --config all.json --run-dir run-{nth}"));
        let whole = outcome(&m, &format!("run-{nth}"));
        assert!(whole.envs[0]["twin"].is_object() && whole.envs[1]["control_accuracy"].is_f64());
        // The members are the same in all runs, so that one is stopped and resumed for all.
        if nth == 0 {
            let stop = format!("{run} --config all.json --stop-after 3 --run-dir stopped");
            assert_eq!(m.run(&stop).code, Some(3));
            m.ok("train --resume stopped --quiet");
            assert_eq!(outcome(&m, "stopped"), whole);
        }
        found.push(whole.weights);
    }
    assert!(found.iter().all(|weights| *weights == found[0]));
    for (env, own) in controllers.iter().enumerate() {
        let alone = format!("--control-split 0.1 --envs 4 --controller {own}");
        m.ok(&format!("{run} {alone} --run-dir alone-{env}"));
        assert_eq!(outcome(&m, &format!("alone-{env}")).weights[env], found[0][env], "{own}");
    }
}

/// A host without slots is one of a member in which nothing grows.
#[test]
fn a_host_without_slots_needs_no_controller() {
    let m = Meristem::new();
    let layers =
        r#"["flatten", { linear = { out = 8 } }, "relu", { linear = { out = "classes" } }]"#;
    fs::write(m.path("plain.toml"), format!("layers = {layers}")).unwrap();
    let members = r#"{"members": [{}, {"host": "plain.toml", "controller": "none"}]}"#;
    fs::write(m.path("members.json"), members).unwrap();
    m.ok(&format!("{RUN} --config members.json --run-dir run"));
    let modules = |env: usize| m.json("run/summary.json")["envs"][env]["history"].clone();
    assert!(modules(0)["germinated"].as_u64().unwrap() > 0, "{}", modules(0));
    assert_eq!(modules(1)["germinated"], 0);
}

#[test]
fn wrong_rules_are_errors_and_idle_ones_are_named() {
    let m = Meristem::new();
    let line = r#"{"step": 1, "op": "PRUNE", "slot": "c9"}"#;
    fs::write(m.path("odd.jsonl"), line).unwrap();
    for (flags, words) in [
        (
            "--members controller=none,greedy:shipped",
            &["`controller`: got greedy:shipped in member 1", "policies belong to the run"][..],
        ),
        ("--members controller=ppo", &["got ppo in member 0", "policies belong to the run"]),
        (
            "--controller ppo:shipped --members controller=none",
            &["got none in member 0", "ppo:shipped, the run's controller"],
        ),
        ("--members controller=fixed:none.jsonl", &["none.jsonl", "in member 0"]),
        ("--members controller=fixed:odd.jsonl,none", &["odd.jsonl", "in member 0", "c9"]),
        ("--members tempo=slow,slower", &["tempo=slower"]),
        ("--members widen-by=0.5,1.5", &["`widen-up-to`: got 2 in member 1", "at least 2.5"]),
        ("--widen-by 0.5 --widen-up-to 1.4", &["`widen-up-to`: got 1.4", "at least 1.5"]),
    ] {
        m.fails(&format!("{RUN} --run-dir run {flags}"), 2, words);
        assert!(!m.path("run").exists(), "{flags}");
    }
    let run = RUN.replace("--steps 9", "--steps 1");
    for (nth, (flags, words)) in [
        (
            "--controller none --widen-by 0.5",
            "--widen-by has no effect, because only the heuristic",
        ),
        (
            "--members controller=none,heuristic --members plateau-steps=1,2",
            "--plateau-steps has no effect in members 0, 1, because nothing grows with controller \
             none",
        ),
        ("--members widen-pause=1,2", "--widen-pause has no effect in members 0, 1, because"),
        (
            "--members controller=random,heuristic --members tempo=slow",
            "--tempo has no effect in member 0, because it is a rule of the heuristic",
        ),
        ("--members lr-warmup=1,3", "--lr-warmup 3 is longer than the 1 steps"),
        ("--members parameters-per-image=1,0.01,0.01", "cannot grow envs 1, 2: a host begins with"),
    ]
    .into_iter()
    .enumerate()
    {
        let said = m.ok(&format!("{run} --max-batches 1 {flags} --run-dir run-{nth}"));
        assert!(said.stderr.contains(words), "{words}: {}", said.stderr);
    }
    for (nth, flags) in [
        "--widen-by 0.1 --widen-up-to 1.1",
        "--widen-by 0.1 --controller none --members controller=none,heuristic",
        "--members birth=joint,aside --members max-modules=1,2",
    ]
    .into_iter()
    .enumerate()
    {
        let used = m.ok(&format!("{run} --max-batches 1 {flags} --run-dir used-{nth}"));
        let idle = ["no effect", "cannot grow"].map(|words| used.stderr.contains(words));
        assert_eq!(idle, [false; 2], "{}", used.stderr);
    }
}

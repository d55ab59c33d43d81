//! Members with their own rules of growth, and members in which nothing grows (P1).

use std::fs;

use crate::common::Meristem;
use crate::common::runs::outcome;
use crate::resume::{Moment, killed_at};

const RUN: &str = "train --dataset mnist1d --host conv1d:4,8 --steps 9 --batch 32 --birth joint \
                   --control-split 0.2 --min-training-steps 1 --max-gap 50 --quiet";

/// Settings of the members, beside those of the run.
const MEMBERS: [&[(&str, &str)]; 7] = [
    &[],
    &[("controller", "none")],
    &[("plateau-steps", "2"), ("plateau-gain", "2")],
    &[("parameters-per-image", "0.05")],
    &[("widen-by", "0.5"), ("widen-pause", "1")],
    &[("widen-by", "1"), ("widen-up-to", "3")],
    &[("tempo", "slow")],
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
        m.ok(&format!("{RUN} --envs 1 --env-numbers {env} {flags} --run-dir alone-{env}"));
        assert_eq!(outcome(&m, &format!("alone-{env}")).weights[0], fleet.weights[env], "{flags}");
    }
    m.ok(&format!("{RUN} --envs 7 --run-dir usual"));
    let usual = outcome(&m, "usual").weights;
    let like_usual: Vec<usize> = (0..7).filter(|env| usual[*env] == fleet.weights[*env]).collect();
    assert_eq!(like_usual, [0], "envs whose settings have no effect");
    let lines = fleet.events.len();
    for (attempt, share) in [(0, 4), (1, 7)] {
        let name = format!("run-{attempt}");
        let moment = Moment::Events(lines * share / 10);
        assert!(killed_at(&m, &format!("{run} --run-dir {name}"), &name, moment));
        m.ok(&format!("train --resume {name} --quiet"));
        assert_eq!(outcome(&m, &name), fleet);
    }
    m.ok("sweep replay fleet 4 --quiet --run-dir replayed");
    assert_eq!(outcome(&m, "replayed").weights, [fleet.weights[4].clone()]);
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
    for (flags, words) in [
        ("--members controller=random,none", &["`controller`: got random in member 0"][..]),
        ("--controller none --members controller=heuristic", &["none, the run's controller"]),
        ("--members tempo=slow,slower", &["tempo=slower"]),
        ("--members widen-by=0.5,1.5", &["`widen-up-to`: got 2 in member 1", "at least 2.5"]),
        ("--widen-by 0.5 --widen-up-to 1.4", &["`widen-up-to`: got 1.4", "at least 1.5"]),
    ] {
        m.fails(&format!("{RUN} --run-dir run {flags}"), 2, words);
        assert!(!m.path("run").exists(), "{flags}");
    }
    let said = m.ok(&format!("{RUN} --steps 1 --controller none --widen-by 0.5 --run-dir run"));
    assert!(
        said.stderr.contains("--widen-by has no effect with --controller none"),
        "{}",
        said.stderr
    );
    let used = m.ok(&format!("{RUN} --steps 1 --widen-by 0.1 --widen-up-to 1.1 --run-dir used"));
    assert!(!used.stderr.contains("no effect"), "{}", used.stderr);
}

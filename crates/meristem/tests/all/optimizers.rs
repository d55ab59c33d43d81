//! Runs with each optimiser: members, growth, resumption, data parallelism (P3).

use crate::common::runs::{outcome, with_images};
use crate::resume::{Moment, killed_at};

const RUN: &str = "train --dataset arrays --data-root images.safetensors --steps 6 --batch 32 \
                   --quiet --host cnn:channels=2";
const ALL: [&str; 6] = ["sgd", "nesterov", "adam", "adamw", "lion", "muon"];

/// Each member of a fleet that grows has the bits of the env with its number in a run with its
/// optimiser. A run without the setting is one of SGD.
#[test]
fn each_optimiser_trains_in_a_fleet_as_alone() {
    let m = with_images();
    let grows = format!("{RUN} --controller random");
    m.ok(&format!("{grows} --run-dir fleet --members optimizer={}", ALL.join(",")));
    let fleet = outcome(&m, "fleet");
    let grown = fleet.events.iter().filter(|event| event["event"] == "stage_changed").count();
    assert!(grown > 6, "{grown} changes of stages");
    for (env, name) in ALL.iter().enumerate() {
        m.ok(&format!("{grows} --run-dir {name} --envs 6 --optimizer {name}"));
        let weights = outcome(&m, name).weights;
        assert_eq!(weights[env], fleet.weights[env], "{name}");
        assert!(env == 0 || weights[0] != fleet.weights[0], "{name} is SGD");
    }
    m.ok(&format!("{grows} --run-dir plain --envs 6"));
    assert_eq!(outcome(&m, "plain").weights, outcome(&m, "sgd").weights);
    let text = std::fs::read_to_string(m.path("muon/config.toml")).unwrap();
    assert!(text.contains("optimizer = \"muon\"") && text.contains("adam_lr = 0.0003"), "{text}");
}

/// Groups that change nothing leave every bit as it is, others do not; a run repeats from its
/// settings.
#[test]
fn groups_of_parameters_have_their_own_numbers() {
    let m = with_images();
    let grows = format!("{RUN} --controller random --envs 2 --optimizer adamw");
    m.ok(&format!("{grows} --run-dir plain"));
    let command = |run: &str, groups: &str| {
        let mut command = m.command();
        command.args(format!("{grows} --run-dir {run}").split_whitespace());
        assert!(command.args(["--param-groups", groups]).status().unwrap().success(), "{groups}");
        outcome(&m, run).weights
    };
    let plain = outcome(&m, "plain").weights;
    assert!(command("same", "*.weight: lr=1x;*.bias: weight_decay=1x") == plain);
    assert!(command("other", "*.bn.*: weight_decay=0; classifier.*: lr=0.1x") != plain);
    m.ok("train --config other/config.toml --run-dir again --quiet");
    assert!(outcome(&m, "again").weights == outcome(&m, "other").weights);
    let tables = r#"{"members": [{"param_groups": "*.bias: lr=0x"}, {"param_groups": "*: lr=0"}]}"#;
    std::fs::write(m.path("c.json"), tables).unwrap();
    m.ok(&format!("{grows} --run-dir members --config c.json"));
}

#[test]
fn a_killed_run_resumes_to_the_same_bits() {
    let m = with_images();
    let members = ALL.join(",");
    let run = format!(
        "{RUN} --controller random --rounds 2 --checkpoint-every 2 --members optimizer={members}"
    );
    m.ok(&format!("{run} --run-dir whole"));
    let whole = outcome(&m, "whole");
    let lines = whole.events.len();
    for (attempt, share) in [(0, 3), (1, 7)] {
        let name = format!("run-{attempt}");
        let start = format!("{run} --run-dir {name}");
        assert!(killed_at(&m, &start, &name, Moment::Events(lines * share / 10)));
        m.ok(&format!("train --resume {name} --quiet --threads {}", attempt + 1));
        assert_eq!(outcome(&m, &name).weights, whole.weights);
    }
}

/// Replicas have equal optimisers, which the run itself checks; a host without batch norm has
/// counts of steps but no running statistics.
#[test]
fn replicas_train_with_each_optimiser() {
    let m = with_images();
    for name in ["adamw", "lion", "muon"] {
        for (host, n) in [("cnn:channels=2", 0), ("mlp:8,8", 1)] {
            let run = format!("{name}-{n}");
            m.ok(&format!(
                "{RUN} --run-dir {run} --host {host} --optimizer {name} --data-parallel --ranks 2 \
                 --envs 1 --controller none --checkpoint-every 2"
            ));
            m.ok(&format!("runs verify {run}"));
        }
    }
}

#[test]
fn numbers_of_other_optimisers_are_refused() {
    let m = with_images();
    let refused = |settings: &str, words: &[&str]| {
        m.fails(&format!("{RUN} --run-dir run {settings}"), 2, words);
        assert!(!m.path("run").exists(), "{settings}");
    };
    refused("--optimizer adamx", &["did you mean `adam"]);
    refused("--beta1 0.8", &["`beta1`: got 0.8", "optimizer sgd, which has lr, momentum"]);
    refused(
        "--optimizer lion --eps 0.001",
        &["`eps`: got 0.001,", "lion, which has lr, weight-decay, beta1"],
    );
    refused("--optimizer adam --beta2 1", &["`beta2`: got 1"]);
    refused("--members optimizer=sgd,adamw --momentum 0.8", &["`momentum`", "in member 1"]);
}

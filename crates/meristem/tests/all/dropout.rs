//! Runs with dropout: rates of members, resumed, with replicas, copies and modules beside it (N3,
//! P1).

use std::fs;

use meristem::nn::safetensors;

use crate::common::Meristem;
use crate::common::runs::{assert_same, outcome, with_images};
use crate::resume::{Moment, killed_at};
use crate::sweeps::is_resumed;

/// Slots before and after a dropout layer, batch norm after one.
const HOST: &str = r#"name = "dropping"
layers = [
  { conv2d = { out = 4, kernel = 3, stride = 2, name = "one" } },
  { batch_norm = { name = "norm" } },
  "relu",
  { slot = { name = "before" } },
  { dropout = { p = 0.3 } },
  { slot = { name = "after" } },
  { conv2d = { out = 6, kernel = 3, stride = 2, name = "two" } },
  { batch_norm = { name = "norm_two" } },
  "relu",
  "global_avg_pool",
  { dropout = { p = 0.1, name = "last" } },
  { linear = { out = "classes", name = "fc" } },
]
"#;

const RUN: &str = "train --dataset arrays --data-root images.safetensors --preset quick --steps 4 \
    --batch 32 --control-split 0.2 --quiet";

fn with_host() -> Meristem {
    let m = with_images();
    fs::write(m.path("dropping.toml"), HOST).unwrap();
    let without: Vec<&str> = HOST.lines().filter(|line| !line.contains("dropout")).collect();
    fs::write(m.path("plain.toml"), without.join("\n")).unwrap();
    m
}

/// Each env has the bits of the env with its number in a run whose rate is the member's, for any
/// number of workers; with a rate of 0 those of the host without the layers.
#[test]
fn members_have_rates_of_their_own() {
    let m = with_host();
    let run = format!("{RUN} --controller none --envs 4 --epoch full");
    let members = "--members dropout=0,0.3,0.5,0.9";
    for threads in [1, 4] {
        m.ok(&format!(
            "{run} --host dropping.toml {members} --threads {threads} --run-dir m{threads}"
        ));
    }
    let fleet = outcome(&m, "m1");
    assert_eq!(outcome(&m, "m4").weights, fleet.weights);
    for (env, rate) in ["0", "0.3", "0.5", "0.9"].into_iter().enumerate() {
        m.ok(&format!("{run} --host dropping.toml --dropout {rate} --run-dir alone{env}"));
        assert_eq!(outcome(&m, &format!("alone{env}")).weights[env], fleet.weights[env], "{rate}");
        assert!((0..env).all(|other| fleet.weights[other] != fleet.weights[env]), "{rate}");
    }
    // Without the metadata, which has the description.
    let tensors = |run: &str| {
        let path = m.path(&format!("{run}/weights/env-0.safetensors"));
        safetensors::from_bytes(&path, &fs::read(&path).unwrap()).unwrap().0
    };
    m.ok(&format!("{run} --host plain.toml --run-dir plain"));
    assert_eq!(tensors("plain"), tensors("alone0"));
    m.fails(
        &format!("{run} --host plain.toml --dropout 0.5 --run-dir no"),
        2,
        &["`dropout`: got 0.5", "`dropping`, which has no dropout layers", "mlp:64,64,dropout=0.5"],
    );
    m.fails(&format!("{run} --host dropping.toml --dropout 1 --run-dir no"), 2, &["`dropout`"]);
}

/// Modules before and after a dropout layer, blended in and permanent, beside twins; a wider layer;
/// recomputed statistics.
#[test]
fn a_killed_run_resumes_to_the_same_bits() {
    let m = with_host();
    let script = r#"{"step": 1, "op": "WIDEN", "layer": "one", "by": 3}
{"step": 2, "env": 0, "op":"GERMINATE","slot":"before","blueprint":"conv_light","then":"FOSSILIZE"}
{"step": 2, "env": 1, "op":"GERMINATE","slot":"after","blueprint":"conv_light","then":"FOSSILIZE"}
"#;
    fs::write(m.path("script.jsonl"), script).unwrap();
    let run = format!(
        "{RUN} --host dropping.toml --controller fixed:script.jsonl --envs 2 --steps 10 --twin on \
         --checkpoint-every 1 --optimizer adam --slots all --run-dir"
    );
    m.ok(&format!("{run} whole"));
    let whole = outcome(&m, "whole");
    let count = |kind: &str| whole.events.iter().filter(|event| event["event"] == kind).count();
    assert_eq!([count("module_germinated"), count("layer_widened")], [2, 2]);
    let lines = whole.events.len();
    let mut kills = 0;
    for (attempt, share) in [2, 4, 6, 8].into_iter().enumerate() {
        let name = format!("killed-{attempt}");
        let moment = Moment::Events(lines * share / 10);
        kills += usize::from(killed_at(&m, &format!("{run} {name}"), &name, moment));
        m.ok(&format!("train --resume {name} --quiet --threads {}", attempt % 3 + 1));
        assert_same(&outcome(&m, &name), &whole, &format!("killed after {share} tenths"));
    }
    assert!(kills > 1, "{kills} of 4 runs were killed in time");
}

/// Blueprints with dropout: between their layers, after the layer of zeros, and none.
const MODULES: &str = r#"[[blueprints]]
name = "dropping"
layers = [
  { conv = { out = { times = { by = 2 } }, kernel = 1, depthwise = false } },
  "relu",
  { dropout = { p = 0.5 } },
  { conv = { out = "same", kernel = 1, depthwise = false } },
  { group_norm = { zero = true } },
  { dropout = { p = 0.2 } },
]
join = "residual"

[[blueprints]]
name = "never"
layers = [
  { conv = { out = "same", kernel = 3, depthwise = false } },
  { group_norm = { zero = true } },
  { dropout = { p = 0 } },
]
join = "residual"

[[blueprints]]
name = "none"
layers = [
  { conv = { out = "same", kernel = 3, depthwise = false } },
  { group_norm = { zero = true } },
]
join = "residual"
"#;

/// Germinates a blueprint in every env, blends it in and makes it permanent.
fn planting(blueprints: &[&str]) -> String {
    let line = |(env, name): (usize, &&str)| {
        format!(
            "{{\"step\": 1, \"env\": {env}, \"op\": \"GERMINATE\", \"slot\": \"after\", \
             \"blueprint\": \"{name}\", \"then\": \"FOSSILIZE\"}}\n"
        )
    };
    blueprints.iter().enumerate().map(line).collect()
}

/// A module drops in a host with dropout and in one without; the setting `dropout` is for the host.
/// A killed run resumes to the same bits, for any number of workers.
#[test]
fn modules_with_dropout_resume_to_the_same_bits() {
    let m = with_host();
    fs::write(m.path("modules.toml"), MODULES).unwrap();
    fs::write(m.path("script.jsonl"), planting(&["dropping", "dropping"])).unwrap();
    let run = format!(
        "{RUN} --blueprints modules.toml --controller fixed:script.jsonl --envs 2 --steps 12 \
         --twin on --checkpoint-every 1 --optimizer adam --slots all"
    );
    for host in ["plain", "dropping"] {
        m.ok(&format!("{run} --host {host}.toml --threads 1 --run-dir {host}"));
        let whole = outcome(&m, host);
        let of_kind = |kind| whole.events.iter().filter(move |event| event["event"] == kind);
        assert_eq!(of_kind("module_germinated").count(), 2);
        assert!(of_kind("module_fossilized").count() > 0, "{:?}", whole.events.last());
        m.ok(&format!("{run} --host {host}.toml --threads 4 --run-dir {host}-4"));
        assert_eq!(outcome(&m, &format!("{host}-4")).weights, whole.weights);
        let mut kills = 0;
        for (attempt, share) in [3, 6, 8].into_iter().enumerate() {
            let name = format!("{host}-killed-{attempt}");
            let moment = Moment::Events(whole.events.len() * share / 10);
            let command = format!("{run} --host {host}.toml --run-dir {name}");
            kills += usize::from(killed_at(&m, &command, &name, moment));
            m.ok(&format!("train --resume {name} --quiet --threads {}", attempt % 3 + 1));
            assert_same(
                &outcome(&m, &name),
                &whole,
                &format!("{host} killed after {share} tenths"),
            );
        }
        assert!(kills > 1, "{kills} of 3 runs were killed in time");
    }
    m.ok(&format!("{run} --host dropping.toml --dropout 0 --run-dir host-0"));
    let tensors = |run: &str| outcome(&m, run).weights;
    assert_ne!(tensors("host-0"), tensors("dropping"));
    assert_ne!(tensors("host-0"), tensors("plain"), "the module drops");
}

/// With probability 0 a module has the bits of the module without the layer; with another one its
/// contribution is measured without dropout, so that a module that was just planted changes
/// nothing.
#[test]
fn modules_without_draws_have_the_bits_of_the_layers_alone() {
    let m = with_host();
    fs::write(m.path("modules.toml"), MODULES).unwrap();
    let run =
        format!("{RUN} --host plain.toml --blueprints modules.toml --envs 1 --steps 8 --slots all");
    let tensors = |blueprint: &str| {
        fs::write(m.path("script.jsonl"), planting(&[blueprint])).unwrap();
        m.ok(&format!("{run} --controller fixed:script.jsonl --run-dir {blueprint}"));
        let path = m.path(&format!("{blueprint}/weights/env-0.safetensors"));
        safetensors::from_bytes(&path, &fs::read(&path).unwrap()).unwrap().0
    };
    let without = tensors("none");
    assert_eq!(tensors("never"), without);
    assert_ne!(tensors("dropping"), without);
    // The weights give the results that the run measured with them.
    let said = m
        .ok("eval --weights dropping/weights/env-0.safetensors --dataset arrays --data-root \
        images.safetensors --split test --json");
    let result: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    let summary: serde_json::Value =
        serde_json::from_slice(&fs::read(m.path("dropping/summary.json")).unwrap()).unwrap();
    assert_eq!(result["accuracy"], summary["envs"][0]["test_accuracy"]);
}

/// The ranks' samples have masks of their own, and all ranks count the same batches, also with a
/// last batch too small for all of them.
#[test]
fn replicas_drop_and_stay_alike() {
    let m = with_host();
    for (name, more) in
        [("dense", ""), ("sparse", "--exchange topk:0.1"), ("local", "--exchange diloco:2")]
    {
        let run = format!(
            "{RUN} --host dropping.toml --controller none --twin off --envs 1 --data-parallel \
             --ranks 3 --batch 57 {more} --checkpoint-every 1"
        );
        m.ok(&format!("{run} --run-dir {name}"));
        let whole = outcome(&m, name);
        assert_eq!(m.run(&format!("{run} --run-dir {name}-stopped --stop-after 2")).code, Some(3));
        m.ok(&format!("train --resume {name}-stopped --quiet --threads 1"));
        assert_same(&outcome(&m, &format!("{name}-stopped")), &whole, name);
        m.ok(&format!("{run} --dropout 0 --run-dir {name}-0"));
        assert_ne!(outcome(&m, &format!("{name}-0")).weights, whole.weights, "{name}");
    }
}

/// Copies of members go on with another rate; a killed population resumes, and a member is trained
/// again alone.
#[test]
fn a_population_changes_rates() {
    let m = with_host();
    let sweep = "dataset = \"arrays\"\ndata_root = \"images.safetensors\"\nbatch = 32\n\
        host = \"dropping.toml\"\ncontroller = \"none\"\nsteps = 5\nsamples = 5\n\
        control_split = 0.2\nscheduler = \"pbt:1\"\ncheckpoint_every = 1\n\
        [space]\ndropout = { uniform = [0, 0.8] }\nlr = { log_uniform = [0.001, 0.1] }\n";
    fs::write(m.path("sweep.toml"), sweep).unwrap();
    m.ok("sweep sweep.toml --quiet --run-dir run");
    let whole = outcome(&m, "run");
    is_resumed(&m, &whole);
    let copied = whole.events.iter().rfind(|event| event["event"] == "member_copied").unwrap();
    let member = copied["member"].as_u64().unwrap() as usize;
    m.ok(&format!("sweep replay run {member} --quiet --run-dir alone"));
    assert!(outcome(&m, "alone").weights.contains(&whole.weights[member]), "member {member}");
}

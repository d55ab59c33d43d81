//! The bare twin of every env: results, reports, and independence of the env.

use serde_json::Value;

use crate::common::{Meristem, figure, of_kind};

/// A run that grows: a module in r0c1 of each of two hosts, whose learning rate falls.
const GROWING: &str = "train --host minimal --envs 2 --steps 9 --max-batches 3 --batch 32 \
                       --control-split 0.1 --lr-schedule cosine --seed 7";

fn script(m: &Meristem) {
    let line = "{\"step\":0,\"op\":\"GERMINATE\",\"slot\":\"r0c1\",\"blueprint\":\"conv_light\",\
                 \"tempo\":\"fast\",\"then\":\"FOSSILIZE\"}\n";
    std::fs::write(m.path("a.jsonl"), line).unwrap();
}

/// Results of a twin equal those of the run without a controller, bit for bit.
#[test]
fn a_twin_equals_the_host_of_a_run_without_growth() {
    let m = Meristem::new();
    script(&m);
    let said =
        m.ok(&format!("{GROWING} --controller fixed:a.jsonl --hot-scope deny --run-dir both"));
    m.ok(&format!("{GROWING} --controller none --run-dir none --quiet"));
    let [both, none] = ["both", "none"].map(|run| m.json(&format!("{run}/summary.json")));
    for env in 0..2 {
        let (twin, bare) = (&both["envs"][env]["twin"], &none["envs"][env]);
        for key in ["control_loss", "control_accuracy", "test_loss", "test_accuracy", "parameters"]
        {
            assert_eq!(twin[key], bare[key], "{key}");
        }
        assert_eq!(twin["training_flops"], bare["training_flops"]);
        assert_ne!(twin["test_loss"], both["envs"][env]["test_loss"], "nothing grew");
        assert!(both["envs"][env]["training_flops"].as_u64() > twin["training_flops"].as_u64());
        assert!(bare.get("twin").is_none(), "{bare}");
    }
    let [both_events, none_events] = ["both", "none"].map(|run| m.events(run));
    let steps = of_kind(&none_events, "step_completed");
    for (grown, bare) in of_kind(&both_events, "step_completed").iter().zip(steps) {
        for key in ["train_loss", "control_loss", "control_accuracy"] {
            assert_eq!(grown["twin"][key], bare[key], "{key} {grown}");
        }
    }
    assert_eq!(both["images"], 2 * none["images"].as_u64().unwrap());
    assert_eq!(both["training_steps"], 2 * none["training_steps"].as_u64().unwrap());
    for words in [" %, bare ", "mean of 2 envs", "│ bare ", "│ grown ", "│ difference ", "× "]
    {
        assert!(said.stdout.contains(words), "{words}: {}", said.stdout);
    }
}

/// Without a twin the env is the same, and the output does not mention twins.
#[test]
fn an_env_does_not_depend_on_its_twin() {
    let m = Meristem::new();
    script(&m);
    let run = format!("{GROWING} --controller fixed:a.jsonl --run-dir");
    m.ok(&format!("{run} with --quiet"));
    let said = m.ok(&format!("{run} without --twin off"));
    assert!(!said.stdout.contains("bare"), "{}", said.stdout);
    for env in 0..2 {
        let weights = |run: &str| m.bytes(&format!("{run}/weights/env-{env}.safetensors"));
        assert_eq!(weights("with"), weights("without"));
    }
    assert!(m.json("without/summary.json")["envs"][0].get("twin").is_none());
    m.fails(
        "train --data-parallel --ranks 2 --controller none --twin on --run-dir no",
        2,
        &["`twin`: got on, expected off with data-parallel"],
    );
}

/// A run that is killed and resumed has the same twins.
#[test]
fn a_twin_is_resumed() {
    let m = Meristem::new();
    script(&m);
    let run =
        format!("{GROWING} --controller fixed:a.jsonl --checkpoint-every 4 --quiet --run-dir");
    m.ok(&format!("{run} run"));
    let whole = m.json("run/summary.json")["envs"].clone();
    std::fs::remove_file(m.path("run/summary.json")).unwrap();
    std::fs::remove_file(m.path("run/checkpoints/round-000000-step-000008.safetensors")).unwrap();
    m.ok("train --resume run --quiet");
    assert_eq!(m.json("run/summary.json")["envs"], whole);
}

/// The reward `shaped` is the change of the lead over the twin; without a twin it is an error.
#[test]
fn a_shaped_reward_is_the_lead_over_the_twin() {
    let m = Meristem::new();
    let run = "train --host minimal --envs 2 --steps 10 --max-batches 3 --batch 32 --seed 7 \
               --controller ppo --policy-hidden 8 --rounds 2 --quiet --reward shaped \
               --min-training-steps 1";
    m.ok(&format!("{run} --run-dir run"));
    let events = m.events("run");
    let steps = of_kind(&events, "step_completed");
    let lead = |step: &Value| {
        (figure(&step["twin"]["control_loss"]) as f32 - figure(&step["control_loss"]) as f32) as f64
    };
    let mut told = 0;
    for now in &steps {
        let same = |key: &str, other: &Value| now[key] == other[key];
        let before = steps.iter().find(|other| {
            same("env", other)
                && same("round", other)
                && other["step"].as_u64().map(|step| step + 1) == now["step"].as_u64()
        });
        let expected = before.map_or(0.0, |before| 8.0 * (lead(now) - lead(before)));
        let got = figure(&now["reward"]["advantage"]);
        // Losses of about 2 are rounded to f32, for both steps and both networks.
        assert!((got - expected).abs() < 8.0 * 8.0 * f64::from(f32::EPSILON), "{now}");
        told += usize::from(got != 0.0);
    }
    assert!(told > 0, "no env was ever ahead or behind");
    m.fails(
        &format!("{run} --twin off --run-dir no"),
        2,
        &["`twin`: got off, expected on with reward shaped"],
    );
}

//! `meristem control train-policy`: the folder, continuation after kills, and use of the policy.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::common::process::Process;
use crate::common::{Meristem, assert_documented};

/// Rounds of four envs with hosts of one to three slots.
pub(crate) const TINY_POLICY: &str = r#"
rounds = 3
envs = 4
evaluate_every = 2
evaluation_tasks = 2
evaluation_envs = 2
teacher_rounds = 1
envs_per_member = 2

[settings]
blueprints = ["vectors"]
policy_hidden = 8
ppo_minibatches = 3
batch = 64
min_training_steps = 1

[task]
dataset = { choice = ["blobs", "spirals", "friedman"] }
train = { int = [200, 300] }
test = { choice = [40] }
steps = { int = [3, 5] }

[members]
host = { choice = ["mlp:4,4,4", "mlp:5", "mlp:4,4"] }
lr = { log_uniform = [0.02, 0.2] }
"#;

/// A host in which no module can grow.
const SLOTLESS: &str = r#"layers = [
    { linear = { out = 3 } }, "relu", { linear = { out = 4 } }, "relu",
    { linear = { out = "classes" } },
]"#;

fn prepared() -> Meristem {
    let m = Meristem::new();
    fs::write(m.path("tiny.toml"), TINY_POLICY).unwrap();
    fs::write(m.path("slotless.toml"), SLOTLESS).unwrap();
    m
}

/// Lines of the curves, without the seconds, the only numbers that differ between two trainings.
fn lines(m: &Meristem, folder: &str) -> Vec<Value> {
    let text = fs::read_to_string(m.path(&format!("{folder}/curves.jsonl"))).unwrap();
    let line = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        for key in ["seconds", "setup_seconds"] {
            line.as_object_mut().unwrap().remove(key);
        }
        line
    };
    text.lines().map(line).collect()
}

fn assert_same(m: &Meristem, one: &str, other: &str) {
    assert_eq!(lines(m, one), lines(m, other));
    for file in ["policy.safetensors", "state.safetensors"] {
        let bytes = |folder: &str| fs::read(m.path(&format!("{folder}/{file}"))).unwrap();
        assert!(bytes(one) == bytes(other), "{file} of {one} and {other}");
    }
}

/// Without evaluations on the way there is the one after the last round.
#[test]
fn a_training_is_evaluated_at_its_end_alone() {
    let m = prepared();
    let text = TINY_POLICY.replace("rounds = 3", "rounds = 1");
    let text = text.replace("evaluation_tasks = 2", "evaluation_tasks = 0");
    fs::write(m.path("tiny.toml"), format!("last_evaluation_tasks = 2\n{text}")).unwrap();
    m.ok("control train-policy tiny.toml --quiet");
    let lines = lines(&m, "policy-tiny");
    let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["round", "evaluation"]);
}

#[test]
fn a_training_without_spaces_of_its_file_can_be_extended() {
    let m = Meristem::new();
    let text = "rounds = 1\nenvs = 2\nevaluation_tasks = 0\n[settings]\npolicy_hidden = 8\n\
                dataset = \"blobs:train=200,test=40\"\nhost = \"mlp:4\"\nsteps = 2\n\
                blueprints = [\"vectors\"]\n";
    fs::write(m.path("tiny.toml"), text).unwrap();
    m.ok("control train-policy tiny.toml --quiet");
    m.ok("control train-policy tiny.toml --rounds 2 --quiet");
    assert_eq!(lines(&m, "policy-tiny").len(), 2);
}

/// A training of an earlier build, whose folder has no version of the settings, goes on with the
/// defaults of version 15.
#[test]
fn a_training_keeps_the_defaults_with_which_it_began() {
    let m = prepared();
    let request = TINY_POLICY.replace("rounds = 3", "rounds = 2");
    fs::write(m.path("older.toml"), format!("settings_version = 15\n{request}")).unwrap();
    m.ok("control train-policy older.toml --quiet");
    let file = m.path("policy-older/training.json");
    let began = fs::read_to_string(&file).unwrap();
    let older = began.replace("  \"settings_version\": 15,\n", "");
    assert_ne!(older, began);
    fs::write(&file, older).unwrap();
    m.ok("control train-policy tiny.toml --run-dir policy-older --quiet");
    let named = "[settings]\nbirth = \"aside\"\nmodule_lr = \"fixed\"";
    fs::write(m.path("named.toml"), TINY_POLICY.replace("[settings]", named)).unwrap();
    m.ok("control train-policy named.toml --quiet");
    assert_same(&m, "policy-older", "policy-named");
    m.ok("control train-policy tiny.toml --quiet");
    assert_ne!(lines(&m, "policy-tiny"), lines(&m, "policy-named"));

    fs::write(m.path("newer.toml"), format!("settings_version = 16\n{TINY_POLICY}")).unwrap();
    let began = "began with `\"settings_version\": 15,`";
    m.fails("control train-policy newer.toml --run-dir policy-older --quiet", 2, &[began]);
    for version in [14, 17] {
        let text = format!("settings_version = {version}\n{TINY_POLICY}");
        fs::write(m.path("unknown.toml"), text).unwrap();
        m.fails("control train-policy unknown.toml --quiet", 2, &["settings_version", "15 to 16"]);
    }
}

#[test]
fn a_training_has_curves_and_a_policy_for_any_host() {
    let m = prepared();
    let more_at_the_end = format!("last_evaluation_tasks = 3\n{TINY_POLICY}");
    fs::write(m.path("tiny.toml"), more_at_the_end).unwrap();
    let told = m.ok("control train-policy tiny.toml --json --quiet");
    let last: Value = serde_json::from_str(&told.stdout).unwrap();
    let lines = lines(&m, "policy-tiny");
    assert_eq!(last["controllers"], lines.last().unwrap()["controllers"]);
    let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    let expected = ["evaluation", "round", "round", "evaluation", "round", "evaluation"];
    assert_eq!(kinds, expected);
    for line in &lines {
        // The keys of `report` are those of an event.
        let mut own = line.clone();
        if let Some(report) = own.get_mut("report") {
            assert_documented("### policy_updated", &report.take());
        }
        if let Some(controllers) = own.get_mut("controllers") {
            assert_documented("## curves.jsonl", &controllers.take()["greedy"]);
        }
        assert_documented("## curves.jsonl", &own);
    }
    for round in lines.iter().filter(|line| line["kind"] == "round") {
        let steps = round["steps"].as_u64().unwrap();
        assert_eq!(round["report"]["transitions"], 4 * steps, "{round}");
    }
    let of = |line: &Value, name: &str| line["controllers"][name].clone();
    for line in lines.iter().filter(|line| line["kind"] == "evaluation") {
        let tasks = |of: &Value| of["returns"].as_array().unwrap().clone();
        for name in ["heuristic", "random"] {
            let (now, first) = (tasks(&of(line, name)), tasks(&of(&lines[0], name)));
            assert_eq!(now[..2], first, "{name} does not learn");
        }
        let expected = if line["round"] == 3 { 3 } else { 2 };
        assert_eq!(tasks(&of(line, "policy")).len(), expected);
        assert!(of(line, "random")["env_std"].as_f64().unwrap() > 0.0);
    }
    // The heuristic acts in the first round, and a demonstration has no KL divergence.
    let rounds: Vec<&Value> = lines.iter().filter(|line| line["kind"] == "round").collect();
    let kl = |round: usize| rounds[round]["report"]["kl"].as_f64().unwrap();
    assert!(kl(0) == 0.0 && kl(1) > 0.0 && kl(2) > 0.0);
    assert!(fs::read_to_string(m.path("policy-tiny/curves.svg")).unwrap().contains("transitions"));
    // On hosts that no round had: another number of slots, other blueprints, members of their own.
    let quick = "--steps 4 --max-batches 2 --batch 32 --quiet";
    let policy = "--controller greedy:policy-tiny/policy.safetensors";
    m.ok(&format!("train {quick} {policy} --host cnn:channels=2 --envs 1"));
    m.ok(&format!(
        "train {quick} {policy} --dataset mnist1d --envs 2 --members host=conv1d:4,4|conv1d:4"
    ));
    let start = "--controller ppo --policy policy-tiny/policy.safetensors --rounds 2";
    m.ok(&format!("train {quick} {start} --dataset blobs --host mlp:6,6 --envs 2 --run-dir run"));
    let config = fs::read_to_string(m.path("run/config.toml")).unwrap();
    assert!(config.contains("policy_form = \"set\""), "{config}");
    m.fails(
        &format!("train {quick} {start} --policy-form vector --dataset blobs --host mlp:6"),
        2,
        &["policy-form", "set, the form of the policy"],
    );
    m.fails(
        &format!(
            "train {quick} --controller ppo --policy none --members host=mlp:4,4|mlp:4 \
             --dataset blobs"
        ),
        2,
        &["hosts with the same slots", "--policy-form set"],
    );
}

/// Trains in the folder `killed`, once for each of the numbers, and kills the process when it has
/// printed this number of lines.
fn kill_after_lines(m: &Meristem, numbers: &[usize]) {
    for lines in numbers {
        let mut command = m.command();
        command.args("control train-policy tiny.toml --run-dir killed".split_whitespace());
        let mut child = Process::start(command.stdout(Stdio::null()).stderr(Stdio::piped()));
        let stderr = BufReader::new(child.stderr.take().unwrap());
        stderr.lines().nth(lines - 1);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn stopped_killed_and_extended_trainings_have_the_same_bits() {
    let m = prepared();
    m.ok("control train-policy tiny.toml --run-dir whole --quiet");
    kill_after_lines(&m, &[1, 2, 3, 4, 5]);
    m.ok("control train-policy tiny.toml --run-dir killed --quiet");
    assert_same(&m, "killed", "whole");
    // Evaluated at its former end, as the whole one is.
    m.ok("control train-policy tiny.toml --rounds 2 --run-dir longer --quiet");
    m.ok("control train-policy tiny.toml --run-dir longer --quiet");
    assert_same(&m, "longer", "whole");
    // Complete already.
    m.ok("control train-policy tiny.toml --run-dir whole --quiet");
    assert_same(&m, "whole", "longer");
}

/// Two families, one of which has convolutional hosts.
#[test]
fn a_training_on_families_goes_on_after_a_kill_to_the_same_bits() {
    let m = Meristem::new();
    let text = TINY_POLICY.replace("[\"vectors\"]", "[\"standard\", \"vectors\"]");
    let text = text.replace("evaluation_tasks = 2", "evaluation_tasks = 4");
    let families = "[[families]]\nweight = 2\n[[families]]\n\
                    task.dataset = { choice = [\"mnist1d\"] }\n\
                    members.host = { choice = [\"conv1d:4,4\", \"conv1d:4\"] }\n";
    fs::write(m.path("tiny.toml"), format!("{text}{families}")).unwrap();
    m.ok("control train-policy tiny.toml --run-dir whole --quiet");
    let curves = lines(&m, "whole");
    let of_evaluation: Vec<u64> =
        curves[0]["families"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert!(of_evaluation.len() == 4 && [0, 1].iter().all(|n| of_evaluation.contains(n)));
    for line in &curves {
        let mut line = line.clone();
        line.as_object_mut().unwrap().retain(|key, _| key != "report" && key != "controllers");
        assert_documented("## curves.jsonl", &line);
    }
    let rounds = curves.iter().filter(|line| line["kind"] == "round");
    let signals = |line: &Value| line["dataset"].as_str().unwrap().starts_with("mnist1d:");
    let (of_signals, others): (Vec<_>, Vec<_>) = rounds.partition(|line| signals(line));
    assert!(!of_signals.is_empty() && !others.is_empty());
    kill_after_lines(&m, &[1, 3]);
    m.ok("control train-policy tiny.toml --run-dir killed --quiet");
    assert_same(&m, "killed", "whole");
}

/// A policy that makes layers wider, taught in the first round, also of a host without slots. Only
/// layers grow, and count as growth.
#[test]
fn a_policy_that_widens_goes_on_after_a_kill_to_the_same_bits() {
    let m = prepared();
    let of_width = "[settings]\npolicy_form = \"set-widen\"\nwiden_by = 0.5\nwiden_pause = 1\n\
                    parameters_per_image = 99\nmax_gap = 99\nmax_modules = 0";
    let text = TINY_POLICY.replace("[settings]", of_width).replace("mlp:5", "slotless.toml");
    fs::write(m.path("tiny.toml"), text.replace("{ int = [3, 5] }", "{ int = [5, 6] }")).unwrap();
    m.ok("control train-policy tiny.toml --run-dir whole --quiet");
    kill_after_lines(&m, &[2, 3, 5]);
    m.ok("control train-policy tiny.toml --run-dir killed --quiet");
    assert_same(&m, "killed", "whole");
    let lines = lines(&m, "whole");
    let rounds = lines.iter().filter(|line| line["kind"] == "round");
    for round in rounds {
        assert!(round["report"]["ops"][6].as_u64() > Some(0), "{round}");
    }
    for line in lines.iter().filter(|line| line["kind"] == "evaluation") {
        let growth = |controller: &str| line["controllers"][controller]["growth"].as_f64();
        assert!(growth("heuristic") > Some(1.2) && growth("random") == Some(1.0), "{line}");
    }
    let acting = "train --dataset spirals --host mlp:3,3 --steps 8 --envs 2 --widen-by 0.5 --quiet \
                  --controller ppo:whole/policy.safetensors --run-dir acting";
    m.ok(acting);
    assert!(fs::read_to_string(m.path("acting/events.jsonl")).unwrap().contains("layer_widened"));
}

#[test]
fn requests_that_do_not_fit_are_refused_before_the_first_round() {
    let m = prepared();
    let file = |name: &str, from: &str, to: &str| {
        assert!(TINY_POLICY.contains(from));
        fs::write(m.path(name), TINY_POLICY.replace(from, to)).unwrap();
    };
    for (from, to, words) in [
        ("rounds = 3", "rounds = 0", "1 to"),
        ("batch = 64", "batch = 0", "batch"),
        ("mlp:5", "mlp:x", "mlp:x"),
        ("mlp:5", "slotless.toml", "a policy of the form set-widen"),
        ("lr = {", "lrr = {", "did you mean `lr`"),
        ("[200, 300]", "[-3, 0]", "train="),
        ("envs = 4", "envs = 4\ncolour = 1", "colour"),
        ("envs_per_member = 2", "envs_per_member = 3", "a divisor of 4"),
        ("envs = 4", "envs = 4\nlast_evaluation_tasks = 1", "2 to"),
        ("envs = 4", "envs = 4\nfamilies = [{ weight = 0 }]", "1 to 1000"),
        ("envs = 4", "envs = 4\nfamilies = [{ weight = 1, colour = 2 }]", "colour"),
        ("envs = 4", "envs = 4\nfamilies = [{ members = [\"host=choice:mlp:x\"] }]", "mlp:x"),
    ] {
        file("bad.toml", from, to);
        m.fails("control train-policy bad.toml --run-dir bad", 2, &[words]);
        assert!(!m.path("bad").exists(), "{to}");
    }
    m.ok("control train-policy tiny.toml --rounds 1 --run-dir there --quiet");
    file("other.toml", "batch = 64", "batch = 32");
    m.fails("control train-policy other.toml --run-dir there", 2, &["batch", "began with"]);
    m.fails("control train-policy none.toml", 2, &["none.toml"]);
    fs::create_dir(m.path("full")).unwrap();
    fs::write(m.path("full/file"), "").unwrap();
    m.fails("control train-policy tiny.toml --run-dir full", 2, &["full"]);
    assert!(m.path("full/file").exists());
}

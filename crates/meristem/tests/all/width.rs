//! Runs whose hosts grow in width: resumed, with replicas, evaluated and continued.

use std::fs;

use crate::common::Meristem;
use crate::common::runs::{Outcome, assert_same, outcome, with_images};
use crate::resume::{Moment, killed_at};

const RUN: &str = "train --dataset arrays --data-root images.safetensors --preset quick \
    --host cnn:channels=2,blocks=2 --batch 16 --control-split 0.2 --checkpoint-every 2 --quiet";

/// The heuristic makes layers wider, whatever the losses and the budget.
const WIDENING: &str = "--controller heuristic --envs 2 --steps 12 --max-modules 0 --widen-by 0.5 \
    --widen-pause 2 --parameters-per-image 99 --max-gap 99";

/// Width, a module in a slot that got wider, and width again.
const SCRIPT: &str = r#"{"step": 1, "op": "WIDEN", "layer": "blocks.0.conv", "by": 3}
{"step": 2, "op": "GERMINATE", "slot": "r0c0", "blueprint": "conv_light", "then": "FOSSILIZE"}
{"step": 4, "op": "WIDEN", "layer": "blocks.1.conv", "by": 2}
{"step": 9, "env": 1, "op": "WIDEN", "layer": "blocks.1.conv", "by": 1}
"#;

fn with_script() -> Meristem {
    let m = with_images();
    fs::write(m.path("width.jsonl"), SCRIPT).unwrap();
    m
}

fn scripted(more: &str) -> String {
    format!("{RUN} --controller fixed:width.jsonl --envs 2 --steps 14 {more}")
}

fn widths(of: &Outcome) -> usize {
    of.events.iter().filter(|event| event["event"] == "layer_widened").count()
}

#[test]
fn a_run_that_widens_is_resumed_to_the_same_bits() {
    let m = with_script();
    for init in ["zero", "net2wider", "firefly", "variance_transfer"] {
        let run = scripted(&format!("--width-init {init} --optimizer adam --run-dir"));
        m.ok(&format!("{run} {init}"));
        let whole = outcome(&m, init);
        assert_eq!(widths(&whole), 5, "both envs twice, and one a third time");
        resumes(&m, &run, init, &[12, 17, 24, 30, 38]);
    }
    assert_ne!(outcome(&m, "zero").weights, outcome(&m, "net2wider").weights);
    assert_ne!(outcome(&m, "zero").weights, outcome(&m, "firefly").weights);
}

/// Rates and optimiser state of new features and modules.
#[test]
fn rates_of_new_parts_are_resumed_to_the_same_bits() {
    let m = with_script();
    let usual = scripted("--run-dir usual");
    m.ok(&usual);
    let usual = outcome(&m, "usual");
    for (name, more, is_other) in [
        ("age", "--growth-lr 3:6", true),
        ("held", "--growth-lr 0:30 --optimizer adam", true),
        ("norm", "--growth-lr norm --width-init variance_transfer", true),
        ("reset", "--growth-momentum reset", true),
        ("one", "--growth-lr 1:6", false),
    ] {
        let run = scripted(&format!("{more} --run-dir"));
        m.ok(&format!("{run} {name}"));
        let whole = outcome(&m, name);
        assert_eq!(whole.weights != usual.weights, is_other, "{name}");
        resumes(&m, &run, name, &[12, 17, 24, 30, 38]);
    }
    m.fails(&scripted("--growth-lr 2 --run-dir no"), 2, &["FACTOR:STEPS"]);
}

/// Growth in width by the orthogonality of activations, which is measured anew after a resume.
#[test]
fn the_orthogonality_of_activations_is_resumed_to_the_same_bits() {
    let m = with_images();
    let heuristic = format!("{RUN} {WIDENING}");
    let run = format!(
        "{heuristic} --widen-trigger orthogonality --widen-place orthogonality \
         --widen-orthogonality 0.6 --run-dir"
    );
    m.ok(&format!("{run} whole"));
    let whole = outcome(&m, "whole");
    assert!(widths(&whole) > 0, "nothing was triggered");
    resumes(&m, &run, "whole", &[12, 17, 24, 30]);
    m.ok(&format!("{run} one-worker --threads 1"));
    assert_same(&outcome(&m, "one-worker"), &whole, "workers");
    m.fails(
        &format!("{heuristic} --widen-trigger plateau --run-dir no"),
        2,
        &["widen-trigger", "plateau-steps"],
    );
    let replicas = "--data-parallel --ranks 2 --envs 1 --twin off";
    let run = run.replace("--envs 2", replicas);
    m.fails(&format!("{run} no"), 2, &["widen-trigger", "different batches"]);
}

/// Growth in width by gradients that further features would have, which are measured anew after a
/// resume. They can be measured for linear layers, or for convolutions without norms.
#[test]
fn scores_of_gradients_are_resumed_to_the_same_bits() {
    let m = with_images();
    let heuristic = format!("{RUN} {WIDENING}");
    let of_linear = heuristic.replace("cnn:channels=2,blocks=2", "mlp:4,4");
    let schedule = format!("{of_linear} --run-dir schedule");
    m.ok(&schedule);
    for (name, rules) in [
        ("ratio", "--widen-trigger gradient_ratio:0.5 --widen-place gradient_ratio"),
        ("natural", "--widen-trigger natural_gradient:0.05 --widen-place natural_gradient"),
        ("both", "--widen-trigger gradient_ratio:0.5 --widen-place natural_gradient"),
    ] {
        let run = format!("{of_linear} {rules} --run-dir");
        m.ok(&format!("{run} {name}"));
        let whole = outcome(&m, name);
        assert!(widths(&whole) > 0, "{name}: nothing was triggered");
        assert_ne!(whole.weights, outcome(&m, "schedule").weights, "{name}");
        resumes(&m, &run, name, &[14, 26]);
        m.ok(&format!("{run} {name}-one-worker --threads 1"));
        assert_same(&outcome(&m, &format!("{name}-one-worker")), &whole, "workers");
        let config = fs::read_to_string(m.path(name).join("config.toml")).unwrap();
        assert!(config.contains("widen_trigger = \""), "{config}");
    }
    let never = format!("{of_linear} --widen-trigger natural_gradient:1000 --run-dir never");
    m.ok(&never);
    assert_eq!(widths(&outcome(&m, "never")), 0);
    for (rule, words) in [
        ("--widen-trigger gradient_ratio:1", "a layer with a bias, and no norm"),
        ("--widen-place natural_gradient", "nothing but activation functions"),
    ] {
        let key = rule.split_whitespace().next().unwrap().trim_start_matches("--");
        m.fails(&format!("{heuristic} {rule} --run-dir no"), 2, &[key, words]);
    }
    let replicas = "--data-parallel --ranks 2 --envs 1 --twin off --widen-place gradient_ratio";
    let run = of_linear.replace("--envs 2", replicas);
    m.fails(&format!("{run} --run-dir no"), 2, &["widen-place", "smallest", "different batches"]);
    m.fails(&format!("{of_linear} --widen-trigger gradient_ratio --run-dir no"), 2, &["ratio:X"]);
}

/// A layer in a branch beside a sigmoid, and with dropout before its activation function.
const BRANCHES: &str = r#"
layers = [
  "flatten",
  { slot = { name = "first" } },
  { branches = { join = "add", branches = [
      [{ linear = { out = 6 } }, "sigmoid", { linear = { out = 8 } }],
      [{ linear = { out = 6 } }, { dropout = { p = 0.3 } }, "relu", { linear = { out = 8 } }],
  ] } },
  { linear = { out = "classes" } },
]
"#;

/// Layers that cannot be measured stay as they are, and demonstrations follow the rules, too.
#[test]
fn scores_of_gradients_in_branches_and_in_demonstrations() {
    let m = with_images();
    fs::write(m.path("branches.toml"), BRANCHES).unwrap();
    let run = format!(
        "{RUN} --envs 1 --steps 8 --max-modules 0 --widen-by 0.5 --widen-pause 1 --max-gap 99 \
         --parameters-per-image 99"
    );
    let of = |host: &str| run.replace("cnn:channels=2,blocks=2", host);
    let rules = "--widen-trigger natural_gradient:0 --widen-place gradient_ratio";
    m.ok(&format!("{} --controller heuristic {rules} --run-dir branches", of("branches.toml")));
    let widened = outcome(&m, "branches");
    let layers = widened.events.iter().filter(|event| event["event"] == "layer_widened");
    let layers: Vec<&str> = layers.map(|event| event["layer"].as_str().unwrap()).collect();
    assert!(!layers.is_empty() && layers.iter().all(|l| l.contains("branches.1")), "{layers:?}");
    let policy =
        "--controller ppo --policy-form set-widen --policy-hidden 8 --ppo-demonstrations 1";
    m.ok(&format!("{} {policy} {rules} --rounds 1 --run-dir taught", of("mlp:4,4")));
    assert!(widths(&outcome(&m, "taught")) > 0, "the demonstrations widen");
    // Without a layer that could become wider there is nothing to measure.
    let linear =
        r#"layers = ["flatten", { slot = { name = "s" } }, { linear = { out = "classes" } }]"#;
    fs::write(m.path("linear.toml"), linear).unwrap();
    m.ok(&format!("{} --controller heuristic {rules} --run-dir linear", of("linear.toml")));
}

/// A policy that makes layers wider: it learns from the heuristic, then from rewards; its file acts
/// in runs with and without growth in width.
#[test]
fn a_policy_that_widens_is_resumed_to_the_same_bits() {
    let m = with_images();
    let run = format!(
        "{RUN} --controller ppo --policy-form set-widen --policy-hidden 8 --widen-by 0.5 --envs 2 \
         --steps 7 --rounds 3 --ppo-demonstrations 1 --widen-pause 1 --parameters-per-image 99 \
         --max-gap 99 --run-dir"
    );
    m.ok(&format!("{run} whole"));
    let whole = outcome(&m, "whole");
    let in_round = |round: u64| {
        let events = whole.events.iter().filter(|event| event["event"] == "layer_widened");
        events.filter(|event| event["round"] == round).count()
    };
    assert!((0..3).all(|round| in_round(round) > 0), "{}", widths(&whole));
    let updates = whole.events.iter().filter(|event| event["event"] == "policy_updated");
    for (round, update) in updates.enumerate() {
        let ops = update["ops"].as_array().unwrap();
        assert_eq!((ops.len(), ops[6].as_u64()), (7, Some(in_round(round as u64) as u64)));
    }
    resumes(&m, &run, "whole", &[14, 27, 45, 60, 80]);
    m.ok(&format!("{run} one-worker --threads 1"));
    assert_same(&outcome(&m, "one-worker"), &whole, "workers");

    let config = fs::read_to_string(m.path("whole/config.toml")).unwrap();
    assert!(config.contains("policy_form = \"set-widen\""), "{config}");
    let acting = |policy: &str, more: &str, name: &str| {
        m.ok(&format!("{RUN} --controller {policy} --envs 2 --steps 9 {more} --run-dir {name}"));
        outcome(&m, name)
    };
    let own = "ppo:whole/policy.safetensors";
    assert!(widths(&acting(own, "--widen-by 0.5", "acting")) > 0);
    assert_eq!(widths(&acting(own, "", "forbidden")), 0);
    m.fails(
        &format!("{RUN} --controller {own} --policy-form set --run-dir no"),
        2,
        &["policy-form", "set-widen, the form of the policy"],
    );
    // A policy of the form `set` has no such action.
    let without = acting("greedy:general", "", "without");
    let with = acting("greedy:general", "--widen-by 0.5", "with");
    assert_eq!(with.weights, without.weights);
    assert_eq!((widths(&with), widths(&without)), (0, 0));
}

/// A host without slots grows in width: by rules, a script and a policy, also beside a host with
/// slots. Controllers that could not let it grow are refused.
#[test]
fn a_host_without_slots_gets_wider() {
    let m = with_images();
    let run = RUN.replace("cnn:channels=2,blocks=2", "slotless.toml");
    let rules = "--envs 2 --steps 8 --widen-by 0.5 --widen-pause 1 --parameters-per-image 99 \
        --max-gap 99";
    let policy = format!(
        "{rules} --rounds 2 --ppo-demonstrations 1 --controller ppo --policy-form set-widen \
         --policy-hidden 8"
    );
    fs::write(m.path("two.jsonl"), r#"{"step": 1, "op": "WIDEN", "layer": "two", "by": 3}"#)
        .unwrap();
    let runs = [
        ("ruled", format!("{run} {rules} --controller heuristic --run-dir")),
        ("scripted", format!("{run} --envs 2 --steps 5 --controller fixed:two.jsonl --run-dir")),
        ("learned", format!("{run} {policy} --run-dir")),
        ("beside", format!("{RUN} {policy} --members host=minimal|slotless.toml --run-dir")),
    ];
    for (name, run) in &runs {
        m.ok(&format!("{run} {name}"));
        let whole = outcome(&m, name);
        assert!(widths(&whole) > 0, "{name}");
        let slotless = whole.events.iter().filter(|event| event["event"] == "layer_widened");
        assert!(slotless.into_iter().any(|event| event["env"] == 1), "{name}");
        resumes(&m, run, name, &[8, 12, 16]);
        m.ok(&format!("{run} {name}-one --threads 1"));
        assert_same(&outcome(&m, &format!("{name}-one")), &whole, "workers");
    }
    m.ok("export onnx ruled/weights/env-0.safetensors --out ruled.onnx");
    m.ok("runs report ruled learned");
    let words = ["got slotless", "a host with slots", "--controller none"];
    for controller in
        ["heuristic", "ppo --widen-by 0.5", "greedy:shipped", "ppo:learned/policy.safetensors"]
    {
        m.fails(&format!("{run} --controller {controller} --run-dir no"), 2, &words);
    }
    let own = "ppo:learned/policy.safetensors --widen-by 0.5";
    m.ok(&format!("{run} --controller {own} --envs 2 --steps 6 --run-dir own"));
    assert!(widths(&outcome(&m, "own")) > 0);
    assert!(!m.path("no").exists());
}

/// Kills runs like the complete one with this name after some numbers of events, and resumes them
/// to the same bits.
fn resumes(m: &Meristem, run: &str, whole: &str, events: &[usize]) {
    let expected = outcome(m, whole);
    let mut kills = 0;
    for events in events {
        let name = format!("{whole}-{events}");
        if killed_at(m, &format!("{run} {name}"), &name, Moment::Events(*events)) {
            kills += 1;
            m.ok(&format!("train --resume {name}"));
        }
        assert_same(&outcome(m, &name), &expected, &format!("killed after {events} events"));
    }
    assert!(2 * kills > events.len(), "hardly a run was killed, nothing was shown");
}

/// Convolutions with biases and nothing between two of them but an activation function.
const PAIRS: &str = r#"
layers = [
  { conv2d = { out = 3, kernel = 3, bias = true, name = "hidden.0" } }, "relu",
  { conv2d = { out = 4, kernel = 3, stride = 2, bias = true, name = "hidden.1" } }, "silu",
  { conv2d = { out = 4, kernel = 3 } }, "relu",
  "global_avg_pool", { linear = { out = "classes" } },
]
"#;

/// Initialisations for layers without norms, which measure batches: in both envs at different
/// steps, for any number of workers, also while another loss is not finite.
#[test]
fn measured_features_are_resumed_to_the_same_bits() {
    let m = with_images();
    fs::write(m.path("pairs.toml"), PAIRS).unwrap();
    let line = |step, env, layer, by| {
        let layer = format!("hidden.{layer}");
        format!(
            r#"{{"step": {step}, "env": {env}, "op": "WIDEN", "layer": "{layer}", "by": {by}}}"#
        )
    };
    let lines = [line(1, 0, 0, 3), line(3, 0, 1, 2), line(4, 1, 1, 5), line(6, 0, 0, 1)];
    fs::write(m.path("script.jsonl"), lines.join("\n")).unwrap();
    for (init, host, width_init) in [
        ("gradmax", "mlp:4,4", "gradmax"),
        ("tiny", "mlp:4,4", "tiny"),
        ("firefly", "mlp:4,4", "firefly"),
        ("convolutions", "pairs.toml", "tiny"),
    ] {
        let run = format!(
            "{RUN} --controller fixed:script.jsonl --envs 2 --steps 9 --host {host} \
             --width-init {width_init}"
        );
        m.ok(&format!("{run} --run-dir {init}"));
        assert_eq!(widths(&outcome(&m, init)), 4);
        resumes(&m, &format!("{run} --run-dir"), init, &[11, 18, 24]);
        m.ok(&format!("{run} --threads 1 --run-dir {init}-one-worker"));
        assert_same(&outcome(&m, &format!("{init}-one-worker")), &outcome(&m, init), "workers");
        let diverging = "--lr 1e4 --clip-norm 1e9 --run-dir";
        m.fails(&format!("{run} {diverging} {init}-diverging"), 1, &["diverged"]);
    }
}

/// Losses with options, several outputs, and hosts of unusual sizes.
#[test]
fn features_are_measured_with_every_loss_and_in_wide_layers() {
    let m = Meristem::new();
    let run = "train --steps 3 --batch 50 --max-batches 2 --control-split 0.2 --max-modules 0 \
               --controller heuristic --widen-by 0.5 --widen-pause 1 --max-gap 99 --quiet";
    for (name, more) in [
        ("weights", "--dataset spirals --host mlp:8,8 --class-weights balanced"),
        ("smoothing", "--dataset spirals --host mlp:8,8 --label-smoothing 0.1"),
        ("numbers", "--dataset friedman --host mlp:8,8 --loss huber"),
        ("wide", "--dataset spirals --host mlp:800,8 --parameters-per-image 99"),
    ] {
        for init in ["firefly", "gradmax", "tiny"] {
            m.ok(&format!("{run} {more} --width-init {init} --run-dir {name}-{init}"));
            assert!(widths(&outcome(&m, &format!("{name}-{init}"))) > 0, "{name} {init}");
        }
    }
    fs::write(m.path("wide.jsonl"), r#"{"step": 0, "op": "WIDEN", "layer": "hidden.0", "by": 1}"#)
        .unwrap();
    let wide = "train --dataset spirals --host mlp:8,1100 --steps 2 --max-batches 1 --run-dir no \
                --control-split 0.2 --controller fixed:wide.jsonl --width-init gradmax";
    m.fails(wide, 1, &["1100 outgoing weights", "at most 1024 are measured"]);
}

#[test]
fn an_initialisation_without_what_it_measures_is_refused() {
    let m = with_images();
    let heuristic = format!("{RUN} --controller heuristic --widen-by 0.5 --steps 3 --run-dir no");
    m.fails(&format!("{heuristic} --width-init gradmax"), 2, &["no norm"]);
    m.fails(&format!("{heuristic} --width-init tiny"), 2, &["nothing but activation functions"]);
    let replicas = "--data-parallel --ranks 2 --envs 1 --controller none --twin off";
    m.fails(
        &format!("{RUN} {replicas} --width-init firefly --run-dir no"),
        2,
        &["width-init", "different batches"],
    );
    fs::write(
        m.path("conv.jsonl"),
        r#"{"step": 1, "op": "WIDEN", "layer": "blocks.0.conv", "by": 1}"#,
    )
    .unwrap();
    let run = format!("{RUN} --controller fixed:conv.jsonl --steps 3 --width-init gradmax");
    m.fails(&format!("{run} --run-dir no"), 1, &["suit all layers"]);
}

#[test]
fn the_heuristic_widens_and_the_weights_are_a_network_like_any_other() {
    let m = with_images();
    let run = format!(
        "{RUN} --controller heuristic --envs 1 --steps 12 --max-modules 0 --widen-by 0.5 \
         --widen-pause 2 --parameters-per-image 99 --max-gap 99"
    );
    m.ok(&format!("{run} --run-dir wide --export wide.safetensors"));
    assert_eq!(
        widths(&outcome(&m, "wide")),
        4,
        "two layers of 2 and 4 channels, each by half, twice"
    );
    let eval = |more: &str| {
        m.ok(&format!(
            "eval --weights wide.safetensors --dataset arrays \
                       --data-root images.safetensors --split test --json {more}"
        ))
    };
    // By the description in the file, and by the host that it was before.
    let all: Vec<String> =
        ["", "--host cnn:channels=2,blocks=2"].iter().map(|more| eval(more).stdout).collect();
    assert_eq!(all[0], all[1]);
    m.ok("export onnx wide.safetensors --out wide.onnx");
    m.ok(&format!("{run} --init wide.safetensors --run-dir further"));
    let further = outcome(&m, "further");
    assert_eq!(widths(&further), 0, "it already has twice the features that it began with");
    let size = |run: &str| outcome(&m, run).envs[0]["host_parameters"].clone();
    assert_eq!(size("further"), size("wide"));
    for view in ["runs .", "runs report wide"] {
        m.ok(view);
    }
}

#[test]
fn replicas_get_wider_together() {
    let m = with_script();
    for exchange in ["dense", "topk:0.1", "diloco:2:int8"] {
        let name = exchange.replace([':', '.'], "-");
        let more = format!("--data-parallel --ranks 2 --exchange {exchange} --run-dir");
        let run = scripted(&more).replace("--envs 2", "--envs 1");
        m.ok(&format!("{run} {name}"));
        let whole = outcome(&m, &name);
        assert_eq!(widths(&whole), 2);
        let killed = format!("{name}-killed");
        killed_at(&m, &format!("{run} {killed}"), &killed, Moment::Events(14));
        m.ok(&format!("train --resume {killed}"));
        assert_same(&outcome(&m, &killed), &whole, exchange);
    }
}

/// A wider layer takes a snapshot, and must not hide that every step fails.
#[test]
fn widening_does_not_end_a_row_of_failures() {
    let m = with_images();
    let line =
        |step| format!(r#"{{"step": {step}, "op": "WIDEN", "layer": "blocks.0.conv", "by": 1}}"#);
    fs::write(m.path("all.jsonl"), (0..10).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let diverging = "--lr 1e4 --clip-norm 1e9 --envs 1 --steps 10 --run-dir";
    m.fails(&format!("{RUN} --controller none {diverging} none"), 1, &["diverged"]);
    m.fails(&format!("{RUN} --controller fixed:all.jsonl {diverging} wide"), 1, &["diverged"]);
}

#[test]
fn what_cannot_become_wider_is_an_error_with_the_line() {
    let m = with_images();
    for (line, code, problem) in [
        (r#"{"step": 0, "op": "WIDEN", "layer": "classifier", "by": 1}"#, 2, "layers that can"),
        (r#"{"step": 0, "op": "WIDEN", "layer": "blocks.0.conv", "by": -1}"#, 2, "-1"),
        // Whether it is too many depends on the host in this step.
        (
            r#"{"step": 1, "op": "WIDEN", "layer": "blocks.0.conv", "by": 99999}"#,
            1,
            "at most 65536",
        ),
    ] {
        fs::write(m.path("bad.jsonl"), line).unwrap();
        let run = format!("{RUN} --controller fixed:bad.jsonl --steps 3 --run-dir bad");
        m.fails(&run, code, &[problem]);
    }
}

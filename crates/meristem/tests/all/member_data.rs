//! Members with their own seed, batch, augmentation, initial weights and part of the data (P1).

use std::fs;

use crate::common::Meristem;
use crate::common::runs::{Outcome, outcome, with_images};
use crate::resume::{Moment, killed_at};
use crate::sweeps::{is_resumed, with_sweep};

const RUN: &str = "train --dataset arrays --data-root images.safetensors --steps 4 --batch 32 \
                   --host cnn:channels=2 --quiet";

/// Settings of the members, beside those of the run.
const MEMBERS: [&[(&str, &str)]; 11] = [
    &[],
    &[("batch", "50")],
    &[("augment", "crop,flip")],
    &[("init", "w.safetensors")],
    &[("batch", "7"), ("augment", "cutout"), ("lr", "0.01")],
    &[("seed", "7")],
    &[("seed", "8"), ("batch", "33"), ("augment", "flip")],
    &[("init", "w.safetensors"), ("batch", "501"), ("host", "cnn:channels=2")],
    &[("train-share", "0.3")],
    &[("bootstrap", "true")],
    &[("train-share", "0.55"), ("bootstrap", "true"), ("batch", "50")],
];

/// A project with images, weights to begin from, and the members in `members.json`.
fn with_members() -> Meristem {
    let m = with_images();
    m.ok(&format!("{RUN} --controller none --seed 3 --steps 1 --envs 1 --run-dir first"));
    fs::copy(m.path("first/weights/env-0.safetensors"), m.path("w.safetensors")).unwrap();
    let member = |settings: &[(&str, &str)]| {
        let entries = settings.iter().map(|(key, value)| format!(r#""{key}": "{value}""#));
        format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
    };
    let all = MEMBERS.map(member).join(", ");
    fs::write(m.path("members.json"), format!(r#"{{"members": [{all}]}}"#)).unwrap();
    m
}

/// Weights and scores of an env.
fn env_of(outcome: &Outcome, env: usize) -> (Vec<u8>, Vec<String>) {
    let of = &outcome.envs[env];
    let keys = ["train_loss", "control_loss", "control_score", "test_loss", "training_flops"];
    (outcome.weights[env].clone(), keys.map(|key| of[key].to_string()).to_vec())
}

/// Each env has the bits of the env with its number in a run whose settings are the member's. The
/// control split is drawn by the seed of the run, so that without one it may be the member's.
#[test]
fn each_env_trains_on_batches_of_its_own() {
    let m = with_members();
    for (name, own, has_control) in [
        ("grown", "--controller random", true),
        ("bare", "--controller none --statistics-batches 3", false),
        ("streamed", "--controller none --data-budget 1KiB --max-batches 9", false),
    ] {
        m.ok(&format!("{RUN} {own} --config members.json --run-dir {name}"));
        let fleet = outcome(&m, name);
        for (env, settings) in MEMBERS.iter().enumerate() {
            if has_control && settings.iter().any(|(key, _)| *key == "seed") {
                continue;
            }
            let flags = settings.iter().map(|(key, value)| match *key {
                "bootstrap" => "--bootstrap".into(),
                key => format!("--{key} {value}"),
            });
            let flags = flags.collect::<Vec<_>>().join(" ");
            let alone = format!("{name}-{env}");
            m.ok(&format!("{} {own} --envs 11 {flags} --run-dir {alone}", base(settings)));
            assert_eq!(env_of(&outcome(&m, &alone), env), env_of(&fleet, env), "{alone}: {flags}");
        }
        let distinct: std::collections::BTreeSet<_> = fleet.weights.iter().collect();
        assert_eq!(distinct.len(), 11, "{name}: envs differ");
        let parts: Vec<u64> = fleet.envs.as_array().unwrap()[7..]
            .iter()
            .map(|env| env["part"]["train_samples"].as_u64().unwrap())
            .collect();
        let samples = parts[0] as f64;
        let shares = [1.0, 0.3, 1.0, 0.55].map(|share| (share * samples).round() as u64);
        assert_eq!(parts, shares, "{name}");
    }
}

/// The flags of the run without those that `settings` has.
fn base(settings: &[(&str, &str)]) -> String {
    let mut words: Vec<&str> = RUN.split_whitespace().collect();
    for (key, _) in settings {
        if let Some(at) = words.iter().position(|word| word.strip_prefix("--") == Some(key)) {
            words.drain(at..at + 2);
        }
    }
    words.join(" ")
}

/// A killed run is resumed to the same bits; hosts in progress do not need their initial weights.
#[test]
fn a_killed_run_resumes_to_the_same_bits() {
    let m = with_members();
    let run = format!(
        "{RUN} --controller random --checkpoint-every 1 --log-batches \
                       --config members.json"
    );
    m.ok(&format!("{run} --run-dir whole"));
    let whole = outcome(&m, "whole");
    let lines = whole.events.len();
    for (attempt, share) in [(0, 3), (1, 6), (2, 8)] {
        let name = format!("run-{attempt}");
        assert!(killed_at(
            &m,
            &format!("{run} --run-dir {name}"),
            &name,
            Moment::Events(lines * share / 10)
        ));
        m.ok(&format!("train --resume {name} --quiet --threads {}", attempt % 2 + 1));
        assert_eq!(outcome(&m, &name), whole);
    }
    assert_eq!(m.run(&format!("{run} --run-dir stopped --stop-after 2")).code, Some(3));
    assert_eq!(m.run(&format!("{run} --run-dir changed --stop-after 2")).code, Some(3));
    fs::remove_file(m.path("w.safetensors")).unwrap();
    m.ok("train --resume stopped --quiet");
    assert_eq!(outcome(&m, "stopped"), whole);
    // In a run with places other members begin later, and need the file.
    fs::copy(m.path("first/weights/env-0.safetensors"), m.path("w.safetensors")).unwrap();
    let places = format!("{run} --places 4");
    assert_eq!(m.run(&format!("{places} --run-dir places --stop-after 2")).code, Some(3));
    fs::remove_file(m.path("w.safetensors")).unwrap();
    m.fails("train --resume places --quiet", 2, &["`init`", "w.safetensors"]);
    fs::copy(m.path("whole/weights/env-0.safetensors"), m.path("w.safetensors")).unwrap();
    m.fails("train --resume places --quiet", 2, &["w.safetensors", "--init"]);
    fs::copy(m.path("first/weights/env-0.safetensors"), m.path("w.safetensors")).unwrap();
    m.ok("train --resume places --quiet");
    assert_eq!(outcome(&m, "places").weights, whole.weights);
}

/// Members of a sweep copy each other with other batches, seeds and augmentations; a killed sweep
/// is resumed, and a member is trained again alone.
#[test]
fn a_population_changes_batches_and_seeds() {
    let m = with_sweep("pbt:1", 5);
    let text = fs::read_to_string(m.path("sweep.toml")).unwrap();
    let more = "batch = { int = [16, 64] }\nseed = { int = [1, 1000] }\n\
                augment = { choice = [\"none\", \"flip\"] }\n\
                train_share = { uniform = [0.3, 1] }\nbootstrap = { choice = [true, false] }\n";
    fs::write(m.path("sweep.toml"), text.replace("[space]\n", &format!("[space]\n{more}")))
        .unwrap();
    m.ok("sweep sweep.toml --quiet --run-dir run");
    let whole = outcome(&m, "run");
    is_resumed(&m, &whole);
    let events = m.events("run");
    let copied = events.iter().rfind(|event| event["event"] == "member_copied").unwrap();
    // A copy keeps the seed and the part of the data of its origin.
    let kept = |text: &str| {
        let of_data = |own: &&str| {
            let key = own.split('=').next().unwrap();
            ["seed", "train_share", "bootstrap"].contains(&key)
        };
        text.split("; ").filter(of_data).map(String::from).collect::<Vec<_>>()
    };
    let begun = events[0]["members"].as_array().unwrap().iter();
    let begun: Vec<_> = begun.map(|settings| kept(settings.as_str().unwrap())).collect();
    for event in events.iter().filter(|event| event["event"] == "member_copied") {
        let own = kept(event["settings"].as_str().unwrap());
        assert!(own.len() == 3 && begun.contains(&own), "{event}");
    }
    for member in [copied["member"].as_u64().unwrap() as usize, 0] {
        let name = format!("alone-{member}");
        m.ok(&format!("sweep replay run {member} --quiet --run-dir {name}"));
        assert!(outcome(&m, &name).weights.contains(&whole.weights[member]), "member {member}");
    }
    m.ok("sweep sweep.toml --quiet --scheduler none --places 4 --run-dir places");
    m.ok("sweep sweep.toml --quiet --scheduler none --run-dir all");
    assert_eq!(outcome(&m, "places").weights, outcome(&m, "all").weights);
}

/// A copy has its own batches, order and augmentation from the step on in which it is made.
#[test]
fn a_copy_trains_on_batches_of_its_own() {
    let m = with_images();
    let run = |name: &str, settings: &str| {
        let changes = format!(r#"["end 1@0", "copy 1 from 0@2: {settings}"]"#);
        let text = format!("members = [\"lr=0.1\", \"lr=0.1\"]\nmember_changes = {changes}\n");
        fs::write(m.path("run.toml"), text).unwrap();
        m.ok(&format!("{RUN} --controller none --log-batches --config run.toml --run-dir {name}"));
        outcome(&m, name)
    };
    let usual = run("usual", "lr=0.1").weights;
    for (name, settings, batches) in [
        ("batch", "lr=0.1; batch=7", 72),
        ("seed", "lr=0.1; seed=7", 16),
        ("augment", "lr=0.1; augment=flip", 16),
        ("share", "lr=0.1; train_share=0.5", 8),
        ("bootstrap", "lr=0.1; bootstrap=true", 16),
    ] {
        let copied = run(name, settings);
        assert_eq!(copied.weights[0], usual[0], "{name}");
        assert_ne!(copied.weights[1], usual[1], "{name}");
        let logged = |env: u64| {
            let of = copied.events.iter().filter(|event| event["event"] == "batch_completed");
            of.filter(|event| event["env"] == env && event["step"] == 3).count()
        };
        assert_eq!([logged(0), logged(1)], [16, batches], "{name}");
        let stop = "--controller none --log-batches --config run.toml --stop-after 3";
        assert_eq!(m.run(&format!("{RUN} {stop} --run-dir {name}-stopped")).code, Some(3));
        m.ok(&format!("train --resume {name}-stopped --quiet"));
        assert_eq!(outcome(&m, &format!("{name}-stopped")), copied, "{name}");
    }
}

/// Paths of initial weights are those of the directory in which the run began.
#[test]
fn initial_weights_are_found_from_any_directory() {
    let m = with_members();
    let run = format!("{RUN} --controller none --members init=w.safetensors,./w.safetensors");
    assert_eq!(
        m.run(&format!("{run} --run-dir run --checkpoint-every 1 --stop-after 1")).code,
        Some(3)
    );
    let text = fs::read_to_string(m.path("run/config.toml")).unwrap();
    assert!(!text.contains("init=w."), "{text}");
    m.ok(&format!("{RUN} --controller none --init w.safetensors --envs 2 --run-dir whole"));
    m.ok("train --resume run --quiet");
    assert_eq!(outcome(&m, "run").weights, outcome(&m, "whole").weights);
}

/// Members that differ only by their seed are summarised together.
#[test]
fn results_have_the_spread_over_seeds() {
    let m = with_images();
    let said = m.ok("train --dataset arrays --data-root images.safetensors --steps 2 --batch 32 \
                     --controller none --control-split 0.2 --run-dir run \
                     --members lr=0.00001,0.1 --members seed=1,2,3");
    let over: Vec<&str> = said.stdout.lines().filter(|line| line.contains("3 envs")).collect();
    assert_eq!(over.len(), 2, "{}", said.stdout);
    assert!(over[0].contains("lr=0.1 ") && !over[0].contains("seed"), "{over:?}");
    assert!(over.iter().all(|line| line.contains('±')), "{over:?}");
}

#[test]
fn wrong_settings_are_errors_that_leave_no_folder() {
    let m = with_members();
    for (flags, words) in [
        ("--members batch=0,3", &["`batch`: got 0 in member 0"][..]),
        ("--members seed=-1", &["seed=-1"]),
        ("--members augment=crop,blur", &["augment=blur"]),
        ("--members init=none.safetensors", &["`init`", "in member 0", "an existing weights file"]),
        ("--members init=w.safetensors --start-topology w.safetensors", &["one of --init"]),
        ("--members host=mlp:8 --init w.safetensors", &["w.safetensors", "mlp:8"]),
        ("--members seed=1,2 --epoch dealt", &["`epoch`", "`seed` of members"]),
        ("--members batch=8,9 --preset quick", &["`epoch`", "full with `batch`"]),
        ("--members train-share=0.5,1 --epoch dealt", &["`epoch`", "full with `train_share`"]),
        ("--members train-share=0.5,2", &["`train-share`: got 2 in member 1"]),
        ("--members train-share=0.5,0.0001", &["`train-share`", "at least one of 500 samples"]),
        ("--members bootstrap=maybe", &["bootstrap=maybe"]),
        ("--members folds=2,3", &["belongs to the run"]),
        ("--members classes=0,1", &["belongs to the run"]),
    ] {
        m.fails(&format!("{RUN} --controller none --run-dir run {flags}"), 2, words);
        assert!(!m.path("run").exists(), "{flags}");
    }
}

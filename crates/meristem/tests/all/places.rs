//! Sweeps with fewer places than members: a member begins when another ends (P4).

use crate::common::runs::{outcome, with_images};
use crate::sweeps::{is_resumed, steps, with_sweep};

/// Members in training after each step of the run.
fn trained(m: &crate::common::Meristem, run: &str) -> Vec<usize> {
    let events = m.events(run);
    let mut counts = vec![];
    for event in events.iter().filter(|event| event["event"] == "step_completed") {
        let step = event["step"].as_u64().unwrap() as usize;
        counts.resize(counts.len().max(step + 1), 0);
        counts[step] += 1;
    }
    counts
}

/// Every member has the bits that it has when all begin together; the places stay in use; a killed
/// run is resumed; members are trained again alone.
#[test]
fn members_in_places_have_the_bits_of_members_side_by_side() {
    let m = with_sweep("none", 4);
    m.ok("sweep sweep.toml --quiet --controller random --run-dir all");
    let all = outcome(&m, "all").weights;
    let said = m.ok("sweep sweep.toml --controller random --places 4 --run-dir places");
    assert!(said.stdout.contains("4 members end: all steps made"), "{}", said.stdout);
    assert_eq!(outcome(&m, "places").weights, all);
    assert_eq!(steps(&m, "places"), [4; 9]);
    assert_eq!(trained(&m, "places"), [4, 4, 4, 4, 4, 4, 4, 4, 1, 1, 1, 1]);
    // 36 steps of members in 12 steps of 4 places.
    assert_eq!(
        m.json("places/summary.json")["places"],
        serde_json::json!({"count": 4, "busy": 0.75})
    );
    assert!(said.stdout.contains("4 places in use for 75.0 % of the steps"), "{}", said.stdout);
    assert!(m.json("all/summary.json").get("places").is_none());
    m.ok("sweep sweep.toml --quiet --controller random --places 1 --run-dir one");
    assert_eq!(outcome(&m, "one").weights, all);
    m.ok("sweep replay places 8 --quiet --run-dir alone");
    assert_eq!(outcome(&m, "alone").weights, [all[8].clone()]);
    m.ok("runs verify places");
}

/// With halving a member is compared with those that have reached its rung so far.
#[test]
fn places_are_filled_again_and_resumed() {
    let m = with_sweep("halving:3", 9);
    let text = std::fs::read_to_string(m.path("sweep.toml")).unwrap();
    std::fs::write(m.path("sweep.toml"), format!("places = 3\n{text}")).unwrap();
    m.ok("sweep sweep.toml --quiet --run-dir run");
    let whole = outcome(&m, "run");
    is_resumed(&m, &whole);
    let made = steps(&m, "run");
    assert!(made.iter().filter(|steps| **steps < 9).count() > 3, "{made:?}");
    assert!(made.contains(&9), "{made:?}");
    let counts = trained(&m, "run");
    assert_eq!(counts.iter().sum::<usize>() as u64, made.iter().sum::<u64>());
    // No place is free while a member waits.
    let begun = m.events("run").iter().filter(|event| event["event"] == "member_begun").count();
    assert_eq!(begun, 6);
    let last = m.events("run").iter().rposition(|event| event["event"] == "member_begun").unwrap();
    let step = m.events("run")[last]["step"].as_u64().unwrap() as usize;
    assert!(counts[..step].iter().all(|count| *count == 3), "{counts:?}, {step}");
    for member in [0, 8] {
        let name = format!("alone-{member}");
        m.ok(&format!("sweep replay run {member} --quiet --run-dir {name}"));
        assert_eq!(outcome(&m, &name).weights, [whole.weights[member].clone()]);
    }
    let stopped = m.run("sweep sweep.toml --quiet --stop-after 2 --run-dir stopped");
    assert_eq!(stopped.code, Some(3), "{}", stopped.stderr);
    assert!(m.json("stopped/summary.json")["envs"].as_array().unwrap().len() < 9);
    m.ok("train --resume stopped --quiet");
    assert_eq!(outcome(&m, "stopped"), whole);
}

/// A member that diverges gives its place to the next one, and all may diverge in turn.
#[test]
fn a_diverged_member_gives_its_place_away() {
    let m = with_images();
    let run = "train --dataset arrays --data-root images.safetensors --controller none --steps 6 \
               --batch 32 --control-split 0.2 --clip-norm off --places 1";
    m.ok(&format!("{run} --quiet --members lr=1e6,0.05,0.06 --run-dir run"));
    let summary = m.json("run/summary.json");
    assert_eq!(summary["envs"][0]["ended"], "diverged");
    assert_eq!(steps(&m, "run")[1..], [6, 6]);
    m.fails(&format!("{run} --members lr=1e6,9e5 --run-dir all"), 1, &["diverged"]);
}

#[test]
fn wrong_places_are_errors() {
    let m = with_sweep("none", 4);
    for (flags, words) in [
        ("--places 0", &["1 to 4096"][..]),
        ("--places 2 --rounds 2", &["1 round"]),
        ("--places 2 --scheduler pbt:1", &["another scheduler"]),
        ("--places 2 --rounds 1 --controller ppo", &["a controller other than a policy"]),
        ("--sampler external", &["meristem.optuna"]),
        ("--samples 400 --device-memory 4MiB", &["device-memory", "with --places fewer"]),
    ] {
        m.fails(&format!("sweep sweep.toml --run-dir bad {flags}"), 2, words);
        assert!(!m.path("bad").exists(), "{flags}");
    }
    let images = "train --dataset arrays --data-root images.safetensors --run-dir bad";
    m.fails(&format!("{images} --controller none --places 2"), 2, &["members to train in them"]);
    m.ok("sweep sweep.toml --quiet --places 2 --run-dir run");
    m.fails("train --resume run --steps 6", 2, &["leaves its place after its"]);
}

/// Members whose parameters alone are more than the memory of the machine are counted, too.
#[test]
#[cfg(target_os = "linux")]
fn more_members_than_the_memory_of_the_machine_are_counted() {
    let m = with_sweep("none", 2);
    let run = "dataset = \"arrays\"\ndata_root = \"images.safetensors\"\ncontroller = \"none\"\n\
               host = \"mlp:3000,3000,3000,3000,3000,3000,3000\"\nsamples = 999\n";
    std::fs::write(m.path("huge.toml"), format!("{run}space = \"lr=uniform:0.01,0.1\"\n")).unwrap();
    let words = ["`members`", "999 in training at a time", "with --places"];
    m.fails("sweep huge.toml --run-dir bad", 2, &words);
    assert!(!m.path("bad").exists());
}

//! The policies that come with the program.

use serde_json::Value;

use crate::common::{Meristem, of_kind};

const TINY: &str = "train --host minimal --envs 2 --steps 8 --max-batches 2 --batch 32 \
                    --rounds 1 --min-training-steps 1 --max-gap 99 --twin off --quiet";

/// The settings of a run's policy, from its `config.toml`.
fn written(m: &Meristem, run: &str) -> [String; 2] {
    let text = String::from_utf8(m.bytes(&format!("{run}/config.toml"))).unwrap();
    ["policy = ", "policy_hidden = "].map(|key| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.unwrap_or_else(|| panic!("no {key}: {text}")).trim_matches('"').into()
    })
}

#[test]
fn ppo_starts_from_the_first_policy_of_the_program_that_fits() {
    let m = Meristem::new();
    let width = "64";
    for (run, arguments, expected) in [
        ("usual", "--slots r0", ["shipped", width]),
        ("asked", "--slots r0 --policy shipped", ["shipped", width]),
        ("new", "--slots r0 --policy none", ["none", "128"]),
        ("narrow", "--slots r0 --policy-hidden 8", ["none", "8"]),
        ("slots", "--slots r0c0,r0c1", ["general", width]),
        ("general", "--slots r0 --policy general", ["general", width]),
        ("form", "--slots r0 --policy-form set", ["general", width]),
    ] {
        m.ok(&format!("{TINY} --controller ppo {arguments} --run-dir {run}"));
        assert_eq!(written(&m, run), expected, "{run}");
        assert_eq!(of_kind(&m.events(run), "run_started")[0]["policy"], expected[0], "{run}");
    }
    let policy = |run: &str| m.bytes(&format!("{run}/policy.safetensors"));
    assert!(policy("usual") == policy("asked"));
    assert!(policy("usual") != policy("new"));
    assert!(policy("general") == policy("form"));
    let aloud = TINY.replace("--quiet", "--slots r0 --controller");
    let said = |controller: &str| {
        let said = m.ok(&format!("{aloud} {controller} --run-dir {}", controller.len()));
        said.stdout.lines().find(|line| line.starts_with("controller")).unwrap().to_string()
    };
    assert!(said("ppo").starts_with("controller ppo from the policy `shipped`,"));
    assert!(said("ppo --policy none").starts_with("controller ppo from a new policy,"));
    assert!(said("none").starts_with("controller none, "));
    // The written settings start the same run.
    m.ok("train --config usual/config.toml --run-dir again --quiet");
    assert!(policy("again") == policy("usual"));
    m.fails(
        &format!("{TINY} --controller ppo --policy shipped --slots r0c0"),
        2,
        &["`policy`: got shipped", "trained for 3 slots"],
    );
    m.fails(
        &format!("{TINY} --controller ppo --policy general --policy-form vector --slots r0"),
        2,
        &["`policy-form`: got vector", "set, the form of the policy `general`"],
    );
    m.fails(
        &format!("{TINY} --controller ppo --slots r0 --policy shipped --policy-hidden 8"),
        2,
        &["`policy-hidden`: got 8", "64, the width of the policy `shipped`"],
    );
}

/// Members with different slots get the policy for any host.
#[test]
fn members_with_different_slots_start_from_the_general_policy() {
    let m = Meristem::new();
    let run = TINY.replace("--host minimal", "").replace("--envs 2", "");
    m.ok(&format!("{run} --controller ppo --members host=minimal|mlp:4,4 --run-dir run"));
    assert_eq!(written(&m, "run"), ["general", "64"]);
}

/// Without learning, both policies grow at once, like the heuristic, their teacher.
#[test]
fn policies_of_the_program_act_without_learning() {
    let m = Meristem::new();
    for controller in ["greedy:shipped", "ppo:shipped", "greedy:general", "ppo:general"] {
        let run = controller.replace(':', "-");
        m.ok(&format!("{TINY} --slots r0 --controller {controller} --run-dir {run}"));
        let events = m.events(&run);
        assert!(events.iter().any(|event| event["event"] == "module_germinated"), "{run}");
        let config = String::from_utf8(m.bytes(&format!("{run}/config.toml"))).unwrap();
        assert!(config.contains(&format!("controller = \"{controller}\"")), "{config}");
        let summary: Value =
            serde_json::from_slice(&m.bytes(&format!("{run}/summary.json"))).unwrap();
        let name = controller.split_once(':').unwrap().1;
        assert_eq!(summary["input_files"][0]["path"], name, "no path of the working folder");
    }
    // It has the form `set` beside a policy that learns in the form `vector`.
    m.ok("control eval --controllers none,greedy:shipped --policy general --seeds 1 --envs 1 \
         --policy-form vector \
         --host minimal --slots r0 --steps 3 --max-batches 2 --batch 32 --json");
}

//! Sweeps: members drawn from a space, ended early or copied (P4, P5).

use std::collections::BTreeSet;

use crate::common::Meristem;
use crate::common::runs::{Outcome, outcome, with_images};
use crate::resume::{Moment, killed_at};

/// Settings of a small sweep, except for its scheduler.
const SETTINGS: &str = "
dataset = \"arrays\"
data_root = \"images.safetensors\"
controller = \"none\"
control_split = 0.2
batch = 32
checkpoint_every = 1
samples = 9
seed = 5

[space]
lr = { log_uniform = [1e-3, 1] }
momentum = { uniform = [0, 0.9] }
host = { choice = [\"cnn:channels=2\", \"cnn:channels=3,blocks=2\"] }
";

/// A project with the file `sweep.toml`.
pub(crate) fn with_sweep(scheduler: &str, steps: usize) -> Meristem {
    let m = with_images();
    let text = format!("scheduler = \"{scheduler}\"\nsteps = {steps}\n{SETTINGS}");
    std::fs::write(m.path("sweep.toml"), text).unwrap();
    m
}

/// The steps that each env was trained.
pub(crate) fn steps(m: &Meristem, run: &str) -> Vec<u64> {
    let summary = m.json(&format!("{run}/summary.json"));
    let envs = summary["envs"].as_array().unwrap().iter();
    envs.map(|env| env["steps"].as_u64().unwrap()).collect()
}

/// Kills a sweep at some moments; resumed, it ends as the undisturbed run.
pub(crate) fn is_resumed(m: &Meristem, whole: &Outcome) {
    let lines = whole.events.len();
    let mut kills = 0;
    for (attempt, share) in [(0, 2), (1, 4), (2, 6), (3, 8)] {
        let name = format!("killed-{attempt}");
        let start = format!("sweep sweep.toml --quiet --run-dir {name}");
        // Late steps have few members and are soon over.
        kills += usize::from(killed_at(m, &start, &name, Moment::Events(lines * share / 10)));
        m.ok(&format!("train --resume {name} --quiet --threads {}", attempt % 2 + 1));
        assert_eq!(outcome(m, &name), *whole, "killed after {share} tenths");
    }
    assert!(kills > 1, "{kills} of 4 runs were killed in time");
}

/// One of three goes on after steps 1 and 3. Who goes on has the bits of a run without a scheduler,
/// and each member trained alone has its bits.
#[test]
fn halving_ends_the_worst_and_changes_nobody_else() {
    let m = with_sweep("halving:3", 9);
    let said = m.ok("sweep sweep.toml --run-dir run");
    assert!(said.stdout.contains("6 members end: not among the best of its rung; 3 left"));
    assert!(said.stdout.contains("2 members end: not among the best of its rung; 1 left"));
    assert!(said.stdout.contains("step   9/9"), "{}", said.stdout);
    let made = steps(&m, "run");
    let count = |wanted| made.iter().filter(|steps| **steps == wanted).count();
    assert_eq!([1, 3, 9].map(count), [6, 2, 1], "{made:?}");
    let whole = outcome(&m, "run");
    is_resumed(&m, &whole);

    m.ok("sweep sweep.toml --quiet --scheduler none --run-dir all");
    let winner = made.iter().position(|steps| *steps == 9).unwrap();
    assert_eq!(outcome(&m, "all").weights[winner], whole.weights[winner]);
    let second = made.iter().position(|steps| *steps == 3).unwrap();
    let first = made.iter().position(|steps| *steps == 1).unwrap();
    for member in [winner, second, first] {
        m.ok(&format!("sweep replay run {member} --quiet --run-dir alone-{member}"));
        let alone = outcome(&m, &format!("alone-{member}"));
        assert_eq!(alone.weights, [whole.weights[member].clone()], "member {member}");
        assert_eq!(steps(&m, &format!("alone-{member}")), [made[member]]);
    }
}

/// Members copy topology, weights, optimiser and settings; the winner is trained again through its
/// lineage.
#[test]
fn a_population_is_resumed_and_its_winner_repeated() {
    let m = with_sweep("pbt:1", 5);
    let text = std::fs::read_to_string(m.path("sweep.toml")).unwrap();
    let grown = text.replace("controller = \"none\"", "controller = \"random\"");
    std::fs::write(m.path("sweep.toml"), grown).unwrap();
    m.ok("sweep sweep.toml --quiet --run-dir run");
    let whole = outcome(&m, "run");
    is_resumed(&m, &whole);
    let events = m.events("run");
    let copies: Vec<_> = events.iter().filter(|event| event["event"] == "member_copied").collect();
    assert!(copies.len() > 2, "{copies:?}");
    let last = copies.last().unwrap();
    let (member, settings) = (last["member"].as_u64().unwrap() as usize, &last["settings"]);
    let summary = m.json("run/summary.json");
    assert_eq!(summary["envs"][member]["member"], *settings, "the results have its last settings");
    for member in BTreeSet::from([member, last["from"].as_u64().unwrap() as usize, 0]) {
        let name = format!("alone-{member}");
        m.ok(&format!("sweep replay run {member} --quiet --run-dir {name}"));
        let alone = outcome(&m, &name).weights;
        assert!(alone.len() < 6 && alone.contains(&whole.weights[member]), "member {member}");
    }
}

/// A run that stops after some steps and whose members are ended by hand is the run whose scheduler
/// ends the same members at the same step.
#[test]
fn members_end_where_a_run_is_resumed() {
    let m = with_sweep("halving:3", 5);
    m.ok("sweep sweep.toml --quiet --run-dir run");
    let whole = outcome(&m, "run").weights;
    let made = steps(&m, "run");
    let losers: Vec<usize> = (0..9).filter(|member| made[*member] == 2).collect();
    assert_eq!(losers.len(), 6, "{made:?}");
    let said = m.run("sweep sweep.toml --quiet --scheduler none --stop-after 2 --run-dir parts");
    assert_eq!(said.code, Some(3), "{}", said.stderr);
    assert_eq!(steps(&m, "parts"), [2; 9]);
    let numbers = losers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    m.ok(&format!("train --resume parts --quiet --end-members {numbers}"));
    assert_eq!(outcome(&m, "parts").weights, whole);
    assert_eq!(steps(&m, "parts"), made);
    m.fails("sweep sweep.toml --end-members 1 --run-dir bad", 2, &["only with --resume"]);
}

/// A member that begins as a planned copy, while no other member ends, is trained.
#[test]
fn a_copy_beside_its_origin_is_trained() {
    let m = with_images();
    std::fs::write(
        m.path("run.toml"),
        r#"
dataset = "arrays"
data_root = "images.safetensors"
controller = "none"
steps = 5
batch = 32
members = ["lr=0.1", "lr=0.2"]
member_changes = ["end 1@0", "copy 1 from 0@2: lr=0.3"]
"#,
    )
    .unwrap();
    m.ok("train --config run.toml --quiet --run-dir run");
    let events = m.events("run");
    let trained = |env: u64| {
        let of_env = events.iter().filter(|event| event["event"] == "step_completed");
        of_env.filter(|event| event["env"] == env).count()
    };
    assert_eq!([trained(0), trained(1)], [5, 3]);
    assert_eq!(steps(&m, "run"), [5, 5], "a copy has the steps of its origin");
}

/// A population with `seed` in its space, begun before copies kept their seed, is not resumed.
#[test]
fn a_population_of_an_earlier_version_is_refused() {
    let m = with_sweep("pbt:1", 4);
    let text = std::fs::read_to_string(m.path("sweep.toml")).unwrap();
    std::fs::write(m.path("sweep.toml"), format!("{text}seed = {{ int = [1, 9] }}\n")).unwrap();
    m.run("sweep sweep.toml --quiet --stop-after 2 --run-dir run");
    let config = std::fs::read_to_string(m.path("run/config.toml")).unwrap();
    let older = config.lines().filter(|line| !line.starts_with("policy_form"));
    let older: String = older.flat_map(|line| [line, "\n"]).collect();
    assert!(older.len() < config.len());
    std::fs::write(m.path("run/config.toml"), older).unwrap();
    m.fails("train --resume run --quiet", 2, &["copies got other seeds", "nothing was changed"]);
    std::fs::write(m.path("run/config.toml"), config).unwrap();
    m.ok("train --resume run --quiet");
}

/// A copy whose perturbed settings would contradict each other has the settings of its origin.
#[test]
fn copies_have_settings_that_go_together() {
    let m = with_images();
    // 1 + widen_by is at most widen_up_to. Within the bounds of the space, three of the four ways
    // to perturb both are errors, and the fourth changes nothing.
    let own = |lr| format!(r#"{{"widen_by": 0.95, "widen_up_to": 2, "lr": {lr}}}"#);
    let members = [0.001, 0.003, 0.01, 0.02, 0.05, 0.1].map(own).join(", ");
    let settings = format!(
        r#"{{"dataset": "arrays", "data_root": "images.safetensors", "batch": 32,
        "host": "cnn:channels=2", "controller": "heuristic", "steps": 8, "scheduler": "pbt:1",
        "members": [{members}],
        "space": {{"widen_by": {{"uniform": [0.95, 5]}}, "widen_up_to": {{"uniform": [1, 2]}}}}}}"#
    );
    std::fs::write(m.path("run.json"), settings).unwrap();
    m.ok("sweep run.json --quiet --run-dir run");
    let events = m.events("run");
    let copies = events.iter().filter(|event| event["event"] == "member_copied");
    let copies: Vec<&str> = copies.map(|event| event["settings"].as_str().unwrap()).collect();
    assert!(copies.len() > 2, "{copies:?}");
    let are_kept = |own: &&str| own.contains("widen_by=0.95; widen_up_to=2;");
    assert!(copies.iter().all(are_kept), "{copies:?}");
}

/// Initial weights and scripts are compared when a member is trained again.
#[test]
fn a_replay_with_a_changed_file_is_refused() {
    let m = with_images();
    let script = |slot: &str| {
        let plant = format!(r#""op": "GERMINATE", "slot": "{slot}", "blueprint": "norm""#);
        let line = format!(r#"{{"step": 1, {plant}}}"#);
        std::fs::write(m.path("s.jsonl"), line).unwrap();
    };
    script("r0c0");
    m.ok("train --dataset arrays --data-root images.safetensors --host cnn:channels=2 --batch 32 \
         --steps 2 --control-split 0.2 --members controller=fixed:s.jsonl,none --quiet \
         --run-dir run");
    m.ok("sweep replay run 0 --quiet --run-dir again");
    script("r0c1");
    let words = ["cannot replay a member of run", "s.jsonl", "--controller", "checksum"];
    m.fails("sweep replay run 0 --run-dir bad", 2, &words);
    assert!(!m.path("bad").exists());
    m.ok("sweep replay run 1 --quiet --run-dir other");
}

/// Rules that end members at other moments, and a space that is sampled in another way.
#[test]
fn other_schedulers_end_members_as_well() {
    let m = with_sweep("median:2", 6);
    for scheduler in ["median:2", "patience:1", "hyperband:2"] {
        let name = scheduler.replace(':', "-");
        m.ok(&format!(
            "sweep sweep.toml --quiet --scheduler {scheduler} --sampler sobol --run-dir {name}"
        ));
        let made = steps(&m, &name);
        assert!(made.iter().any(|steps| *steps < 6), "{scheduler}: {made:?}");
        let events = m.events(&name);
        let ended = events.iter().filter(|event| event["event"] == "members_ended");
        let count: usize = ended.map(|event| event["members"].as_array().unwrap().len()).sum();
        assert_eq!(count, made.iter().filter(|steps| **steps < 6).count(), "{scheduler}");
    }
}

/// A member whose training fails ends alone and is last; if all fail, the run fails.
#[test]
fn a_member_that_diverges_ends_alone() {
    let m = with_images();
    let run = "train --dataset arrays --data-root images.safetensors --controller none --steps 8 \
               --batch 32 --control-split 0.2 --clip-norm off";
    let said = m.ok(&format!("{run} --members lr=1e6,0.05 --run-dir run"));
    assert!(said.stdout.contains("member 0 ends: training failed; 1 left"), "{}", said.stdout);
    let summary = m.json("run/summary.json");
    assert_eq!(summary["status"], "completed");
    assert_eq!(summary["envs"][0]["ended"], "diverged");
    assert_eq!(steps(&m, "run")[1], 8);
    let board: Vec<&str> = said.stdout.lines().filter(|line| line.contains("lr=")).collect();
    assert!(board[1].contains("lr=1e6"), "{board:?}");
    m.ok("runs verify run");
    m.fails(&format!("{run} --members lr=1e6,9e5 --run-dir all"), 1, &["env 0", "diverged"]);
}

/// An env has the bits of the env with its number, where actions and samples are drawn by number.
#[test]
fn envs_have_the_bits_of_their_numbers() {
    let m = with_images();
    let run = "train --dataset arrays --data-root images.safetensors --controller random --steps 4 \
               --batch 32 --quiet";
    for (name, own) in [("bootstrap", "--bootstrap"), ("share", "--train-share 0.5")] {
        m.ok(&format!("{run} {own} --envs 6 --run-dir {name}-all"));
        m.ok(&format!("{run} {own} --envs 3 --env-numbers 4,1,5 --run-dir {name}-some"));
        let [all, some] = ["all", "some"].map(|of| outcome(&m, &format!("{name}-{of}")).weights);
        assert_eq!(some, [4, 1, 5].map(|env| all[env].clone()), "{name}");
    }
}

#[test]
fn wrong_sweeps_are_errors_that_leave_no_folder() {
    let m = with_sweep("halving:3", 9);
    for (flags, words) in [
        ("--space lr=choice:", &["`lr=choice:`", "at least one value"][..]),
        ("--space momentum=uniform:0,2", &["`momentum=uniform:0,2`", "0 to 0.999999"]),
        ("--space lr=choice:0.1|fast", &["`lr=choice:0.1|fast`", "expected a number"]),
        ("--space host=choice:minimal|nohost", &["`host=choice:minimal|nohost`", "`nohost`"]),
        ("--space lr=uniform:1,0", &["the lower first"]),
        ("--space lr=log_uniform:0,1", &["above 0"]),
        ("--space lrr=uniform:0,1", &["did you mean `lr`?"]),
        ("--space steps=int:1,5", &["belongs to the run"]),
        ("--space lr=uniform:-2,-1", &["`lr=uniform:-2,-1`", "0 to 1000000"]),
        ("--samples 0", &["1 to 4096"]),
        ("--members lr=0.1,0.2", &["none with members"]),
        ("--scheduler halving:1", &["from 2"]),
        ("--scheduler halfing", &["did you mean `halving"]),
        ("--control-split 0", &["a control split"]),
        ("--rounds 2", &["1 round"]),
        ("--epoch dealt", &["epoch full"]),
        ("--controller ppo --rounds 1", &["a controller other than a policy"]),
        ("--scheduler pbt --envs 18", &["one env for each member"]),
        ("--scheduler none --member-changes 5@4", &["member-changes"]),
        (r#"--scheduler none --member-changes ["end@4"]"#, &["end 3@9"]),
        (r#"--member-changes []"#, &["none with member-changes"]),
        ("--env-numbers 1,2", &["one for each of 9 envs"]),
        ("--env-numbers 1,1", &["distinct numbers"]),
    ] {
        m.fails(&format!("sweep sweep.toml --run-dir bad {flags}"), 2, words);
        assert!(!m.path("bad").exists(), "{flags}");
    }
    let images = "train --dataset arrays --data-root images.safetensors --run-dir bad";
    for (flags, words) in [
        ("--samples 3", &["without a space"][..]),
        ("--space lr=uniform:0,1", &["`samples`"]),
        ("--scheduler halving", &["at least 2 members"]),
        ("--members lr=0.1,0.2 --scheduler pbt --control-split 0.2", &["a space"]),
        ("--members host=minimal,nohost", &["member 1: unknown host `nohost`"]),
        ("--members max-parameters=9", &["9 in member 0", "the host's parameters"]),
    ] {
        m.fails(&format!("{images} --controller none {flags}"), 2, words);
    }
    let condition = r#"["lr_schedule=choice:constant|cosine",
        "momentum=uniform:0,0.9 when lr_schedule=step"]"#;
    std::fs::write(m.path("space.json"), format!(r#"{{"space": {condition}, "samples": 2}}"#))
        .unwrap();
    m.fails("sweep space.json", 2, &["`step` is none of constant, cosine"]);
    std::fs::write(m.path("plain.toml"), "steps = 3").unwrap();
    m.fails("sweep plain.toml", 2, &["neither members nor a space"]);
    m.fails("sweep", 2, &["FILE"]);
    m.ok("sweep sweep.toml --quiet --steps 2 --run-dir run");
    m.fails("sweep replay run 9 --run-dir bad", 2, &["below 9"]);
    m.fails("sweep replay run 0 --lr 0.1 --run-dir bad", 2, &["`lr`", "the value of the run"]);
    m.fails("sweep replay nowhere 0", 2, &["nowhere"]);
    m.ok(&format!("{} --quiet --controller none --steps 1", images.replace("bad", "plain")));
    m.fails("sweep replay plain 0 --run-dir bad", 2, &["a run with members"]);
    let longer = "train --resume run --quiet --steps 12";
    m.fails(longer, 2, &["has planned its rungs"]);
}

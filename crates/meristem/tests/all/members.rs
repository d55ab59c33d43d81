//! Runs whose envs have different settings (P1, P2).

use crate::common::Meristem;
use crate::common::runs::{outcome, with_images};
use crate::resume::{Moment, killed_at};

const RUN: &str = "train --dataset arrays --data-root images.safetensors --steps 6 --batch 32 \
                   --controller random --quiet";

/// Weights of the envs of a run.
fn weights(m: &Meristem, run: &str) -> Vec<Vec<u8>> {
    outcome(m, run).weights
}

/// The fleet of members that are alike has the bits of the fleet without members.
#[test]
fn members_that_are_alike_are_the_usual_fleet() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir usual --envs 2 --lr 0.05"));
    m.ok(&format!("{RUN} --run-dir alike --members lr=0.05,0.05"));
    m.ok(&format!("{RUN} --run-dir two --envs 2 --members lr=0.05"));
    assert_eq!(weights(&m, "alike"), weights(&m, "usual"));
    assert_eq!(weights(&m, "two"), weights(&m, "usual"));
}

/// Each env has the bits of the env with its number in a run whose settings are the member's.
#[test]
fn each_env_trains_as_in_a_run_with_its_settings() {
    let m = with_images();
    let axes = "--members host=cnn:channels=2|cnn:channels=3,blocks=2 \
                --members lr=0.1,0.01 --members lr-schedule=cosine,constant";
    m.ok(&format!("{RUN} --run-dir fleet {axes}"));
    let fleet = weights(&m, "fleet");
    assert_eq!(fleet.len(), 8);
    for (env, host, lr, schedule) in [
        (0, "cnn:channels=2", 0.1, "cosine"),
        (3, "cnn:channels=2", 0.01, "constant"),
        (5, "cnn:channels=3,blocks=2", 0.1, "constant"),
        (6, "cnn:channels=3,blocks=2", 0.01, "cosine"),
    ] {
        let run = format!("alone-{env}");
        let settings = format!("--host {host} --lr {lr} --lr-schedule {schedule}");
        m.ok(&format!("{RUN} --run-dir {run} --envs 8 {settings}"));
        assert_eq!(weights(&m, &run)[env], fleet[env], "env {env}");
    }
    let others = [
        ("momentum", "0.5"),
        ("weight-decay", "0.1"),
        ("clip-norm", "0.1"),
        ("label-smoothing", "0.2"),
        ("lr-warmup", "3"),
        ("max-parameters", "1000"),
    ];
    let axes: String =
        others.iter().map(|(key, value)| format!(r#",{{"{key}":"{value}"}}"#)).collect();
    std::fs::write(m.path("c.json"), format!(r#"{{"members": [{{"lr": 0.02}}{axes}]}}"#)).unwrap();
    m.ok(&format!("{RUN} --run-dir others --config c.json"));
    let fleet = weights(&m, "others");
    for (env, (key, value)) in others.iter().enumerate() {
        m.ok(&format!("{RUN} --run-dir {key} --envs 7 --{key} {value}"));
        assert_eq!(weights(&m, key)[env + 1], fleet[env + 1], "{key}");
    }
}

#[test]
fn a_killed_run_resumes_to_the_same_bits_with_any_number_of_workers() {
    let m = with_images();
    let run = format!(
        "{RUN} --rounds 2 --checkpoint-every 2 --members lr=0.1,0.01 \
         --members host=cnn:channels=2|cnn:channels=3,blocks=2"
    );
    m.ok(&format!("{run} --run-dir whole"));
    let whole = outcome(&m, "whole");
    let lines = whole.events.len();
    for (attempt, share) in [(0, 3), (1, 5), (2, 8)] {
        let name = format!("run-{attempt}");
        let start = format!("{run} --run-dir {name}");
        assert!(killed_at(&m, &start, &name, Moment::Events(lines * share / 10)));
        m.ok(&format!("train --resume {name} --quiet --threads {}", attempt + 1));
        assert_eq!(outcome(&m, &name).weights, whole.weights);
    }
    m.fails("train --resume run-0 --members lr=0.1", 2, &["--members"]);
}

/// The slots of a host are those that it has by default, also after a resume.
#[test]
fn hosts_of_members_have_slots_of_their_own() {
    let m = with_images();
    let run = "train --dataset arrays --data-root images.safetensors --controller random --steps 3 \
               --batch 32 --quiet --members host=minimal|mlp:8";
    m.ok(&format!("{run} --run-dir whole"));
    assert_eq!(m.run(&format!("{run} --run-dir run --stop-after 1")).code, Some(3));
    m.ok("train --resume run --quiet");
    assert_eq!(weights(&m, "run"), weights(&m, "whole"));
}

/// Members are in the summary, in the first event, in the order of their scores at the end, and
/// weights files can be used as usual.
#[test]
fn results_name_the_members_and_order_them() {
    let m = with_images();
    let run = "train --dataset arrays --data-root images.safetensors --controller none --steps 4 \
               --batch 32 --control-split 0.2 --envs 4 --run-dir run";
    let said = m.ok(&format!("{run} --members lr=0.00001,0.1"));
    let board: Vec<&str> = said.stdout.lines().filter(|line| line.contains("lr=")).collect();
    assert!(board.len() == 2 && board[0].contains("lr=0.1") && board[0].contains('±'), "{board:?}");
    let summary = m.json("run/summary.json");
    let members = summary["envs"].as_array().unwrap().iter();
    let members: Vec<&str> = members.map(|env| env["member"].as_str().unwrap()).collect();
    assert_eq!(members, ["lr=0.00001", "lr=0.1", "lr=0.00001", "lr=0.1"]);
    assert_eq!(m.events("run")[0]["members"].as_array().unwrap().len(), 2);
    m.ok("eval --weights run/weights/env-1.safetensors --dataset arrays --data-root \
          images.safetensors");
    m.ok("runs verify run");
    // The folder's settings begin the same run.
    m.ok("train --config run/config.toml --run-dir again --quiet");
    assert_eq!(weights(&m, "again"), weights(&m, "run"));
}

#[test]
fn wrong_members_are_errors_that_leave_no_folder() {
    let m = with_images();
    for (members, words) in [
        ("lr", &["KEY=VALUES"][..]),
        ("lr=a", &["lr=a", "number"]),
        ("lr=-1", &["`lr`: got -1 in member 0", "expected 0"]),
        ("lr=0.1,1e9", &["in member 1"]),
        ("lrr=1", &["did you mean `lr`?"]),
        ("steps=3,4", &["belongs to the run", "momentum"]),
        ("host=baselin", &["did you mean `baseline`?"]),
        ("host=conv1d:8|cnn:channels=2", &["host conv1d:8", "signals"]),
    ] {
        m.fails(&format!("{RUN} --run-dir run --members {members}"), 2, words);
        assert!(!m.path("run").exists(), "{members}");
    }
    let odd = format!("{RUN} --run-dir run --members lr=0.1,0.2 --envs 3");
    m.fails(&odd, 2, &["`envs`: got 3", "a multiple of 2"]);
    let learned = "train --controller ppo --policy none --steps 2 --rounds 1 --run-dir run \
                   --members host=cnn:channels=2,blocks=2|cnn:channels=2";
    m.fails(learned, 2, &["`members`", "the same slots"]);
    assert!(!m.path("run").exists());
}

/// Patterns of parameter groups match a parameter of a network that has them, or may grow one.
#[test]
fn patterns_without_parameters_are_errors() {
    let m = with_images();
    let run = "train --dataset arrays --data-root images.safetensors --steps 1 --max-batches 1 \
               --quiet --control-split 0.2";
    for (nth, (flags, pattern)) in [
        ("--controller none --param-groups *.biass:lr=0.1x", "*.biass"),
        ("--controller none --param-groups *.bias:lr=0.1x;slots.r9.*:lr=0.1x", "slots.r9.*"),
        ("--controller none --members host=minimal|mlp:8 --param-groups *.gate.9:lr=1", "*.gate.9"),
        ("--controller none --members param-groups=*.bias:lr=1|x:lr=1", "got x in member 1"),
        ("--host minimal --param-groups slots.*.layers.9.*:lr=1", "slots.*.layers.9.*"),
    ]
    .into_iter()
    .enumerate()
    {
        let words = [pattern, "`param-groups`", "blocks.0.", "names of parameters, such as"];
        m.fails(&format!("{run} {flags} --run-dir run-{nth}"), 2, &words);
        assert!(!m.path(&format!("run-{nth}")).exists(), "{flags}");
    }
    for (nth, flags) in [
        "--host minimal --controller heuristic --param-groups slots.*.gate.*:lr=1;*.bias:lr=1",
        "--controller none --members host=minimal|mlp:8 --param-groups blocks.*:lr=1",
        "--host minimal --controller none --param-groups slots.*:lr=1",
    ]
    .into_iter()
    .enumerate()
    {
        m.ok(&format!("{run} {flags} --run-dir fits-{nth}"));
    }
}

/// A comparison has the members of a run and the best of them, TensorBoard's series have the names
/// of the members, and a report has the members over their seeds.
#[test]
fn comparisons_series_and_reports_name_the_members() {
    let m = with_images();
    let run = "train --dataset arrays --data-root images.safetensors --controller none --steps 3 \
               --batch 32 --control-split 0.2 --quiet";
    m.ok(&format!("{run} --members lr=0.00001,0.1 --members seed=1,2 --run-dir run --tensorboard"));
    m.ok(&format!("{run} --run-dir plain"));
    let said = m.ok("runs compare run plain").stdout;
    let row = |name: &str| said.lines().find(|line| line.contains(name)).unwrap_or_default();
    assert!(row("best member").contains('–'), "{said}");
    assert!(row("its settings").contains("lr=0.1; seed="), "{said}");
    assert!(row("its control score").contains('%'), "{said}");
    assert!(!m.ok("runs compare plain plain").stdout.contains("member"));
    let compared: serde_json::Value =
        serde_json::from_str(&m.ok("runs compare run plain --json").stdout).unwrap();
    let members = compared["members"][0].as_array().unwrap();
    let summary = m.json("run/summary.json");
    for member in members {
        let env = &summary["envs"][member["number"].as_u64().unwrap() as usize];
        assert_eq!(member["settings"], env["member"]);
        assert_eq!(member["control_accuracy"], env["control_accuracy"]);
        assert_eq!((&member["steps"], &member["ended"]), (&3.into(), &serde_json::Value::Null));
    }
    let scores: Vec<f64> =
        members.iter().map(|member| member["control_accuracy"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    assert_eq!(compared["members"][1].as_array().unwrap().len(), 0);

    m.ok("export tensorboard run --out board");
    for folder in ["board", "run/tensorboard"] {
        let files = std::fs::read_dir(m.path(folder)).unwrap().map(|file| file.unwrap().path());
        let file = files.into_iter().next().unwrap();
        let board = String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned();
        for words in ["control_accuracy/env 2: lr=0.1; seed=1", "| 3 | lr=0.1; seed=2 |"] {
            assert!(board.contains(words), "{folder}: {words}");
        }
    }

    m.ok("runs report run plain --out run.html");
    let page = String::from_utf8(m.bytes("run.html")).unwrap();
    let table = page.split("Members over their seeds").nth(2).unwrap();
    let rows: Vec<&str> = table.split("<tr>").skip(1).take(3).collect();
    assert!(rows[1].contains("lr=0.1<") && rows[2].contains("lr=0.00001<"), "{rows:?}");
    assert!(rows.iter().skip(1).all(|row| row.contains('±')), "{rows:?}");
    assert_eq!(page.matches("Members over their seeds").count(), 2, "only in one run");
    assert!(page.contains("best member"));
}

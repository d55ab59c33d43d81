//! Reports and tables of sweeps (P6).

use std::fs;

use crate::common::Meristem;
use crate::common::runs::{with_images, without_checksums};
use crate::sweeps::with_sweep;

const SETTINGS: &str = "
dataset = \"arrays\"
data_root = \"images.safetensors\"
controller = \"none\"
control_split = 0.2
batch = 32
steps = 4
samples = 18
seed = 5

[space]
host = { choice = [\"cnn:channels=2\", \"cnn:channels=3,blocks=2\"] }
lr = { log_uniform = [1e-3, 1] }
momentum = { uniform = [0, 0.9] }
weight_decay = { log_uniform = [1e-5, 1e-2], when = \"host=cnn:channels=2\" }
";

fn swept(scheduler: &str) -> Meristem {
    let m = with_images();
    let text = format!("scheduler = \"{scheduler}\"\n{SETTINGS}");
    fs::write(m.path("sweep.toml"), text).unwrap();
    m.ok("sweep sweep.toml --quiet --run-dir run");
    m
}

fn report(m: &Meristem, run: &str) -> String {
    let page = format!("{run}.html");
    m.ok(&format!("runs report {run} --out {page}"));
    String::from_utf8(m.bytes(&page)).unwrap()
}

/// Cells of the table `members`, the first row the header.
fn exported(m: &Meristem, run: &str) -> Vec<Vec<String>> {
    let text = m.ok(&format!("export csv {run} --table members")).stdout;
    let mut rows = vec![];
    for line in text.lines() {
        // Hosts have commas.
        let quoted: Vec<&str> = line.split('"').collect();
        let parts = quoted.iter().enumerate().map(|(nth, part)| match nth % 2 {
            0 => part.to_string(),
            _ => part.replace(',', "|"),
        });
        rows.push(parts.collect::<String>().split(',').map(String::from).collect());
    }
    rows
}

#[test]
fn a_report_shows_what_settings_did_and_who_ended() {
    let m = swept("halving:2");
    let page = report(&m, "run");
    for words in [
        "Settings and scores of the members, in parallel coordinates",
        "control scores by the end of the member",
        "step 1: 9 ended",
        "step 2: 5 ended",
        "4 not ended",
        "Share of the variance of the control accuracy of 18 members after 1 step",
        "weight_decay",
        "cnn:...ocks=2",
    ] {
        assert!(page.contains(words), "{words}");
    }
    assert!(!page.contains("Lineage"));
    // The run is complete, so no member is in training.
    assert!(page.contains("Members; 4 of 18 made all steps"));
    assert!(page.contains("<td>complete</td>") && !page.contains("in training"));
    // A line for each member across four axes of settings and one of scores.
    let drawing = page.split("in parallel coordinates</title>").nth(1).unwrap();
    let drawing = drawing.split("</svg>").next().unwrap();
    let lines: Vec<&str> = drawing.split("<polyline points=\"").skip(1).collect();
    assert_eq!(lines.len(), 18);
    let points = |line: &&str| line.split('"').next().unwrap().split(' ').count();
    assert!(lines.iter().all(|line| points(line) == 5), "{drawing}");

    let rows = exported(&m, "run");
    let header = ["member", "from_step", "copy_of", "host", "lr", "momentum", "weight_decay"];
    assert_eq!(rows[0][..7], header.map(String::from));
    assert_eq!(rows[0][7..], ["steps", "control_accuracy", "ended"].map(String::from));
    assert_eq!(rows.len(), 19);
    let summary = m.json("run/summary.json");
    for (member, row) in rows[1..].iter().enumerate() {
        let env = &summary["envs"][member];
        assert_eq!((&*row[0], &*row[1], &*row[2]), (&*member.to_string(), "0", ""));
        assert_eq!(row[7], env["steps"].to_string());
        assert_eq!(row[8].parse::<f64>().unwrap(), env["control_accuracy"].as_f64().unwrap());
        assert_eq!(row[9], env["ended"].as_str().unwrap_or_default());
        let settings = env["member"].as_str().unwrap();
        assert!(settings.contains(&format!("lr={}", row[4])), "{settings}: {row:?}");
        // A condition: others do not have the setting.
        assert_eq!(row[6].is_empty(), !settings.contains("weight_decay"), "{settings}: {row:?}");
    }
}

/// With places a member that made all steps has ended, and others begin later.
#[test]
fn members_in_places_are_reported_with_their_own_steps() {
    let m = with_sweep("none", 4);
    m.ok("sweep sweep.toml --quiet --controller random --places 4 --run-dir run");
    assert!(report(&m, "run").contains("Members; 9 of 9 made all steps"));
    let rows = exported(&m, "run");
    let column = |at: usize| rows[1..].iter().map(|row| row[at].clone()).collect::<Vec<_>>();
    assert_eq!(column(1), ["0", "0", "0", "0", "4", "4", "4", "4", "8"]);
    let steps = rows[0].iter().position(|name| name == "steps").unwrap();
    assert_eq!(column(steps), ["4"; 9]);
    std::fs::remove_file(m.path("run/summary.json")).unwrap();
    let listed: serde_json::Value = serde_json::from_str(&m.ok("runs . --json").stdout).unwrap();
    assert_eq!(listed["runs"][0]["steps"], serde_json::json!([12, 12]));
}

#[test]
fn a_report_draws_the_lineage_of_copies() {
    let m = swept("pbt:1");
    let page = report(&m, "run");
    for words in ["Lineage", "member 17", "in parallel coordinates"] {
        assert!(page.contains(words), "{words}");
    }
    // Settings of copies change, and nobody has ended.
    assert!(!page.contains("Share of the variance") && !page.contains("by the end of the member"));
    let rows = exported(&m, "run");
    let copies = m.events("run").iter().filter(|event| event["event"] == "member_copied").count();
    assert!(copies > 0);
    assert_eq!(rows.len(), 19 + copies);
    assert_eq!(rows.iter().filter(|row| !row[2].is_empty()).count(), copies + 1);
}

#[test]
fn a_run_without_members_has_no_part_about_them() {
    let m = with_images();
    m.ok("train --dataset arrays --data-root images.safetensors --controller none --steps 1 \
          --envs 2 --quiet --run-dir run");
    let page = report(&m, "run");
    for words in
        ["in parallel coordinates", "variance of the", "Lineage", "Members;", "by the end of"]
    {
        assert!(!page.contains(words), "{words}");
    }
    assert_eq!(exported(&m, "run").len(), 1);
}

/// Names and values of settings in damaged events are text only.
#[test]
fn settings_are_escaped() {
    let m = swept("halving:2");
    let path = m.path("run/events.jsonl");
    let text = without_checksums(&fs::read_to_string(&path).unwrap());
    let evil = "<script>alert(1)</script>";
    let text = text.replace("cnn:channels=2", &format!("cnn:channels=2{evil}"));
    let text = text.replace("momentum=", &format!("{evil}=")).replace("lr=0.", "lr=-1e999");
    fs::write(&path, text).unwrap();
    let page = report(&m, "run");
    assert!(page.contains("&lt;script"), "{page}");
    for forbidden in ["<script", "NaN", "inf\""] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert_eq!(exported(&m, "run")[0][3..6], ["<script>alert(1)</script>", "host", "lr"]);
}

//! `meristem bench`: that it runs and says what was measured. The figures themselves are not tested.

#![allow(clippy::unwrap_used, reason = "a test may panic, its helpers too")]

mod common;

use common::Meristem;
use serde_json::Value;

#[test]
fn benchmarks_print_json() {
    let m = Meristem::new();
    let said = m.ok("bench host --host minimal --envs 2 --batch 32 --seconds 0.2 --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report["images_per_s"].as_f64().unwrap() > 0.0);
    assert_eq!(report["config"]["envs"], 2);
    let said = m.ok("bench gather --seconds 0.2 --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report["us_per_batch"].as_f64().unwrap() > 0.0);
    assert_eq!(report["config"]["batch"], 128);
    let said = m.ok("bench counterfactual --batch 8 --seconds 0.1 --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report["share"]["median"].as_f64().unwrap() > 0.0);
    assert_eq!(
        (&report["config"]["configurations"], &report["config"]["distinct"]),
        (&12.into(), &8.into())
    );
    // Counted, not timed: the target of issue 4.
    assert!(report["flops_share"].as_f64().unwrap() < 0.5);
    m.fails("bench counterfactual --blueprint conv_larch", 2, &["conv_larch", "conv_light"]);
}

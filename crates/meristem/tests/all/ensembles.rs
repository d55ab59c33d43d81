//! `meristem eval --ensemble`: the mean of the networks of a run against single networks (P7).

use meristem::nn::{HostData, safetensors};
use serde_json::Value;

use crate::common::Meristem;
use crate::common::runs::with_images;

/// Growing hosts of two topologies.
const MIXED: &str = "train --dataset arrays --data-root images.safetensors --steps 8 --batch 32 \
    --controller random --control-split 0.2 --members host=cnn:channels=2|cnn:channels=3,blocks=2 \
    --envs 4 --quiet --run-dir run";

/// Bound of the difference of two orders of the same operations in f64: fewer than 10⁴ terms of
/// size 1 with rounding errors of 1.1·10⁻¹⁶ each.
const ROUNDING: f64 = 1e-12;

fn json(m: &Meristem, arguments: &str) -> Value {
    serde_json::from_str(&m.ok(&format!("{arguments} --json")).stdout).unwrap()
}

fn close(found: &Value, expected: f64, tolerance: f64) {
    let number = found.as_f64().unwrap();
    assert!((number - expected).abs() <= tolerance, "{found}, expected {expected}");
}

/// Numbers of a file that `--logits` wrote.
fn logits(m: &Meristem, file: &str) -> Vec<f64> {
    let numbers = m.bytes(file)[128..].to_vec();
    numbers.chunks_exact(4).map(|v| f64::from(f32::from_le_bytes(v.try_into().unwrap()))).collect()
}

/// Accuracy, negative log-likelihood and expected calibration error, by their definitions.
fn by_definition(probabilities: &[Vec<f64>], labels: &[i64]) -> [f64; 3] {
    let mut bins = vec![vec![]; 15];
    let (mut correct, mut loss) = (0.0, 0.0);
    for (row, &label) in probabilities.iter().zip(labels) {
        let confidence = row.iter().copied().fold(0.0, f64::max);
        let hit = f64::from(row.iter().position(|p| *p == confidence) == Some(label as usize));
        correct += hit;
        loss -= row[label as usize].ln();
        let bin = (1..=15).find(|m| confidence <= f64::from(*m) / 15.0).unwrap_or(15);
        bins[bin as usize - 1].push((hit, confidence));
    }
    let n = labels.len() as f64;
    let gap = |bin: &Vec<(f64, f64)>| {
        let size = bin.len() as f64;
        let hits: f64 = bin.iter().map(|(hit, _)| hit).sum();
        let confidence: f64 = bin.iter().map(|(_, confidence)| confidence).sum();
        if bin.is_empty() { 0.0 } else { size / n * (hits / size - confidence / size).abs() }
    };
    [correct / n, loss / n, bins.iter().map(gap).sum()]
}

/// Networks with other topologies, some of them grown: the figures are those of the logits that
/// `eval --logits` writes for each.
#[test]
fn the_mean_of_mixed_and_grown_networks_is_by_definition() {
    let m = with_images();
    m.ok(MIXED);
    let summary = m.json("run/summary.json");
    let envs = summary["envs"].as_array().unwrap();
    assert!(envs.iter().any(|env| !env["modules"].as_array().unwrap().is_empty()), "{summary}");
    let (state, _) = safetensors::load(&m.path("images.safetensors")).unwrap();
    let HostData::I64(labels) = &state.get("test_labels").unwrap().data else { panic!("labels") };

    let found = json(&m, "eval --ensemble run");
    let mut sums = vec![vec![0.0; 4]; labels.len()];
    for (env, own) in envs.iter().enumerate() {
        m.ok(&format!(
            "eval --weights run/weights/env-{env}.safetensors --dataset arrays \
             --data-root images.safetensors --logits {env}.npy"
        ));
        let softmax = |row: &[f64]| {
            let sum: f64 = row.iter().map(|z| z.exp()).sum();
            row.iter().map(|z| z.exp() / sum).collect::<Vec<_>>()
        };
        let rows: Vec<_> = logits(&m, &format!("{env}.npy")).chunks(4).map(softmax).collect();
        let [accuracy, loss, error] = by_definition(&rows, labels);
        let single = &found["envs"][env];
        assert_eq!(single["accuracy"], own["test_accuracy"]);
        assert_eq!(single["member"], own["member"]);
        close(&single["accuracy"], accuracy, 0.0);
        close(&single["loss"], loss, ROUNDING);
        close(&single["calibration_error"], error, ROUNDING);
        sums.iter_mut().zip(rows).for_each(|(sum, row)| {
            sum.iter_mut().zip(row).for_each(|(sum, p)| *sum += p / 4.0);
        });
    }
    let [accuracy, loss, error] = by_definition(&sums, labels);
    close(&found["ensemble"]["accuracy"], accuracy, 0.0);
    close(&found["ensemble"]["loss"], loss, ROUNDING);
    close(&found["ensemble"]["calibration_error"], error, ROUNDING);
    assert_eq!(found["samples"], 100);
    // The best is chosen on the control split.
    let control = |env: &Value| env["control_accuracy"].as_f64().unwrap();
    let best = envs.iter().rev().max_by(|a, b| control(a).total_cmp(&control(b))).unwrap();
    assert_eq!(found["best"]["env"], best["env"]);
    let mean = envs.iter().map(|env| env["test_accuracy"].as_f64().unwrap()).sum::<f64>() / 4.0;
    close(&found["mean_of_singles"]["accuracy"], mean, ROUNDING);

    // Equal for any number of workers; a batch of another size changes the last bits only.
    assert_eq!(json(&m, "eval --ensemble run --threads 1"), found);
    let other = json(&m, "eval --ensemble run --batch 7");
    // Logits of another batch size differ by rounding in f32, below 1e-5.
    close(&other["ensemble"]["loss"], loss, 1e-4);
    let said = m.ok("eval --ensemble run").stdout;
    for words in ["test, 100 samples", "ensemble of 4", "best single, env", "mean of the 4"] {
        assert!(said.contains(words), "{said}");
    }
    let train = json(&m, "eval --ensemble run --split train");
    assert_eq!(train["samples"], 500);
    let given = "--dataset arrays --data-root images.safetensors";
    assert_eq!(json(&m, &format!("eval --ensemble run {given}")), found);
}

#[test]
fn members_are_chosen_by_number_and_by_control_score() {
    let m = with_images();
    m.ok(MIXED);
    let envs = |report: &Value| {
        let envs = report["envs"].as_array().unwrap().iter();
        envs.map(|env| env["env"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let found = json(&m, "eval --ensemble run --members 1");
    assert_eq!((envs(&found), &found["left_out"]), (vec![1, 3], &serde_json::json!([0, 2])));
    let summary = m.json("run/summary.json");
    let control = |env: u64| summary["envs"][env as usize]["control_accuracy"].as_f64().unwrap();
    let mut order = [0, 1, 2, 3];
    order.sort_by(|a, b| control(*b).total_cmp(&control(*a)));
    let mut top = order[..2].to_vec();
    top.sort_unstable();
    assert_eq!(envs(&json(&m, "eval --ensemble run --top 2")), top);
    m.fails("eval --ensemble run --members 2", 2, &["`members`: got 2", "from 0 to 1"]);
    m.fails("eval --ensemble run --top 1", 2, &["1 of the 4 networks", "at least two"]);

    // Without members the numbers are those of envs.
    m.ok("train --dataset arrays --data-root images.safetensors --envs 3 --steps 1 --quiet \
          --controller none --run-dir plain");
    let found = json(&m, "eval --ensemble plain --members 2,0");
    assert_eq!(envs(&found), [0, 2]);
    assert!(found["best"].get("member").is_none(), "{found}");
    let said = m.ok("eval --ensemble plain").stdout;
    assert!(said.contains("the best single has the best training score"), "{said}");
}

/// After successive halving the survivors are the ensemble, and a run that has only one of them
/// says how to choose others.
#[test]
fn survivors_of_a_sweep_are_the_default() {
    let m = with_images();
    let sweep = "train --dataset arrays --data-root images.safetensors --controller none \
        --control-split 0.2 --quiet --members lr=0.3,0.2,0.1,0.05,0.02,0.01";
    m.ok(&format!("{sweep} --scheduler halving:3 --steps 3 --run-dir run"));
    let found = json(&m, "eval --ensemble run");
    let ended = |env: &Value| {
        m.json("run/summary.json")["envs"][env.as_u64().unwrap() as usize].get("ended").is_some()
    };
    assert_eq!(found["envs"].as_array().unwrap().len(), 2);
    assert!(found["envs"].as_array().unwrap().iter().all(|env| !ended(&env["env"])), "{found}");
    assert!(found["left_out"].as_array().unwrap().iter().all(ended), "{found}");
    m.ok(&format!("{sweep} --scheduler halving:6 --steps 6 --run-dir one"));
    m.fails("eval --ensemble one", 2, &["1 of the 6 networks", "made all steps", "top"]);
    assert_eq!(json(&m, "eval --ensemble one --top 3")["envs"].as_array().unwrap().len(), 3);
}

#[test]
fn numbers_have_the_mean_of_predictions() {
    let m = Meristem::new();
    m.ok("train --dataset friedman --host mlp:16 --envs 3 --steps 3 --batch 32 --quiet \
          --controller none --control-split 0.2 --run-dir run");
    let found = json(&m, "eval --ensemble run");
    let summary = m.json("run/summary.json");
    let variance = (0..3).map(|env| {
        let own = &summary["envs"][env];
        // Batches of another size are summed in another order.
        close(&found["envs"][env]["r2"], own["test_r2"].as_f64().unwrap(), 1e-6);
        close(&found["envs"][env]["loss"], own["test_loss"].as_f64().unwrap(), 1e-6);
        let single = &found["envs"][env];
        single["loss"].as_f64().unwrap() / (1.0 - single["r2"].as_f64().unwrap())
    });
    let variance: Vec<f64> = variance.collect();
    // R² is 1 − loss/variance for the mean, too.
    let mean = &found["ensemble"];
    close(&mean["r2"], 1.0 - mean["loss"].as_f64().unwrap() / variance[0], 1e-9);
    // The error of the mean is at most the mean of the errors (Jensen).
    assert!(mean["loss"].as_f64() < found["mean_of_singles"]["loss"].as_f64(), "{found}");
    assert!(mean["calibration_error"].is_null());
    assert!(!found.to_string().contains("accuracy"), "{found}");
}

#[test]
fn impossible_ensembles_are_refused() {
    let m = with_images();
    m.ok("train --dataset arrays --data-root images.safetensors --envs 2 --steps 1 --quiet \
          --controller none --run-dir run");
    m.fails("eval --ensemble none", 2, &["none", "there is no such folder"]);
    m.fails("eval --ensemble run --batch 0", 2, &["`batch`"]);
    m.fails("eval --ensemble run --data-root x", 2, &["--dataset", "dataset of the run"]);
    m.fails("eval --ensemble run --dataset friedman", 2, &["for task classify"]);
    m.fails("eval --ensemble run --weights x", 2, &["cannot be used with"]);
    m.fails("eval --weights x --top 2", 2, &["cannot be used with"]);
    m.fails("eval --top 2", 2, &["--ensemble"]);
    m.fails("eval", 2, &["--weights"]);
    std::fs::rename(m.path("run/weights/env-1.safetensors"), m.path("away")).unwrap();
    m.fails("eval --ensemble run", 2, &["env-1.safetensors"]);
    std::fs::write(m.path("run/weights/env-1.safetensors"), "damaged").unwrap();
    m.fails("eval --ensemble run", 1, &["env-1.safetensors"]);
    std::fs::remove_file(m.path("run/summary.json")).unwrap();
    m.fails("eval --ensemble run", 2, &["without a summary", "train --resume"]);
}

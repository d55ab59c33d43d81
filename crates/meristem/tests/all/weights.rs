//! `meristem eval`, and weights written and read by runs.

use std::collections::BTreeMap;

use meristem::nn::safetensors::{from_bytes, load};
use meristem::nn::{HostData, HostTensor};
use serde_json::Value;

use crate::common::runs::save;
use crate::common::{Meristem, TINY, of_kind};

#[test]
fn eval_repeats_the_accuracy_of_the_report() {
    let m = Meristem::new();
    // A run with live modules, and one with fossilized modules.
    for (run, flags) in [
        ("live", "--steps 9 --min-contribution 100"),
        ("fossil", "--steps 14 --min-contribution -100"),
    ] {
        m.ok(&format!(
            "train --preset quick --host baseline --controller heuristic --max-gap 99 \
             --parameters-per-image 99 {flags} --batch 32 --max-batches 4 --control-split 0.02 \
             --run-dir {run} --quiet"
        ));
        let summary = m.json(&format!("{run}/summary.json"));
        let mut grown = vec![];
        for env in summary["envs"].as_array().unwrap() {
            check_eval(&m, &format!("{run}/{}", env["weights"].as_str().unwrap()), env);
            let modules = env["modules"].as_array().unwrap();
            grown.extend(modules.iter().map(|module| module["stage"].as_str().unwrap().to_owned()));
        }
        let stages = if run == "live" { ["blending", "holding"] } else { ["fossilized"; 2] };
        assert!(grown.iter().any(|stage| stages.contains(&stage.as_str())), "{run}: {grown:?}");
    }
    let said = m.ok("eval --weights live/weights/env-0.safetensors --split train");
    assert!(said.stdout.contains("on 10,000 train samples"), "{}", said.stdout);
}

/// Evaluates a file on the test split with several commands, and compares the results with the
/// run's summary.
fn check_eval(m: &Meristem, weights: &str, env: &Value) {
    for flags in ["", "--host baseline", "--batch 77"] {
        let said = m.ok(&format!("eval --weights {weights} --split test --json {flags}"));
        let report: Value = serde_json::from_str(&said.stdout).unwrap();
        assert_eq!(report["samples"], 2500);
        assert_eq!(report["accuracy"], env["test_accuracy"]);
        let [loss, expected] = [&report["loss"], &env["test_loss"]].map(|l| l.as_f64().unwrap());
        assert!((loss - expected).abs() < 1e-6 * expected, "{loss} {expected}");
    }
}

#[test]
fn a_file_has_the_layers_of_its_host_and_older_files_need_none() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --export w.safetensors --quiet"));
    let (state, metadata) = load(&m.path("w.safetensors")).unwrap();
    let expected = m.ok("eval --weights w.safetensors").stdout;
    let mut changed = metadata.clone();
    let list = changed.remove("host").unwrap();
    save(&m.path("older.safetensors"), &state, &changed);
    assert_eq!(m.ok("eval --weights older.safetensors").stdout.replace("older", "w"), expected);
    for (text, other, words) in [
        ("\"relu\",", "", "the entry `host` has other layers than `minimal`"),
        (
            "\"version\":1",
            "\"version\":3",
            "`host` has version 3, and this program reads version 2",
        ),
    ] {
        assert!(list.contains(text), "{list}");
        changed.insert("host".into(), list.replacen(text, other, 1));
        save(&m.path("other.safetensors"), &state, &changed);
        let said = m.run("eval --weights other.safetensors");
        assert_eq!(said.code, Some(2), "{}", said.stderr);
        let told = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(told.contains(words), "{told}");
    }
}

#[test]
fn prefixes_of_pytorch_wrappers_are_removed_with_a_note() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --export w.safetensors --quiet"));
    let (plain, metadata) = load(&m.path("w.safetensors")).unwrap();
    let expected = m.ok("eval --weights w.safetensors").stdout;
    for prefix in ["module.", "_orig_mod.", "module._orig_mod."] {
        let mut wrapped = plain.clone();
        let named = |(name, tensor)| (format!("{prefix}{name}"), tensor);
        wrapped.0 = plain.0.clone().into_iter().map(named).collect();
        save(&m.path("wrapped.safetensors"), &wrapped, &metadata);
        let note =
            format!("note: wrapped.safetensors: the names of all tensors begin with `{prefix}`");
        let said = m.ok("eval --weights wrapped.safetensors");
        assert!(said.stderr.contains(&note), "{}", said.stderr);
        assert_eq!(said.stdout.replace("wrapped", "w"), expected);
        let said =
            m.ok(&format!("train {TINY} --init wrapped.safetensors --run-dir of-{prefix}run"));
        assert!(said.stderr.contains(&note), "{}", said.stderr);
        m.ok("export onnx wrapped.safetensors --out wrapped.onnx");
        std::fs::remove_file(m.path("wrapped.onnx")).unwrap();
        // If one name lacks the prefix, no prefix is removed.
        wrapped.insert("other", HostTensor::scalar_i64(1));
        save(&m.path("wrapped.safetensors"), &wrapped, &metadata);
        let said = m.run("eval --weights wrapped.safetensors");
        assert_eq!(said.code, Some(2));
        assert!(said.stderr.contains(&format!("{prefix}classifier.weight")), "{}", said.stderr);
    }
}

#[test]
fn files_of_other_formats_are_errors_with_a_conversion() {
    let m = Meristem::new();
    for (start, named) in [
        (&b"PK\x03\x04archive/data.pkl"[..], "a zip archive, as torch.save (.pt, .pth)"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a pickle, as torch.save"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}", "an array of numpy (.npy)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ] {
        std::fs::write(m.path("w.pt"), start).unwrap();
        for command in ["eval --weights w.pt", &format!("train {TINY} --init w.pt")] {
            let said = m.run(command);
            assert_eq!(said.code, Some(1), "{command}");
            let told = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(told.contains(named) && !told.contains("damaged"), "{told}");
        }
    }
}

#[test]
fn files_have_pytorch_names_and_metadata_for_readers() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --export best.safetensors --quiet"));
    let (state, metadata) = load(&m.path("best.safetensors")).unwrap();
    let shapes: BTreeMap<&str, &[usize]> =
        state.iter().map(|(name, tensor)| (name, &tensor.shape[..])).collect();
    assert_eq!(shapes["blocks.0.conv.weight"], [2, 1, 1, 1]);
    assert_eq!(shapes["blocks.2.bn.running_var"], [8]);
    assert_eq!(shapes["blocks.2.bn.num_batches_tracked"], [0; 0]);
    assert_eq!(shapes["classifier.weight"], [10, 8]);
    // Three steps of three batches; each batch is counted again when the statistics are recomputed.
    assert_eq!(state.get("blocks.1.bn.num_batches_tracked").unwrap().data, HostData::I64(vec![18]));
    let topology: Value = serde_json::from_str(&metadata["topology"]).unwrap();
    assert_eq!(topology["host"], "cnn:channels=2,blocks=3,kernel=1,pools=0");
    let classes: Vec<String> = serde_json::from_str(&metadata["classes"]).unwrap();
    assert_eq!(classes[9], "Ankle boot");
    let normalization: Value = serde_json::from_str(&metadata["normalization"]).unwrap();
    assert!((normalization["mean"][0].as_f64().unwrap() - 0.2867).abs() < 1e-3);
    // Without a control split, env 0 is exported.
    assert_eq!(m.bytes("best.safetensors"), m.bytes("run/weights/env-0.safetensors"));
}

#[test]
fn a_run_starts_from_given_weights_in_file_order() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir first --quiet"));
    let base = "train --host minimal --controller none --envs 1 --init \
                first/weights/env-0.safetensors --shuffle off --augment none --batch 128 \
                --max-batches 5 --steps 1 --log-batches --quiet";
    m.ok(&format!("{base} --export a.safetensors --run-dir a"));
    m.ok(&format!("{base} --export b.safetensors --run-dir b --seed 7"));
    // Neither order nor weights are random here, so the seed has no effect.
    assert_eq!(m.bytes("a.safetensors"), m.bytes("b.safetensors"));
    assert_ne!(m.bytes("a.safetensors"), m.bytes("first/weights/env-0.safetensors"));

    // With a learning rate of 0 only the running statistics change.
    m.ok(&format!("{base} --lr 0 --export c.safetensors --run-dir c"));
    let (before, _) = load(&m.path("first/weights/env-0.safetensors")).unwrap();
    let (after, _) = load(&m.path("c.safetensors")).unwrap();
    for (name, tensor) in before.iter() {
        let same = after.get(name) == Some(tensor);
        let statistic = name.contains("running_") || name.contains("num_batches");
        assert_eq!(same, !statistic, "{name}");
    }
}

/// `--start-topology` trains exactly the final modules of another run, as a fixed network with new
/// weights. A module that was not blended in is left out.
#[test]
fn a_topology_is_trained_from_the_beginning() {
    let m = Meristem::new();
    let script = r#"
{"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "norm", "tempo": "fast"}
{"step": 1, "op": "ADVANCE", "slot": "r0c1"}
{"step": 3, "op": "ADVANCE", "slot": "r0c1"}
{"step": 4, "op": "GERMINATE", "slot": "r0c0", "blueprint": "conv_small"}
"#;
    std::fs::write(m.path("script"), script).unwrap();
    let small = "train --host minimal --envs 1 --rounds 1 --batch 32 --max-batches 2 --quiet";
    m.ok(&format!(
        "{small} --controller fixed:script --min-training-steps 1 --steps 6 --run-dir grown"
    ));
    let grown = &m.json("grown/summary.json")["envs"][0];
    assert_eq!(grown["modules"][0]["stage"], "germinated");
    assert_eq!(grown["modules"][1]["stage"], "blending");

    let fixed = format!(
        "{small} --controller none --steps 2 \
         --start-topology grown/weights/env-0.safetensors --run-dir"
    );
    m.ok(&format!("{fixed} fixed"));
    let summary = m.json("fixed/summary.json");
    let env = &summary["envs"][0];
    let modules = env["modules"].as_array().unwrap();
    assert_eq!(modules.len(), 1, "{modules:?}");
    assert_eq!((&modules[0]["slot"], &modules[0]["stage"]), (&"r0c1".into(), &"fossilized".into()));
    assert_eq!(modules[0]["parameters"], grown["modules"][1]["parameters"]);
    assert_eq!(modules[0]["alpha"], 1.0);
    // The weights are new: the loss of the first step is about ln 10.
    let first = of_kind(&m.events("fixed"), "step_completed")[0]["train_loss"].as_f64().unwrap();
    assert!((first - 10f64.ln()).abs() < 0.5, "{first}");
    let other = fixed.replace("--host minimal", "--host baseline");
    m.fails(&format!("{other} x"), 2, &["made with host `minimal`"]);
    m.fails(&format!("{fixed} x --init y"), 2, &["init"]);
    m.fails(
        &format!("{small} --start-topology nothing --run-dir x"),
        2,
        &["`start-topology`", "an existing weights file"],
    );
    // A run folder has a topology for each of its envs.
    let of_run = format!("{small} --controller none --steps 1 --start-topology grown");
    m.ok(&format!("{of_run} --run-dir each"));
    assert_eq!(m.json("each/summary.json")["envs"][0]["parameters"], env["parameters"]);
    m.fails(
        &format!("{of_run} --envs 2 --run-dir x").replace("--envs 1 ", ""),
        2,
        &["`start-topology`", "env-1.safetensors", "weights of 2 envs"],
    );
}

#[test]
fn a_file_from_pytorch_is_a_bare_host() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    let (state, mut metadata) = load(&m.path("run/weights/env-0.safetensors")).unwrap();
    save(&m.path("plain.safetensors"), &state, &BTreeMap::new());
    let eval = |flags: &str| -> (Value, String) {
        let said = m.ok(&format!("eval --json --weights {flags}"));
        (serde_json::from_str(&said.stdout).unwrap(), said.stderr)
    };
    let (expected, told) = eval("run/weights/env-0.safetensors");
    assert_eq!((&expected["normalization"], &*told), (&"weights".into(), ""));
    let (mut plain, told) = eval("plain.safetensors --host minimal");
    // The file has no constants; the dataset's constants are the same here.
    assert_eq!(plain["normalization"], "dataset");
    assert!(told.contains("no normalisation constants"), "{told}");
    plain["normalization"] = "weights".into();
    assert_eq!(plain, expected);
    m.fails("eval --weights plain.safetensors", 2, &["topology", "--host"]);
    // `eval` uses the constants of the file, not those of the dataset.
    metadata.insert("normalization".into(), r#"{"mean":[0.5],"std":[0.1]}"#.into());
    save(&m.path("other.safetensors"), &state, &metadata);
    let (other, _) = eval("other.safetensors");
    assert_eq!(other["normalization"], "weights");
    assert_ne!(other["loss"], expected["loss"], "pixels were normalised as the dataset says");
}

#[test]
fn unsuitable_weights_are_refused_with_all_reasons() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    let (mut state, metadata) = load(&m.path("run/weights/env-0.safetensors")).unwrap();
    state.0.remove("blocks.0.conv.weight");
    state.0.remove("classifier.bias");
    state.insert("blocks.9.conv.weight", HostTensor::f32(&[1], vec![0.0]));
    state.insert("classifier.weight", HostTensor::f32(&[8, 10], vec![0.0; 80]));
    state.insert("blocks.1.bn.bias", HostTensor::f32(&[4], vec![0.0, f32::NAN, 0.0, 0.0]));
    save(&m.path("bad.safetensors"), &state, &metadata);
    let reasons = [
        "bad.safetensors",
        "missing (2): blocks.0.conv.weight, classifier.bias",
        "blocks.9.conv.weight",
        "classifier.weight (expected f32 [10, 8], got f32 [8, 10])",
        "with NaN or infinity (1): blocks.1.bn.bias",
    ];
    m.fails("eval --weights bad.safetensors --host minimal", 2, &reasons);
    m.fails(&format!("train {TINY} --init bad.safetensors --run-dir x"), 2, &reasons);
    assert!(!m.path("x").exists(), "a run that cannot start leaves no folder");

    // A negative variance would give a loss of NaN, other classes wrong results.
    let (mut state, mut metadata) = load(&m.path("run/weights/env-0.safetensors")).unwrap();
    state.insert("blocks.1.bn.running_var", HostTensor::f32(&[4], vec![1.0, -0.5, 1.0, 1.0]));
    save(&m.path("below.safetensors"), &state, &metadata);
    let reasons = ["below.safetensors", "negative variances: blocks.1.bn.running_var"];
    m.fails("eval --weights below.safetensors", 2, &reasons);
    m.fails(&format!("train {TINY} --init below.safetensors --run-dir x"), 2, &reasons);
    let (state, _) = load(&m.path("run/weights/env-0.safetensors")).unwrap();
    let mut classes: Vec<String> = serde_json::from_str(&metadata["classes"]).unwrap();
    classes.swap(3, 4);
    let reasons = ["order.safetensors", "label 3 is `Coat` in these weights and `Dress`"];
    metadata.insert("classes".into(), serde_json::to_string(&classes).unwrap());
    save(&m.path("order.safetensors"), &state, &metadata);
    m.fails("eval --weights order.safetensors", 2, &reasons);

    let good = "run/weights/env-0.safetensors";
    m.fails(
        &format!("eval --weights {good} --host wide"),
        2,
        &["made with host", "minimal", "wide"],
    );
    m.fails("eval --weights run/config.toml --host wide", 1, &["safetensors", "config.toml"]);
    let gone = ["cannot read gone.safetensors: ", "help: give a .safetensors file that exists"];
    m.fails("eval --weights gone.safetensors --host wide", 2, &gone);
    let bytes = m.bytes(good);
    std::fs::write(m.path("short.safetensors"), &bytes[..bytes.len() - 40]).unwrap();
    m.fails("eval --weights short.safetensors", 1, &["short.safetensors", "export it again"]);
}

/// A changed byte is an error, also in the entries that turn the comparison on, or white space.
#[test]
fn no_changed_byte_of_weights_and_policies_is_accepted() {
    let m = Meristem::new();
    m.ok("train --host cnn:channels=1 --slots r0 --envs 1 --rounds 1 --steps 1 --batch 512 \
          --max-batches 1 --control-split 0.01 --controller ppo --policy none --policy-hidden 4 \
          --run-dir run --quiet");
    for file in ["run/weights/env-0.safetensors", "run/policy.safetensors"] {
        let (path, bytes) = (m.path(file), m.bytes(file));
        let whole = from_bytes(&path, &bytes).unwrap();
        for at in 0..bytes.len() {
            for mask in [1 << (at % 8), 0x20, 0xff] {
                let mut changed = bytes.clone();
                changed[at] ^= mask;
                if let Ok(found) = from_bytes(&path, &changed) {
                    assert!(found == whole, "{file}, byte {at} xor {mask}");
                }
            }
        }
    }
}

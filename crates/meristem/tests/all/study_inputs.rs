//! Inputs of a study that goes on: the files that it has made where they are now, and its data.

use std::fs;

use crate::common::Meristem;
use crate::common::runs::{save, with_images};
use meristem::nn::HostData;
use meristem::nn::safetensors::load;
use serde_json::Value;

const SETTINGS: &str = "--host minimal --envs 2 --steps 4 --max-batches 3 --batch 32 --rounds 1 \
                        --policy-hidden 8 --min-training-steps 1 --control-split 0.02 --quiet";

/// Runs the study in a folder, or continues it; returns its results.
fn study(m: &Meristem, folder: &str) -> Value {
    let said = m.ok(&command(folder));
    serde_json::from_str(&said.stdout).unwrap()
}

fn command(folder: &str) -> String {
    let contenders = "--controllers none,ppo,static@ppo --seeds 1";
    format!("control eval {SETTINGS} {contenders} --json --run-dir {folder}")
}

/// A study in the folder `moved`, which was complete in another folder, and its results.
fn moved() -> (Meristem, Value) {
    let m = Meristem::new();
    let whole = study(&m, "study");
    fs::rename(m.path("study"), m.path("moved")).unwrap();
    (m, whole)
}

#[test]
fn complete_runs_are_compared_with_the_files_in_the_new_folder() {
    let (m, whole) = moved();
    assert_eq!(study(&m, "moved"), whole);
    m.ok(&format!("train {SETTINGS} --controller ppo --policy none --run-dir other"));
    for (file, other, run) in [
        ("2-ppo-learning/policy.safetensors", "other/policy.safetensors", "2-ppo"),
        ("2-ppo/weights/env-1.safetensors", "other/weights/env-0.safetensors", "3-static-ppo"),
    ] {
        let file = format!("moved/seed-1000/{file}");
        let own = m.bytes(&file);
        fs::write(m.path(&file), m.bytes(other)).unwrap();
        let name = file.rsplit('/').next().unwrap();
        m.fails(&command("moved"), 2, &[run, name, "checksum"]);
        fs::write(m.path(&file), own).unwrap();
    }
    assert_eq!(study(&m, "moved"), whole);
}

/// A run of one round has no checkpoint until it is stopped, and starts again.
#[test]
fn killed_runs_go_on_with_the_files_in_the_new_folder() {
    let (m, whole) = moved();
    for run in ["2-ppo", "3-static-ppo"] {
        let folder = m.path("moved/seed-1000").join(run);
        let settings = fs::read(folder.join("config.toml")).unwrap();
        // Killed at the end, or before the first event.
        for has_events in [true, false] {
            fs::remove_file(folder.join("summary.json")).unwrap();
            if !has_events {
                fs::write(folder.join("events.jsonl"), "").unwrap();
            }
            assert_eq!(study(&m, "moved"), whole, "{run}, {has_events}");
            assert!(folder.join("summary.json").exists(), "{run}, {has_events}");
        }
        assert_eq!(fs::read(folder.join("config.toml")).unwrap(), settings);
    }
    // Once more from elsewhere, with the records of runs that went on after the first move.
    fs::rename(m.path("moved"), m.path("again")).unwrap();
    assert_eq!(study(&m, "again"), whole);
}

/// A study goes on with the data that its complete runs had.
#[test]
fn other_images_or_labels_are_named_by_their_split() {
    let m = with_images();
    let command = "control eval --dataset arrays --data-root images.safetensors --controllers none \
                   --host cnn:channels=2,blocks=2 --envs 1 --steps 1 --max-batches 1 --batch 16 \
                   --quiet --run-dir study --seeds";
    m.ok(&format!("{command} 1"));
    let path = m.path("images.safetensors");
    let (began, metadata) = load(&path).unwrap();
    for (changed, named) in [
        (&["train_images"][..], "other training images or labels"),
        (&["test_labels"], "other test images or labels"),
        (&["train_labels", "test_images"], "other training and test images or labels"),
    ] {
        let mut other = began.clone();
        for name in changed {
            match &mut other.0.get_mut(*name).unwrap().data {
                HostData::U8(bytes) => bytes[0] ^= 1,
                HostData::I64(labels) => labels[0] = (labels[0] + 1) % 4,
                HostData::F32(_) => panic!("{name}"),
            }
        }
        save(&path, &other, &metadata);
        m.fails(
            &format!("{command} 2"),
            2,
            &["`dataset`", named, "the data of study/seed-1000/1-none"],
        );
    }
    save(&path, &began, &metadata);
    m.ok(&format!("{command} 2"));
}

//! Runs with growth on a few small images, and comparison of their results.

use std::fs;
use std::path::Path;

use meristem::device::random::{Purpose, Rng};
use meristem::nn::safetensors::{self, Metadata};
use meristem::nn::{HostData, HostTensor, StateDict};
use serde_json::Value;

use super::Meristem;

/// A host without slots, which can grow in width only.
const SLOTLESS: &str = r#"layers = [
    { conv2d = { out = 4, kernel = 3, name = "one" } }, "batch_norm", "relu",
    { conv2d = { out = 4, kernel = 3, name = "two" } }, "relu",
    "global_avg_pool", { linear = { out = "classes" } },
]"#;

/// A folder with 600 images of 8x8 bytes; the label is the position of the bright half. Beside them
/// `slotless.toml`, a host without slots.
pub(crate) fn with_images() -> Meristem {
    let m = Meristem::new();
    let mut random = Rng::new(1, Purpose::Test, 0, 0);
    let mut arrays = StateDict::default();
    for (split, images) in [("train", 500), ("test", 100)] {
        let labels: Vec<i64> = (0..images).map(|_| i64::from(random.below(4))).collect();
        let bright = |label: i64, i: usize| match label {
            0 => i % 8 < 4,
            1 => i % 8 >= 4,
            2 => i < 32,
            _ => i >= 32,
        };
        let mut pixel = |label, i| random.below(160) as u8 + if bright(label, i) { 90 } else { 0 };
        let bytes = labels.iter().flat_map(|&label| (0..64).map(move |i| (label, i)));
        let bytes = bytes.map(|(label, i)| pixel(label, i)).collect();
        let tensor = HostTensor { shape: vec![images, 8, 8], data: HostData::U8(bytes) };
        arrays.insert(format!("{split}_images"), tensor);
        let tensor = HostTensor { shape: vec![images], data: HostData::I64(labels) };
        arrays.insert(format!("{split}_labels"), tensor);
    }
    save(&m.path("images.safetensors"), &arrays, &Metadata::new());
    fs::write(m.path("slotless.toml"), SLOTLESS).unwrap();
    m
}

/// Writes a weights file.
pub(crate) fn save(path: &Path, state: &StateDict, metadata: &Metadata) {
    std::fs::write(path, safetensors::to_bytes(path, state, metadata).unwrap()).unwrap();
}

/// Converts events or a summary to version 1 of the format, without checksums, so that a test may
/// change them.
pub(crate) fn without_checksums(text: &str) -> String {
    let mut rest = text;
    let mut all = String::new();
    while let Some(at) = rest.find("\"crc32\":") {
        all += rest[..at].trim_end().trim_end_matches(',');
        rest = &rest[at..][rest[at..].find('}').unwrap()..];
    }
    (all + rest).replace("\"v\":2", "\"v\":1").replace("\"v\": 2", "\"v\": 1")
}

/// Results that must be equal: weights, and events without times and number of threads.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) weights: Vec<Vec<u8>>,
    policy: Option<Vec<u8>>,
    pub(crate) events: Vec<Value>,
    pub(crate) envs: Value,
    /// Without times, memory and path.
    summary: Value,
}

pub(crate) fn outcome(m: &Meristem, run: &str) -> Outcome {
    let mut summary = m.json(&format!("{run}/summary.json"));
    assert_eq!(summary["status"], "completed");
    let envs = summary["envs"].take();
    let files = envs.as_array().unwrap().iter().map(|env| env["weights"].as_str().unwrap());
    let weights = files.map(|file| m.bytes(&format!("{run}/{file}"))).collect();
    let policy = std::fs::read(m.path(run).join("policy.safetensors")).ok();
    let mut events = m.events(run);
    for event in &mut events {
        let event = event.as_object_mut().unwrap();
        for own in ["seconds", "step_seconds", "images_per_s", "wall_seconds", "threads", "crc32"] {
            event.remove(own);
        }
    }
    let fields = summary.as_object_mut().unwrap();
    // Counts of the hot path begin in each process after its first step.
    for own in [
        "run_dir",
        "wall_seconds",
        "step_seconds_total",
        "images_per_s",
        "memory",
        "threads",
        "hot_path",
        "crc32",
    ] {
        fields.remove(own);
    }
    Outcome { weights, policy, events, envs, summary }
}

impl Outcome {
    /// Removes the lists of devices, the only difference from a run on other devices of a kind.
    pub(crate) fn without_devices(mut self) -> Self {
        for started in self.events.iter_mut().filter(|event| event["event"] == "run_started") {
            started.as_object_mut().unwrap().remove("devices");
        }
        self.summary.as_object_mut().unwrap().remove("computed");
        self
    }

    /// Removes the record of an extension, the only difference from a run of that length.
    pub(crate) fn without_extension(mut self) -> Self {
        self.events.retain(|event| event["event"] != "run_extended");
        for (number, event) in self.events.iter_mut().enumerate() {
            event["seq"] = number.into();
        }
        let started = self.events[0].as_object_mut().unwrap();
        started.retain(|key, _| key != "steps" && key != "rounds");
        self.summary.as_object_mut().unwrap().remove("extended");
        self
    }
}

/// Asserts that two results are equal, event by event.
pub(crate) fn assert_same(got: &Outcome, expected: &Outcome, context: &str) {
    for (got, expected) in got.events.iter().zip(&expected.events) {
        assert_eq!(got, expected, "{context}");
    }
    assert_eq!(got.events.len(), expected.events.len(), "{context}");
    for (env, (got, expected)) in got.weights.iter().zip(&expected.weights).enumerate() {
        assert!(got == expected, "{context}: other weights in env {env}");
    }
    assert_eq!(got.envs, expected.envs, "{context}");
    assert_eq!(got.summary, expected.summary, "{context}");
    assert!(got.policy == expected.policy, "{context}: another policy");
}

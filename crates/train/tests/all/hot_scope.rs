//! The training step under a hot scope: forbidden operations of an extension, and the end of the
//! run (V2).

use std::path::Path;

use meristem_device::ScopePolicy;
use meristem_nn::Network;
use meristem_train::config::{ConfigLayer, TrainConfig};
use meristem_train::settings::{BatchLimit, ByteSize, ControllerKind, HotScopePolicy, Switch};
use meristem_train::{Error, Observer, Result, Silent, Summary, resume, run};

/// Reads a loss back in the inner loop from the `from`-th batch on, which is forbidden.
struct Peeks {
    from: usize,
    batches: usize,
}

impl Observer for Peeks {
    fn batch_enqueued(&mut self, _env: usize, network: &Network) -> Result<()> {
        self.batches += 1;
        if self.batches > self.from {
            network.metrics().to_vec::<f64>()?;
        }
        Ok(())
    }
}

const PEEKS_AT: u32 = line!() - 6;

/// Settings of three steps of four batches of two envs.
fn settings(folder: &Path, policy: ScopePolicy) -> ConfigLayer {
    ConfigLayer {
        host: Some("minimal".into()),
        envs: Some(2),
        controller: Some(ControllerKind::Heuristic),
        steps: Some(3),
        batch: Some(16),
        max_batches: Some(BatchLimit::Count(4)),
        run_dir: Some(Some(folder.join("run"))),
        export: Some(Some(folder.join("best.safetensors"))),
        // A twin's batches would be counted, but the observer would not see them.
        twin: Some(Some(Switch(false))),
        hot_scope: Some(HotScopePolicy(policy)),
        ..ConfigLayer::default()
    }
}

fn train(folder: &Path, policy: ScopePolicy, from: usize) -> Result<Summary> {
    let settings = settings(folder, policy);
    let config = TrainConfig::resolve(ConfigLayer::default(), settings).unwrap();
    run(&config, &mut Peeks { from, batches: 0 })
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_refused_read_back_ends_the_run_cleanly() {
    let folder = tempfile::tempdir().unwrap();
    // The third batch of env 0 in the second step.
    let error = train(folder.path(), ScopePolicy::Deny, 8 + 4).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Device(_)) && error.is_hot_scope(), "{text}");
    assert!(text.contains("`train_step`") && text.contains("copy to the host"), "{text}");
    assert!(text.contains(&format!("hot_scope.rs:{PEEKS_AT}:")), "{text}");
    assert_eq!(error.exit_code(), 1);
    assert!(error.remedy().unwrap().contains("--hot-scope warn"));

    let run = folder.path().join("run");
    let summary = json(&run.join("summary.json"));
    assert_eq!((&summary["status"], &summary["steps"]), (&"failed".into(), &1.into()));
    assert_eq!(summary["error"], text);
    let events = std::fs::read_to_string(run.join("events.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["status"]), (&"run_ended".into(), &"failed".into()));
    assert!(!folder.path().join("best.safetensors").exists());

    assert_eq!(std::fs::read_dir(run.join("checkpoints")).unwrap().count(), 1);
    // The run resumes after its last complete step, with the result of an undisturbed run.
    let whole = tempfile::tempdir().unwrap();
    let undisturbed = train(whole.path(), ScopePolicy::Deny, usize::MAX).unwrap();
    let options =
        ConfigLayer { hot_scope: Some(HotScopePolicy(ScopePolicy::Warn)), ..Default::default() };
    let summary = resume(&run, &options, &mut Peeks { from: 0, batches: 0 }).unwrap();
    assert_eq!((summary.steps, summary.envs), (3, undisturbed.envs));
    for file in ["weights/env-0.safetensors", "weights/env-1.safetensors"] {
        let read = |folder: &Path| std::fs::read(folder.join("run").join(file)).unwrap();
        assert!(read(folder.path()) == read(whole.path()), "{file}");
    }
}

#[test]
fn warn_and_off_count_a_forbidden_operation() {
    for policy in [ScopePolicy::Off, ScopePolicy::Warn] {
        let folder = tempfile::tempdir().unwrap();
        let hot = train(folder.path(), policy, 0).unwrap().hot_path;
        // The first step is not measured, the next two are.
        assert_eq!(hot.training_steps, 2 * 4 * 2);
        assert_eq!((hot.copies_to_host, hot.synchronizations), (1.0, 1.0));
        assert_eq!((hot.copies_to_device, hot.allocations), (0.0, 0.0));
    }
}

/// Each batch of streamed images is one counted copy, which the scopes permit. The first batch of
/// an epoch is copied before the inner loop.
#[test]
fn copies_of_streamed_images_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let streamed = ConfigLayer {
        data_budget: Some(Some(ByteSize(1 << 20))),
        ..settings(folder.path(), ScopePolicy::Deny)
    };
    let config = TrainConfig::resolve(ConfigLayer::default(), streamed).unwrap();
    let hot = run(&config, &mut Silent).unwrap().hot_path;
    assert_eq!((hot.training_steps, hot.copies_to_device), (2 * 4 * 2, 3.0 / 4.0));
    assert_eq!((hot.copies_to_host, hot.synchronizations, hot.allocations), (0.0, 0.0, 0.0));
}

/// The first step may allocate what later steps reuse, so it is not judged.
#[test]
fn the_first_step_is_only_counted() {
    let folder = tempfile::tempdir().unwrap();
    let error = train(folder.path(), ScopePolicy::Deny, 0).unwrap_err();
    assert!(error.is_hot_scope(), "{error}");
    assert_eq!(json(&folder.path().join("run/summary.json"))["steps"], 1);
}

//! Envs that break in the middle of a run: the governor restores them, and other envs are
//! unaffected.

use std::collections::BTreeMap;
use std::path::Path;

use meristem_grow::Birth;
use meristem_nn::safetensors;
use meristem_nn::{Network, StateDict};
use meristem_train::config::{ConfigLayer, TrainConfig};
use meristem_train::events::{Event, StepCompleted};
use meristem_train::settings::{BatchLimit, ControllerKind, Preset};
use meristem_train::{Error, Observer, Result, Summary, resume, run};
use serde_json::Value;

const ENVS: usize = 3;
const BATCHES: usize = 4;

/// Damage to a host's weights right after a training step.
#[derive(Clone, Copy, Debug, Default)]
enum Harm {
    /// One weight is NaN.
    #[default]
    NotFinite,
    /// All weights are zero.
    Forgets,
    /// All weights are 30 times as large.
    Grows,
}

impl Harm {
    fn to(self, weights: &mut [f32]) {
        match self {
            Harm::NotFinite => weights[0] = f32::NAN,
            Harm::Forgets => weights.fill(0.0),
            Harm::Grows => weights.iter_mut().for_each(|w| *w *= 30.0),
        }
    }
}

/// Observer that damages hosts and stops runs.
#[derive(Debug, Default)]
struct Breaks {
    harm: Harm,
    /// Round, step, env and batch of each damage.
    at: Vec<(usize, usize, usize, usize)>,
    /// Step of the first round at which the run is stopped.
    stop_at: Option<usize>,
    now: (usize, usize),
    /// Number of batches of each env in the current step.
    batches: [usize; ENVS],
}

impl Breaks {
    fn at(at: &[(usize, usize, usize, usize)]) -> Self {
        Self { at: at.to_vec(), ..Self::default() }
    }

    /// Observes a run that resumes at `step` of the first round.
    fn from(self, step: usize) -> Self {
        Self { now: (0, step), ..self }
    }

    fn stop_at(self, step: usize) -> Self {
        Self { stop_at: Some(step), ..self }
    }
}

impl Observer for Breaks {
    fn event(&mut self, event: &Event) {
        match event {
            Event::RoundStarted { round } => self.now = (*round, 0),
            Event::StepCompleted(StepCompleted { round, step, .. }) => {
                (self.now, self.batches) = ((*round, step + 1), [0; ENVS]);
            }
            _ => {}
        }
    }

    fn batch_enqueued(&mut self, env: usize, network: &Network) -> Result<()> {
        let (round, step) = self.now;
        if self.at.contains(&(round, step, env, self.batches[env])) {
            let values = network.packed_parameters(0).unwrap();
            let launch = values.stream().launch("break").write(values);
            let harm = self.harm;
            launch.run(move |args| harm.to(args.write(0)))?;
        }
        self.batches[env] += 1;
        Ok(())
    }

    fn stop_requested(&self) -> bool {
        self.stop_at.is_some_and(|step| self.now >= (0, step))
    }
}

/// Settings of a run in `folder`: three small hosts that may grow anywhere.
fn flags(folder: &Path, controller: ControllerKind) -> ConfigLayer {
    ConfigLayer {
        preset: Some(Preset::Quick),
        host: Some("minimal".into()),
        slots: Some(Some(vec!["r0".into()])),
        envs: Some(ENVS),
        steps: Some(12),
        rounds: Some(1),
        batch: Some(16),
        max_batches: Some(BatchLimit::Count(BATCHES)),
        control_split: Some((controller != ControllerKind::None).then_some(0.02)),
        controller: Some(controller),
        policy_hidden: Some(Some(8)),
        checkpoint_every: Some(1),
        run_dir: Some(Some(folder.into())),
        ..ConfigLayer::default()
    }
}

fn train(flags: ConfigLayer, mut observer: Breaks) -> Result<Summary> {
    let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
    run(&config, &mut observer)
}

fn go_on(folder: &Path, mut observer: Breaks) -> Result<Summary> {
    resume(folder, &ConfigLayer::default(), &mut observer)
}

/// Reads the events of a run, without times.
fn events(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("events.jsonl")).unwrap();
    let mut events: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for event in &mut events {
        for key in ["seconds", "step_seconds", "images_per_s", "wall_seconds", "crc32"] {
            event.as_object_mut().unwrap().remove(key);
        }
    }
    events
}

fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == kind).collect()
}

/// The events of one env, without `seq`, which counts the events of all envs.
fn of_env(events: &[Value], env: usize) -> Vec<Value> {
    let mut own: Vec<Value> = events.iter().filter(|event| event["env"] == env).cloned().collect();
    own.iter_mut().for_each(|event| drop(event.as_object_mut().unwrap().remove("seq")));
    own
}

fn weights(folder: &Path, env: usize) -> Vec<u8> {
    std::fs::read(folder.join(format!("weights/env-{env}.safetensors"))).unwrap()
}

/// The checkpoint after `step` steps of the first round.
fn checkpoint(folder: &Path, step: usize) -> StateDict {
    let file = folder.join(format!("checkpoints/round-000000-step-{step:06}.safetensors"));
    safetensors::load(&file).unwrap().0
}

/// The tensors with a prefix, as bytes.
fn bits(of: &StateDict, prefix: &str) -> BTreeMap<String, Vec<u8>> {
    let own = of.iter().filter_map(|(name, t)| Some((name.strip_prefix(prefix)?.to_string(), t)));
    let bytes = |tensor: &meristem_nn::HostTensor| {
        let mut bytes = vec![];
        tensor.data.le_bytes(|piece| bytes.extend_from_slice(piece));
        bytes
    };
    own.map(|(name, tensor)| (name, bytes(tensor))).collect()
}

/// Script that grows a module in r0c0 of every env; the module is in Training from step 2 on.
fn script(folder: &Path) -> ControllerKind {
    let file = folder.join("script.jsonl");
    let text = r#"{"step": 1, "op": "GERMINATE", "slot": "r0c0", "blueprint": "conv_light"}
{"step": 2, "op": "ADVANCE", "slot": "r0c0"}
{"step": 9, "op": "PRUNE", "slot": "r0c0"}"#;
    std::fs::write(&file, text).unwrap();
    ControllerKind::Fixed(file)
}

#[test]
fn a_broken_env_is_rolled_back_and_the_others_are_unaffected() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let controller = script(folder.path());
    // Aside, so that a module in Training does not affect the output.
    let flags = |folder| ConfigLayer {
        birth: Some(Birth::Aside),
        ..self::flags(folder, controller.clone())
    };
    train(flags(&whole), Breaks::default()).unwrap();
    let summary = train(flags(&broken), Breaks::at(&[(0, 7, 1, 1)])).unwrap();
    let counts: Vec<usize> = summary.envs.iter().map(|env| env.rollbacks).collect();
    assert_eq!((summary.rollbacks, counts), (1, vec![0, 1, 0]));

    let own = of_the_broken(&whole, &broken);
    let [rollback] = of_kind(&own, "governor_rollback")[..] else { panic!("{own:?}") };
    let expected = serde_json::json!({
        "v": 2, "event": "governor_rollback", "env": 1, "round": 0, "step": 7,
        "failure": "not_finite", "train_loss": null, "control_loss": null, "restored_step": 5,
        "pruned": ["r0c0"], "penalty": -10.0,
        "cause_step": 2,
    });
    assert_eq!(*rollback, expected, "ADVANCE was the last to change anything");
    let [pruned] = of_kind(&own, "module_pruned")[..] else { panic!("{own:?}") };
    assert_eq!((&pruned["step"], &pruned["blueprint"]), (&7.into(), &"conv_light".into()));
    // The event has the training loss of the failed step and the control loss of the restored host.
    // Step 5 has the same control loss: its module was in Training and did not affect the output.
    let steps = of_kind(&own, "step_completed");
    assert_eq!(steps[7]["train_loss"], Value::Null);
    assert_eq!(steps[7]["control_loss"], steps[5]["control_loss"]);
    assert_eq!(steps[7]["slots"][0]["stage"], "pruned");
    assert_eq!(steps[7]["reward"]["gain"], 0.0);
    // The env trains on, and actions of the script for the pruned module are ignored.
    assert_eq!(steps.len(), 12);
    assert!(steps[8..].iter().all(|step| step["train_loss"].as_f64().is_some()));
    assert_eq!(steps[9]["action"], "WAIT");
}

/// Checkpoints after each step show the effect of a rollback on weights, optimiser and rollout.
#[test]
fn a_rollback_restores_the_snapshot_and_ends_the_trajectory() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let observer = Breaks::at(&[(0, 7, 1, 2)]).stop_at(8);
    train(flags(&run, ControllerKind::Ppo), observer).unwrap();
    let [kept, before, after] = [6, 7, 8].map(|step| checkpoint(&run, step));
    let snapshot = bits(&kept, "env.1.snapshot.");
    assert!(!snapshot.is_empty());
    assert_eq!(bits(&after, "env.1.snapshot."), snapshot, "none is taken of an env that failed");
    assert_eq!(bits(&after, "env.1.weights."), snapshot, "running statistics are among them");
    // The snapshot was taken after step 5, so its weights are in the checkpoint before step 6,
    // which also has the weights of live modules.
    let then = bits(&kept, "env.1.weights.");
    assert!(snapshot.iter().all(|(name, bytes)| then[name] == *bytes));
    let zero = |tensors: BTreeMap<String, Vec<u8>>| tensors.values().flatten().all(|b| *b == 0);
    assert!(zero(bits(&after, "env.1.optimiser.")) && !zero(bits(&before, "env.1.optimiser.")));
    assert!(!zero(bits(&after, "env.0.optimiser.")));

    let events = events(&run);
    let [rollback] = of_kind(&events, "governor_rollback")[..] else { panic!("{events:?}") };
    let cause = rollback["cause_step"].as_u64().unwrap() as usize;
    let column = |name: &str| -> Vec<f32> {
        let rows = after.get(&format!("controller.rollout.{name}")).unwrap();
        rows.as_f32().unwrap().iter().skip(1).step_by(ENVS).take(8).copied().collect()
    };
    assert_eq!(column("terminated"), [0., 0., 0., 0., 0., 0., 1., 0.]);
    assert_eq!(column("keep"), [0., 1., 1., 1., 1., 1., 1., 0.]);
    let own = of_env(&events, 1);
    for (step, (event, paid)) in
        of_kind(&own, "step_completed").iter().zip(column("rewards")).enumerate()
    {
        let terms = event["reward"].as_object().unwrap().values();
        let reward = terms.map(|term| term.as_f64().unwrap()).sum::<f64>() as f32;
        let penalty = if step == cause { -10.0 } else { 0.0 };
        assert_eq!(paid, reward + penalty, "step {step}");
    }
    // The last action of the policy before the failure that changed the network.
    let acted = |step: usize| {
        let own = of_env(&events, 1);
        let action = of_kind(&own, "step_completed")[step]["action"].clone();
        action != "WAIT"
    };
    assert!((cause + 1..7).all(|step| !acted(step) || is_refused(&own, step)), "cause {cause}");
}

/// Whether a gate refused the action of a step.
fn is_refused(events: &[Value], step: usize) -> bool {
    let gates = of_kind(events, "gate_evaluated");
    gates.iter().any(|gate| gate["step"] == step && gate["passed"] == false)
}

#[test]
fn a_run_resumed_before_or_after_a_rollback_ends_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let two_rounds = |folder: &Path| ConfigLayer {
        rounds: Some(2),
        checkpoint_every: Some(0),
        // Envs may grow, be rolled back to an old snapshot, and learn from that.
        ..flags(folder, ControllerKind::Ppo)
    };
    let at = [(0, 8, 1, 3), (0, 9, 2, 0), (1, 0, 0, 1)];
    let expected = train(two_rounds(&whole), Breaks::at(&at)).unwrap();
    assert_eq!(expected.rollbacks, 3);
    for stop in [7, 9] {
        let run = folder.path().join(format!("stopped-{stop}"));
        let stopped = train(two_rounds(&run), Breaks::at(&at).stop_at(stop)).unwrap();
        assert_eq!(stopped.steps, stop as u64);
        let summary = go_on(&run, Breaks::at(&at).from(stop)).unwrap();
        assert_eq!(summary.rollbacks, 3, "stopped at {stop}");
        for (got, expected) in events(&run).iter().zip(&events(&whole)) {
            assert_eq!(got, expected, "stopped at {stop}");
        }
        for env in 0..ENVS {
            assert!(weights(&run, env) == weights(&whole, env), "stopped at {stop}: env {env}");
        }
        let policy = |folder: &Path| std::fs::read(folder.join("policy.safetensors")).unwrap();
        assert!(policy(&run) == policy(&whole), "stopped at {stop}: policy");
    }
}

/// Without a control split, only the weights show that the last batch broke them.
#[test]
fn broken_weights_are_not_saved_without_a_control_split() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let at = [(0, 5, 0, BATCHES - 1), (0, 11, 2, BATCHES - 1)];
    let summary = train(flags(&run, ControllerKind::None), Breaks::at(&at)).unwrap();
    let counts: Vec<usize> = summary.envs.iter().map(|env| env.rollbacks).collect();
    assert_eq!(counts, [1, 0, 1]);
    let events = events(&run);
    let rollbacks = of_kind(&events, "governor_rollback");
    let of = |key: &str| rollbacks.iter().map(|event| event[key].clone()).collect::<Vec<_>>();
    assert_eq!(
        (of("step"), of("restored_step")),
        (vec![5.into(), 11.into()], vec![0.into(), 10.into()])
    );
    assert!(of("train_loss").iter().all(|loss| loss.as_f64().is_some()), "the loss saw nothing");
    // Every checkpoint can be loaded, and the last weights are usable.
    for step in [9, 10, 11] {
        let finite = |state: &StateDict| {
            let values = state.iter().filter_map(|(_, tensor)| tensor.as_f32());
            values.flatten().all(|x| x.is_finite())
        };
        assert!(finite(&checkpoint(&run, step)), "step {step}");
    }
    assert!(summary.envs.iter().all(|env| env.test_loss.unwrap().is_finite()));
    // A resume reads the summary of a complete run.
    assert_eq!(go_on(&run, Breaks::default()).unwrap().rollbacks, 2);
}

/// The step's training loss shows nothing, but its control loss does, before a snapshot is taken.
#[test]
fn a_collapsed_host_is_rolled_back() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let learning = ConfigLayer {
        host: Some("baseline".into()),
        envs: Some(1),
        steps: Some(7),
        batch: Some(32),
        max_batches: Some(BatchLimit::Count(40)),
        lr: Some(Some(0.05)),
        control_split: Some(Some(0.02)),
        ..flags(&run, ControllerKind::None)
    };
    let observer = Breaks { harm: Harm::Forgets, ..Breaks::at(&[(0, 5, 0, 39)]) };
    assert_eq!(train(learning, observer).unwrap().rollbacks, 1);
    let events = events(&run);
    let [rollback] = of_kind(&events, "governor_rollback")[..] else { panic!("{events:?}") };
    assert_eq!((&rollback["failure"], &rollback["step"]), (&"collapse".into(), &5.into()));
    assert_eq!(rollback["restored_step"], 0);
    let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
    let steps = of_kind(&events, "step_completed");
    assert!(number(rollback, "train_loss") < 1.0 && number(rollback, "control_loss") > 2.2);
    assert_eq!(steps[5]["control_loss"], steps[0]["control_loss"]);
    let [fresh, restored] = [0, 6].map(|step| number(steps[step], "train_loss"));
    assert!(restored < fresh, "what the snapshot had learned is there: {restored}, {fresh}");
}

/// The events of env 1, which breaks in the second run; the other envs have equal events in both.
fn of_the_broken(whole: &Path, broken: &Path) -> Vec<Value> {
    let (expected, got) = (events(whole), events(broken));
    for env in [0, 2] {
        assert_eq!(of_env(&got, env), of_env(&expected, env));
        assert!(weights(broken, env) == weights(whole, env), "env {env}");
    }
    assert!(of_kind(&expected, "governor_rollback").is_empty());
    of_env(&got, 1)
}

/// A loss far above its history, for the number of consecutive steps in the settings, is a failure:
/// the env returns to a snapshot before it, and the action to blame gets the penalty in the
/// settings.
#[test]
fn a_lasting_spike_is_rolled_back() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let layer = |run: &Path| ConfigLayer {
        governor_spike_loss: Some(4.0),
        governor_spike_patience: Some(2),
        governor_snapshot_steps: Some(3),
        governor_penalty: Some(-2.5),
        ..flags(run, script(folder.path()))
    };
    train(layer(&whole), Breaks::default()).unwrap();
    // A snapshot would be due in step 6, which has the first spike and must not be kept.
    let observer = Breaks { harm: Harm::Grows, ..Breaks::at(&[(0, 6, 1, BATCHES - 1)]) };
    assert_eq!(train(layer(&broken), observer).unwrap().rollbacks, 1);
    let own = of_the_broken(&whole, &broken);
    let [rollback] = of_kind(&own, "governor_rollback")[..] else { panic!("{own:?}") };
    let of = |key: &str| &rollback[key];
    assert_eq!((of("failure"), of("step")), (&"spike".into(), &7.into()), "{rollback}");
    assert_eq!((of("restored_step"), of("pruned")), (&3.into(), &vec!["r0c0"].into()));
    assert_eq!((of("cause_step"), of("penalty")), (&2.into(), &(-2.5).into()));
    let steps = of_kind(&own, "step_completed");
    let loss = |step: usize| steps[step]["control_loss"].as_f64().unwrap();
    assert!(loss(6) > 4.0 && loss(6) > 3.0 * loss(5), "{} after {}", loss(6), loss(5));
    assert!(rollback["control_loss"].as_f64().unwrap() > 4.0);
    assert!(loss(7) < 4.0 && loss(11) < 4.0, "it is back and stays so");
}

#[test]
fn an_untrainable_env_ends_the_run_and_leaves_a_readable_folder() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let absurd = ConfigLayer {
        lr: Some(Some(1e6)),
        max_batches: Some(BatchLimit::Count(40)),
        // More steps than the run reaches before it fails.
        steps: Some(10_000),
        ..flags(&run, ControllerKind::Heuristic)
    };
    let error = train(absurd, Breaks::default()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Diverged { failures: 3, round: 0, .. }), "{text}");
    assert!(
        text.contains("not finite") && text.ends_with("3 failures since its last snapshot"),
        "{text}"
    );
    assert!(error.remedy().unwrap().contains("--lr"), "{text}");
    assert_eq!(error.exit_code(), 1);
    let summary: Value =
        serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    assert_eq!((&summary["status"], &summary["error"]), (&"failed".into(), &text.clone().into()));
    let events = events(&run);
    let last = &events[events.len() - 1];
    assert_eq!((&last["event"], &last["error"]), (&"run_ended".into(), &text.clone().into()));
    let rollbacks = of_kind(&events, "governor_rollback");
    assert!(rollbacks.len() >= 2, "{rollbacks:?}");
    // Episodes shorter than three steps end the run as well, if all steps failed.
    for steps in [1, 2] {
        let short = folder.path().join(format!("short-{steps}"));
        let absurd = ConfigLayer {
            lr: Some(Some(1e6)),
            max_batches: Some(BatchLimit::Count(40)),
            steps: Some(steps),
            rounds: Some(3),
            ..flags(&short, ControllerKind::None)
        };
        let error = train(absurd, Breaks::default()).unwrap_err();
        let last = steps - 1;
        let ends = matches!(error, Error::Diverged { round: 0, step, .. } if step == last);
        assert!(ends, "{error}");
    }
    // The run can be resumed, with the same end.
    let again = go_on(&run, Breaks::default()).unwrap_err();
    assert!(matches!(again, Error::Diverged { failures: 3, round: 0, .. }), "{again:?}");
    assert_eq!(again.to_string(), text);
}

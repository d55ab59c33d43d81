//! Tests of sessions: the bits of a run, resuming, calls that do not fit.

use std::path::Path;

use meristem_grow::{AlphaTarget, Style, Tempo};

use super::*;
use crate::record::observer::Silent;
use crate::run::run;
use crate::settings::{BatchLimit, ControllerKind, Preset};

const STEPS: usize = 3;

fn config(folder: &Path, controller: ControllerKind) -> TrainConfig {
    let flags = ConfigLayer {
        preset: Some(Preset::Quick),
        host: Some("minimal".into()),
        controller: Some(controller),
        run_dir: Some(Some(folder.into())),
        envs: Some(2),
        batch: Some(16),
        max_batches: Some(BatchLimit::Count(2)),
        control_split: Some(Some(0.01)),
        steps: Some(STEPS),
        ..ConfigLayer::default()
    };
    TrainConfig::resolve(ConfigLayer::default(), flags).unwrap()
}

fn weights(folder: &Path) -> [Vec<u8>; 2] {
    [0, 1].map(|env| std::fs::read(folder.join(format!("weights/env-{env}.safetensors"))).unwrap())
}

fn plant() -> Action {
    let (style, tempo) = (Style::LinearAdd, Tempo::Standard);
    Action::Germinate { slot: 1, blueprint: 0, style, tempo, alpha_target: AlphaTarget::Full }
}

/// Actions of both envs in a step.
fn actions(step: usize) -> Vec<Action> {
    let one = match step {
        0 => plant(),
        1 => Action::Advance { slot: 1 },
        _ => Action::Wait,
    };
    vec![one; 2]
}

#[test]
fn a_session_has_the_bits_of_a_run_with_the_same_actions() {
    let base = tempfile::tempdir().unwrap();
    let [script, scripted, stepped] =
        ["script.jsonl", "scripted", "stepped"].map(|name| base.path().join(name));
    let lines = r#"
        {"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "norm"}
        {"step": 1, "op": "ADVANCE", "slot": "r0c1"}
    "#;
    std::fs::write(&script, lines).unwrap();
    run(&config(&scripted, ControllerKind::Fixed(script)), &mut Silent).unwrap();
    let mut session = Session::start(&config(&stepped, ControllerKind::External)).unwrap();
    let mut of_network = vec![];
    for step in 0..2 {
        assert_eq!(session.step(&mut || {}).unwrap().len(), 2);
        of_network = session.weights(0).unwrap();
        let rewards = session.act(actions(step), &mut || {}).unwrap();
        assert!(rewards.iter().all(|reward| reward.is_finite()));
    }
    session.checkpoint().unwrap();
    session.step(&mut || {}).unwrap();
    assert_ne!(session.weights(0).unwrap(), of_network);
    session.act(actions(2), &mut || {}).unwrap();
    assert_eq!(session.point(), Point::End);
    assert!(session.step(&mut || {}).is_err(), "it was the last round");
    assert_eq!(session.close().unwrap().steps, STEPS as u64);
    assert_eq!(weights(&scripted), weights(&stepped));
}

#[test]
fn a_session_that_was_dropped_resumes_where_it_was() {
    let base = tempfile::tempdir().unwrap();
    let [whole, broken] = ["whole", "broken"].map(|name| base.path().join(name));
    let steps = |session: &mut Session, steps: std::ops::Range<usize>| {
        for step in steps {
            session.step(&mut || {}).unwrap();
            session.act(actions(step), &mut || {}).unwrap();
        }
    };
    steps(&mut Session::start(&config(&whole, ControllerKind::External)).unwrap(), 0..STEPS);
    steps(&mut Session::start(&config(&broken, ControllerKind::External)).unwrap(), 0..2);
    let mut session = Session::resume(broken.clone(), ConfigLayer::default()).unwrap();
    steps(&mut session, 2..STEPS);
    session.close().unwrap();
    assert_eq!(weights(&whole), weights(&broken));
}

#[test]
fn calls_that_do_not_fit_change_nothing() {
    let base = tempfile::tempdir().unwrap();
    let folder = base.path().join("run");
    let mut session = Session::start(&config(&folder, ControllerKind::External)).unwrap();
    let refused = |result: Result<Vec<f32>>, words: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Session { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(session.act(actions(0), &mut || {}), "`act`: no actions are due");
    session.step(&mut || {}).unwrap();
    refused(session.act(actions(1), &mut || {}), "ADVANCE is not legal in env 0");
    refused(session.act(vec![], &mut || {}), "expected an action for each of 2 envs, got 0");
    refused(session.weights(7).map(|_| vec![]), "there is no env 7: the run has 2");
    refused(session.step(&mut || {}).map(|_| vec![]), "`step`: the actions of this step");
    session.act(actions(0), &mut || {}).unwrap();
}

#[test]
fn a_controller_of_the_program_and_its_setting_belong_together() {
    let base = tempfile::tempdir().unwrap();
    let alone = run(&config(&base.path().join("a"), ControllerKind::External), &mut Silent);
    let error = alone.unwrap_err().to_string();
    assert!(error.contains("got external, expected the controller of a program"), "{error}");
    let other = Session::start(&config(&base.path().join("b"), ControllerKind::None));
    let error = other.err().unwrap().to_string();
    assert!(error.contains("got none, expected external"), "{error}");
}

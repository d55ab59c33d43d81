//! Tests of learners: bits, growth, resuming, calls that do not fit. The Python package tests more.

use meristem_control::ActionOp;
use meristem_grow::{AlphaTarget, Style, Tempo};
use meristem_nn::StateDict;

use super::*;
use crate::settings::BlueprintSource;
use meristem_control::Action;

const SAMPLES: usize = 8;
const INPUTS: usize = 3;

fn learners(threads: usize) -> Learners {
    let settings = ConfigLayer {
        host: Some("mlp:8,8,dropout=0.3".into()),
        envs: Some(2),
        batch: Some(SAMPLES),
        threads: Some(threads),
        blueprints: Some(Some(vec![BlueprintSource::Vectors])),
        min_training_steps: Some(1),
        ..ConfigLayer::default()
    };
    Learners::new(settings, LearnerShape { input: vec![INPUTS], outputs: 2 }).unwrap()
}

/// Numbers that differ from call to call.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((seed * 31 + i * 7) % 19) as f32 / 9.5 - 1.0).collect()
}

fn of_both(values: &[Vec<f32>]) -> Vec<EnvBatch<'_>> {
    values.iter().enumerate().map(|(env, values)| EnvBatch { env, values }).collect()
}

/// Two training steps, then a step of growth in which env 0 grows.
fn advance(learners: &mut Learners, step: usize) {
    for half in 0..2 {
        let inputs = [0, 1].map(|env| numbers(4 * step + 2 * half + env, SAMPLES * INPUTS));
        let outputs = learners.forward(&of_both(&inputs)).unwrap();
        let gradients: Vec<Vec<f32>> =
            outputs.iter().map(|all| all.iter().map(|y| (y - 0.5) / 8.0).collect()).collect();
        learners.backward(&of_both(&gradients)).unwrap();
        learners.update(&[0, 1]).unwrap();
    }
    let seen = learners.step(&[]).unwrap();
    let (style, tempo) = (Style::LinearAdd, Tempo::Fast);
    let germinate =
        Action::Germinate { slot: 0, blueprint: 0, style, tempo, alpha_target: AlphaTarget::Full };
    let all = [germinate, Action::Advance { slot: 0 }, Action::Wait];
    let first =
        all.into_iter().find(|action| meristem_control::legal(action, &seen[0].host).is_ok());
    learners.act(vec![first.unwrap(), Action::Wait]).unwrap();
}

fn states(learners: &Learners) -> Vec<(StateDict, StateDict)> {
    let networks = learners.population.envs.iter().map(|env| &env.grown.network);
    networks.map(|n| (n.state_dict().unwrap(), n.momentum_dict().unwrap())).collect()
}

#[test]
fn neither_workers_nor_a_resume_change_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.safetensors");
    let [mut one, mut three] = [1, 3].map(learners);
    for step in 0..4 {
        advance(&mut one, step);
        advance(&mut three, step);
    }
    three.checkpoint(&file).unwrap();
    let mut resumed = Learners::resume(&file, ConfigLayer::default()).unwrap();
    for step in 4..9 {
        for each in [&mut one, &mut three, &mut resumed] {
            advance(each, step);
        }
    }
    assert_eq!(states(&one), states(&three));
    assert_eq!(states(&one), states(&resumed), "weights, and the count of batches of dropout");
    let [host, bare] = [0, 1].map(|env| one.seen()[env].figures.grown_parameters);
    assert!(host > 0 && bare == 0);
    assert_eq!(one.seen()[0].view().last.map(|(op, _)| op), Some(ActionOp::Wait));
}

#[test]
fn what_does_not_fit_is_refused_with_the_place() {
    let mut learners = learners(1);
    let x = numbers(1, SAMPLES * INPUTS);
    let refused = |result: Result<()>, words: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.exit_code(), 2);
    };
    let batch = |env, values| [EnvBatch { env, values }];
    refused(learners.forward(&batch(2, &x)).map(drop), "there is no env 2; there are 2");
    refused(learners.forward(&[]).map(drop), "expected envs in ascending order, got []");
    let twice = [EnvBatch { env: 1, values: &x }, EnvBatch { env: 0, values: &x }];
    refused(learners.forward(&twice).map(drop), "in ascending order, got [1, 0]");
    refused(
        learners.forward(&batch(0, &x[1..])).map(drop),
        "samples of 3 numbers for env 0, got 23",
    );
    refused(learners.eval(&batch(0, &x), Some(9)).map(drop), "there is no slot 9");
    refused(learners.backward(&batch(0, &x)), "env 0 has no forward pass; call forward first");
    learners.forward(&batch(0, &x)).unwrap();
    refused(learners.backward(&batch(0, &x)), "a gradient [8, 2] for env 0");
    refused(learners.update(&[0]), "env 0 has no gradient");
    refused(learners.act(vec![Action::Wait; 2]).map(drop), "no actions are due");
    refused(learners.step(&[OwnScores::default()]).map(drop), "scores of 2 envs, got 1");
    let without = vec![OwnScores { score: Some(1.0), without: vec![(0, 0.5)] }; 2];
    refused(learners.step(&without).map(drop), "slot 0 of env 0 has no module");
    let settings = ConfigLayer { rounds: Some(2), ..ConfigLayer::default() };
    let shape = LearnerShape { input: vec![INPUTS], outputs: 2 };
    refused(Learners::new(settings, shape).map(drop), "`rounds`: got a value, expected no value");
    let shape = LearnerShape { input: vec![], outputs: 2 };
    refused(Learners::new(ConfigLayer::default(), shape).map(drop), "`input`: got []");
}

#[test]
fn learners_have_the_settings_of_resume_and_none_of_a_controller() {
    let known = settings();
    assert!(RESUME_SETTINGS.iter().all(|key| known.contains(key)), "{known:?}");
    for key in ["dataset", "controller", "plateau_steps", "run_dir"] {
        assert!(ConfigLayer::KEYS.contains(&key) && !known.contains(&key), "{key}");
    }
}

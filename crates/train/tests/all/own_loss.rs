//! Losses of the program (T3): the built-in losses written as such, with growth; copies and waits;
//! resuming; refusals.

use std::path::Path;

use meristem_control::{Action, Controller, EnvView};
use meristem_device::ScopePolicy;
use meristem_train::config::{ConfigLayer, TrainConfig};
use meristem_train::external::{Custom, LossBatch, LossTargets, OwnController, OwnLoss};
use meristem_train::settings::{
    BatchLimit, ByteSize, ControllerKind, HotScopePolicy, LossKind, Switch,
};
use meristem_train::summary::EnvSummary;
use meristem_train::{Error, Result, Silent, Summary, resume_with, run_with};

const STEPS: usize = 5;

/// Cross-entropy or mean squared error, in f64.
struct Formula;

impl OwnLoss for Formula {
    fn compute(
        &mut self,
        batch: &LossBatch,
        losses: &mut [f32],
        gradient: Option<&mut [f32]>,
    ) -> Result<()> {
        let width = batch.width;
        assert_eq!((losses.len(), batch.outputs.len()), (batch.samples, batch.samples * width));
        let mut slopes = vec![];
        for (sample, (loss, row)) in losses.iter_mut().zip(batch.outputs.chunks(width)).enumerate()
        {
            let outputs: Vec<f64> = row.iter().map(|output| f64::from(*output)).collect();
            match &batch.targets {
                LossTargets::Classes(classes) => {
                    let class = classes[sample] as usize;
                    let max = outputs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = outputs.iter().map(|z| (z - max).exp()).sum();
                    *loss = (sum.ln() + max - outputs[class]) as f32;
                    let slope = |(c, z): (usize, &f64)| {
                        (z - max).exp() / sum - f64::from(u8::from(c == class))
                    };
                    slopes.extend(outputs.iter().enumerate().map(slope));
                }
                LossTargets::Numbers(numbers) => {
                    let of_sample = &numbers[sample * width..];
                    let pairs = outputs.iter().zip(of_sample);
                    let differences: Vec<f64> =
                        pairs.map(|(output, target)| output - f64::from(*target)).collect();
                    let squares = differences.iter().map(|d| d * d).sum::<f64>();
                    *loss = (squares / width as f64) as f32;
                    slopes.extend(differences.iter().map(|d| 2.0 * d / width as f64));
                }
            }
        }
        if let Some(gradient) = gradient {
            assert_eq!(gradient.len(), slopes.len());
            gradient.iter_mut().zip(slopes).for_each(|(to, slope)| *to = slope as f32);
        }
        Ok(())
    }
}

/// Grows by the number of the step, so that rounding changes no decision.
struct Plants;

impl Controller for Plants {
    fn name(&self) -> &str {
        "external"
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> meristem_control::Result<Vec<Action>> {
        let decide = |view: &EnvView<'_>| match view.step {
            0 => plant(),
            1..=2 => Action::Advance { slot: 0 },
            _ => Action::Wait,
        };
        Ok(views.iter().map(decide).collect())
    }
}

fn plant() -> Action {
    use meristem_grow::{AlphaTarget, Style, Tempo};
    let (style, tempo, alpha_target) = (Style::LinearAdd, Tempo::Fast, AlphaTarget::Full);
    Action::Germinate { slot: 0, blueprint: 0, style, tempo, alpha_target }
}

fn flags(folder: &Path, dataset: &str, loss: LossKind) -> ConfigLayer {
    ConfigLayer {
        dataset: Some(dataset.into()),
        host: Some("mlp:16".into()),
        blueprints: Some(Some(vec!["vectors".parse().unwrap()])),
        controller: Some(ControllerKind::External),
        loss: Some(loss),
        envs: Some(2),
        steps: Some(STEPS),
        // The last batch of the control split is smaller.
        batch: Some(48),
        max_batches: Some(BatchLimit::Count(5)),
        control_split: Some(Some(0.1)),
        min_training_steps: Some(1),
        twin: Some(Some(Switch(true))),
        checkpoint_every: Some(1),
        hot_scope: Some(HotScopePolicy(ScopePolicy::Deny)),
        run_dir: Some(Some(folder.into())),
        ..ConfigLayer::default()
    }
}

fn custom(own: bool) -> Custom {
    let loss = own.then(|| Box::new(Formula) as Box<dyn OwnLoss>);
    let controller = Some(OwnController::Deciding(Box::new(Plants)));
    Custom { loss, controller, ..Custom::default() }
}

fn train(flags: ConfigLayer, custom: Custom) -> Result<Summary> {
    let config = TrainConfig::resolve(ConfigLayer::default(), flags)?;
    run_with(&config, custom, &mut Silent)
}

fn weights(folder: &Path) -> [Vec<u8>; 2] {
    [0, 1].map(|env| std::fs::read(folder.join(format!("weights/env-{env}.safetensors"))).unwrap())
}

/// The only differences are roundings to f32, of 6e-8, in the gradients of 25 updates.
#[test]
fn built_in_losses_written_by_a_program_give_their_results() {
    let folder = tempfile::tempdir().unwrap();
    for dataset in ["blobs", "friedman"] {
        let run = |name: &str, loss| {
            let own = loss == LossKind::External;
            train(flags(&folder.path().join(name).join(dataset), dataset, loss), custom(own))
        };
        let built_in = run("built-in", LossKind::Auto).unwrap();
        let own = run("own", LossKind::External).unwrap();
        let figures = |env: &EnvSummary| {
            let twin = env.twin.as_ref().unwrap();
            [
                env.train_loss,
                env.train_score,
                env.control_loss.unwrap(),
                env.control_score.unwrap(),
                env.test_loss.unwrap(),
                env.test_score.unwrap(),
                twin.control_loss.unwrap(),
                twin.test_loss.unwrap(),
            ]
        };
        for (one, two) in built_in.envs.iter().zip(&own.envs) {
            assert_eq!(one.history.germinated, 1);
            assert_eq!(one.parameters, two.parameters);
            for (one, two) in figures(one).into_iter().zip(figures(two)) {
                assert!((one - two).abs() <= 1e-6 * one.abs().max(1.0), "{dataset}: {one} {two}");
            }
            let contributions = [one, two].map(|env| env.modules[0].contribution.unwrap());
            // Percentage points.
            assert!((contributions[0] - contributions[1]).abs() <= 1e-4, "{contributions:?}");
        }
        let cost = own.own_loss.unwrap();
        assert!(cost.calls > 0 && cost.samples > 10 * cost.calls && cost.seconds > 0.0);
        assert_eq!(built_in.own_loss, None);
        // Outputs and targets of each batch, and its gradient.
        assert_eq!((own.hot_path.copies_to_host, own.hot_path.copies_to_device), (2.0, 1.0));
        assert_eq!(built_in.hot_path.copies_to_host, 0.0);
    }
}

#[test]
fn workers_streams_and_stops_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, changed: ConfigLayer| {
        let base = flags(&folder.path().join(name), "mnist1d", LossKind::External);
        let ConfigLayer { threads, data_budget, stop_after, .. } = changed;
        let flags = ConfigLayer { threads, data_budget, stop_after, ..base };
        train(flags, custom(true)).unwrap();
        folder.path().join(name)
    };
    let one = of("one", ConfigLayer { threads: Some(1), ..ConfigLayer::default() });
    let two = of("two", ConfigLayer { threads: Some(2), ..ConfigLayer::default() });
    assert!(weights(&one) == weights(&two));
    let budget = Some(Some(ByteSize(1 << 18)));
    let streamed = of("streamed", ConfigLayer { data_budget: budget, ..ConfigLayer::default() });
    assert!(weights(&one) == weights(&streamed));
    let stopped =
        of("stopped", ConfigLayer { stop_after: Some(Some(3)), ..ConfigLayer::default() });
    let again = |custom| resume_with(&stopped, &ConfigLayer::default(), custom, &mut Silent);
    let error = again(custom(false)).unwrap_err();
    assert!(matches!(&error, Error::Value { key, .. } if key == "loss"), "{error}");
    again(custom(true)).unwrap();
    assert!(weights(&one) == weights(&stopped));
}

/// A loss that fails.
struct Fails;

impl OwnLoss for Fails {
    fn compute(&mut self, _: &LossBatch, _: &mut [f32], _: Option<&mut [f32]>) -> Result<()> {
        Err(Error::OwnLoss { problem: "no more".into() })
    }
}

#[test]
fn a_run_has_a_loss_of_the_program_if_its_settings_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |loss, custom| {
        train(flags(&folder.path().join("run"), "blobs", loss), custom).unwrap_err().to_string()
    };
    let missing = refused(LossKind::External, custom(false));
    assert!(missing.contains("meristem.train(loss=function)"), "{missing}");
    let unexpected = refused(LossKind::Auto, custom(true));
    assert!(unexpected.contains("expected external"), "{unexpected}");
    let failing = Custom { loss: Some(Box::new(Fails)), ..custom(false) };
    let failed = refused(LossKind::External, failing);
    assert_eq!(failed, "the loss of the program failed: no more");
    assert!(!folder.path().join("run").exists());
}

/// One host on two ranks, which call the function one at a time.
fn replicated(folder: &Path, dataset: &str, loss: LossKind) -> ConfigLayer {
    ConfigLayer {
        data_parallel: Some(true),
        envs: Some(1),
        ranks: Some(Some(2)),
        twin: Some(Some(Switch(false))),
        // The last batch of an epoch is small.
        max_batches: Some(BatchLimit::Count(100)),
        batch: Some(50),
        train_share: Some(0.07),
        ..flags(folder, dataset, loss)
    }
}

/// The tolerances are those without replicas.
#[test]
fn replicas_share_a_loss_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    for dataset in ["blobs", "friedman"] {
        let run = |name: &str, loss| {
            let own = loss == LossKind::External;
            let place = folder.path().join(name).join(dataset);
            train(replicated(&place, dataset, loss), custom(own)).unwrap()
        };
        let (built_in, own) = (run("built-in", LossKind::Auto), run("own", LossKind::External));
        let figures = |run: &Summary| {
            let env = &run.envs[0];
            let control = [env.control_loss.unwrap(), env.control_score.unwrap()];
            let test = [env.test_loss.unwrap(), env.test_score.unwrap()];
            [[env.train_loss, env.train_score], control, test].concat()
        };
        assert_eq!(own.envs[0].history.germinated, 1);
        for (one, two) in figures(&built_in).into_iter().zip(figures(&own)) {
            assert!((one - two).abs() <= 1e-6 * one.abs().max(1.0), "{dataset}: {one} {two}");
        }
        assert_eq!(built_in.images, own.images);
        assert!(own.own_loss.unwrap().calls > 0);
    }
}

#[test]
fn replicas_with_a_loss_of_the_program_resume_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, stop_after| {
        let base = replicated(&folder.path().join(name), "blobs", LossKind::External);
        train(ConfigLayer { stop_after: Some(stop_after), ..base }, custom(true)).unwrap();
        folder.path().join(name)
    };
    let weights = |run: &Path| std::fs::read(run.join("weights/env-0.safetensors")).unwrap();
    let (whole, stopped) = (of("whole", None), of("stopped", Some(3)));
    resume_with(&stopped, &ConfigLayer::default(), custom(true), &mut Silent).unwrap();
    assert!(weights(&whole) == weights(&stopped));
    let failing = Custom { loss: Some(Box::new(Fails)), ..custom(false) };
    let flags = replicated(&folder.path().join("failing"), "blobs", LossKind::External);
    let failed = train(flags, failing).unwrap_err().to_string();
    assert_eq!(failed, "the loss of the program failed: no more");
}

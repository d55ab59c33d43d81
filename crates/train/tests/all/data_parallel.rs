//! One host trained by several ranks: its events, growth, resume and failure.

use std::path::Path;

use meristem_device::ScopePolicy;
use meristem_nn::Network;
use meristem_train::config::{ConfigLayer, TrainConfig};
use meristem_train::events::{Event, StepCompleted};
use meristem_train::settings::{
    BatchLimit, ControllerKind, ExchangeKind, ExchangeMethod, HotScopePolicy, OptimizerKind,
    Preset, Switch,
};
use meristem_train::{Error, Observer, Result, Silent, Summary, resume, run};

/// Settings of a host with a convolution that is large enough for a sparse exchange, trained on a
/// few batches of which the last is smaller.
fn flags(folder: &Path, ranks: usize, exchange: impl Into<ExchangeKind>) -> ConfigLayer {
    ConfigLayer {
        preset: Some(Preset::Quick),
        host: Some("cnn:channels=8,blocks=2,kernel=3,pools=2".into()),
        controller: Some(ControllerKind::Heuristic),
        data_parallel: Some(true),
        ranks: Some(Some(ranks)),
        exchange: Some(exchange.into()),
        batch: Some(36),
        max_batches: Some(BatchLimit::Count(4)),
        control_split: Some(Some(0.02)),
        parameters_per_image: Some(99.0),
        max_gap: Some(99.0),
        steps: Some(10),
        checkpoint_every: Some(1),
        hot_scope: Some(HotScopePolicy(ScopePolicy::Deny)),
        run_dir: Some(Some(folder.join("run"))),
        ..ConfigLayer::default()
    }
}

fn train(flags: ConfigLayer, observer: &mut dyn Observer) -> Result<Summary> {
    run(&TrainConfig::resolve(ConfigLayer::default(), flags).unwrap(), observer)
}

fn weights(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("run/weights/env-0.safetensors")).unwrap()
}

/// Observer of steps, germinated modules and rollbacks.
#[derive(Default)]
struct SeenSteps {
    steps: Vec<StepCompleted>,
    germinated: usize,
    rollbacks: usize,
    stop_at: Option<usize>,
}

impl Observer for SeenSteps {
    fn event(&mut self, event: &Event) {
        match event {
            Event::StepCompleted(step) => self.steps.push(step.clone()),
            Event::ModuleGerminated { .. } => self.germinated += 1,
            Event::GovernorRollback { .. } => self.rollbacks += 1,
            _ => {}
        }
    }

    fn stop_requested(&self) -> bool {
        self.stop_at.is_some_and(|step| self.steps.len() >= step)
    }
}

#[test]
fn one_rank_equals_a_single_env() {
    let [one, plain] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (mut seen, mut expected) = (SeenSteps::default(), SeenSteps::default());
    let summary = train(flags(one.path(), 1, ExchangeMethod::Dense), &mut seen).unwrap();
    let alone = ConfigLayer {
        data_parallel: None,
        envs: Some(1),
        twin: Some(Some(Switch(false))),
        ..flags(plain.path(), 1, ExchangeMethod::Dense)
    };
    assert_eq!(train(alone, &mut expected).unwrap().envs, summary.envs);
    assert!(weights(one.path()) == weights(plain.path()));
    assert!(expected.germinated > 0 && seen.steps.iter().all(|step| step.fingerprint.is_none()));
}

/// The host grows equally on all ranks, with any number of workers, and in two parts as in one.
#[test]
fn a_host_grows_on_all_ranks_and_resumes_to_the_same_bits() {
    let sparse = ExchangeMethod::TopK(0.05);
    let [whole, cut] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut seen = SeenSteps::default();
    let summary = train(flags(whole.path(), 3, sparse), &mut seen).unwrap();
    assert!(seen.germinated > 0, "nothing grew, nothing was shown");
    assert_eq!((summary.training_steps, summary.images), (40, 10 * 4 * 36));
    assert_eq!(summary.hot_path.training_steps, 36);
    let fingerprints: Vec<&String> =
        seen.steps.iter().map(|step| step.fingerprint.as_ref().unwrap()).collect();
    assert_eq!(fingerprints.len(), 10);
    assert!(fingerprints.windows(2).all(|two| two[0] != two[1]), "it learned");

    let mut first = SeenSteps { stop_at: Some(4), ..SeenSteps::default() };
    let one_thread = ConfigLayer { threads: Some(1), ..flags(cut.path(), 3, sparse) };
    train(one_thread, &mut first).unwrap();
    let mut rest = SeenSteps::default();
    let run = cut.path().join("run");
    let options = ConfigLayer { threads: Some(2), ..ConfigLayer::default() };
    let resumed = resume(&run, &options, &mut rest).unwrap();
    assert_eq!(resumed.envs, summary.envs);
    assert!(weights(cut.path()) == weights(whole.path()));
    let steps = first.steps.iter().chain(&rest.steps);
    assert!(steps.map(|step| step.fingerprint.as_ref().unwrap()).eq(fingerprints));

    let dense = tempfile::tempdir().unwrap();
    train(flags(dense.path(), 3, ExchangeMethod::Dense), &mut Silent).unwrap();
    assert!(weights(dense.path()) != weights(whole.path()), "what was sent made a difference");
}

/// Local training: the host grows, is stopped while a module is in training, and resumes with the
/// bits of every rank's own optimiser, also on another number of workers.
#[test]
fn a_host_of_local_steps_grows_and_resumes_to_the_same_bits() {
    for exchange in ["diloco:3:int8", "diloco:2:topk:0.05"] {
        let exchange: ExchangeKind = exchange.parse().unwrap();
        let [whole, cut] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let adam = |folder: &Path| ConfigLayer {
            optimizer: Some(OptimizerKind::Adam),
            ..flags(folder, 3, exchange)
        };
        let mut seen = SeenSteps::default();
        let summary = train(adam(whole.path()), &mut seen).unwrap();
        assert!(seen.germinated > 0, "nothing grew, nothing was shown");
        assert!(summary.exchange_bytes.unwrap() > 0);
        for stop in [2, 5, 7] {
            let cut = cut.path().join(stop.to_string());
            let mut first = SeenSteps { stop_at: Some(stop), ..SeenSteps::default() };
            train(ConfigLayer { threads: Some(1), ..adam(&cut) }, &mut first).unwrap();
            let options = ConfigLayer { threads: Some(2), ..ConfigLayer::default() };
            let resumed = resume(&cut.join("run"), &options, &mut SeenSteps::default()).unwrap();
            assert_eq!(resumed.envs, summary.envs, "{exchange}, stopped after step {stop}");
            assert_eq!(resumed.exchange_bytes, summary.exchange_bytes);
            assert!(weights(&cut) == weights(whole.path()));
        }
    }
}

/// Observer that damages the leader in the inner loop.
struct DamagesLeader<F> {
    what: F,
    at: usize,
    batches: usize,
    seen: SeenSteps,
}

impl<F: FnMut(&Network) -> Result<()>> Observer for DamagesLeader<F> {
    fn event(&mut self, event: &Event) {
        self.seen.event(event);
    }

    fn batch_enqueued(&mut self, _env: usize, network: &Network) -> Result<()> {
        self.batches += 1;
        if self.batches == self.at { (self.what)(network) } else { Ok(()) }
    }
}

fn broken_by<F: FnMut(&Network) -> Result<()>>(at: usize, what: F) -> DamagesLeader<F> {
    DamagesLeader { what, at, batches: 0, seen: SeenSteps::default() }
}

#[test]
fn replicas_that_differ_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut flips = broken_by(4 * 3 - 1, |network| {
        let values = network.packed_parameters(0).unwrap();
        Ok(values.stream().launch("flip").write(values).run(|args| {
            // Not the last bit, which the rounding of the next update may restore.
            let x = &mut args.write::<f32>(0)[0];
            *x = f32::from_bits(x.to_bits() ^ (1 << 12));
        })?)
    });
    let error = train(flags(folder.path(), 2, ExchangeMethod::Dense), &mut flips).unwrap_err();
    assert!(matches!(error, Error::ReplicasDiffer { .. }), "{error}");
    assert_eq!((flips.seen.steps.len(), error.exit_code()), (2, 1));
}

/// Averaging breaks the statistics of all replicas, and the governor restores all of them.
#[test]
fn a_broken_host_is_rolled_back_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let mut breaks = broken_by(4 * 4, |network| {
        let (statistics, _) = network.statistics().next().unwrap();
        let launch = statistics.stream().launch("break").write(statistics);
        Ok(launch.run(|args| args.write::<f32>(0)[0] = f32::NAN)?)
    });
    let flags = flags(folder.path(), 3, ExchangeMethod::Dense);
    // Recomputed statistics would contain nothing of the broken ones.
    let flags = ConfigLayer { statistics_batches: Some(0), ..flags };
    assert_rolled_back(flags, &mut breaks);
}

/// A loss that is not finite on one rank restores all ranks, with a sparse exchange too.
#[test]
fn a_broken_loss_is_rolled_back_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let mut breaks = broken_by(4 * 4, |network| {
        let metrics = network.metrics();
        let launch = metrics.stream().launch("break").write(metrics);
        // The sum of the losses follows three words of the layout.
        Ok(launch.run(|args| args.write::<f64>(0)[3] = f64::NAN)?)
    });
    assert_rolled_back(flags(folder.path(), 3, ExchangeMethod::TopK(0.05)), &mut breaks);
    let (folder, local) = (tempfile::tempdir().unwrap(), "diloco:2:int8");
    breaks = broken_by(4 * 4, breaks.what);
    assert_rolled_back(
        flags(folder.path(), 3, local.parse::<ExchangeKind>().unwrap()),
        &mut breaks,
    );
}

fn assert_rolled_back<F>(flags: ConfigLayer, breaks: &mut DamagesLeader<F>)
where
    F: FnMut(&Network) -> Result<()>,
{
    let summary = train(flags, breaks).unwrap();
    assert_eq!((breaks.seen.rollbacks, summary.rollbacks, summary.steps), (1, 1, 10));
    assert!(summary.envs[0].test_loss.unwrap().is_finite());
}

/// All ranks end with the failed rank, and report its error.
#[test]
fn a_rank_that_fails_ends_all() {
    let folder = tempfile::tempdir().unwrap();
    let mut peeks = broken_by(4 + 2, |network| Ok(network.metrics().to_vec::<f64>().map(drop)?));
    let error = train(flags(folder.path(), 3, ExchangeMethod::Dense), &mut peeks).unwrap_err();
    assert!(error.is_hot_scope() && error.to_string().contains("`train_step`"), "{error}");
    assert_eq!(peeks.seen.steps.len(), 1);
}

//! The networks of a run as an ensemble: the mean of their predictions against the single networks.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use meristem_data::{
    Batch, Dataset, DatasetInfo, DatasetSpec, Residency, Source, Split, Subset, TargetKind, cache,
};
use meristem_device::{DeviceId, DeviceOptions, Tensor};
use meristem_nn::{Isa, Network, NetworkFleet, NetworkOptions, Plans, Precision, Score, ScoreKind};
use serde::Serialize;

use super::calibration::{Judged, Quality, Tally};
use super::{grown_host, rebuilt};
use crate::config::devices::Devices;
use crate::config::{ConfigLayer, TrainConfig, check_precision, file as config_file};
use crate::error::{Error, Result};
use crate::record::reading::{check_is_run, read_summary};
use crate::record::summary::{EnvSummary, Summary};
use crate::resources::{OpenDevices, Served, Serving, split_samples};
use crate::setup::weights::{Wanted, Weights};
use crate::setup::{dataset_of, image_shape};
use crate::sweep::EndReason;
use crate::task::{Task, TaskSettings, test_score};

/// An evaluation of the networks of a run as an ensemble.
#[derive(Clone, Debug)]
pub struct EnsembleConfig {
    /// Folder of the run.
    pub run: PathBuf,
    /// Numbers of the members of the ensemble, with all envs of each; in a run without members,
    /// numbers of envs. `None` for the members that made all steps, or if none did, for all.
    pub members: Option<Vec<usize>>,
    /// Number of envs with the best control scores to take; `None` for all.
    pub top: Option<usize>,
    /// Dataset to evaluate on; `None` for the run's, restricted to its classes.
    pub dataset: Option<DatasetSpec>,
    /// Split of the dataset.
    pub split: Split,
    /// Samples in a batch. Results depend on it only in the last bits.
    pub batch: usize,
    /// Device to evaluate on.
    pub device: DeviceId,
    /// Precision of convolutions and linear layers.
    pub precision: Precision,
    /// Worker threads; 0 means one per core.
    pub threads: usize,
}

impl EnsembleConfig {
    /// The test split of the run's dataset, with the default choice of members, on the CPU.
    pub fn new(run: impl Into<PathBuf>) -> Self {
        Self {
            run: run.into(),
            members: None,
            top: None,
            dataset: None,
            split: Split::Test,
            batch: 128,
            device: DeviceId::Cpu(0),
            precision: Precision::F32,
            threads: 0,
        }
    }
}

/// One network of an ensemble.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnsembleEnv {
    /// Number of its env.
    pub env: usize,
    /// Number of its member; omitted for a run without members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub member_number: Option<usize>,
    /// Settings of its member; omitted for a run without members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
    /// Score on the control split at the end of the run; null without a control split.
    #[serde(rename = "control_accuracy")]
    pub control_score: Option<f64>,
    /// Quality of its predictions.
    #[serde(flatten)]
    pub quality: Quality,
}

/// Results of an ensemble.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnsembleReport {
    /// Split that was evaluated.
    pub split: Split,
    /// Number of samples.
    pub samples: u64,
    /// Kind of the scores.
    #[serde(skip)]
    pub score_kind: ScoreKind,
    /// Quality of the mean of the predictions: of probabilities for classes (softmax) and labels
    /// (sigmoid), of standardised numbers otherwise.
    pub ensemble: Quality,
    /// The network with the best control score, or training score without a control split; the
    /// first of several. The evaluated split has no influence on the choice.
    pub best: EnsembleEnv,
    /// Means of the figures of the single networks.
    pub mean_of_singles: Quality,
    /// The networks of the ensemble, by number.
    pub envs: Vec<EnsembleEnv>,
    /// Numbers of the envs of the run that are not part of the ensemble.
    pub left_out: Vec<usize>,
}

/// Evaluates networks of a run that has ended, and the mean of their predictions, on every sample
/// of a split. The networks may have any topologies. The mean is summed in f64 in the order of the
/// envs, so equal bits of the networks' outputs give equal bits. Memory holds all networks and one
/// batch of their outputs. Waits for the device.
///
/// # Errors
/// [`Error::NotARun`]; [`Error::Value`]: a run without a summary, a member that it does not have,
/// fewer than two networks; weights that cannot be read, or do not fit the dataset or each other;
/// an unreadable dataset, or one without the split; a device failure.
pub fn evaluate_ensemble(config: &EnsembleConfig) -> Result<EnsembleReport> {
    if config.batch == 0 {
        return Err(Error::value("batch", 0, "at least 1"));
    }
    check_precision(config.precision, [config.device])?;
    check_is_run(&config.run)?;
    let summary = read_summary(&config.run)?.ok_or_else(|| {
        let expected = "a run that has ended: wait for it, or continue it with `train --resume`";
        Error::value("ensemble", format!("{} without a summary", config.run.display()), expected)
    })?;
    let envs = choose(config, &summary)?;
    let of_env = |env: &&EnvSummary| Weights::load(&config.run.join(&env.weights));
    let weights: Vec<Weights> = envs.iter().map(of_env).collect::<Result<_>>()?;
    let (dataset, restricted) = dataset(config, &weights)?;
    let ensemble = Ensemble::prepare(config, &weights, &dataset, restricted.as_ref());
    let result = ensemble.and_then(Ensemble::run);
    cache::clear(|key| key.source == dataset.source);
    let (panel, samples) = result?;
    Ok(panel.report(config, &envs, &summary, samples))
}

/// The envs of the ensemble, by number.
fn choose<'s>(config: &EnsembleConfig, summary: &'s Summary) -> Result<Vec<&'s EnvSummary>> {
    let number = |env: &EnvSummary| env.member_number.unwrap_or(env.env);
    let mut all: Vec<&EnvSummary> = summary.envs.iter().collect();
    all.sort_by_key(|env| env.env);
    let diverged =
        |env: &EnvSummary| env.ended.as_ref().is_some_and(|end| *end == EndReason::Diverged);
    let mut envs = match &config.members {
        Some(members) => {
            let known: BTreeSet<usize> = all.iter().map(|env| number(env)).collect();
            if let Some(other) = members.iter().find(|member| !known.contains(member)) {
                let last = known.last().copied().unwrap_or_default();
                let expected = format!("numbers from 0 to {last}, of members of the run");
                return Err(Error::value("members", other, expected));
            }
            all.into_iter().filter(|env| members.contains(&number(env))).collect::<Vec<_>>()
        }
        // The best are not always among those that made all steps.
        None if config.top.is_some() => all.into_iter().filter(|env| !diverged(env)).collect(),
        None if all.iter().any(|env| env.ended.is_none()) => {
            all.into_iter().filter(|env| env.ended.is_none()).collect()
        }
        None => all,
    };
    if let Some(top) = config.top {
        // Stable: of equal scores the first envs are taken.
        envs.sort_by(|a, b| rank(b).total_cmp(&rank(a)));
        envs.truncate(top);
        envs.sort_by_key(|env| env.env);
    }
    if envs.len() < 2 {
        let got = format!("{} of the {} networks of the run", envs.len(), summary.envs.len());
        let expected =
            "at least two; by default those that made all steps, others with members or top";
        return Err(Error::value("ensemble", got, expected));
    }
    Ok(envs)
}

/// The score by which networks are chosen: control, or training without a control split.
fn rank(env: &EnvSummary) -> f64 {
    let score = env.control_score.unwrap_or(env.train_score);
    if score.is_nan() { f64::NEG_INFINITY } else { score }
}

/// The dataset to evaluate on. For the dataset of the run, also the task settings, which restrict
/// the classes.
fn dataset(
    config: &EnsembleConfig,
    weights: &[Weights],
) -> Result<(DatasetSpec, Option<TaskSettings>)> {
    let (mut spec, restricted) = match &config.dataset {
        Some(given) => (given.clone(), None),
        None => {
            let settings = config_file::read(&config.run.join("config.toml"))?;
            let of_run = TrainConfig::resolve(settings, ConfigLayer::default())?;
            (dataset_of(&of_run)?, Some(TaskSettings::from(&of_run)))
        }
    };
    if spec.source == Source::Table {
        let rules = weights.first().map(Weights::table_rules).transpose()?.flatten();
        spec.table.rules = rules.map(Arc::new);
    }
    Ok((spec, restricted))
}

/// Networks, their split, and the results so far.
struct Ensemble {
    devices: OpenDevices,
    networks: Vec<Network>,
    served: Served,
    panel: Panel,
}

impl Ensemble {
    fn prepare(
        config: &EnsembleConfig,
        weights: &[Weights],
        dataset: &DatasetSpec,
        restricted: Option<&TaskSettings>,
    ) -> Result<Self> {
        let options = DeviceOptions { threads: config.threads, ..DeviceOptions::default() };
        let of_envs = vec![config.device; weights.len()];
        let placed = Devices { of_envs, of_ranks: vec![], policy: config.device };
        let devices = OpenDevices::open(&placed, 0..weights.len(), &options)?;
        let files = cache::files(dataset)?;
        let datasets = devices.load(&files, config.split, Residency::Resident)?;
        let info = files.info()?;
        weights.iter().try_for_each(|own| own.check_classes(&info.classes))?;
        weights.iter().try_for_each(|own| own.check_outputs(&info))?;
        let normalization = same_normalization(weights, &info)?;
        let image = image_shape(&info);
        let isa = Isa::from_env().map_err(meristem_device::Error::from)?;
        let task = Task::new(&TaskSettings::default(), &info)?;
        let (precision, loss, plans) = (config.precision, task.loss.clone(), Plans::default());
        let network = |(own, stream): (&Weights, _)| {
            let host = own.host_spec()?;
            let host = grown_host(own, &Wanted { host: host.as_ref(), image: &image })?;
            let (configs, loss) = (1, loss.clone());
            let options = NetworkOptions::new(0, 0, isa, config.batch);
            let options = NetworkOptions { configs, precision, loss, ..options };
            rebuilt(own, &host, stream, (options, &plans))
        };
        let networks = weights.iter().zip(devices.streams()).map(network);
        let networks = networks.collect::<Result<Vec<_>>>()?;
        let restricted = restricted.map(|settings| Task::new(settings, &info)).transpose()?;
        let classes = restricted.and_then(|task| task.classes);
        let split: &Dataset = &datasets[0];
        let (subset, _): (Subset, usize) = split_samples(classes.as_deref(), split)?;
        let serving = Serving { batch: config.batch, subset, normalization };
        let served = Served::new(serving, &devices, &datasets)?;
        let score = test_score(task.score, split)?;
        let panel = Panel::new(&info, score, networks.len());
        Ok(Self { devices, networks, served, panel })
    }

    /// Evaluates all batches; returns the number of samples, too.
    fn run(mut self) -> Result<(Panel, u64)> {
        let Self { devices, networks, served, panel } = &mut self;
        let mut samples = 0;
        let mut pass = served.pass(devices.envs())?;
        while let Some(batches) = pass.next()? {
            let inputs: Vec<&Tensor> = batches.iter().map(|batch: &Batch| &batch.inputs).collect();
            let outputs = NetworkFleet::new(networks.iter_mut()).infer(&inputs, 0)?;
            let outputs = outputs.iter().map(|own| Ok(own.to_vec::<f32>()?));
            let outputs: Vec<Vec<f32>> = outputs.collect::<Result<_>>()?;
            if let Some(Batch { targets, .. }) = batches.first() {
                samples += targets.dims()[0] as u64;
                panel.add(&outputs, targets)?;
            }
        }
        Ok((self.panel, samples))
    }
}

/// The constants with which all networks see their samples; `None` if the files have none.
fn same_normalization(
    weights: &[Weights],
    info: &DatasetInfo,
) -> Result<Option<meristem_data::Normalization>> {
    let mut first = None;
    for (nth, own) in weights.iter().enumerate() {
        let constants = own.normalization(info.channels)?;
        if nth == 0 {
            first = constants;
        } else if constants != first {
            return Err(Error::Weights {
                path: own.path().into(),
                message: "its normalisation constants differ from those of the first network of \
                          the ensemble; all must see the same samples"
                    .into(),
            });
        }
    }
    Ok(first)
}

/// Predictions of all networks and of their mean, judged sample by sample.
struct Panel {
    targets: TargetKind,
    /// Outputs of a network.
    outputs: usize,
    score: Score,
    singles: Vec<Tally>,
    mean: Tally,
}

impl Panel {
    fn new(info: &DatasetInfo, score: Score, networks: usize) -> Self {
        let singles = vec![Tally::default(); networks];
        let (targets, outputs) = (info.targets, info.classes.len());
        Self { targets, outputs, score, singles, mean: Tally::default() }
    }

    /// Adds a batch: outputs f32 `[samples, outputs]` of each network, and targets u32 `[samples]`
    /// or f32 `[samples, outputs]`. Waits for the targets.
    fn add(&mut self, outputs: &[Vec<f32>], targets: &Tensor) -> Result<()> {
        let width = self.outputs;
        let row = |sample: usize| sample * width..(sample + 1) * width;
        if self.targets == TargetKind::Classes {
            for (sample, target) in targets.to_vec::<u32>()?.into_iter().enumerate() {
                let rows: Vec<&[f32]> = outputs.iter().map(|own| &own[row(sample)]).collect();
                self.add_classes(&rows, target as usize);
            }
            return Ok(());
        }
        let values = targets.to_vec::<f32>()?;
        for (sample, targets) in values.chunks_exact(width).enumerate() {
            self.singles.iter_mut().chain([&mut self.mean]).for_each(Tally::begin_sample);
            for (output, target) in targets.iter().enumerate() {
                let place = sample * width + output;
                let own: Vec<f64> = outputs.iter().map(|own| f64::from(own[place])).collect();
                match self.targets {
                    TargetKind::Labels => self.add_label(&own, *target > 0.5),
                    _ => self.add_number(&own, f64::from(*target)),
                }
            }
        }
        Ok(())
    }

    /// Adds the logits of a sample.
    fn add_classes(&mut self, rows: &[&[f32]], target: usize) {
        let mut mean = vec![0.0; self.outputs];
        let mut of_target = vec![];
        for (logits, tally) in rows.iter().zip(&mut self.singles) {
            let logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
            let predicted = argmax(&logits);
            let max = logits[predicted];
            let ln_sum = logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
            let ln_probability = |logit: f64| logit - max - ln_sum;
            mean.iter_mut().zip(&logits).for_each(|(sum, own)| *sum += ln_probability(*own).exp());
            let ln_target = ln_probability(logits[target]);
            of_target.push(ln_target);
            let confidence = ln_probability(max).exp();
            tally.begin_sample();
            tally.add_class(Judged { confidence, correct: predicted == target, ln_target });
        }
        mean.iter_mut().for_each(|sum| *sum /= rows.len() as f64);
        let predicted = argmax(&mean);
        let confidence = mean[predicted];
        let ln_target = ln_mean_exp(&of_target);
        self.mean.begin_sample();
        self.mean.add_class(Judged { confidence, correct: predicted == target, ln_target });
    }

    /// Adds the logits of a label.
    fn add_label(&mut self, logits: &[f64], present: bool) {
        // ln sigmoid(z), without overflow.
        let ln_sigmoid = |z: f64| z.min(0.0) - (-z.abs()).exp().ln_1p();
        let mut of_target = vec![];
        let mut sum = 0.0;
        for (&logit, tally) in logits.iter().zip(&mut self.singles) {
            let ln_target = ln_sigmoid(if present { logit } else { -logit });
            of_target.push(ln_target);
            sum += ln_sigmoid(logit).exp();
            let confidence = ln_sigmoid(logit.abs()).exp();
            let correct = (logit > 0.0) == present;
            tally.add_label(Judged { confidence, correct, ln_target }, present);
        }
        let probability = sum / logits.len() as f64;
        let confidence = if probability > 0.5 { probability } else { 1.0 - probability };
        let correct = (probability > 0.5) == present;
        let ln_target = ln_mean_exp(&of_target);
        self.mean.add_label(Judged { confidence, correct, ln_target }, present);
    }

    /// Adds the predictions of a number.
    fn add_number(&mut self, predicted: &[f64], target: f64) {
        for (own, tally) in predicted.iter().zip(&mut self.singles) {
            tally.add_number(*own, target);
        }
        let mean = predicted.iter().sum::<f64>() / predicted.len() as f64;
        self.mean.add_number(mean, target);
    }

    fn report(
        &self,
        config: &EnsembleConfig,
        envs: &[&EnvSummary],
        summary: &Summary,
        samples: u64,
    ) -> EnsembleReport {
        let single = |(env, tally): (&&EnvSummary, &Tally)| EnsembleEnv {
            env: env.env,
            member_number: env.member_number,
            member: env.member.clone(),
            control_score: env.control_score,
            quality: tally.quality(self.score),
        };
        let found: Vec<EnsembleEnv> = envs.iter().zip(&self.singles).map(single).collect();
        let ranks: Vec<f64> = envs.iter().map(|env| rank(env)).collect();
        let qualities: Vec<Quality> = found.iter().map(|env| env.quality).collect();
        let numbers: BTreeSet<usize> = envs.iter().map(|env| env.env).collect();
        let all = summary.envs.iter().map(|env| env.env);
        EnsembleReport {
            split: config.split,
            samples,
            score_kind: self.score.kind(),
            ensemble: self.mean.quality(self.score),
            best: found[argmax(&ranks)].clone(),
            mean_of_singles: Quality::mean(&qualities),
            envs: found,
            left_out: all.filter(|env| !numbers.contains(env)).collect(),
        }
    }
}

/// Index of the first largest element; a NaN counts as largest, as in `torch.argmax`.
fn argmax(values: &[f64]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] || (value.is_nan() && !values[best].is_nan()) {
            best = i;
        }
    }
    best
}

/// `ln(Σ exp(x)/n)`, without underflow.
fn ln_mean_exp(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    let sum: f64 = values.iter().map(|value| (value - max).exp()).sum();
    max + (sum / values.len() as f64).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(targets: TargetKind, outputs: usize, score: Score) -> Panel {
        let singles = vec![Tally::default(); 2];
        Panel { targets, outputs, score, singles, mean: Tally::default() }
    }

    fn close(found: f64, expected: f64) {
        // Logits are rounded to f32: 6e-8 of values below 3.
        assert!((found - expected).abs() < 3e-7, "{found}, by hand {expected}");
    }

    /// By hand: two networks with the probabilities of three classes as given; the target is
    /// class 1 in both samples.
    #[test]
    fn the_mean_of_probabilities_is_judged() {
        let mut panel = panel(TargetKind::Classes, 3, Score::Accuracy);
        let logits = |p: [f32; 3]| p.map(f32::ln);
        panel.add_classes(&[&logits([0.6, 0.3, 0.1]), &logits([0.1, 0.8, 0.1])], 1);
        panel.add_classes(&[&logits([0.5, 0.4, 0.1]), &logits([0.6, 0.2, 0.2])], 1);
        let [first, second] = [0, 1].map(|n| panel.singles[n].quality(panel.score));
        let mean = panel.mean.quality(panel.score);
        assert_eq!([first.score, second.score, mean.score], [0.0, 0.5, 0.5]);
        // Means: 0.35, 0.55, 0.1 and 0.55, 0.3, 0.15.
        close(first.loss, -(0.3f64 * 0.4).ln() / 2.0);
        close(second.loss, -(0.8f64 * 0.2).ln() / 2.0);
        close(mean.loss, -(0.55f64 * 0.3).ln() / 2.0);
        // Both 0.55, in one bin, one of two correct: |1 − 1.1|/2.
        close(mean.calibration_error.unwrap(), 0.05);
        // 0.6 and 0.5 are both wrong.
        close(first.calibration_error.unwrap(), 0.55);
    }

    /// By hand: probabilities 0.9 and 0.3 of a label that is present.
    #[test]
    fn the_mean_of_sigmoids_is_judged() {
        let mut panel = panel(TargetKind::Labels, 1, Score::F1);
        panel.singles.iter_mut().chain([&mut panel.mean]).for_each(Tally::begin_sample);
        panel.add_label(&[9f64.ln(), (3.0f64 / 7.0).ln()], true);
        let mean = panel.mean.quality(panel.score);
        close(mean.loss, -(0.6f64).ln());
        close(mean.calibration_error.unwrap(), 0.4);
        close(panel.singles[1].quality(panel.score).loss, -(0.3f64).ln());
        assert_eq!(panel.singles[1].quality(panel.score).score, 0.0);
        assert_eq!(mean.score, 1.0);
    }

    /// Probabilities far below the smallest f64 still have a logarithm.
    #[test]
    fn a_certain_mistake_has_a_finite_loss() {
        let mut panel = panel(TargetKind::Classes, 2, Score::Accuracy);
        panel.add_classes(&[&[2000.0, 0.0], &[3000.0, 0.0]], 1);
        assert_eq!(panel.singles[1].quality(panel.score).loss, 3000.0);
        let mean = panel.mean.quality(panel.score).loss;
        close(mean, 2000.0 + 2f64.ln());
        assert_eq!(ln_mean_exp(&[f64::NEG_INFINITY; 2]), f64::NEG_INFINITY);
    }
}

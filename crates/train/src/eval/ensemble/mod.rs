//! The networks of a run as an ensemble: the mean of their predictions against the single networks.

mod choice;
mod scores;

use std::path::PathBuf;
use std::sync::Arc;

use meristem_data::{
    Batch, Dataset, DatasetInfo, DatasetSpec, Residency, Source, Split, Subset, cache,
};
use meristem_device::{DeviceId, DeviceOptions, Tensor};
use meristem_nn::{Isa, Network, NetworkFleet, NetworkOptions, Plans, Precision, ScoreKind};
use serde::Serialize;

use self::choice::choose;
use self::scores::EnsembleScores;
use super::calibration::Quality;
use super::{grown_host, rebuilt};
use crate::config::devices::Devices;
use crate::config::{ConfigLayer, TrainConfig, check_precision, file as config_file};
use crate::error::{Error, Result};
use crate::record::reading::{check_is_run, read_summary};
use crate::record::summary::EnvSummary;
use crate::resources::{OpenDevices, Served, Serving, split_samples};
use crate::setup::weights::{Wanted, Weights};
use crate::setup::{dataset_of, image_shape};
use crate::task::{Task, TaskSettings, test_score};

/// An evaluation of the networks of a run as an ensemble.
#[derive(Clone, Debug)]
pub struct EnsembleConfig {
    /// Folder of the run.
    pub run: PathBuf,
    /// Numbers of the members to choose from, with all envs of each; in a run without members,
    /// numbers of envs. `None` with `top`: all whose training did not diverge. `None` without
    /// `top`: those that made all steps, or if none did, all.
    pub members: Option<Vec<usize>>,
    /// Number of envs to take: those with the best control scores, or training scores without a
    /// control split. `None` for all that `members` chooses.
    pub top: Option<usize>,
    /// Dataset to evaluate on; `None` for the run's, restricted to its classes.
    pub dataset: Option<DatasetSpec>,
    /// Split of the dataset.
    pub split: Split,
    /// Samples in a batch. Results depend on it only in the last bits.
    pub batch: usize,
    /// Device to evaluate on.
    pub device: DeviceId,
    /// Precision of convolutions and linear layers, and with bf16 of the values in memory.
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
/// envs, so equal bits of the networks' outputs give equal bits. Memory holds the split, all
/// networks and one batch of their outputs. Waits for the device.
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
    let (scores, samples) = result?;
    Ok(scores.report(config, &envs, &summary, samples))
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
    scores: EnsembleScores,
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
        let of_policies = vec![config.device];
        let placed = Devices { of_envs, of_ranks: vec![], of_policies };
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
        let scores = EnsembleScores::new(&info, score, networks.len());
        Ok(Self { devices, networks, served, scores })
    }

    /// Evaluates all batches; returns the number of samples, too.
    fn run(mut self) -> Result<(EnsembleScores, u64)> {
        let Self { devices, networks, served, scores } = &mut self;
        let mut samples = 0;
        let mut pass = served.pass(devices.envs())?;
        while let Some(batches) = pass.next()? {
            let inputs: Vec<&Tensor> = batches.iter().map(|batch: &Batch| &batch.inputs).collect();
            let outputs = NetworkFleet::new(networks.iter_mut()).infer(&inputs, 0)?;
            let outputs = outputs.iter().map(|own| Ok(own.to_vec::<f32>()?));
            let outputs: Vec<Vec<f32>> = outputs.collect::<Result<_>>()?;
            if let Some(Batch { targets, .. }) = batches.first() {
                samples += targets.dims()[0] as u64;
                scores.add(&outputs, targets)?;
            }
        }
        Ok((self.scores, samples))
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

//! Evaluating weights on a split without training: those of one file, or of all networks of a run
//! as an ensemble.

mod calibration;
mod ensemble;

use std::path::PathBuf;
use std::sync::Arc;

use meristem_data::{Batch, DatasetSpec, Residency, Source, Split, Subset, cache};
use meristem_device::{DeviceId, DeviceOptions, Stream};
use meristem_grow::{BlueprintSet, Host, HostSpec, Optimisers, Rules};
use meristem_nn::{Isa, Network, NetworkOptions, Plans, Precision, Score, ScoreKind};
use serde::{Deserialize, Serialize};

pub use self::calibration::Quality;
pub use self::ensemble::{EnsembleConfig, EnsembleEnv, EnsembleReport, evaluate_ensemble};
use crate::config::check_precision;
use crate::config::devices::Devices;
use crate::config::types::Normalize;
use crate::error::{Error, Result};
use crate::hosts::read_host;
use crate::record::output::check_output;
use crate::record::run_folder::write_whole;
use crate::record::summary::MemorySummary;
use crate::record::trace::{RunTrace, TraceSummary};
use crate::resources::{OpenDevices, Served, Serving};
use crate::setup::image_shape;
use crate::setup::weights::{Wanted, Weights};
use crate::task::{Task, TaskSettings, test_score};

/// An evaluation of a weights file on a split.
#[derive(Clone, Debug)]
pub struct EvalConfig {
    /// Path of the weights file.
    pub weights: PathBuf,
    /// Host description; `None` if the file's metadata has the topology.
    pub host: Option<String>,
    /// Dataset to evaluate on. A table is read by the rules in the weights file, if it has some.
    pub dataset: DatasetSpec,
    /// Split of the dataset.
    pub split: Split,
    /// Samples in a batch. The loss depends on it only in the last bits.
    pub batch: usize,
    /// Normalisation of the pixels; `None` for the constants of the weights file, or without them
    /// the constants of the dataset.
    pub normalize: Option<Normalize>,
    /// Path of a `.npy` file to write the logits to; must not exist.
    pub logits: Option<PathBuf>,
    /// Device to evaluate on.
    pub device: DeviceId,
    /// Precision of convolutions and linear layers, and with bf16 of the values in memory.
    pub precision: Precision,
    /// Worker threads; 0 means one per core.
    pub threads: usize,
    /// Path of a Perfetto trace to write; must not exist.
    pub trace: Option<PathBuf>,
}

/// Source of the mean and standard deviation that pixels are normalised with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormalizedBy {
    /// The weights' metadata: the network sees pixels as it did in training.
    Weights,
    /// The dataset's training images, because the weights' metadata has no constants.
    Dataset,
    /// [`EvalConfig::normalize`].
    Given,
}

/// Results of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalReport {
    /// Mean loss, with the default loss of the task: cross-entropy in nats, binary cross-entropy,
    /// or squared difference of standardised numbers.
    pub loss: f64,
    /// Kind of the score.
    #[serde(skip)]
    pub score_kind: ScoreKind,
    /// Score: the share of samples classified correctly, micro-F1, or R².
    #[serde(rename = "accuracy", alias = "f1", alias = "r2")]
    pub score: f64,
    /// Number of samples.
    pub samples: u64,
    /// Source of the normalisation constants.
    pub normalization: NormalizedBy,
    /// Device memory that was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemorySummary>,
    /// The trace, if one was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<TraceSummary>,
}

/// Evaluates weights on every sample of a split, in evaluation mode. A grown network is rebuilt
/// from the topology in the file. Normalisation constants come from `config`, else from the file,
/// else from the dataset. Logits are f32 `[samples, classes]`, in the order of the split. Waits for
/// the device.
///
/// # Errors
/// Weights that do not fit the host or the dataset; a normalisation that does not fit the images; a
/// precision that the device lacks; an unreadable dataset, or one without the split; a logits file
/// that exists or cannot be written; a device failure.
pub fn evaluate(config: &EvalConfig) -> Result<EvalReport> {
    let weights = Weights::load(&config.weights)?;
    let spec = match &config.host {
        Some(text) => Some(read_host(text)?),
        None => weights.host_spec()?,
    };
    if config.batch == 0 {
        return Err(Error::value("batch", 0, "at least 1"));
    }
    check_precision(config.precision, [config.device])?;
    config.logits.as_deref().map_or(Ok(()), |path| check_output("logits", path))?;
    let isa = Isa::from_env().map_err(meristem_device::Error::from)?;
    let mut dataset = config.dataset.clone();
    if dataset.source == Source::Table {
        dataset.table.rules = weights.table_rules()?.map(Arc::new);
    }
    let config = &EvalConfig { dataset, ..config.clone() };
    let trace = RunTrace::open(config.trace.as_deref())?;
    let prepared =
        PreparedEvaluation::prepare(config, &weights, spec.as_ref(), isa, trace.as_ref());
    let result = RunTrace::unless_refused(trace, prepared)
        .and_then(|(evaluation, trace)| evaluation.run(trace));
    cache::clear(|key| key.source == config.dataset.source);
    result
}

/// An evaluation that is ready to run.
struct PreparedEvaluation {
    devices: OpenDevices,
    network: Network,
    served: Served,
    normalization: NormalizedBy,
    score: Score,
    /// File for the logits.
    logits: Option<PathBuf>,
}

impl PreparedEvaluation {
    fn prepare(
        config: &EvalConfig,
        weights: &Weights,
        spec: Option<&HostSpec>,
        isa: Isa,
        trace: Option<&RunTrace>,
    ) -> Result<Self> {
        let (threads, trace) = (config.threads, trace.map(RunTrace::trace));
        let options = DeviceOptions { threads, trace, ..DeviceOptions::default() };
        let devices = OpenDevices::open(&Devices::one(config.device), 0..1, &options)?;
        let files = cache::files(&config.dataset)?;
        let datasets = devices.load(&files, config.split, Residency::Resident)?;
        let info = files.info()?;
        weights.check_classes(&info.classes)?;
        weights.check_outputs(&info)?;
        let image = image_shape(&info);
        let wanted = Wanted { host: spec, image: &image };
        let host = grown_host(weights, &wanted)?;
        let (constants, normalization) = match &config.normalize {
            Some(given) => (Some(given.constants(&info)?), NormalizedBy::Given),
            None => match weights.normalization(image.channels)? {
                Some(own) => (Some(own), NormalizedBy::Weights),
                None => (None, NormalizedBy::Dataset),
            },
        };

        // The loss that the task is trained with by default.
        let Task { loss, score, .. } = Task::new(&TaskSettings::default(), &info)?;
        let score = datasets.first().map_or(Ok(score), |split| test_score(score, split))?;
        let precision = config.precision;
        let options = NetworkOptions {
            configs: 1,
            precision,
            loss,
            ..NetworkOptions::new(0, 0, isa, config.batch)
        };
        let stream = &devices.streams()[0];
        let network = rebuilt(weights, &host, stream, (options, &Plans::default()))?;
        let serving =
            Serving { batch: config.batch, subset: Subset::All, normalization: constants };
        let served = Served::new(serving, &devices, &datasets)?;
        let logits = config.logits.clone();
        Ok(Self { devices, network, served, normalization, score, logits })
    }

    fn run(mut self, trace: Option<RunTrace>) -> Result<EvalReport> {
        let Self { devices, network, served, normalization, score, logits } = &mut self;
        let span = devices.span(|| "eval");
        let mut pass = served.pass(0..1)?;
        let mut values = vec![];
        while let Some(batches) = pass.next()? {
            for Batch { inputs, targets, .. } in &batches {
                network.eval_step(inputs, targets, 0)?;
                if logits.is_some() {
                    values.extend(network.infer(inputs, 0)?.to_vec::<f32>()?);
                }
            }
        }
        let metrics = devices.read_metrics(&[network.metrics()])?;
        drop(span);
        let eval =
            metrics.first().and_then(|metrics| metrics.eval.first()).copied().unwrap_or_default();
        if let Some(path) = logits {
            write_whole(path, &npy(&values, network.graph().classes()))?;
        }
        Ok(EvalReport {
            loss: eval.loss().unwrap_or(f64::NAN),
            score_kind: score.kind(),
            score: eval.score(*score).unwrap_or(f64::NAN),
            samples: eval.samples,
            normalization: *normalization,
            memory: Some(MemorySummary::from_devices(devices.distinct())),
            trace: trace.map(RunTrace::finish).transpose()?,
        })
    }
}

/// The host of a weights file, with its modules.
///
/// # Errors
/// Weights that do not fit `wanted`.
fn grown_host(weights: &Weights, wanted: &Wanted<'_>) -> Result<Host> {
    let blueprints = Arc::new(BlueprintSet::standard());
    weights.host(wanted, &[], &blueprints, Rules::default())
}

/// The network of a weights file on a stream, with the alphas of `host` as row 0. Does not wait for
/// the device.
///
/// # Errors
/// Weights that do not fit; a device failure.
fn rebuilt(
    weights: &Weights,
    host: &Host,
    stream: &Stream,
    (options, plans): (NetworkOptions, &Plans),
) -> Result<Network> {
    let graph = Arc::new(host.graph(&Optimisers::default())?);
    let mut network = Network::with_plans(stream, graph, options, plans)?;
    weights.fill(&mut network)?;
    network.set_alphas(&[host.alphas()])?;
    Ok(network)
}

/// Encodes f32 `[rows, columns]` as numpy's `.npy`, version 1 (NEP 1).
fn npy(values: &[f32], columns: usize) -> Vec<u8> {
    /// The header ends at a multiple of this.
    const ALIGNMENT: usize = 64;
    let rows = values.len() / columns.max(1);
    let start: &[u8] = b"\x93NUMPY\x01\x00";
    let form =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let length_bytes = size_of::<u16>();
    let unpadded = start.len() + length_bytes + form.len() + 1;
    let padding = unpadded.next_multiple_of(ALIGNMENT) - unpadded;
    let header = format!("{form}{}\n", " ".repeat(padding));
    let mut bytes = start.to_vec();
    // The header is shorter than 128 bytes for any shape.
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.into_bytes());
    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
    bytes
}

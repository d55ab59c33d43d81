//! Shape of inputs and outputs without a dataset, and the settings that apply to learners.

use meristem_data::{DatasetInfo, InputKind, StoredType, TargetKind};
use serde::{Deserialize, Serialize};

use crate::config::{ConfigLayer, TrainConfig, all};
use crate::error::{Error, Result};
use crate::hosts::read_host;
use crate::settings::{ControllerKind, TaskKind};

/// Maximum size of an axis of the inputs, and maximum number of outputs.
const SIZE_MAX: usize = 65_536;

/// Keys of the settings of learners, see [`Setting::of_learner`](crate::config::declare::Setting).
/// The others are of runs: of datasets, controllers, and run folders.
pub fn settings() -> Vec<&'static str> {
    all().iter().filter(|setting| setting.of_learner).map(|setting| setting.key).collect()
}

/// Settings that [`Learners::resume`](super::Learners::resume) replaces.
pub const RESUME_SETTINGS: [&str; 3] = ["devices", "device_memory", "threads"];

/// Shape of a sample, and the number of outputs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnerShape {
    /// `[features]`, `[channels, points]`, or `[channels, rows, columns]`.
    pub input: Vec<usize>,
    /// Outputs of a network.
    pub outputs: usize,
}

impl LearnerShape {
    /// Checks the sizes.
    pub(super) fn check(&self) -> Result<()> {
        let Self { input, outputs } = self;
        let is_size = |size: &usize| (1..=SIZE_MAX).contains(size);
        if !(1..=3).contains(&input.len()) || !input.iter().all(is_size) {
            let expected = format!(
                "[features], [channels, points] or [channels, rows, columns], each 1 to {SIZE_MAX}"
            );
            return Err(Error::value("input", format!("{input:?}"), expected));
        }
        if !is_size(outputs) {
            return Err(Error::value("outputs", outputs, format!("1 to {SIZE_MAX}")));
        }
        Ok(())
    }

    /// Channels, rows and columns of a sample.
    pub(super) fn dims(&self) -> [usize; 3] {
        match self.input[..] {
            [channels, points] => [channels, 1, points],
            [channels, rows, columns] => [channels, rows, columns],
            _ => [self.input.first().copied().unwrap_or(1), 1, 1],
        }
    }

    /// Numbers of a sample.
    pub fn sample_len(&self) -> usize {
        self.dims().into_iter().product()
    }

    /// Description of the inputs as a dataset whose samples are used as they are.
    pub(super) fn info(&self, task: TaskKind) -> DatasetInfo {
        let [channels, height, width] = self.dims();
        let kind = match self.input.len() {
            1 => InputKind::Vector,
            2 => InputKind::Signal,
            _ => InputKind::Image,
        };
        let targets = match task {
            TaskKind::Classify => TargetKind::Classes,
            TaskKind::Multilabel => TargetKind::Labels,
            TaskKind::Auto | TaskKind::Regress => TargetKind::Numbers,
        };
        let numbers = if targets == TargetKind::Numbers { self.outputs } else { 0 };
        DatasetInfo {
            name: "of the program".into(),
            kind,
            stored: StoredType::F32,
            channels,
            height,
            width,
            targets,
            classes: (0..self.outputs).map(|output| output.to_string()).collect(),
            train_len: 0,
            per_class: vec![],
            target_mean: vec![0.0; numbers],
            target_std: vec![1.0; numbers],
            test_len: None,
            mean: vec![0.0; channels],
            std: vec![1.0; channels],
            skipped: 0,
            table: None,
        }
    }
}

/// The settings of learners, from a layer of settings.
///
/// # Errors
/// A setting that is not among [`settings`]; a `width_init` that measures gradients; as
/// [`TrainConfig::resolve`].
pub(super) fn resolve(given: ConfigLayer) -> Result<TrainConfig> {
    check_keys(&given, &settings(), "learners have no dataset, controller or run folder")?;
    let config = TrainConfig::resolve(ConfigLayer::default(), given)?;
    let init = config.rules.width_init;
    if init.measures() {
        let expected = "zero, net2wider or variance_transfer; learners have no batches to measure";
        return Err(Error::value("width_init", init.name(), expected));
    }
    with_controller(config)
}

/// The settings with the controller that the host needs: the program, or none without slots.
pub(super) fn with_controller(config: TrainConfig) -> Result<TrainConfig> {
    let has_slots = read_host(&config.host)?.select_slots(["all"]).is_ok_and(|all| !all.is_empty());
    let controller = if has_slots { ControllerKind::External } else { ControllerKind::None };
    Ok(TrainConfig { controller, ..config })
}

/// Checks that only these settings are given.
pub(super) fn check_keys(layer: &ConfigLayer, known: &[&str], reason: &str) -> Result<()> {
    match layer.given().into_iter().find(|key| !known.contains(key)) {
        None => Ok(()),
        Some(other) => {
            let expected = format!("no value: {reason}; the settings are {}", known.join(", "));
            Err(Error::value(other, "a value", expected))
        }
    }
}

//! Parts of the dataset: the samples that each env of a run trains on and is measured on.

use meristem_data::parts::{
    EnvPart, HeldOut, PartTargets, Parts, PartsConfig, SampleDraw, of_classes,
};
use meristem_data::{Dataset, Subset, TargetKind};

use crate::error::{Error, Result};
use crate::record::summary::PartSummary;
use crate::setup::Setup;

/// Draws the parts of all envs of a run from the training split. Waits for the device if the
/// settings need the targets.
///
/// # Errors
/// [`Error::Value`]: settings that do not fit the samples; a device failure.
pub(super) fn draw(setup: &Setup, train: &Dataset) -> Result<Parts> {
    let (config, classes) = (&setup.config, setup.task.classes.as_deref());
    let held_out = match (config.folds, train.folds()) {
        (Some(folds), Some(listed)) if folds == listed.len() => HeldOut::Listed(listed.clone()),
        (Some(folds), Some(listed)) => {
            let expected = format!("{}, the number of folds that the dataset lists", listed.len());
            return Err(Error::value("folds", folds, expected));
        }
        (Some(folds), None) => HeldOut::Folds(folds),
        (None, _) => HeldOut::Share(config.control_share()),
    };
    let rules = PartsConfig {
        classes: classes.map(Into::into),
        held_out,
        // Env i has member i modulo the number of members, so each member gets every fold.
        envs_per_fold: config.members_len(),
        draws: (0..config.members_len())
            .map(|env| setup.member(env).config.sample_draw())
            .collect(),
        numbers: config.env_numbers.as_ref().map(|numbers| numbers.all().to_vec()),
        seed: config.seed,
    };
    let needs_targets = config.folds.is_some() || classes.is_some();
    let has_classes = train.target_kind() == TargetKind::Classes;
    let labels = (needs_targets && has_classes).then(|| train.targets().to_vec::<u32>());
    let targets = labels.transpose()?;
    let targets = match &targets {
        Some(classes) => PartTargets::Classes(classes),
        None => PartTargets::Other(train.len()),
    };
    Parts::draw(&rules, targets, config.envs).map_err(as_setting)
}

/// The samples of a split that have one of `classes`, and their number; all samples for `None`.
/// Waits for the device unless `classes` is `None`.
///
/// # Errors
/// [`Error::Value`] if no sample has one of the classes; a device failure.
pub(crate) fn split_samples(classes: Option<&[u32]>, split: &Dataset) -> Result<(Subset, usize)> {
    let Some(classes) = classes else { return Ok((Subset::All, split.len())) };
    let samples = of_classes(&split.targets().to_vec::<u32>()?, classes);
    if samples.is_empty() {
        let expected = "classes of which the evaluated split has samples";
        return Err(Error::value("classes", text(classes), expected));
    }
    let count = samples.len();
    Ok((Subset::Shared(samples), count))
}

/// The parts of all envs for events and summary; empty if all envs have the same samples.
pub(super) fn summaries(setup: &Setup, parts: &Parts) -> Vec<PartSummary> {
    if !has_parts(setup) {
        return vec![];
    }
    let summary = |part: &EnvPart| PartSummary {
        fold: part.fold,
        train_samples: part.train.len(),
        control_samples: part.held_out.len(),
    };
    parts.envs().iter().map(summary).collect()
}

/// Whether envs may have different samples.
pub(super) fn has_parts(setup: &Setup) -> bool {
    let mut members = 0..setup.config.members_len();
    setup.config.folds.is_some()
        || members.any(|env| setup.member(env).config.sample_draw() != SampleDraw::ALL)
}

/// Converts an error about an argument to the error about the setting with the same name.
pub(super) fn as_setting(error: meristem_data::Error) -> Error {
    match error {
        meristem_data::Error::Argument { argument, expected, got, .. } => {
            let key = match argument {
                "held_out" => "control-split".into(),
                argument => argument.replace('_', "-"),
            };
            Error::value(&key, got, expected)
        }
        error => error.into(),
    }
}

fn text(classes: &[u32]) -> String {
    classes.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

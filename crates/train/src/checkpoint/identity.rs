//! Identity of a run: inputs that must be equal when it resumes, and on all its processes.

use std::path::Path;

use meristem_device::Isa;
use serde::{Deserialize, Serialize};

use crate::config::{changed_line, identity, without_length};
use crate::error::{Error, Result};
use crate::input_file::{InputFile, check_files};
use crate::record::summary::DatasetSummary;

/// Inputs that must be equal for a resumed run to give the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Resolved configuration, without the settings that no result depends on.
    pub(crate) config: String,
    pub(crate) dataset: DatasetSummary,
    /// Instruction set of the kernels, because instruction sets round differently.
    pub(crate) instruction_set: String,
    /// Files that envs and controllers are made from; empty in older checkpoints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<InputFile>,
}

impl Identity {
    /// Checks that a run with this identity may resume from the checkpoint in `file`, whose
    /// identity is `other`. The planned length may differ.
    ///
    /// # Errors
    /// [`Error::OtherSettings`]; [`Error::OtherInput`] if the instruction set, the data or a file
    /// differ.
    pub(crate) fn check(&self, file: &Path, other: &Identity) -> Result<()> {
        let [ours, theirs] = [self, other].map(|run| without_length(&identity(&run.config)));
        if let Some((began, now)) = changed_line(&theirs, &ours) {
            return Err(Error::OtherSettings { path: file.into(), began, now });
        }
        check_instruction_set(file, &self.instruction_set, &other.instruction_set)?;
        if let Some([input, began, now]) = other_data(&other.dataset, &self.dataset) {
            let remedy = "put the data back that the run began with, or start a new run with \
                          --config RUN/config.toml and another --run-dir";
            let (action, path) = ("resume", file.into());
            let (input, remedy) = (input.into(), remedy.into());
            return Err(Error::OtherInput { action, path, input, began, now, remedy });
        }
        check_files(file, &self.files, &other.files)
    }

    /// Description of the first difference between `other`, the identity on another process, and
    /// this one, rank 0's.
    fn difference(&self, other: &Self) -> Option<String> {
        let missing = |of: &Identity, from: &Identity| {
            let lines: Vec<&str> = from.config.lines().collect();
            let mut own = of.config.lines();
            own.find(|line| !lines.contains(line)).map(str::to_string)
        };
        match (missing(other, self), missing(self, other)) {
            (Some(other), Some(first)) => {
                return Some(format!("it has `{other}`, rank 0 has `{first}`"));
            }
            (Some(line), None) | (None, Some(line)) => {
                return Some(format!("only one of it and rank 0 has `{line}`"));
            }
            (None, None) => {}
        }
        let (isa, first) = (&other.instruction_set, &self.instruction_set);
        if isa != first {
            let how = "set MERISTEM_ISA to the same value for all ranks";
            return Some(format!("it has {isa} kernels, rank 0 has {first} kernels; {how}"));
        }
        (other.dataset != self.dataset).then(|| "its dataset differs from rank 0's".into())
    }
}

/// Checks that the kernels have the instruction set that a run began with.
///
/// # Errors
/// [`Error::OtherInput`], with the instruction sets of this machine.
pub(crate) fn check_instruction_set(path: &Path, now: &str, began: &str) -> Result<()> {
    if now == began {
        return Ok(());
    }
    let names: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
    let remedy = if names.contains(&began) {
        format!("set MERISTEM_ISA={began}, because other instruction sets round differently")
    } else {
        format!(
            "this machine has {} and lacks {began}, and other instruction sets round differently: \
             resume on a machine with {began}, or start a new run with --config RUN/config.toml \
             and another --run-dir",
            names.join(", ")
        )
    };
    Err(Error::OtherInput {
        action: "resume",
        path: path.into(),
        input: "the instruction set of the kernels".into(),
        began: began.into(),
        now: now.into(),
        remedy: remedy.into(),
    })
}

/// The first difference between the data that a run began with and the data now: its
/// description, and both values.
fn other_data(began: &DatasetSummary, now: &DatasetSummary) -> Option<[String; 3]> {
    let [was, is] = [began, now].map(|data| {
        let [channels, rows, columns] = data.image;
        let count = |samples: Option<usize>| samples.map_or("none".into(), |n| n.to_string());
        let constants = |of: &[f32]| of.iter().map(f32::to_string).collect::<Vec<_>>().join(",");
        let of_targets = |of: &[f64]| of.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
        [
            ("dataset", data.name.clone()),
            ("channels, rows and columns of the images", format!("{channels}x{rows}x{columns}")),
            ("kind of the targets", data.targets.to_string()),
            ("number of classes", data.classes.len().to_string()),
            ("number of training images", (data.train_samples + data.control_samples).to_string()),
            ("number of images in the control split", data.control_samples.to_string()),
            ("number of test images", count(data.test_samples)),
            ("number of skipped images", data.skipped.to_string()),
            ("normalisation", data.normalize.clone()),
            ("mean of the training images", constants(&data.mean)),
            ("standard deviation of the training images", constants(&data.std)),
            ("mean of the training targets", of_targets(&data.target_mean)),
            ("standard deviation of the training targets", of_targets(&data.target_std)),
        ]
    });
    let difference = |input: &str, was: &str, is: &str| Some([input, was, is].map(str::to_string));
    let labels = began.classes.iter().zip(&now.classes).enumerate();
    let renamed = labels.filter(|(_, (was, is))| was != is).find_map(|(label, (was, is))| {
        difference(&format!("name of class {label}"), &format!("`{was}`"), &format!("`{is}`"))
    });
    let sums = began.checksums.iter().zip(&now.checksums).zip(["training", "test"]);
    let changed = sums.into_iter().find(|((was, is), _)| was != is);
    let differs = was.into_iter().zip(is).find(|((_, was), (_, is))| was != is);
    differs
        // Mean and standard deviation follow from the images, whose checksum is reported instead.
        .filter(|((input, _), _)| changed.is_none() || !input.ends_with("the training images"))
        .and_then(|((input, was), (_, is))| difference(input, &was, &is))
        .or(renamed)
        .or_else(|| {
            let ((was, is), split) = changed?;
            difference(&format!("checksum of {split} images and labels"), was, is)
        })
}

/// Identity of a run and checksums of its inputs, for comparing processes.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct RunInputs {
    /// Identity without files and checksums of data, which are in `checksums`. Its `config` has all
    /// settings that processes share, also those that no result depends on.
    pub(crate) identity: Identity,
    /// Name and checksum of each input.
    pub(crate) checksums: Vec<(String, String)>,
}

impl RunInputs {
    /// Checks that all processes, given by rank, have equal inputs.
    ///
    /// # Errors
    /// [`Error::OfRank`] names the first rank that differs from rank 0, and the setting or file.
    pub(crate) fn check_same(all: &[Self]) -> Result<()> {
        let Some((first, others)) = all.split_first() else { return Ok(()) };
        let differs = |(rank, other)| {
            let problem = first.difference(other)?;
            let remedy = Some(
                "start all ranks with the same settings, data and instruction set".to_string(),
            );
            Some(Error::OfRank { rank, problem, remedy, exit_code: 2 })
        };
        (1..).zip(others).find_map(differs).map_or(Ok(()), Err)
    }

    fn difference(&self, other: &Self) -> Option<String> {
        let mut both = self.checksums.iter().zip(&other.checksums);
        let differs = both.find(|(first, other)| first != other);
        self.identity
            .difference(&other.identity)
            .or_else(|| differs.map(|((name, _), _)| format!("its {name} differs from rank 0's")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(all: &[RunInputs]) -> String {
        let error = RunInputs::check_same(all).unwrap_err();
        assert!(matches!(error, Error::OfRank { exit_code: 2, .. }), "{error:?}");
        error.to_string()
    }

    #[test]
    fn a_process_that_does_something_else_is_named() {
        let with_seed = |seed: usize| {
            let config = format!("a = 1\nseed = {seed}\n");
            let (dataset, instruction_set) = (Default::default(), "portable".into());
            let identity = Identity { config, dataset, instruction_set, files: vec![] };
            RunInputs { identity, checksums: vec![] }
        };
        let all = [0, 0, 1].map(with_seed);
        RunInputs::check_same(&all[..2]).unwrap();
        assert_eq!(difference(&all), "rank 2: it has `seed = 1`, rank 0 has `seed = 0`");
        let with_data = |data: usize| {
            let (config, dataset, instruction_set, files) = Default::default();
            let identity = Identity { config, dataset, instruction_set, files };
            let checksums = vec![("version".into(), "1".into()), ("data".into(), data.to_string())];
            RunInputs { identity, checksums }
        };
        assert_eq!(difference(&[0, 1].map(with_data)), "rank 1: its data differs from rank 0's");
    }
}

//! Identity of a run: inputs that must be equal when it resumes, and on all its processes.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::{changed_line, identity, without_length};
use crate::error::{Error, Result};
use crate::record::summary::DatasetSummary;

/// Inputs that must be equal for a resumed run to give the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Resolved configuration, without the settings that no result depends on.
    pub(crate) config: String,
    pub(crate) dataset: DatasetSummary,
    /// Instruction set of the kernels, because sets round differently.
    pub(crate) instruction_set: String,
}

impl Identity {
    /// Checks that a run with this identity may resume from the checkpoint in `file`, whose
    /// identity is `other`. The planned length may differ.
    ///
    /// # Errors
    /// [`Error::OtherSettings`]; [`Error::Value`] if the instruction set or the data differ.
    pub(crate) fn check(&self, file: &Path, other: &Identity) -> Result<()> {
        let [ours, theirs] = [self, other].map(|run| without_length(&identity(&run.config)));
        if let Some((began, now)) = changed_line(&theirs, &ours) {
            return Err(Error::OtherSettings { path: file.into(), began, now });
        }
        if self.instruction_set != other.instruction_set {
            let expected = format!(
                "{}, with which the run began; other instruction sets round differently",
                other.instruction_set
            );
            return Err(Error::value("MERISTEM_ISA", &self.instruction_set, expected));
        }
        let wrong = |got| Err(Error::value("dataset", got, "the data that the run began with"));
        let known = !other.dataset.checksums.is_empty();
        if known && self.dataset.checksums != other.dataset.checksums {
            return wrong("other images or labels");
        }
        let checksums = other.dataset.checksums.clone();
        match (DatasetSummary { checksums, ..self.dataset.clone() }) == other.dataset {
            true => Ok(()),
            false => wrong("other data"),
        }
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
        let (own, isa) = (&other.instruction_set, &self.instruction_set);
        if own != isa {
            let how = "set MERISTEM_ISA to the same value for all ranks";
            return Some(format!("it has {own} kernels, rank 0 has {isa} kernels; {how}"));
        }
        (other.dataset != self.dataset).then(|| "its dataset differs from rank 0's".into())
    }
}

/// Identity of a run and checksums of its input files, for comparing processes.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct RunInputs {
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
            let identity = Identity { config, dataset, instruction_set };
            RunInputs { identity, checksums: vec![] }
        };
        let all = [0, 0, 1].map(with_seed);
        RunInputs::check_same(&all[..2]).unwrap();
        assert_eq!(difference(&all), "rank 2: it has `seed = 1`, rank 0 has `seed = 0`");
        let with_data = |data: usize| {
            let (config, dataset, instruction_set) = Default::default();
            let identity = Identity { config, dataset, instruction_set };
            let checksums = vec![("version".into(), "1".into()), ("data".into(), data.to_string())];
            RunInputs { identity, checksums }
        };
        assert_eq!(difference(&[0, 1].map(with_data)), "rank 1: its data differs from rank 0's");
    }
}

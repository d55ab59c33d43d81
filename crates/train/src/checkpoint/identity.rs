//! The identity of a run: what must be the same for it to go on, and on all its processes.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::identity;
use crate::error::{Error, Result};
use crate::record::summary::DatasetSummary;

/// Everything that must be the same for a run to go on with the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The resolved configuration, without what no result depends on.
    pub(crate) config: String,
    pub(crate) dataset: DatasetSummary,
    /// Instruction set of the kernels: another one rounds differently.
    pub(crate) instruction_set: String,
}

impl Identity {
    /// Whether a run that is `self` may go on from the checkpoint in `file`, which is of `other`.
    ///
    /// # Errors
    /// [`Error::OtherSettings`]; [`Error::Value`] where this machine's kernels
    /// or the data are others.
    pub(crate) fn check(&self, file: &Path, other: &Identity) -> Result<()> {
        let [ours, theirs] = [self, other].map(|run| identity(&run.config));
        let only_in = |one: &str, another: &str| {
            one.lines().find(|line| !another.lines().any(|l| l == *line)).map(str::to_string)
        };
        let of_same_key = |text: &str, line: &str| {
            let key = |line: &str| line.split(" = ").next().map(str::to_string);
            let found = text.lines().find(|other| key(other) == key(line));
            found.unwrap_or("no such line").to_string()
        };
        let differing = only_in(&theirs, &ours).map(|began| {
            let now = of_same_key(&ours, &began);
            (began, now)
        });
        let differing = differing
            .or_else(|| only_in(&ours, &theirs).map(|now| (of_same_key(&theirs, &now), now)));
        if let Some((began, now)) = differing {
            return Err(Error::OtherSettings { path: file.into(), began, now });
        }
        if self.instruction_set != other.instruction_set {
            let expected = format!(
                "{}, which the run began with: others round differently",
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

    /// The first difference of `other`, which is another process', from this one, which is rank
    /// 0's.
    fn difference(&self, other: &Self) -> Option<String> {
        let missing = |of: &Identity, from: &Identity| {
            let lines: Vec<&str> = from.config.lines().collect();
            let mut own = of.config.lines();
            own.find(|line| !lines.contains(line)).map(str::to_string)
        };
        match (missing(other, self), missing(self, other)) {
            (Some(other), Some(first)) => {
                return Some(format!("it has `{other}`, rank 0 `{first}`"));
            }
            (Some(line), None) | (None, Some(line)) => {
                return Some(format!("`{line}` is not set on it and on rank 0 alike"));
            }
            (None, None) => {}
        }
        let (own, isa) = (&other.instruction_set, &self.instruction_set);
        if own != isa {
            let how = "MERISTEM_ISA sets one for all";
            return Some(format!("its kernels are {own}, those of rank 0 {isa}: {how}"));
        }
        (other.dataset != self.dataset).then(|| "its data are others than those of rank 0".into())
    }
}

/// The identity of a run with checksums of its input files, for comparing processes.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct RunInputs {
    pub(crate) identity: Identity,
    /// Names and checksums.
    pub(crate) checksums: Vec<(String, String)>,
}

impl RunInputs {
    /// Whether all processes, here by rank, have the same.
    ///
    /// # Errors
    /// [`Error::OfRank`] names the first that differs from rank 0, and the setting or file.
    pub(crate) fn check_same(all: &[Self]) -> Result<()> {
        let Some((first, others)) = all.split_first() else { return Ok(()) };
        let differs = |(rank, other)| {
            let problem = first.difference(other)?;
            let remedy = Some("start all with the same settings, data and kernels".to_string());
            Some(Error::OfRank { rank, problem, remedy, exit_code: 2 })
        };
        (1..).zip(others).find_map(differs).map_or(Ok(()), Err)
    }

    fn difference(&self, other: &Self) -> Option<String> {
        let mut both = self.checksums.iter().zip(&other.checksums);
        let differs = both.find(|(first, other)| first != other);
        self.identity
            .difference(&other.identity)
            .or_else(|| differs.map(|((name, _), _)| format!("its {name} is not that of rank 0")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(all: &[RunInputs]) -> String {
        RunInputs::check_same(all).unwrap_err().to_string()
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
        assert_eq!(difference(&all), "rank 2: it has `seed = 1`, rank 0 `seed = 0`");
        let with_data = |data: usize| {
            let (config, dataset, instruction_set) = Default::default();
            let identity = Identity { config, dataset, instruction_set };
            let checksums = vec![("version".into(), "1".into()), ("data".into(), data.to_string())];
            RunInputs { identity, checksums }
        };
        assert_eq!(difference(&[0, 1].map(with_data)), "rank 1: its data is not that of rank 0");
    }
}

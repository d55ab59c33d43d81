//! The request: a file with the number of rounds, the settings of all runs, and two spaces.

use std::path::Path;

use meristem_data::Generated;
use meristem_device::named_file;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigLayer, add_values_from_before, file, settings_version};
use crate::error::{Error, Result};
use crate::settings::{Dimension, ObservationForm, Space};

/// Version of the settings of requests without one in the folder of a training.
const FIRST_VERSION: u32 = 15;
/// Limit of the number of rounds.
const ROUNDS_MAX: usize = 1_000_000;
/// Limit of the number of envs, as of a run.
const ENVS_MAX: usize = 4096;
/// Limit of the number of tasks of an evaluation.
const TASKS_MAX: usize = 10_000;
/// Limit of the number of families, and of their weights.
const FAMILIES_MAX: usize = 1000;

/// Settings that the training decides, or that belong to single runs.
const DECIDED: [&str; 25] = [
    "checkpoint_every",
    "controller",
    "data_parallel",
    "end_members",
    "env_numbers",
    "envs",
    "export",
    "folds",
    "member_changes",
    "members",
    "name",
    "places",
    "policy",
    "ppo_demonstrations",
    "ranks",
    "rounds",
    "run_dir",
    "sampler",
    "samples",
    "scheduler",
    "seed",
    "space",
    "stop_after",
    "trace",
    "twin",
];

/// Beginnings of the names of settings of the policy and of devices, which all rounds share.
const OF_ALL_ROUNDS: [&str; 7] =
    ["data_budget", "device", "policy_", "ppo_", "precision", "threads", "winograd"];

/// Use of a task. It is a key of the draws, so that the tasks of evaluations differ from the tasks
/// of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Round,
    Evaluation,
}

/// Training of a policy on drawn tasks.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyTraining {
    /// Number of rounds. More rounds extend a training that is complete.
    pub rounds: usize,
    /// Number of envs of a round.
    #[serde(default = "envs")]
    pub envs: usize,
    /// Number of envs of each member, which share its drawn settings. With more than one, the
    /// advantages of the actions in these envs are compared with each other.
    #[serde(default = "one")]
    pub envs_per_member: usize,
    /// Number of rounds at the beginning in which the heuristic acts and the policy learns to
    /// imitate it.
    #[serde(default)]
    pub teacher_rounds: usize,
    /// Seed of the initial weights, of all draws and of all runs.
    #[serde(default = "seed")]
    pub seed: u64,
    /// Rounds between two evaluations; 0 for none but those before the first round and after the
    /// last one.
    #[serde(default = "evaluate_every")]
    pub evaluate_every: usize,
    /// Number of tasks of an evaluation; 0 for no evaluation. No round trains on these tasks.
    #[serde(default = "evaluation_tasks")]
    pub evaluation_tasks: usize,
    /// Number of tasks of the evaluation after the last round; `evaluation_tasks` if it is missing.
    /// The first of these tasks are the tasks of the other evaluations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_evaluation_tasks: Option<usize>,
    /// Number of envs of a task of an evaluation, at most `envs`; `envs` if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation_envs: Option<usize>,
    /// Version of the settings whose defaults the settings have that are not given here, from 15
    /// on. If it is missing, a new training has the version of the program; a training goes on with
    /// the version with which it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_version: Option<u32>,
    /// Settings of all runs.
    #[serde(default)]
    pub settings: toml::Table,
    /// Space from which the settings of each round are drawn. Keys are settings of a run, and
    /// options of generated datasets ([`Generated::OPTIONS`]). An option is left out if the dataset
    /// of the round does not have it.
    #[serde(default, skip_serializing_if = "Space::is_empty")]
    pub task: Space,
    /// Space from which the settings of each member of each round are drawn.
    #[serde(default, skip_serializing_if = "Space::is_empty")]
    pub members: Space,
    /// Families of tasks. Each task belongs to one of them, drawn by weight. Without families all
    /// tasks have the two spaces above.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub families: Vec<TaskFamily>,
}

/// A family of tasks.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TaskFamily {
    /// Share of the tasks that belong to the family, in proportion to the other weights.
    #[serde(default = "one")]
    pub weight: usize,
    /// Dimensions of the tasks of this family, added to [`PolicyTraining::task`]. A dimension
    /// replaces the dimension of the same setting there.
    #[serde(default, skip_serializing_if = "Space::is_empty")]
    pub task: Space,
    /// Dimensions of the members of these tasks, added to [`PolicyTraining::members`] likewise.
    #[serde(default, skip_serializing_if = "Space::is_empty")]
    pub members: Space,
}

/// The spaces of a task and of its members.
pub(super) struct TaskSpaces {
    pub(super) task: Space,
    pub(super) members: Space,
}

fn envs() -> usize {
    64
}

fn one() -> usize {
    1
}

fn seed() -> u64 {
    1
}

fn evaluate_every() -> usize {
    50
}

fn evaluation_tasks() -> usize {
    8
}

impl PolicyTraining {
    /// Reads and checks the file at `path`, TOML or JSON by its extension.
    ///
    /// # Errors
    /// [`Error::ConfigFile`]: the file cannot be read, or has an unknown key or a value of another
    /// type. [`Error::Value`]: a number outside its range, or a setting that the training decides.
    pub fn read(path: &Path) -> Result<Self> {
        let fail = |message: String| Error::ConfigFile { path: path.to_owned(), message };
        let text = named_file::text(path);
        let text = text.map_err(|error| fail(format!("cannot be read: {error}")))?;
        Self::parse(path, &text)
    }

    /// Parses `text`, the contents of the file at `path`, as [`PolicyTraining::read`] does.
    ///
    /// # Errors
    /// As [`PolicyTraining::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let fail = |message: String| Error::ConfigFile { path: path.to_owned(), message };
        let request: Self = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => toml::from_str(text).map_err(|error| fail(error.to_string()))?,
            Some("json") => serde_json::from_str(text).map_err(|error| fail(error.to_string()))?,
            _ => return Err(fail("its name must end in .toml or .json".into())),
        };
        request.check()?;
        Ok(request)
    }

    /// Number of tasks of the evaluation after the last round.
    pub(super) fn last_tasks(&self) -> usize {
        self.last_evaluation_tasks.unwrap_or(self.evaluation_tasks)
    }

    /// Number of envs of a task.
    pub(super) fn envs_of(&self, of: Use) -> usize {
        match of {
            Use::Round => self.envs,
            Use::Evaluation => self.evaluation_envs.unwrap_or(self.envs),
        }
    }

    /// Number of members of a task, whose settings are drawn. Env i has the settings of member i
    /// modulo this number.
    pub(super) fn members_of(&self, of: Use) -> usize {
        match of {
            Use::Round => self.envs / self.envs_per_member,
            Use::Evaluation => self.envs_of(of),
        }
    }

    /// Index of the family to which a task belongs, by a number in 0..1; 0 without families.
    pub(super) fn family_at(&self, position: f64) -> usize {
        let total: usize = self.families.iter().map(|family| family.weight).sum();
        let mut rest = position * total as f64;
        let is_family = |family: &TaskFamily| {
            rest -= family.weight as f64;
            rest < 0.0
        };
        let found = self.families.iter().position(is_family);
        found.unwrap_or(self.families.len().saturating_sub(1))
    }

    /// The spaces of the tasks of a family.
    ///
    /// # Errors
    /// [`Error::Value`]: a condition on a setting that the space of the family does not have.
    pub(super) fn spaces(&self, family: usize) -> Result<TaskSpaces> {
        let (task, members) = (&self.task, &self.members);
        let Some(of) = self.families.get(family) else {
            return Ok(TaskSpaces { task: task.clone(), members: members.clone() });
        };
        let named = |error| Error::value("families", format!("family {}", family + 1), error);
        let task = task.with(&of.task).map_err(named)?;
        Ok(TaskSpaces { task, members: members.with(&of.members).map_err(named)? })
    }

    /// The settings of all runs.
    ///
    /// # Errors
    /// [`Error::Value`]: an unknown key, or a value that its setting does not accept.
    pub(super) fn layer(&self) -> Result<ConfigLayer> {
        let wrong = |problem: String| {
            let got = toml::to_string(&self.settings).unwrap_or_default();
            Error::value("settings", got.trim(), format!("settings of train: {problem}"))
        };
        file::check_keys(self.settings.keys().map(String::as_str)).map_err(wrong)?;
        let text = toml::to_string(&self.settings).map_err(|error| wrong(error.to_string()))?;
        let mut layer = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        if let Some(version) = self.settings_version {
            let added = add_values_from_before(&mut layer, version);
            added.map_err(|error| wrong(error.to_string()))?;
        }
        Ok(layer)
    }

    /// The request with the version of the settings of `began`, the request with which the training
    /// began, or of this program for a new training. A version that is given stays.
    pub(super) fn with_version_of(mut self, began: Option<&Self>) -> Self {
        let began = began.map(|began| began.settings_version.unwrap_or(FIRST_VERSION));
        self.settings_version.get_or_insert(began.unwrap_or_else(settings_version));
        self
    }

    /// Checks numbers and keys.
    pub(super) fn check(&self) -> Result<()> {
        for (key, got, [least, most]) in [
            ("rounds", self.rounds, [1, ROUNDS_MAX]),
            ("envs", self.envs, [1, ENVS_MAX]),
            ("evaluate_every", self.evaluate_every, [0, ROUNDS_MAX]),
            ("evaluation_tasks", self.evaluation_tasks, [0, TASKS_MAX]),
            ("envs_per_member", self.envs_per_member, [1, self.envs]),
            ("teacher_rounds", self.teacher_rounds, [0, ROUNDS_MAX]),
            ("last_evaluation_tasks", self.last_tasks(), [self.evaluation_tasks, TASKS_MAX]),
            ("evaluation_envs", self.envs_of(Use::Evaluation), [1, self.envs]),
        ] {
            if !(least..=most).contains(&got) {
                return Err(Error::value(key, got, format!("{least} to {most}")));
            }
        }
        if let Some(version) = self.settings_version {
            let known = FIRST_VERSION..=settings_version();
            if !known.contains(&version) {
                let expected = format!("{} to {}", known.start(), known.end());
                return Err(Error::value("settings_version", version, expected));
            }
        }
        if !self.envs.is_multiple_of(self.envs_per_member) {
            let expected = format!("a divisor of {} envs", self.envs);
            return Err(Error::value("envs_per_member", self.envs_per_member, expected));
        }
        if self.seed > u64::MAX >> 1 {
            return Err(Error::value("seed", self.seed, format!("at most {}", u64::MAX >> 1)));
        }
        let decided = |key: &&str| DECIDED.contains(key);
        let layer = self.layer()?;
        if let Some(key) = layer.given().into_iter().find(decided) {
            return Err(Error::value("settings", key, expected_undecided(key)));
        }
        if let Some(Some(form @ ObservationForm::Vector)) = layer.policy_form {
            return Err(Error::value(
                "policy-form",
                form,
                "set or set-widen, for hosts of any size",
            ));
        }
        self.check_families()?;
        check_task(&self.task)?;
        self.families.iter().try_for_each(|family| check_task(&family.task))
    }

    fn check_families(&self) -> Result<()> {
        if self.families.len() > FAMILIES_MAX {
            let expected = format!("at most {FAMILIES_MAX} families");
            return Err(Error::value("families", self.families.len(), expected));
        }
        for (at, family) in self.families.iter().enumerate() {
            if !(1..=FAMILIES_MAX).contains(&family.weight) {
                let key = format!("weight of family {}", at + 1);
                return Err(Error::value(&key, family.weight, format!("1 to {FAMILIES_MAX}")));
            }
            self.spaces(at)?;
        }
        Ok(())
    }
}

/// Checks the keys of a space of tasks.
fn check_task(space: &Space) -> Result<()> {
    for key in space.dimensions().iter().map(Dimension::key) {
        if DECIDED.contains(&key) {
            return Err(Error::value("task", key, expected_undecided(key)));
        }
        if OF_ALL_ROUNDS.iter().any(|beginning| key.starts_with(beginning)) {
            let expected = "a setting that may differ from round to round; give this one in \
                            [settings]";
            return Err(Error::value("task", key, expected));
        }
        if !Generated::OPTIONS.contains(&key) {
            file::check_keys([key].into_iter()).map_err(|problem| {
                let options = Generated::OPTIONS[1..].join(", ");
                let expected = format!("a setting of train, or one of {options}: {problem}");
                Error::value("task", key, expected)
            })?;
        }
    }
    Ok(())
}

fn expected_undecided(key: &str) -> String {
    match key {
        "seed" => "none, because every round has a seed of its own, drawn from `seed`".into(),
        "envs" | "rounds" => format!("`{key}` at the top of the file"),
        "members" | "space" | "samples" => "the table [members], a space".into(),
        _ => "none, because the training decides it".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PolicyTraining> {
        PolicyTraining::parse(Path::new("p.toml"), text)
    }

    #[test]
    fn a_file_needs_only_rounds_and_errors_name_their_key() {
        let request = parse("rounds = 3").unwrap();
        assert_eq!((request.rounds, request.envs, request.seed), (3, 64, 1));
        for (text, words) in [
            ("", "rounds"),
            ("rounds = 0", "1 to 1000000"),
            ("rounds = 1\nround = 2", "round"),
            ("rounds = 1\n[settings]\nlr = \"x\"", "lr"),
            ("rounds = 1\n[settings]\ncontroller = \"random\"", "the training decides it"),
            ("rounds = 1\n[settings]\nseed = 3", "drawn from `seed`"),
            ("rounds = 1\n[task]\nppo_lr = { uniform = [0, 1] }", "give this one in [settings]"),
            ("rounds = 1\n[settings]\nppo_demonstrations = 2", "the training decides it"),
            ("rounds = 1\n[settings]\npolicy_form = \"vector\"", "set or set-widen"),
            ("rounds = 1\n[task]\nlrr = { uniform = [0, 1] }", "did you mean `lr`"),
            ("rounds = 1\n[task]\nseed = { int = [0, 1] }", "every round has a seed"),
            ("rounds = 1\n[task]\nlr = { between = [0, 1] }", "uniform"),
            ("rounds = 1\n[[families]]\nweight = 0", "1 to 1000"),
            ("rounds = 1\n[[families]]\nshare = 2", "share"),
            ("rounds = 1\n[[families]]\ntask.seed = { int = [0, 1] }", "every round has a seed"),
            ("rounds = 1\n[[families]]\nmembers = [\"lr=uniform:0,1 when host=a\"]", "host"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }
}

//! Results of training a policy: the lines of `curves.jsonl`.

use std::collections::BTreeMap;

use meristem_control::RoundReport;
use serde::{Deserialize, Serialize};

use crate::record::null_as_nan;
use crate::statistics::Spread;

/// A line of `curves.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CurveLine {
    /// A round of training.
    Round(Box<TrainedRound>),
    /// Controllers on the tasks of the evaluation.
    Evaluation(Evaluation),
}

/// A round of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainedRound {
    /// Number of the round, from 0.
    pub round: usize,
    /// Transitions of all rounds up to the end of this one.
    pub transitions_total: u64,
    /// Seconds of the round.
    pub seconds: f64,
    /// Seconds of it before the end of the first step: data, networks, plans.
    pub setup_seconds: f64,
    /// Dataset with its options.
    pub dataset: String,
    /// Steps of the episode.
    pub steps: usize,
    /// Report of the policy's update; `None` for a round whose training diverged, from which the
    /// policy did not learn.
    pub report: Option<RoundReport>,
}

/// Controllers on the tasks of the evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Number of rounds before the evaluation, with those whose training diverged.
    pub round: usize,
    /// Transitions that the policy had learned from.
    pub transitions_total: u64,
    /// Index of the family of each task; empty without families.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub families: Vec<usize>,
    /// Results by controller: `policy` draws its actions, `greedy` takes the most probable ones of
    /// the same policy; `heuristic` and `random`, which do not learn.
    pub controllers: BTreeMap<String, Evaluated>,
}

/// Results of a controller. Return, gain and growth are means over the envs of a task, and then
/// over the tasks whose training did not diverge.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// Sum of the rewards of an episode.
    #[serde(rename = "return", deserialize_with = "null_as_nan")]
    pub mean_return: f64,
    /// Standard deviation of the return over the envs of a task, a mean over the tasks; 0 for one
    /// env.
    #[serde(default, deserialize_with = "null_as_nan")]
    pub env_std: f64,
    /// Number of tasks whose training diverged. All means are over the other tasks.
    #[serde(default)]
    pub diverged: usize,
    /// Half the width of the 95 % confidence interval of `mean_return` over the tasks (Student's
    /// t); `None` for fewer than two tasks.
    pub ci95: Option<f64>,
    /// Control loss of the bare twin minus control loss of the env, after the last step in which
    /// both are finite.
    #[serde(deserialize_with = "null_as_nan")]
    pub gain: f64,
    /// Parameters of the env with its modules in the last step, divided by the initial parameters
    /// of its host.
    #[serde(deserialize_with = "null_as_nan")]
    pub growth: f64,
    /// Return on each task, for paired differences; null for a task whose training diverged.
    pub returns: Vec<Option<f64>>,
}

/// Results of one task.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TaskResult {
    pub(super) mean_return: f64,
    pub(super) env_std: f64,
    pub(super) gain: f64,
    pub(super) growth: f64,
}

impl Evaluated {
    /// Results over `tasks`; `None` stands for a task whose training diverged.
    pub(super) fn new(tasks: &[Option<TaskResult>]) -> Self {
        let all = || tasks.iter().flatten();
        let mean = |of: fn(&TaskResult) -> f64| all().map(of).sum::<f64>() / all().count() as f64;
        let returns: Vec<f64> = all().map(|task| task.mean_return).collect();
        Self {
            mean_return: mean(|task| task.mean_return),
            env_std: mean(|task| task.env_std),
            diverged: tasks.iter().filter(|task| task.is_none()).count(),
            ci95: Spread::from_values(&returns).and_then(|spread| spread.ci95),
            gain: mean(|task| task.gain),
            growth: mean(|task| task.growth),
            returns: tasks.iter().map(|task| task.map(|task| task.mean_return)).collect(),
        }
    }
}

//! Report of a study.

use serde::{Deserialize, Serialize};

use super::Contender;
use crate::config::types::TaskKind;
use crate::record::summary::{
    DatasetSummary, EnvSummary, ModuleCounts, RoundSummary, Status, Summary,
};
use crate::statistics::{PairedDifference, Spread};

/// Version of the format of `study.json`.
pub const STUDY_VERSION: u32 = 2;

/// Results of a study. Scores are those of the test split at the end of an episode.
///
/// The unit of all statistics is the seed. The value of a seed is the mean over its envs, which
/// share data and are not independent of each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Study {
    /// [`STUDY_VERSION`].
    #[serde(alias = "version")]
    pub v: u32,
    /// Version of meristem.
    pub program_version: String,
    /// Status; an interrupted study has the completed runs only.
    pub status: Status,
    /// Task of the runs. Absent for `classify`, and if no run is complete; with another task, keys
    /// with `accuracy` in their names have the score of the task instead.
    #[serde(default = "TaskKind::classify", skip_serializing_if = "TaskKind::is_classify")]
    pub task: TaskKind,
    /// Dataset; absent if no run is complete.
    pub dataset: Option<DatasetSummary>,
    /// Host description.
    pub host: String,
    /// Number of envs of each run.
    pub envs: usize,
    /// Steps of each run, except of a fixed network with equal compute. A step is one epoch of host
    /// training.
    pub steps: usize,
    /// Rounds in which learning contenders learn before their comparison.
    pub rounds: usize,
    /// Seeds, the same for all contenders.
    pub seeds: Vec<u64>,
    /// Results in the order of the request; differences are relative to the first.
    pub contenders: Vec<ContenderReport>,
}

impl Study {
    /// Number of complete runs, over all contenders.
    pub fn complete(&self) -> usize {
        self.contenders.iter().map(|report| report.runs.len()).sum()
    }
}

/// Results of one contender. Statistics are over the seeds with a complete run, and absent if there
/// are none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContenderReport {
    /// The contender.
    pub contender: Contender,
    /// Seeds of the study that its policy was trained with, according to the policy's file. Its
    /// training had the hosts and images of these seeds.
    #[serde(default)]
    pub known_seeds: Vec<u64>,
    /// Test score.
    #[serde(rename = "test_accuracy", alias = "test_f1", alias = "test_r2")]
    pub test_score: Option<Spread>,
    /// Trained parameters of the host with its modules.
    pub parameters: Option<Spread>,
    /// Percentage points of test score per 1000 parameters.
    pub points_per_1000_parameters: Option<Spread>,
    /// Floating-point operations of an env's episode: training, and counterfactual evaluations.
    /// Operations of the policy, and of the rounds in which it learned, are excluded.
    #[serde(default)]
    pub flops: Option<Spread>,
    /// Test score minus the first contender's test score with the same seed, in percentage
    /// points; absent for the first contender.
    pub difference_pp: Option<PairedDifference>,
    /// Results of each seed.
    pub runs: Vec<StudyRun>,
}

/// Results of one contender with one seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StudyRun {
    /// Seed of the run.
    pub seed: u64,
    /// Test score, as the mean over the envs.
    #[serde(rename = "test_accuracy", alias = "test_f1", alias = "test_r2")]
    pub test_score: f64,
    /// Trained parameters, as the mean over the envs.
    pub parameters: f64,
    /// Percentage points of test score per 1000 parameters, as the mean over the envs.
    pub points_per_1000_parameters: f64,
    /// Floating-point operations of training and of counterfactual evaluations, as the mean over
    /// the envs.
    #[serde(default)]
    pub flops: f64,
    /// Results of each env.
    pub envs: Vec<StudyEnv>,
    /// Results of the rounds in which the contender learned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub training: Vec<RoundSummary>,
}

/// Results of one env at the end of its episode.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StudyEnv {
    /// Test score.
    #[serde(rename = "test_accuracy", alias = "test_f1", alias = "test_r2")]
    pub test_score: f64,
    /// Control score.
    #[serde(rename = "control_accuracy", alias = "control_f1", alias = "control_r2")]
    pub control_score: Option<f64>,
    /// Trained parameters of the host with its modules.
    pub parameters: usize,
    /// Trained parameters of the modules.
    pub grown_parameters: usize,
    /// Percentage points of test score per 1000 parameters.
    pub points_per_1000_parameters: f64,
    /// Number of modules germinated, pruned and fossilized.
    pub modules: ModuleCounts,
    /// Number of rollbacks.
    pub rollbacks: usize,
}

impl From<&EnvSummary> for StudyEnv {
    fn from(env: &EnvSummary) -> Self {
        // A study begins only where there is a test split.
        let test_score = env.test_score.unwrap_or(f64::NAN);
        Self {
            test_score,
            control_score: env.control_score,
            parameters: env.parameters,
            grown_parameters: env.grown_parameters,
            points_per_1000_parameters: 100_000.0 * test_score / env.parameters as f64,
            modules: env.history,
            rollbacks: env.rollbacks,
        }
    }
}

impl StudyRun {
    /// The results of a complete run; `training` has the rounds in which its policy learned.
    pub(super) fn new(summary: &Summary, training: Vec<RoundSummary>) -> Self {
        let envs: Vec<StudyEnv> = summary.envs.iter().map(StudyEnv::from).collect();
        let mean = |of: &dyn Fn(&StudyEnv) -> f64| {
            envs.iter().map(of).sum::<f64>() / envs.len().max(1) as f64
        };
        Self {
            seed: summary.seed,
            test_score: mean(&|env| env.test_score),
            parameters: mean(&|env| env.parameters as f64),
            points_per_1000_parameters: mean(&|env| env.points_per_1000_parameters),
            flops: (summary.training_flops + summary.counterfactual_cost.flops) as f64
                / envs.len().max(1) as f64,
            envs,
            training,
        }
    }
}

/// A contender with its runs.
pub(super) struct ContenderRuns {
    pub(super) contender: Contender,
    /// Seeds that its policy was trained with.
    pub(super) known_seeds: Vec<u64>,
    pub(super) runs: Vec<StudyRun>,
}

/// Computes the contenders' statistics from their runs.
pub(super) fn reports(all: Vec<ContenderRuns>) -> Vec<ContenderReport> {
    let first: Vec<(u64, f64)> = all
        .first()
        .map_or(vec![], |first| first.runs.iter().map(|run| (run.seed, run.test_score)).collect());
    let report =
        |(index, ContenderRuns { contender, known_seeds, runs }): (usize, ContenderRuns)| {
            let spread = |of: &dyn Fn(&StudyRun) -> f64| {
                Spread::from_values(&runs.iter().map(of).collect::<Vec<f64>>())
            };
            let pair = |run: &StudyRun| {
                let other = first.iter().find(|(seed, _)| *seed == run.seed)?.1;
                Some((100.0 * run.test_score, 100.0 * other))
            };
            let pairs: Vec<(f64, f64)> = runs.iter().filter_map(pair).collect();
            ContenderReport {
                contender,
                known_seeds,
                test_score: spread(&|run| run.test_score),
                parameters: spread(&|run| run.parameters),
                points_per_1000_parameters: spread(&|run| run.points_per_1000_parameters),
                flops: spread(&|run| run.flops),
                difference_pp: PairedDifference::from_pairs(&pairs).filter(|_| index > 0),
                runs,
            }
        };
    all.into_iter().enumerate().map(report).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seed: u64, test_score: f64) -> StudyRun {
        let (envs, training) = (vec![], vec![]);
        let (parameters, points_per_1000_parameters) = (2000.0, 50.0 * test_score);
        StudyRun {
            seed,
            test_score,
            parameters,
            points_per_1000_parameters,
            flops: 1e9,
            envs,
            training,
        }
    }

    /// A stopped study: the second contender lacks a seed, the third has none.
    #[test]
    fn only_seeds_that_both_have_are_compared() {
        let ran = |text: &str, runs: Vec<StudyRun>| {
            let contender = text.parse::<Contender>().unwrap();
            ContenderRuns { contender, known_seeds: vec![], runs }
        };
        let reports = reports(vec![
            ran("none", vec![run(7, 0.25), run(8, 0.75)]),
            ran("random", vec![run(8, 0.5)]),
            ran("heuristic", vec![]),
        ]);
        assert_eq!(reports[0].test_score.unwrap().mean, 0.5);
        assert_eq!(reports[0].difference_pp, None);
        let difference = reports[1].difference_pp.unwrap();
        assert_eq!((difference.spread.count, difference.spread.mean), (1, -25.0));
        assert_eq!((difference.spread.std, difference.ahead), (None, 0));
        assert_eq!((reports[2].test_score, reports[2].difference_pp), (None, None));
    }
}

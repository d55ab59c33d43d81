//! Results of the bench: `growth.json`.

use std::collections::BTreeMap;

use meristem_grow::Stage;
use meristem_nn::ScoreKind;
use serde::{Deserialize, Serialize};

use crate::record::summary::{ModuleSummary, Status, Summary};
use crate::statistics::{PairedDifference, Spread};

/// Version of the format of `growth.json`.
pub const GROWTH_TABLE_VERSION: u32 = 1;

/// Results of the bench. Scores are shares 0..1, or R² of a regression.
///
/// All statistics are over seeds. Everything but the seconds is the same, bit for bit, for any
/// number of threads and after any interruption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GrowthTable {
    /// [`GROWTH_TABLE_VERSION`].
    pub v: u32,
    /// Version of meristem.
    pub program_version: String,
    /// Status; an interrupted bench has the complete runs only.
    pub status: Status,
    /// Name of the suite.
    pub suite: String,
    /// Settings that override those of the suite, by key.
    pub settings: BTreeMap<String, serde_json::Value>,
    /// Seeds on which learning rates were chosen, by the control split only.
    pub tuning_seeds: Vec<u64>,
    /// Seeds of the table.
    pub seeds: Vec<u64>,
    /// Results of each task that has begun.
    pub tasks: Vec<TaskReport>,
}

/// Results on one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// Name of the task.
    pub task: String,
    /// Host that grows.
    pub host: String,
    /// Host of the method `large`.
    pub large: String,
    /// Steps of an episode. A step is one epoch of training.
    pub steps: usize,
    /// Envs of a run; the value of a seed is the mean over them.
    pub envs: usize,
    /// Kind of the scores.
    pub score: ScoreKind,
    /// Instruction set of the kernels, on which the bits of results depend.
    pub instruction_set: String,
    /// Results in the order of the methods.
    pub methods: Vec<MethodReport>,
}

/// Results of one method on one task. A statistic is null without a complete run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MethodReport {
    /// Name of the method.
    pub method: String,
    /// Learning rate of host and modules: the best of [`MethodReport::tuning`], or the only one.
    /// Null until it is chosen, and if no rate has a control score.
    pub lr: Option<f32>,
    /// Whether the best rate is the smallest or the largest of several, so that a better one may be
    /// outside.
    pub at_edge: bool,
    /// Rates with their control scores on the tuning seeds; empty if there is only one rate.
    pub tuning: Vec<RateReport>,
    /// Test score at the end of an episode.
    pub test_score: Option<Spread>,
    /// Trained parameters of the host with its modules.
    pub parameters: Option<Spread>,
    /// Multiply-accumulate operations of an env's episode, in training and counterfactual
    /// evaluations.
    pub macs: Option<Spread>,
    /// Seconds of an env's steps.
    pub seconds: Option<Spread>,
    /// Test score minus another method's with the same seed, in percentage points, by the other
    /// method's name.
    pub difference_pp: BTreeMap<String, PairedDifference>,
    /// Seeds of the table without a result: training failed too often, or the method needs the run
    /// of another method that has no result.
    pub diverged: Vec<u64>,
    /// Results of each seed.
    pub runs: Vec<SeedReport>,
}

/// Results of a learning rate on the tuning seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateReport {
    /// Learning rate.
    pub lr: f32,
    /// Mean control score at the end of an episode; null if one of the seeds has no result.
    pub control_score: Option<f64>,
}

/// Results of one seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeedReport {
    /// Seed of the run.
    pub seed: u64,
    /// Test score, as the mean over the envs.
    pub test_score: f64,
    /// Control score, as the mean over the envs.
    pub control_score: f64,
    /// Trained parameters, as the mean over the envs.
    pub parameters: f64,
    /// Steps of the episode.
    pub steps: u64,
    /// Multiply-accumulate operations of training and counterfactual evaluations, as the mean over
    /// the envs.
    pub macs: f64,
    /// Seconds of the steps, divided by the number of envs. With other work on the machine they
    /// mean little.
    pub seconds: f64,
    /// Modules of each env in stage Blending, Holding or Fossilized, such as `r0c0 conv_heavy`.
    pub modules: Vec<Vec<String>>,
}

impl SeedReport {
    pub(super) fn new(summary: &Summary) -> Self {
        let envs = &summary.envs;
        let count = envs.len().max(1) as f64;
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / count;
        let flops = summary.training_flops + summary.counterfactual_cost.flops;
        let takes_part = |module: &&ModuleSummary| {
            let stage = module.stage.known();
            matches!(stage, Some(Stage::Blending | Stage::Holding | Stage::Fossilized))
        };
        let name = |module: &ModuleSummary| format!("{} {}", module.slot, module.blueprint);
        Self {
            seed: summary.seed,
            test_score: mean(&mut envs.iter().map(|env| env.test_score.unwrap_or(f64::NAN))),
            control_score: mean(&mut envs.iter().map(|env| env.control_score.unwrap_or(f64::NAN))),
            parameters: mean(&mut envs.iter().map(|env| env.parameters as f64)),
            steps: summary.steps,
            // `flops` counts a multiply-add as two operations.
            macs: flops as f64 / 2.0 / count,
            seconds: summary.step_seconds_total / count,
            modules: envs
                .iter()
                .map(|env| env.modules.iter().filter(takes_part).map(name).collect())
                .collect(),
        }
    }
}

impl MethodReport {
    /// A report of a method before its first run.
    pub(super) fn new(method: &str) -> Self {
        Self {
            method: method.into(),
            lr: None,
            at_edge: false,
            tuning: vec![],
            test_score: None,
            parameters: None,
            macs: None,
            seconds: None,
            difference_pp: BTreeMap::new(),
            diverged: vec![],
            runs: vec![],
        }
    }

    /// Chooses the best rate of the tuning: the highest control score, and of equal ones the
    /// smallest rate.
    pub(super) fn choose(&mut self) {
        let scored = self.tuning.iter().enumerate();
        let scored = scored.filter_map(|(place, rate)| Some((place, rate.control_score?)));
        let better =
            |best: (usize, f64), own: (usize, f64)| if own.1 > best.1 { own } else { best };
        let best = scored.reduce(better).map(|(place, _)| place);
        self.lr = best.map(|place| self.tuning[place].lr);
        self.at_edge = best.is_some_and(|place| place == 0 || place + 1 == self.tuning.len());
    }

    fn test_scores(&self) -> impl Iterator<Item = (u64, f64)> {
        self.runs.iter().map(|run| (run.seed, run.test_score))
    }
}

/// Computes the statistics of all methods from their runs.
pub(super) fn summarise(methods: &mut [MethodReport]) {
    let scores: Vec<(String, Vec<(u64, f64)>)> =
        methods.iter().map(|own| (own.method.clone(), own.test_scores().collect())).collect();
    for own in methods {
        let spread = |of: fn(&SeedReport) -> f64| {
            Spread::from_values(&own.runs.iter().map(of).collect::<Vec<f64>>())
        };
        own.test_score = spread(|run| run.test_score);
        own.parameters = spread(|run| run.parameters);
        own.macs = spread(|run| run.macs);
        own.seconds = spread(|run| run.seconds);
        let others = scores.iter().filter(|(name, _)| *name != own.method);
        let difference = |(name, others): &(String, Vec<(u64, f64)>)| {
            let pair = |(seed, score): (u64, f64)| {
                let (_, other) = others.iter().find(|(known, _)| *known == seed)?;
                Some((100.0 * score, 100.0 * other))
            };
            let pairs: Vec<(f64, f64)> = own.test_scores().filter_map(pair).collect();
            Some((name.clone(), PairedDifference::from_pairs(&pairs)?))
        };
        own.difference_pp = others.filter_map(difference).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seed: u64, test_score: f64) -> SeedReport {
        SeedReport {
            seed,
            test_score,
            control_score: 0.0,
            parameters: 10.0,
            steps: 1,
            macs: 4.0,
            seconds: 1.0,
            modules: vec![],
        }
    }

    #[test]
    fn the_best_rate_has_the_highest_control_score_and_a_failed_one_is_not_chosen() {
        let chosen = |scores: &[Option<f64>]| {
            let mut report = MethodReport::new("none");
            let rates = [0.1, 0.2, 0.3, 0.4].into_iter().zip(scores);
            report.tuning =
                rates.map(|(lr, score)| RateReport { lr, control_score: *score }).collect();
            report.choose();
            (report.lr, report.at_edge)
        };
        assert_eq!(chosen(&[Some(0.5), Some(0.7), Some(0.7), None]), (Some(0.2), false));
        assert_eq!(chosen(&[Some(-3.0), Some(-2.0), None, None]), (Some(0.2), false));
        assert_eq!(chosen(&[Some(0.5), Some(0.4), Some(0.3), Some(0.6)]), (Some(0.4), true));
        assert_eq!(chosen(&[Some(0.5), Some(0.4), None, None]), (Some(0.1), true));
        assert_eq!(chosen(&[None; 4]), (None, false));
        assert_eq!(chosen(&[]), (None, false));
    }

    /// The second method lacks the last seed.
    #[test]
    fn differences_are_paired_by_seed() {
        let mut methods = ["none", "static", "policy"].map(MethodReport::new);
        methods[0].runs = vec![run(7, 0.25), run(8, 0.5), run(9, 1.0)];
        methods[1].runs = vec![run(8, 0.25), run(7, 0.5)];
        summarise(&mut methods);
        let difference = methods[1].difference_pp["none"];
        assert_eq!((difference.spread.count, difference.spread.mean), (2, 0.0));
        assert_eq!(
            (difference.spread.std.map(|std| std * std), difference.ahead),
            (Some(1250.0), 1)
        );
        assert_eq!(methods[0].difference_pp["static"].ahead, 1);
        assert_eq!(methods[0].test_score.unwrap().count, 3);
        assert!(!methods[0].difference_pp.contains_key("policy"));
        assert_eq!(methods[2].test_score, None);
    }
}

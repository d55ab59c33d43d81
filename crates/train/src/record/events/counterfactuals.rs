//! Results of evaluating an env with different sets of its modules: the counterfactual evaluation.

use meristem_nn::PairedLoss;
use serde::{Deserialize, Serialize};

use crate::record::null_as_nan;

/// Counterfactual evaluation of an env: control scores with different sets of modules, and the
/// contributions that follow from them (`docs/growth.md`, Contributions).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counterfactuals {
    /// Number of the env.
    pub env: usize,
    /// Number of the round.
    pub round: usize,
    /// Number of the step.
    pub step: usize,
    /// Score of the unchanged network.
    #[serde(rename = "accuracy", alias = "f1", alias = "r2", deserialize_with = "null_as_nan")]
    pub score: f64,
    /// Contributions of the live modules with an alpha above 0.
    pub modules: Vec<ModuleOff>,
    /// Interactions of pairs of modules.
    pub interactions: Vec<ModulePair>,
    /// All evaluated configurations, each set of modules once; the first has all modules on.
    pub configurations: Vec<ModulesOn>,
    /// Cost of the evaluation.
    pub cost: CounterfactualCost,
}

/// Contribution of a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleOff {
    /// Name of the slot.
    pub slot: String,
    /// Control score without the module.
    #[serde(
        rename = "accuracy_without",
        alias = "f1_without",
        alias = "r2_without",
        deserialize_with = "null_as_nan"
    )]
    pub score_without: f64,
    /// Score with the module minus score without it, in percentage points.
    pub contribution: f64,
    /// Control loss without the module minus control loss with it, and its standard error, from the
    /// differences of the images.
    #[serde(default)]
    pub contribution_loss: Option<PairedLoss>,
    /// Shapley value in percentage points: the module's mean gain over all orders of switching
    /// modules on. The values sum to the score with all modules minus the score with none.
    /// Exact up to four modules; with more it is an estimate, made only in the last step of an
    /// episode.
    pub shapley: Option<f64>,
}

/// Interaction of two modules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModulePair {
    /// Names of their slots.
    pub slots: [String; 2],
    /// Score with both, minus the scores with each alone, plus the score with neither, in
    /// percentage points.
    pub interaction: f64,
}

/// Configuration: the set of live modules that are on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModulesOn {
    /// Slots of the modules that are on.
    pub on: Vec<String>,
    /// Control score.
    #[serde(rename = "accuracy", alias = "f1", alias = "r2", deserialize_with = "null_as_nan")]
    pub score: f64,
    /// Control loss.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
}

/// Cost of evaluating an env in several configurations, and of evaluating them one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterfactualCost {
    /// Number of requested configurations.
    pub configurations: usize,
    /// Number of distinct configurations, which were evaluated.
    pub evaluated: usize,
    /// Number of images.
    pub images: u64,
    /// Floating-point operations per image of the one pass that evaluates all configurations; with
    /// a loss that the program computes, of one pass for each evaluated configuration.
    pub flops: u64,
    /// Floating-point operations per image of separate passes, one for each requested
    /// configuration.
    pub flops_separate: u64,
}

//! Results of evaluating an env with different sets of its modules: the counterfactual evaluation.

use meristem_nn::PairedLoss;
use serde::{Deserialize, Serialize};

use crate::record::null_as_nan;

/// Counterfactual evaluation of an env: control accuracies with different sets of modules, and the
/// contributions that follow from them (`docs/growth.md`, Contributions).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counterfactuals {
    /// Number of the env.
    pub env: usize,
    /// Number of the round.
    pub round: usize,
    /// Number of the step.
    pub step: usize,
    /// Accuracy of the unchanged network.
    pub accuracy: f64,
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
    /// Control accuracy without the module.
    pub accuracy_without: f64,
    /// Accuracy with the module minus accuracy without it, in percentage points.
    pub contribution: f64,
    /// Control loss without the module minus control loss with it, and its standard error, from the
    /// differences of the images.
    #[serde(default)]
    pub contribution_loss: Option<PairedLoss>,
    /// Shapley value in percentage points: the module's mean gain over all orders of switching
    /// modules on. The values sum to the accuracy with all modules minus the accuracy with none.
    /// Exact up to four modules; with more it is an estimate, made only in the last step of an
    /// episode.
    pub shapley: Option<f64>,
}

/// Interaction of two modules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModulePair {
    /// Names of their slots.
    pub slots: [String; 2],
    /// Accuracy with both, minus the accuracies with each alone, plus the accuracy with neither, in
    /// percentage points.
    pub interaction: f64,
}

/// Configuration: the set of live modules that are on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModulesOn {
    /// Slots of the modules that are on.
    pub on: Vec<String>,
    /// Control accuracy.
    pub accuracy: f64,
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
    /// Floating-point operations per image of the single pass.
    pub flops: u64,
    /// Floating-point operations per image of one full pass for each requested configuration.
    pub flops_separate: u64,
}

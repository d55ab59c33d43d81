//! State of an env in a checkpoint.

use meristem_control::{History, Op, RewardState};
use meristem_grow::{GateInputs, Topology};
use meristem_nn::{EvalMetrics, Metrics, StateDict};
use serde::{Deserialize, Serialize};

use super::guard::Guard;
use crate::record::summary::ModuleCounts;

/// Saved env.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SavedEnv {
    pub(crate) state: EnvState,
    pub(crate) tensors: EnvTensors,
}

/// State of an env, without tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EnvState {
    pub(crate) topology: Topology,
    pub(crate) measured: Vec<GateInputs>,
    pub(crate) interactions_pp: Vec<Option<f32>>,
    pub(crate) accuracies_pp: Vec<f32>,
    pub(crate) losses: Vec<f32>,
    #[serde(default)]
    pub(crate) train_losses: Vec<f32>,
    pub(crate) slot_history: History,
    pub(crate) reward_state: RewardState,
    pub(crate) last: Option<(Op, bool)>,
    pub(crate) train: Metrics,
    pub(crate) control: Option<EvalMetrics>,
    pub(crate) history: ModuleCounts,
    pub(crate) guard: Guard,
    /// Floating-point operations of training in this episode.
    #[serde(default)]
    pub(crate) training_flops: u64,
    /// State of the twin, if there is one.
    #[serde(default)]
    pub(crate) twin: Option<TwinState>,
}

/// State of an env's twin, without tensors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TwinState {
    pub(crate) training_flops: u64,
    pub(crate) diverged: bool,
}

/// Tensors of an env, with PyTorch's names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct EnvTensors {
    /// Parameters and running statistics.
    pub(crate) weights: StateDict,
    /// Momentum of the optimiser.
    pub(crate) optimiser: StateDict,
    /// Snapshot of the governor.
    pub(crate) snapshot: StateDict,
    /// Gradients that the ranks have not sent yet, with the names from `fleet::Replicas`.
    pub(crate) exchange: StateDict,
    /// Tensors of the twin; empty without one.
    pub(crate) twin: TwinTensors,
}

/// Tensors of an env's twin, with PyTorch's names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TwinTensors {
    /// Parameters and running statistics.
    pub(crate) weights: StateDict,
    /// Momentum of the optimiser.
    pub(crate) optimiser: StateDict,
}

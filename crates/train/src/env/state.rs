//! State of an env in a checkpoint.

use meristem_grow::Topology;
use meristem_nn::{EvalMetrics, Metrics, StateDict};
use serde::{Deserialize, Serialize};

use super::{GovernorState, Measurements, NewFeatures};
use crate::record::summary::ModuleCounts;

/// Saved env, with its twin.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SavedEnv {
    /// Index of the env in the run.
    pub(crate) index: usize,
    pub(crate) state: EnvState,
    pub(crate) tensors: EnvTensors,
}

/// State of an env, without tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EnvState {
    // As in `Env` and its `TrainedHost`.
    pub(crate) topology: Topology,
    #[serde(flatten)]
    pub(crate) seen: Measurements,
    #[serde(rename = "train")]
    pub(crate) metrics: Metrics,
    pub(crate) control: Option<EvalMetrics>,
    #[serde(rename = "history")]
    pub(crate) module_counts: ModuleCounts,
    #[serde(rename = "guard")]
    pub(crate) governor: GovernorState,
    /// Floating-point operations of training in this episode.
    #[serde(default)]
    pub(crate) training_flops: u64,
    /// Features that layers got in this episode; empty with the setting `growth_lr = "uniform"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) new_features: Vec<NewFeatures>,
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
    /// Tensors of the grown host.
    pub(crate) grown: TrainedTensors,
    /// Snapshot of the governor.
    pub(crate) snapshot: StateDict,
    /// State of the exchange between the ranks, such as gradients that they have not sent yet, with
    /// the names from `resources::Replicas`.
    pub(crate) exchange: StateDict,
    /// Tensors of the twin; empty without a twin, and if the twin diverged.
    pub(crate) twin: TrainedTensors,
}

/// Tensors of a network in training, with PyTorch's names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TrainedTensors {
    /// Parameters and running statistics.
    pub(crate) weights: StateDict,
    /// State of the optimisers, and counts of dropout batches
    /// ([`Network::momentum_dict`](meristem_nn::Network::momentum_dict)).
    pub(crate) optimiser: StateDict,
}

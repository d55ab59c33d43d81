//! Measurements of an env since the start of its trajectory.

use meristem_control::{ActionOp, RewardState, SlotHistories};
use meristem_grow::{GateInputs, Host, ParameterCounts};
use serde::{Deserialize, Serialize};

/// Measurements of an env since the start of the episode or the last rollback: decisions and
/// rewards follow from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measurements {
    /// Gradient health and contribution of each enabled slot in the last step; `None` if it was not
    /// measured in that step. A contribution that the program measures stays until its next score.
    pub(crate) measured: Vec<GateInputs>,
    /// For each enabled slot, the sum of its module's interactions with the others in the last
    /// step, in percentage points.
    pub(crate) interactions_pp: Vec<Option<f32>>,
    /// Control score after each step, in percentage points. With learners: each score that the
    /// program measured.
    #[serde(rename = "accuracies_pp")]
    pub(crate) scores_pp: Vec<f32>,
    /// Control loss after each step; empty with learners.
    pub(crate) losses: Vec<f32>,
    /// Training loss of each step; empty with learners.
    #[serde(default)]
    pub(crate) train_losses: Vec<f32>,
    /// States of the slots in the last steps.
    pub(crate) slot_history: SlotHistories,
    /// State that the next reward is computed against.
    pub(crate) reward_state: RewardState,
    /// The last op, and whether it succeeded.
    pub(crate) last: Option<(ActionOp, bool)>,
}

impl Measurements {
    /// No measurements yet, of a host with these parameters.
    pub(super) fn new(host: &Host, parameters: &ParameterCounts) -> Self {
        let slots = host.slots().len();
        Self {
            measured: vec![GateInputs::default(); slots],
            interactions_pp: vec![None; slots],
            scores_pp: vec![],
            losses: vec![],
            train_losses: vec![],
            slot_history: SlotHistories::default(),
            reward_state: RewardState::begin(host, parameters),
            last: None,
        }
    }
}

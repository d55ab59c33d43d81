//! Slots, and the modules in them.

use std::sync::Arc;

use meristem_nn::graph::Dims;
use serde::{Deserialize, Serialize};

use super::alpha::{AlphaController, AlphaTarget, Curve, Style, Tempo};
use super::error::{AlphaError, LifecycleError};
use super::stage::Stage;
use crate::blueprint::Blueprint;
use crate::spec::SlotName;

/// Place of a module in the network while it is live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Birth {
    /// Beside the host. In Training the module learns, but the output of the host ignores it. Then
    /// alpha blends the module in. The input of the module is detached until the module is
    /// fossilized.
    Aside,
    /// In the host, with alpha 1 from Training on and gradients through its input. A new module is
    /// the identity, so the host's function is the same before its first update.
    #[default]
    Joint,
}

impl Birth {
    /// All births.
    pub const ALL: [Birth; 2] = [Birth::Aside, Birth::Joint];

    /// Name in settings and files.
    pub fn name(self) -> &'static str {
        match self {
            Birth::Aside => "aside",
            Birth::Joint => "joint",
        }
    }

    /// The birth of modules in files without one.
    pub(crate) fn aside() -> Self {
        Birth::Aside
    }

    /// Whether it is [`Birth::aside`], which files omit.
    pub(crate) fn is_aside(&self) -> bool {
        *self == Birth::Aside
    }
}

/// Parameters of a germination: blueprint, blending and target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Germination {
    /// Index of the blueprint in the host's set.
    pub blueprint: usize,
    /// Blending style.
    pub style: Style,
    /// Duration of the blending.
    pub tempo: Tempo,
    /// Alpha at the end of the blending.
    pub alpha_target: AlphaTarget,
    /// Current control score of the host in percentage points, from which the gain since the
    /// germination is computed later; `None` if unknown.
    pub score_pp: Option<f32>,
}

/// A module in a slot, with its blending.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Module {
    /// The blueprint.
    pub blueprint: Arc<Blueprint>,
    /// Index of the blueprint in the host's set.
    pub blueprint_index: usize,
    /// Place in the network until it is fossilized.
    pub birth: Birth,
    /// Blending style.
    pub style: Style,
    /// Duration of the first blending.
    pub tempo: Tempo,
    /// Alpha at the end of the first blending.
    pub alpha_target: f32,
    /// Alpha: 0 until Blending, 1 once fossilized. With [`Birth::Joint`] it only times the stages:
    /// [`Slot::alpha`] is 1 from Training on, until alpha moves to 0 for the removal.
    pub alpha: AlphaController,
    /// Steps since germination.
    pub age_steps: u32,
    /// Whether alpha is moving to 0 for the removal of the module.
    pub pruning: bool,
    /// Control score of the host at germination in percentage points; `None` if unknown.
    pub score_at_germination_pp: Option<f32>,
}

impl Module {
    /// A module in stage Germinated: not in the network, with alpha 0.
    pub(crate) fn germinated(
        blueprint: Arc<Blueprint>,
        birth: Birth,
        germination: Germination,
    ) -> Self {
        Self {
            blueprint,
            blueprint_index: germination.blueprint,
            birth,
            style: germination.style,
            tempo: germination.tempo,
            alpha_target: germination.alpha_target.value(),
            alpha: AlphaController::at_rest(0.0),
            age_steps: 0,
            pruning: false,
            score_at_germination_pp: germination.score_pp,
        }
    }

    /// Checks that alpha is at rest; the error has the slot's name.
    pub(crate) fn check_at_rest(&self, slot: &SlotName) -> Result<(), LifecycleError> {
        let alpha = &self.alpha;
        if alpha.is_at_rest() {
            return Ok(());
        }
        let (target, steps_to_go) = (alpha.target(), alpha.steps_to_go());
        let source = AlphaError::NotAtRest { target, steps_to_go };
        Err(LifecycleError::Alpha { slot: slot.clone(), source })
    }

    /// Moves alpha to a new target; the error has the slot's name.
    pub(crate) fn retarget(
        &mut self,
        slot: &SlotName,
        target: f32,
        steps: u32,
        curve: Curve,
    ) -> Result<(), LifecycleError> {
        let moved = self.alpha.retarget(target, steps, curve);
        moved.map_err(|source| LifecycleError::Alpha { slot: slot.clone(), source })
    }
}

/// An enabled slot of a host.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Slot {
    /// Name.
    pub name: SlotName,
    /// Shape of the tensor at this slot, for one sample.
    pub dims: Dims,
    /// Stage.
    pub stage: Stage,
    /// Epochs begun in this stage; 0 immediately after the action that entered it.
    pub stage_steps: u32,
    /// The module, in the stages Germinated to Fossilized.
    pub module: Option<Module>,
}

/// A completed change of stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageChange {
    /// Index of the slot in its host.
    pub index: usize,
    /// Name of the slot.
    pub slot: SlotName,
    /// Stage before.
    pub from: Stage,
    /// Stage after.
    pub to: Stage,
}

impl Slot {
    pub(crate) fn new(name: SlotName, dims: Dims) -> Self {
        Self { name, dims, stage: Stage::Dormant, stage_steps: 0, module: None }
    }

    /// Alpha of the module in the network; 0 without one.
    pub fn alpha(&self) -> f32 {
        let Some(module) = &self.module else { return 0.0 };
        if self.is_joint() && !module.pruning { 1.0 } else { module.alpha.alpha() }
    }

    /// Whether a live module of [`Birth::Joint`] computes.
    pub(crate) fn is_joint(&self) -> bool {
        let computes = matches!(self.stage, Stage::Training | Stage::Blending | Stage::Holding);
        computes && self.module.as_ref().is_some_and(|module| module.birth == Birth::Joint)
    }

    /// Whether the module is being removed.
    pub fn is_pruning(&self) -> bool {
        self.module.as_ref().is_some_and(|module| module.pruning)
    }

    /// The error for an action in the wrong stage.
    pub(crate) fn wrong_stage(&self, action: &'static str, needs: &'static str) -> LifecycleError {
        let (slot, stage) = (self.name.clone(), self.stage);
        LifecycleError::WrongStage { slot, action, needs, stage }
    }

    /// Enters a stage; every change of stage goes through this function.
    pub(crate) fn enter(&mut self, index: usize, to: Stage) -> Result<StageChange, LifecycleError> {
        let (slot, from) = (self.name.clone(), self.stage);
        if !from.can_become(to) {
            return Err(LifecycleError::Transition { slot, from, to });
        }
        self.stage = to;
        self.stage_steps = 0;
        if !to.is_occupied() {
            self.module = None;
        }
        Ok(StageChange { index, slot, from, to })
    }
}

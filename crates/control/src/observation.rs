//! Observations: a policy's view of an env, as numbers in a fixed layout.
//!
//! A row is the [`BaseObservation`] followed by one [`SlotObservation`] per enabled slot. Both are
//! written field by field, in the order of declaration. The blueprints of the slots are separate
//! indices, for the policy's embedding. `docs/control.md`, Observation, has the scales. Here T is
//! the number of steps of an episode, and L(x) = sign(x)·ln(1 + |x|)/7.

use meristem_grow::{AlphaMode, Module, Slot, Stage};
use meristem_nn::graph::BlendMode;

use crate::action::ActionOp;
use crate::history::SlotHistory;
use crate::view::EnvView;

/// Number of recent steps whose losses and scores are in an observation.
pub const RECENT_STEPS: usize = 5;

/// Decay per step of the confidence in a counterfactual measurement.
const COUNTERFACTUAL_DECAY: f32 = 0.995;

/// Substitute for a loss or a norm that is not finite.
const NOT_FINITE: f32 = 1e6;

/// An observation of the whole env.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BaseObservation {
    /// Step / T. In [0, 1].
    pub step: f32,
    /// L(current control loss); −1 before the first step.
    pub loss: f32,
    /// Current control score, in [0, 1]; −1 before the first step.
    pub score: f32,
    /// L(control loss) of the last five steps, the newest last; −1 for missing steps.
    pub recent_losses: [f32; RECENT_STEPS],
    /// Control score, in [0, 1], of the last five steps, the newest last; −1 for missing steps.
    pub recent_scores: [f32; RECENT_STEPS],
    /// Share of the enabled slots in Training.
    pub training_share: f32,
    /// Share of the enabled slots in Blending.
    pub blending_share: f32,
    /// Share of the enabled slots in Holding or Fossilized.
    pub settled_share: f32,
    /// 1 if the last action succeeded, else 0; 0 in the first step and in the step of a rollback.
    pub last_succeeded: f32,
    /// One-hot of the last op; zeros after WIDEN, in the first step and in the step of a rollback.
    pub last_op: [f32; ActionOp::OF_HEAD.len()],
}

/// An observation of one slot. A dormant slot is all zeros. A slot that waits for reuse (Pruned,
/// Embargoed, Resetting) has only `stage` and `stage_steps`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlotObservation {
    /// 1 if the slot has a module.
    pub occupied: f32,
    /// One-hot of the stage, in the order of [`Stage::ALL`]; the tenth position is always 0.
    pub stage: [f32; Stage::ONE_HOT],
    /// Alpha.
    pub alpha: f32,
    /// Contribution in percentage points / 10, clipped to ±1; 0 before the first measurement.
    pub contribution: f32,
    /// Change between the last two contributions in percentage points / 10, clipped to ±1.
    pub contribution_velocity: f32,
    /// Steps of the module's first blending / 12.
    pub tempo: f32,
    /// Target of alpha: the module's target before Blending, the alpha controller's from then on.
    pub target: f32,
    /// Mode of the alpha controller (rest 0, up 1, down 2) / 2.
    pub mode: f32,
    /// Length of the alpha controller's last move, in steps / T.
    pub steps_total: f32,
    /// Steps of the move that are done / T.
    pub steps_done: f32,
    /// Steps of the move that are left / T.
    pub steps_to_go: f32,
    /// Change of alpha since the last step.
    pub alpha_velocity: f32,
    /// Mode of the blending style (add 0, multiply 1, gate 2) / 2.
    pub blend: f32,
    /// Sum of the interactions with other modules in percentage points / 10, clipped to ±1.
    pub interaction_sum: f32,
    /// L(L2 norm of the module's gradient in this step); 0 if not measured.
    pub gradient_norm: f32,
    /// Gradient health in this step, in [0, 1]; 0 if not measured.
    pub health: f32,
    /// Share of tensors whose gradient vanished.
    pub vanishing: f32,
    /// Share of tensors whose gradient exploded.
    pub exploding: f32,
    /// Gradient health in the step before; −1 if unknown.
    pub previous_health: f32,
    /// Steps in the current stage / T.
    pub stage_steps: f32,
    /// .995 to the power of the steps since the last counterfactual; −1 before the first one.
    pub counterfactual_freshness: f32,
    /// Age of the module in steps / T.
    pub age: f32,
}

impl BaseObservation {
    /// Number of floats.
    pub const LEN: usize = 23;

    /// Observes an env.
    pub fn from_view(view: &EnvView<'_>) -> Self {
        let slots = view.host.slots();
        let share = |stages: &[Stage]| {
            let count = slots.iter().filter(|slot| stages.contains(&slot.stage)).count();
            count as f32 / slots.len().max(1) as f32
        };
        let recent_losses = last(view.losses, log_scale);
        let recent_scores = last(view.scores_pp, |pp| if_finite(pp / 100.0));
        let mut last_op = [0.0; ActionOp::OF_HEAD.len()];
        // No position for WIDEN: policies that choose it see when each layer became wider.
        if let Some(last) = view.last.and_then(|(op, _)| last_op.get_mut(op.index())) {
            *last = 1.0;
        }
        Self {
            step: over(view.step, view.episode_steps),
            loss: recent_losses[RECENT_STEPS - 1],
            score: recent_scores[RECENT_STEPS - 1],
            recent_losses,
            recent_scores,
            training_share: share(&[Stage::Training]),
            blending_share: share(&[Stage::Blending]),
            settled_share: share(&[Stage::Holding, Stage::Fossilized]),
            last_succeeded: f32::from(u8::from(view.last.is_some_and(|(_, succeeded)| succeeded))),
            last_op,
        }
    }

    pub(crate) fn write(&self, row: &mut RowWriter<'_>) {
        row.all(&[self.step, self.loss, self.score]);
        row.all(&self.recent_losses);
        row.all(&self.recent_scores);
        row.all(&[self.training_share, self.blending_share, self.settled_share]);
        row.all(&[self.last_succeeded]);
        row.all(&self.last_op);
    }
}

impl SlotObservation {
    /// Number of floats.
    pub const LEN: usize = 31;

    /// Observes slot `index` of an env.
    pub fn from_view(view: &EnvView<'_>, index: usize) -> Self {
        let slot = &view.host.slots()[index];
        if slot.stage == Stage::Dormant {
            return Self::default();
        }
        let mut stage = [0.0; Stage::ONE_HOT];
        stage[slot.stage.index()] = 1.0;
        let stage_steps = over(slot.stage_steps, view.episode_steps);
        let waiting = Self { stage, stage_steps, ..Self::default() };
        match &slot.module {
            Some(module) => waiting.with_module(view, slot, module, index),
            None => waiting,
        }
    }

    fn with_module(self, view: &EnvView<'_>, slot: &Slot, module: &Module, index: usize) -> Self {
        let history = view.history.get(index).copied().unwrap_or_default();
        let SlotHistory { contribution_pp, health: known_health, .. } = history;
        let alpha = &module.alpha;
        let steps = |steps: u32| over(steps, view.episode_steps);
        let before_blending = matches!(slot.stage, Stage::Germinated | Stage::Training);
        let health = view.measured(index).gradient_health;
        let freshness = |steps: u32| COUNTERFACTUAL_DECAY.powf(steps as f32);
        Self {
            occupied: 1.0,
            alpha: slot.alpha(),
            contribution: tenths(contribution_pp.now.unwrap_or(0.0)),
            contribution_velocity: tenths(contribution_pp.change()),
            tempo: module.tempo.steps() as f32 / 12.0,
            target: if before_blending { module.alpha_target } else { alpha.target() },
            mode: match alpha.mode() {
                AlphaMode::Rest => 0.0,
                AlphaMode::Up => 0.5,
                AlphaMode::Down => 1.0,
            },
            steps_total: steps(alpha.steps_total()),
            steps_done: steps(alpha.steps_done()),
            steps_to_go: steps(alpha.steps_to_go()),
            alpha_velocity: history.alpha.change(),
            blend: match module.style.blend_mode() {
                BlendMode::Add => 0.0,
                BlendMode::Multiply => 0.5,
                BlendMode::Gate => 1.0,
            },
            interaction_sum: tenths(history.interaction_sum_pp.unwrap_or(0.0)),
            gradient_norm: health.map_or(0.0, |health| log_scale(health.norm as f32)),
            health: health.map_or(0.0, |health| health.health as f32),
            vanishing: health.map_or(0.0, |health| health.vanishing as f32),
            exploding: health.map_or(0.0, |health| health.exploding as f32),
            previous_health: known_health.before.unwrap_or(-1.0),
            counterfactual_freshness: history.steps_since_counterfactual.map_or(-1.0, freshness),
            age: steps(module.age_steps),
            ..self
        }
    }

    pub(crate) fn write(&self, row: &mut RowWriter<'_>) {
        row.all(&[self.occupied]);
        row.all(&self.stage);
        row.all(&[self.alpha, self.contribution, self.contribution_velocity]);
        row.all(&[self.tempo, self.target, self.mode]);
        row.all(&[self.steps_total, self.steps_done, self.steps_to_go]);
        row.all(&[self.alpha_velocity, self.blend, self.interaction_sum, self.gradient_norm]);
        row.all(&[self.health, self.vanishing, self.exploding, self.previous_health]);
        row.all(&[self.stage_steps, self.counterfactual_freshness, self.age]);
    }
}

/// Floats of an observation with `slots` enabled slots S: 23 + 31·S.
pub fn observation_len(slots: usize) -> usize {
    BaseObservation::LEN + SlotObservation::LEN * slots
}

/// Writes an env's observation into `row` (23 + 31·S floats), and the blueprints of its slots into
/// `blueprints` (S indices in the host's blueprint set). An empty slot has the index
/// `blueprints().len()`.
///
/// Values beyond the end of either slice are dropped.
pub fn write_observation(view: &EnvView<'_>, row: &mut [f32], blueprints: &mut [u32]) {
    let mut row = RowWriter::new(row);
    BaseObservation::from_view(view).write(&mut row);
    for index in 0..view.host.slots().len() {
        SlotObservation::from_view(view, index).write(&mut row);
    }
    let empty = view.host.blueprints().len();
    for (blueprint, slot) in blueprints.iter_mut().zip(view.host.slots()) {
        *blueprint = slot.module.as_ref().map_or(empty, |module| module.blueprint_index) as u32;
    }
}

/// The part of a row that is not yet written.
pub(crate) struct RowWriter<'a> {
    rest: &'a mut [f32],
}

impl<'a> RowWriter<'a> {
    pub(crate) fn new(row: &'a mut [f32]) -> Self {
        Self { rest: row }
    }

    pub(crate) fn all(&mut self, values: &[f32]) {
        let rest = std::mem::take(&mut self.rest);
        let (here, rest) = rest.split_at_mut(values.len().min(rest.len()));
        here.copy_from_slice(&values[..here.len()]);
        self.rest = rest;
    }
}

/// L(x); a value that is not finite counts as 10^6.
pub(crate) fn log_scale(x: f32) -> f32 {
    let x = if x.is_finite() { x } else { NOT_FINITE };
    x.signum() * x.abs().ln_1p() / 7.0
}

pub(crate) fn if_finite(x: f32) -> f32 {
    if x.is_finite() { x } else { 0.0 }
}

/// Percentage points / 10, clipped to ±1.
fn tenths(pp: f32) -> f32 {
    (if_finite(pp) / 10.0).clamp(-1.0, 1.0)
}

pub(crate) fn over(steps: u32, episode_steps: u32) -> f32 {
    steps as f32 / episode_steps.max(1) as f32
}

/// The last five values, the newest last; −1 for missing values.
fn last(values: &[f32], scale: impl Fn(f32) -> f32) -> [f32; RECENT_STEPS] {
    let mut recent = [-1.0; RECENT_STEPS];
    for (place, value) in recent.iter_mut().rev().zip(values.iter().rev()) {
        *place = scale(*value);
    }
    recent
}

/// Mean of the last three values, as the heuristic compares losses; 0 without a value.
pub(crate) fn recent_mean(values: &[f32]) -> f32 {
    let last = &values[values.len().saturating_sub(3)..];
    last.iter().sum::<f32>() / last.len().max(1) as f32
}

//! A controller of written rules (`docs/control.md`, Controllers).

use std::cmp::Reverse;

use meristem_grow::{Curve, Host, Speed, Stage};
use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::budget::fitting_modules;
use crate::controller::Controller;
use crate::error::Result;
use crate::heuristic_config::{HeuristicConfig, WidenTrigger};
use crate::rules::legal;
use crate::state::ControllerState;
use crate::trend::Trend;
use crate::view::EnvView;
use crate::widening;

/// Steps over which losses are averaged for the comparison with `max_gap`.
const GAP_STEPS: usize = 3;

/// Memory of the heuristic about one env. Penalties are kept from one episode to the next.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct HeuristicMemory {
    /// Penalty per blueprint.
    penalties: Vec<f64>,
    /// Steps since the last prune; 1 in the first step after it.
    steps_since_prune: Option<u32>,
    /// Blueprint in each slot at the last step.
    seen: Vec<Option<usize>>,
    /// Steps since a layer became wider; 1 in the first step after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    steps_since_widen: Option<u32>,
    /// Orthogonality of each layer's activations in the first step of the episode, if measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    first_orthogonality: Vec<f32>,
}

/// Grows the largest modules within its budget, one after another, until the host overfits. Keeps a
/// module if the control loss is significantly higher without it, by default. If `widen_by` is
/// above 0, also widens layers when no module is due, by the rules `widen_trigger` and
/// `widen_place`.
///
/// A module that has disappeared counts as pruned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Heuristic {
    config: HeuristicConfig,
    memories: Vec<Option<HeuristicMemory>>, // [envs]
}

impl Heuristic {
    /// A controller with these constants.
    pub fn new(config: HeuristicConfig) -> Self {
        Self { config, memories: vec![] }
    }

    /// The constants.
    pub fn config(&self) -> &HeuristicConfig {
        &self.config
    }

    fn memory(&mut self, env: usize, host: &Host) -> &mut HeuristicMemory {
        let (blueprints, slots) = (host.blueprints().len(), host.slots().len());
        if self.memories.len() <= env {
            self.memories.resize(env + 1, None);
        }
        let memory = self.memories[env].get_or_insert_with(HeuristicMemory::default);
        memory.penalties.resize(blueprints, 0.0);
        memory.seen.resize(slots, None);
        memory
    }
}

impl Default for Heuristic {
    fn default() -> Self {
        Self::new(HeuristicConfig::default())
    }
}

impl Controller for Heuristic {
    fn name(&self) -> &str {
        "heuristic"
    }

    fn save(&self) -> Result<ControllerState> {
        ControllerState::from_memory(self.name(), &self.memories)
    }

    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        self.memories = state.memory(self.name())?;
        Ok(())
    }

    fn copy_env(&mut self, from: usize, to: usize) {
        let memory = self.memories.get(from).cloned().flatten();
        if self.memories.len() <= to {
            self.memories.resize(to + 1, None);
        }
        self.memories[to] = memory;
    }

    fn begin_episode(&mut self, env: usize) {
        if let Some(Some(memory)) = self.memories.get_mut(env) {
            memory.steps_since_prune = None;
            memory.steps_since_widen = None;
            memory.first_orthogonality.clear();
            memory.seen.clear();
        }
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        let config = self.config;
        Ok(views.iter().map(|view| self.decide(view, &config)).collect())
    }
}

impl Heuristic {
    /// Chooses an action for a live module; if none is due, germinates another module, or else
    /// widens a layer.
    pub(crate) fn decide(&mut self, view: &EnvView<'_>, config: &HeuristicConfig) -> Action {
        let memory = self.memory(view.env, view.host);
        memory.notice(view.host, config);
        if memory.first_orthogonality.is_empty() {
            memory.first_orthogonality = view.width_scores.orthogonality.clone();
        }
        let actions = view.host.live().map(|index| act_on_module(index, view, config));
        let grown = [HeuristicMemory::germinate, HeuristicMemory::widen];
        let grown = grown.iter().map(|grow| grow(memory, view, config));
        let action = actions
            .chain(grown)
            .find(|action| *action != Action::Wait && legal(action, view.host).is_ok())
            .unwrap_or(Action::Wait);
        if matches!(action, Action::Widen { .. }) {
            memory.steps_since_widen = Some(0);
        }
        action
    }
}

impl HeuristicMemory {
    /// Updates the memory for a new step: penalties decay, and absent modules count as pruned.
    fn notice(&mut self, host: &Host, config: &HeuristicConfig) {
        self.penalties.iter_mut().for_each(|penalty| *penalty *= config.penalty_decay);
        for steps in [&mut self.steps_since_prune, &mut self.steps_since_widen] {
            *steps = steps.map(|steps| steps.saturating_add(1));
        }
        for (seen, slot) in self.seen.iter_mut().zip(host.slots()) {
            let now = slot.module.as_ref().map(|module| module.blueprint_index);
            if let (Some(blueprint), None) = (*seen, now) {
                // A blueprint beyond the end of the host's set gets no penalty.
                if let Some(penalty) = self.penalties.get_mut(blueprint) {
                    *penalty += config.prune_penalty;
                }
                self.steps_since_prune = Some(1);
            }
            *seen = now;
        }
    }

    fn germinate(&self, view: &EnvView<'_>, config: &HeuristicConfig) -> Action {
        let paused = self.steps_since_prune.is_some_and(|s| s < config.pause_after_prune_steps);
        let waits = paused
            || !is_plateau(view.scores_pp, config)
            || overfits(view, config)
            || !can_finish(view, config);
        let HeuristicConfig { style, tempo, alpha_target, .. } = *config;
        match self.place(view.host, config).filter(|_| !waits) {
            Some((slot, blueprint)) => {
                Action::Germinate { slot, blueprint, style, tempo, alpha_target }
            }
            None => Action::Wait,
        }
    }

    /// Widens a layer, by the rules of trigger and place; among equals the first.
    fn widen(&self, view: &EnvView<'_>, config: &HeuristicConfig) -> Action {
        let paused = self.steps_since_widen.is_some_and(|steps| steps < config.widen_pause);
        let is_early =
            config.widen_trigger == WidenTrigger::Plateau && !is_plateau(view.scores_pp, config);
        if config.widen_by == 0.0 || paused || is_early || overfits(view, config) {
            return Action::Wait;
        }
        let next = widening::choose(view, config, &self.first_orthogonality);
        next.map_or(Action::Wait, |next| Action::Widen { layer: next.layer, by: next.by })
    }

    /// Slot and blueprint of the next germination. Only blueprints within the host's budget count;
    /// the smallest penalty wins, then the largest number of parameters.
    fn place(&self, host: &Host, config: &HeuristicConfig) -> Option<(usize, usize)> {
        let best = fitting_modules(host, config).min_by(|one, other| {
            let penalties = [one, other].map(|(_, blueprint, _)| self.penalties[*blueprint]);
            let rank = |(slot, blueprint, size): &(usize, usize, usize)| {
                (Reverse(*size), *slot, *blueprint)
            };
            penalties[0].total_cmp(&penalties[1]).then_with(|| rank(one).cmp(&rank(other)))
        });
        best.map(|(slot, blueprint, _)| (slot, blueprint))
    }
}

/// Whether the gain in score per step, over the last `plateau_steps` steps, is not significantly
/// above `plateau_gain_pp`: the slope minus `significance` standard errors is below it. For a
/// plateau of one step the error is unknown and counts as 0.
fn is_plateau(scores_pp: &[f32], config: &HeuristicConfig) -> bool {
    let steps = config.plateau_steps;
    let Some(from) = scores_pp.len().checked_sub(steps.saturating_add(1)) else {
        return steps == 0;
    };
    steps == 0
        || Trend::fit(&scores_pp[from..]).is_none_or(|trend| {
            let surely = trend.slope - config.significance * trend.standard_error.unwrap_or(0.0);
            surely < f64::from(config.plateau_gain_pp)
        })
}

/// Whether the control loss exceeds the training loss by more than the share `max_gap` of it, both
/// averaged over the last steps. The training loss is measured before each update, half a step
/// earlier on average, so a host that still learns fast does not count as overfitting.
fn overfits(view: &EnvView<'_>, config: &HeuristicConfig) -> bool {
    let mean = |losses: &[f32]| {
        let last = &losses[losses.len().saturating_sub(GAP_STEPS)..];
        last.iter().copied().map(f64::from).sum::<f64>() / last.len() as f64
    };
    mean(view.losses) > (1.0 + config.max_gap) * mean(view.train_losses)
}

/// Whether a module that germinates now can be fossilized before the episode ends. It needs one
/// step to reach Training, then Training, blending and Holding.
fn can_finish(view: &EnvView<'_>, config: &HeuristicConfig) -> bool {
    let training = view.host.rules().gates.min_training_steps;
    let needed = 2u32.saturating_add(training).saturating_add(config.tempo.steps());
    view.step.saturating_add(needed) < view.episode_steps
}

/// The next action for a live module.
fn act_on_module(index: usize, view: &EnvView<'_>, config: &HeuristicConfig) -> Action {
    let slot = &view.host.slots()[index];
    if slot.is_pruning() {
        return Action::Wait;
    }
    let prune = Action::Prune { slot: index, speed: Speed::Instant, curve: Curve::Linear };
    let due = view.host.rules().gates.min_training_steps.saturating_add(config.patience_steps);
    match slot.stage {
        Stage::Germinated => Action::Advance { slot: index },
        // A host that overfits gets no further module: this one is pruned before it is blended in.
        Stage::Training if overfits(view, config) => prune,
        Stage::Training | Stage::Blending if view.gate_passes(index) => {
            Action::Advance { slot: index }
        }
        Stage::Training if slot.stage_steps >= due => prune,
        Stage::Holding if slot.stage_steps >= config.patience_steps => prune,
        Stage::Holding => {
            let measured = view.measured(index).contribution_loss;
            match config.keep_modules.keeps(measured, config.significance) {
                None => Action::Wait,
                Some(true) => Action::Fossilize { slot: index },
                Some(false) => prune,
            }
        }
        _ => Action::Wait,
    }
}

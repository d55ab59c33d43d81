//! A controller of written rules (`docs/control.md`, Controllers).

use meristem_grow::{AlphaTarget, Curve, Host, Module, Slot, Speed, Stage, Style, Tempo};
use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::controller::Controller;
use crate::error::Result;
use crate::rules::legal;
use crate::state::ControllerState;
use crate::view::EnvView;

/// Constants of the heuristic. In files every key is optional and unknown keys are errors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeuristicConfig {
    /// Consecutive steps of small gain before it germinates: 3.
    pub plateau_steps: usize,
    /// Gain in percentage points of control accuracy per step below which it is small: .5.
    pub plateau_gain_pp: f32,
    /// Steps to wait after a prune before it germinates again: 5.
    pub pause_after_prune_steps: u32,
    /// Penalty of a blueprint whose module was pruned: 2.
    pub prune_penalty: f64,
    /// Factor on every penalty, applied each step: .5.
    pub penalty_decay: f64,
    /// Steps in Training after which a drop of accuracy counts: 5.
    pub drop_after_steps: u32,
    /// Drop since germination, in percentage points, that prunes a module in Training: 2.
    pub max_drop_pp: f32,
    /// Contribution in percentage points above which a module in Holding is fossilized: .5.
    pub min_contribution_pp: f32,
    /// Steps for which a gate may keep refusing before the module is pruned: 5. Counted in Training
    /// from `min_training_steps` on and in Holding from the start. Not in the specification:
    /// without it a module that contributes enough for this controller but not for the gate would
    /// block its env for ever.
    pub patience_steps: u32,
    /// Style of every germination: linear_add.
    pub style: Style,
    /// Tempo of every germination: standard (5 steps).
    pub tempo: Tempo,
    /// Alpha target of every germination: 1.
    pub alpha_target: AlphaTarget,
}

impl Default for HeuristicConfig {
    fn default() -> Self {
        Self {
            plateau_steps: 3,
            plateau_gain_pp: 0.5,
            pause_after_prune_steps: 5,
            prune_penalty: 2.0,
            penalty_decay: 0.5,
            drop_after_steps: 5,
            max_drop_pp: 2.0,
            min_contribution_pp: 0.5,
            patience_steps: 5,
            style: Style::LinearAdd,
            tempo: Tempo::Standard,
            alpha_target: AlphaTarget::Full,
        }
    }
}

/// Memory of an env. Rotation and penalties outlast an episode, so that the next one continues
/// them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Memory {
    /// Index of the next blueprint in the rotation.
    next: usize,
    /// Penalty per blueprint.
    penalties: Vec<f64>,
    /// Steps since a prune was noticed; the step after the prune is 1.
    steps_since_prune: Option<u32>,
    /// The blueprint in each slot at the last step.
    seen: Vec<Option<usize>>,
}

/// Grows one module at a time: germinates on a plateau, advances when gates pass, fossilizes
/// modules that contribute.
///
/// The rotation of env e starts at blueprint e (modulo their number), so that the envs of a fleet
/// try different ones. A prune is noticed by the absence of the module, whoever removed it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Heuristic {
    config: HeuristicConfig,
    memories: Vec<Option<Memory>>, // [envs]
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

    fn memory(&mut self, env: usize, host: &Host) -> &mut Memory {
        let (blueprints, slots) = (host.blueprints().len(), host.slots().len());
        if self.memories.len() <= env {
            self.memories.resize(env + 1, None);
        }
        let memory = self.memories[env].get_or_insert_with(|| Memory {
            next: env % blueprints.max(1),
            penalties: vec![],
            steps_since_prune: None,
            seen: vec![],
        });
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
        ControllerState::of(self.name(), &self.memories)
    }

    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        self.memories = state.memory(self.name())?;
        Ok(())
    }

    fn begin_episode(&mut self, env: usize) {
        if let Some(Some(memory)) = self.memories.get_mut(env) {
            memory.steps_since_prune = None;
            memory.seen.clear();
        }
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        Ok(views.iter().map(|view| self.decide(view)).collect())
    }
}

impl Heuristic {
    fn decide(&mut self, view: &EnvView<'_>) -> Action {
        let config = self.config;
        let memory = self.memory(view.env, view.host);
        memory.notice(view.host, &config);
        let mut live = view.host.live().peekable();
        let action = match live.peek() {
            None => memory.germinate(view, &config),
            Some(_) => live
                .map(|index| tend(index, view, &config))
                .find(|action| *action != Action::Wait && legal(action, view.host).is_ok())
                .unwrap_or(Action::Wait),
        };
        if let Action::Germinate { blueprint, .. } = action {
            memory.next = (blueprint + 1) % view.host.blueprints().len();
        }
        action
    }
}

impl Memory {
    /// Takes note of a new step: penalties decay, and modules that are gone count as pruned.
    fn notice(&mut self, host: &Host, config: &HeuristicConfig) {
        self.penalties.iter_mut().for_each(|penalty| *penalty *= config.penalty_decay);
        self.steps_since_prune = self.steps_since_prune.map(|steps| steps.saturating_add(1));
        for (seen, slot) in self.seen.iter_mut().zip(host.slots()) {
            let now = slot.module.as_ref().map(|module| module.blueprint_index);
            if let (Some(blueprint), None) = (*seen, now) {
                // A blueprint that this host's set does not have needs no penalty.
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
        if paused || !is_plateau(view.accuracies_pp, config) {
            return Action::Wait;
        }
        let Some(blueprint) = self.blueprint() else {
            return Action::Wait;
        };
        let Some(slot) = smallest_slot(view.host, blueprint) else {
            return Action::Wait;
        };
        let HeuristicConfig { style, tempo, alpha_target, .. } = *config;
        let action = Action::Germinate { slot, blueprint, style, tempo, alpha_target };
        legal(&action, view.host).map_or(Action::Wait, |()| action)
    }

    /// The blueprint with the smallest penalty; among equals the first in the rotation.
    fn blueprint(&self) -> Option<usize> {
        let n = self.penalties.len();
        let in_turn = (0..n).map(|i| (self.next + i) % n);
        in_turn.min_by(|a, b| self.penalties[*a].total_cmp(&self.penalties[*b]))
    }
}

/// Whether each of the last `plateau_steps` steps gained less than `plateau_gain_pp`.
fn is_plateau(accuracies_pp: &[f32], config: &HeuristicConfig) -> bool {
    let steps = config.plateau_steps;
    let little = |pair: &[f32]| pair[1] - pair[0] < config.plateau_gain_pp;
    match accuracies_pp.len().checked_sub(steps.saturating_add(1)) {
        Some(from) => accuracies_pp[from..].windows(2).all(little),
        None => false,
    }
}

/// The dormant slot in which this blueprint has the fewest parameters; among equals the first.
fn smallest_slot(host: &Host, blueprint: usize) -> Option<usize> {
    let blueprint = host.blueprints().get(blueprint)?;
    let empty = host.slots().iter().enumerate().filter(|(_, slot)| slot.stage == Stage::Dormant);
    let sized = empty.filter_map(|(i, slot)| Some((blueprint.parameters(slot.channels).ok()?, i)));
    sized.min().map(|(_, index)| index)
}

/// The next action for a live module.
fn tend(index: usize, view: &EnvView<'_>, config: &HeuristicConfig) -> Action {
    let slot = &view.host.slots()[index];
    let Some(module) = slot.module.as_ref().filter(|module| !module.pruning) else {
        return Action::Wait;
    };
    let prune = Action::Prune { slot: index, speed: Speed::Instant, curve: Curve::Linear };
    match slot.stage {
        Stage::Germinated => Action::Advance { slot: index },
        Stage::Training if gate_passes(index, view) => Action::Advance { slot: index },
        Stage::Training if training_failed(slot, module, view, config) => prune,
        Stage::Blending if gate_passes(index, view) => Action::Advance { slot: index },
        Stage::Holding => match view.measured(index).contribution_pp {
            _ if slot.stage_steps >= config.patience_steps => prune,
            None => Action::Wait,
            Some(contribution) => {
                let improved =
                    view.gain_since_germination_pp(module).is_some_and(|gain| gain > 0.0);
                match contribution > config.min_contribution_pp && improved {
                    true => Action::Fossilize { slot: index },
                    false => prune,
                }
            }
        },
        _ => Action::Wait,
    }
}

fn gate_passes(index: usize, view: &EnvView<'_>) -> bool {
    view.host.gate(index, &view.measured(index)).is_some_and(|report| report.passed)
}

fn training_failed(
    slot: &Slot,
    module: &Module,
    view: &EnvView<'_>,
    config: &HeuristicConfig,
) -> bool {
    let fell =
        view.gain_since_germination_pp(module).is_some_and(|gain| gain < -config.max_drop_pp);
    let due = view.host.rules().gates.min_training_steps.saturating_add(config.patience_steps);
    (slot.stage_steps >= config.drop_after_steps && fell) || slot.stage_steps >= due
}

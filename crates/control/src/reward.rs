//! Rewards of single transitions, term by term (`docs/control.md`, Rewards).
//!
//! acc is the control score in percentage points, and c the leave-one-out contribution of a
//! module. E is the number of parameters that growth has added: those of all modules, each weighted
//! by its alpha, and those of widened layers. The number of parameters with which the host began is
//! `host`.

use meristem_grow::{Host, ParameterCounts, Stage};
use serde::{Deserialize, Serialize};

use crate::action::{Action, ActionOp};
use crate::report::null_as_nan;
use crate::rules::ActionOutcome;
use crate::view::EnvView;

/// Smallest number of host parameters in the ratio of grown to host parameters.
const MIN_HOST_PARAMETERS: f64 = 200.0;

/// Kind of reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardMode {
    /// Gain in score, minus a rent for grown parameters.
    Basic,
    /// `Basic`, plus a stage potential, and terms for fossilizing, pruning and acting.
    #[default]
    Contribution,
    /// 0 until the end of the episode, then the final score minus a price for grown parameters.
    Sparse,
    /// Change of the lead over the bare twin ([`EnvView::twin_lead`]), plus a stage potential,
    /// minus prices for parameters and actions. The discounted potential terms of an episode that
    /// starts without modules sum to 0.
    Shaped,
}

impl RewardMode {
    /// All modes, with their names in configuration.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("basic", Self::Basic),
        ("contribution", Self::Contribution),
        ("sparse", Self::Sparse),
        ("shaped", Self::Shaped),
    ];

    /// The name in configuration.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// Weights of the rewards; `docs/control.md` has the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RewardConfig {
    /// Kind of reward.
    pub mode: RewardMode,
    /// Reward per percentage point of score gained: .2.
    pub gain: f64,
    /// Factor on the logarithm in the rent: .05.
    pub rent: f64,
    /// Largest rent of a step: .5.
    pub rent_max: f64,
    /// Weight of the stage potential: .1.
    pub potential: f64,
    /// Discount in the stage potential. Equal to the policy's γ, so that the potential changes no
    /// optimal policy (Ng, Harada and Russell, ICML 1999): .995.
    pub gamma: f64,
    /// Weight of the harmonic mean of gain and contribution, for a FOSSILIZE that passes its gate
    /// with a gain above 0 ([`RewardTerms::fossilize`]): .1.
    pub fossilize: f64,
    /// Price of any other FOSSILIZE: .5.
    pub fossilize_price: f64,
    /// Reward for pruning a module with negative contribution: .1.
    pub prune: f64,
    /// Price of every op except WAIT: .01.
    pub op_price: f64,
    /// Weight of the size in the sparse reward: .1.
    pub sparse_size: f64,
    /// Reward per nat of increase of the lead over the twin: 8. This equals `gain` at 40 percentage
    /// points of score per nat (records/2026-11-22-growth-that-pays.md).
    #[serde(rename = "advantage")]
    pub twin_lead: f64,
    /// Weight of the size in the shaped reward: .1.
    pub size: f64,
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self {
            mode: RewardMode::default(),
            gain: 0.2,
            rent: 0.05,
            rent_max: 0.5,
            potential: 0.1,
            gamma: 0.995,
            fossilize: 0.1,
            fossilize_price: 0.5,
            prune: 0.1,
            op_price: 0.01,
            sparse_size: 0.1,
            twin_lead: 8.0,
            size: 0.1,
        }
    }
}

/// The terms of one transition's reward. Ranges hold for the default weights and scores from 0
/// to 100 percentage points. Terms that the mode does not use are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardTerms {
    /// `gain · (acc_t − acc_{t−1})`, 0 in the first step. In [−20, 20]. Basic, contribution.
    #[serde(deserialize_with = "null_as_nan")]
    pub gain: f64,
    /// `−min(rent · ln(1 + E/max(host, 200)), rent_max)`. In [−.5, 0]. Basic, contribution.
    #[serde(deserialize_with = "null_as_nan")]
    pub rent: f64,
    /// `potential · (γΦ' − Φ)`, with the potential Φ before the transition and Φ' after it. Φ sums
    /// over the modules: Germinated 1, Training 2, Blending 3.5, Holding 5.5, Fossilized 6. In
    /// [−.6, .6] per slot. Contribution, shaped. In mode shaped Φ' is 0 at the last step, so that
    /// without a rollback the discounted terms of an episode sum to `−potential · Φ` at its start.
    #[serde(deserialize_with = "null_as_nan")]
    pub potential: f64,
    /// For FOSSILIZE, with p the env's gain in score since the module germinated: `fossilize ·
    /// 2pc/(p + c)` if the gate passes, p > 0 and c >= 0; else `−fossilize_price`. The gate
    /// requires c >= [`meristem_grow::Gates::min_contribution_pp`]. In [−.5, 10]. Contribution.
    #[serde(deserialize_with = "null_as_nan")]
    pub fossilize: f64,
    /// `prune` for a PRUNE of a module with c < 0. 0 or .1. Contribution.
    #[serde(deserialize_with = "null_as_nan")]
    pub prune: f64,
    /// `−op_price` for every op except WAIT. −.01 or 0. Contribution, shaped.
    #[serde(deserialize_with = "null_as_nan")]
    pub op: f64,
    /// At the last step `acc/100 − sparse_size · ln(1 + E/max(host, 200))`, else 0. At most 1.
    /// Sparse.
    #[serde(deserialize_with = "null_as_nan")]
    pub result: f64,
    /// `twin_lead · (A_t − A_{t−1})` with the lead A in nats ([`EnvView::twin_lead`]); 0 in the
    /// first step. A step without A repeats the last A. Shaped. In events it is `advantage`.
    #[serde(default, rename = "advantage", deserialize_with = "null_as_nan")]
    pub twin_lead: f64,
    /// `−size · (G' − G)` with G = ln(1 + E/max(host, 200)) before the transition and G' after it.
    /// Shaped.
    #[serde(default, deserialize_with = "null_as_nan")]
    pub size: f64,
}

impl RewardTerms {
    /// The terms by their names in events, in the order of their declaration.
    pub fn named(&self) -> [(&'static str, f64); 9] {
        let Self { gain, rent, potential, fossilize, prune, op, result, twin_lead, size } = *self;
        [
            ("gain", gain),
            ("rent", rent),
            ("potential", potential),
            ("fossilize", fossilize),
            ("prune", prune),
            ("op", op),
            ("result", result),
            ("advantage", twin_lead),
            ("size", size),
        ]
    }

    /// The reward: the sum of the terms. A sum that is not finite, from a NaN loss, counts as 0;
    /// the governor's penalty takes its place.
    pub fn total(&self) -> f64 {
        let total: f64 = self.named().iter().map(|(_, term)| term).sum();
        if total.is_finite() { total } else { 0.0 }
    }

    /// Adds the terms of another transition, for totals.
    pub fn add(&mut self, other: &Self) {
        self.gain += other.gain;
        self.rent += other.rent;
        self.potential += other.potential;
        self.fossilize += other.fossilize;
        self.prune += other.prune;
        self.op += other.op;
        self.result += other.result;
        self.twin_lead += other.twin_lead;
        self.size += other.size;
    }
}

/// State before an action, for its reward. Recorded early because the action may remove the module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActionContext {
    op: ActionOp,
    contribution_pp: Option<f32>,
    gain_since_germination_pp: Option<f32>,
    score_pp: Option<f32>,
    /// Lead over the twin ([`EnvView::twin_lead`]).
    twin_lead: Option<f64>,
    last_step: bool,
}

impl ActionContext {
    /// Records the state before `action`.
    pub fn new(action: &Action, view: &EnvView<'_>) -> Self {
        let slot = action.slot();
        let module = slot.and_then(|index| view.host.slots().get(index)?.module.as_ref());
        Self {
            op: action.op(),
            contribution_pp: slot.and_then(|index| view.measured(index).contribution_pp),
            gain_since_germination_pp: module.and_then(|m| view.gain_since_germination_pp(m)),
            score_pp: view.score_pp(),
            twin_lead: view.twin_lead(),
            last_step: view.step + 1 >= view.episode_steps,
        }
    }
}

/// Reference values for the reward of an env's next transition. Reset at the start of an episode
/// and after a rollback, so that no difference spans either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardState {
    #[serde(rename = "accuracy_pp")]
    score_pp: Option<f32>,
    potential: f64,
    /// The last known lead over the twin.
    #[serde(default, rename = "advantage")]
    twin_lead: Option<f64>,
    #[serde(default)]
    growth: f64,
}

impl RewardState {
    /// Starts a trajectory with this host. There is no earlier measurement to compare with. Stages
    /// reached before this point yield no reward. In mode shaped, parameters grown before have no
    /// price; the rent and the size in the sparse reward include them.
    pub fn begin(host: &Host, parameters: &ParameterCounts) -> Self {
        let growth = growth_log(host, parameters);
        Self { score_pp: None, potential: potential(host), twin_lead: None, growth }
    }

    /// Computes the terms of a transition. `context` is the state before the action; `host`,
    /// `parameters` and `outcome` describe the state after it.
    pub fn transition(
        &mut self,
        config: &RewardConfig,
        context: &ActionContext,
        host: &Host,
        parameters: &ParameterCounts,
        outcome: &ActionOutcome,
    ) -> RewardTerms {
        let before = *self;
        *self = Self {
            score_pp: context.score_pp,
            twin_lead: context.twin_lead.or(before.twin_lead),
            ..Self::begin(host, parameters)
        };
        let op = if context.op == ActionOp::Wait { 0.0 } else { -config.op_price };
        match config.mode {
            RewardMode::Basic => self.basic(config, &before),
            RewardMode::Contribution => {
                let harmful = context.contribution_pp.is_some_and(|c| c < 0.0);
                RewardTerms {
                    potential: self.stages(config, &before),
                    fossilize: match context.op {
                        ActionOp::Fossilize => fossilize(config, context, outcome),
                        _ => 0.0,
                    },
                    prune: if context.op == ActionOp::Prune && harmful {
                        config.prune
                    } else {
                        0.0
                    },
                    op,
                    ..self.basic(config, &before)
                }
            }
            RewardMode::Sparse if !context.last_step => RewardTerms::default(),
            RewardMode::Sparse => {
                let score = context.score_pp.map_or(0.0, |pp| f64::from(pp) / 100.0);
                let result = score - config.sparse_size * self.growth;
                RewardTerms { result, ..RewardTerms::default() }
            }
            RewardMode::Shaped => {
                // The potential of the state after the last step is 0.
                self.potential = if context.last_step { 0.0 } else { self.potential };
                let both = self.twin_lead.zip(before.twin_lead);
                RewardTerms {
                    twin_lead: config.twin_lead * both.map_or(0.0, |(now, before)| now - before),
                    size: -config.size * (self.growth - before.growth),
                    potential: self.stages(config, &before),
                    op,
                    ..RewardTerms::default()
                }
            }
        }
    }

    fn basic(&self, config: &RewardConfig, before: &Self) -> RewardTerms {
        let both = self.score_pp.zip(before.score_pp);
        RewardTerms {
            gain: config.gain * both.map_or(0.0, |(now, before)| f64::from(now - before)),
            rent: -(config.rent * self.growth).min(config.rent_max),
            ..RewardTerms::default()
        }
    }

    fn stages(&self, config: &RewardConfig, before: &Self) -> f64 {
        config.potential * (config.gamma * self.potential - before.potential)
    }
}

/// The FOSSILIZE term. A refusal by the gate costs `fossilize_price`; the gate, not this function,
/// compares the contribution with `min_contribution_pp`.
fn fossilize(config: &RewardConfig, context: &ActionContext, outcome: &ActionOutcome) -> f64 {
    let gain = context.gain_since_germination_pp.map_or(0.0, f64::from);
    let contribution = context.contribution_pp.map_or(0.0, f64::from);
    // In permissive mode the gate admits a contribution of 0; the harmonic mean is then 0.
    if !outcome.succeeded || gain <= 0.0 || contribution < 0.0 {
        return -config.fossilize_price;
    }
    config.fossilize * 2.0 * gain * contribution / (gain + contribution)
}

/// `ln(1 + E/max(host, 200))`, with the parameters of the host before any layer was widened.
fn growth_log(host: &Host, parameters: &ParameterCounts) -> f64 {
    let weighted = host.slots().iter().zip(&parameters.modules);
    let modules: f64 = weighted.map(|(slot, n)| f64::from(slot.alpha()) * *n as f64).sum();
    let (now, first) = (host.bare_parameters(), host.first_parameters());
    let active = modules + now.saturating_sub(first) as f64;
    (active / (first as f64).max(MIN_HOST_PARAMETERS)).ln_1p()
}

/// Φ: the stage potential of a host.
fn potential(host: &Host) -> f64 {
    let of = |stage: Stage| match stage {
        Stage::Germinated => 1.0,
        Stage::Training => 2.0,
        Stage::Blending => 3.5,
        Stage::Holding => 5.5,
        Stage::Fossilized => 6.0,
        Stage::Dormant | Stage::Pruned | Stage::Embargoed | Stage::Resetting => 0.0,
    };
    host.slots().iter().map(|slot| of(slot.stage)).sum()
}

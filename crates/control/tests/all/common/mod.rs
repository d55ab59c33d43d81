//! An env without training: a host with invented measurements.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

pub(crate) mod toy;

use std::sync::Arc;

use meristem_control::{
    Action, ActionOp, ActionOutcome, EnvFacts, EnvView, HeuristicConfig, SlotHistories,
    WidthScores, apply,
};
use meristem_grow::{
    Birth, BlueprintSet, GateInputs, Gates, GradientHealth, Host, HostSpec, Rules, TaskShape,
};
use meristem_nn::PairedLoss;

/// A tiny host with the first `slots` slots of `minimal` enabled.
pub(crate) fn tiny(slots: usize, rules: Rules) -> Host {
    let spec: HostSpec = "minimal".parse().unwrap();
    let image = TaskShape { channels: 1, height: 4, width: 4, classes: 3 };
    let set = Arc::new(BlueprintSet::standard());
    let slots = spec.slots()[..slots].to_vec();
    Host::new(spec, image, &slots, set, rules).unwrap()
}

/// The gates of quick presets, and modules that learn beside their host.
pub(crate) fn quick() -> Rules {
    Rules { birth: Birth::Aside, gates: Gates::default().quick(), ..Rules::default() }
}

/// A heuristic that requires a plateau of one step: a gain below 3 points.
pub(crate) fn quick_heuristic() -> HeuristicConfig {
    HeuristicConfig { plateau_steps: 1, plateau_gain_pp: 3.0, ..HeuristicConfig::default() }
}

/// A contribution in loss for a contribution in score: .02 per point, standard error .005.
pub(crate) fn loss_of(contribution_pp: f32) -> PairedLoss {
    PairedLoss { difference: 0.02 * f64::from(contribution_pp), standard_error: 0.005 }
}

/// Measurements of a slot.
pub(crate) fn worth(contribution_pp: Option<f32>) -> GateInputs {
    GateInputs {
        gradient_health: GradientHealth::from_norms(&[1.0, 2.0]),
        contribution_pp,
        contribution_loss: contribution_pp.map(loss_of),
    }
}

/// An env whose measurements are set by hand.
#[derive(Clone)]
pub(crate) struct FakeEnv {
    pub(crate) index: usize,
    pub(crate) host: Host,
    pub(crate) step: u32,
    pub(crate) episode_steps: u32,
    pub(crate) scores_pp: Vec<f32>,
    pub(crate) losses: Vec<f32>,
    pub(crate) twin_loss: Option<f32>,
    pub(crate) train_losses: Vec<f32>,
    pub(crate) measured: Vec<GateInputs>,
    pub(crate) history: SlotHistories,
    pub(crate) facts: EnvFacts,
    pub(crate) last: Option<(ActionOp, bool)>,
}

impl FakeEnv {
    pub(crate) fn new(index: usize, host: Host, episode_steps: u32) -> Self {
        let measured = vec![GateInputs::default(); host.slots().len()];
        Self {
            index,
            host,
            step: 0,
            episode_steps,
            scores_pp: vec![],
            losses: vec![],
            train_losses: vec![],
            measured,
            history: SlotHistories::default(),
            facts: EnvFacts::default(),
            last: None,
            twin_loss: None,
        }
    }

    /// Adds an epoch with this loss and score.
    pub(crate) fn epoch(&mut self, loss: f32, score_pp: f32) {
        self.host.step();
        self.losses.push(loss);
        self.train_losses.push(loss);
        self.scores_pp.push(score_pp);
    }

    /// Records the measurements in the history.
    pub(crate) fn remember(&mut self, interactions_pp: &[Option<f32>]) {
        self.history.note(&self.host, &self.measured, interactions_pp);
    }

    pub(crate) fn view(&self) -> EnvView<'_> {
        EnvView {
            env: self.index,
            host: &self.host,
            step: self.step,
            episode_steps: self.episode_steps,
            scores_pp: &self.scores_pp,
            losses: &self.losses,
            twin_loss: self.twin_loss,
            train_losses: &self.train_losses,
            measured: &self.measured,
            history: self.history.slots(),
            width_scores: WidthScores::NONE,
            facts: self.facts,
            last: self.last,
        }
    }

    /// Applies an action, which must be legal.
    pub(crate) fn act(&mut self, action: &Action) -> ActionOutcome {
        let score = self.scores_pp.last().copied();
        let outcome = apply(action, &mut self.host, &self.measured, score).unwrap();
        self.last = Some((action.op(), outcome.succeeded));
        self.step += 1;
        outcome
    }
}

//! An env with scripted scores and measurements.

use std::sync::Arc;

use meristem_control::{
    Action, ActionOp, ActionOutcome, Controller, EnvFacts, EnvView, Heuristic, HeuristicConfig,
    WidthScores, apply, legal,
};
use meristem_grow::{
    BlueprintSet, GateInputs, Gates, GradientHealth, Host, HostSpec, Rules, TaskShape,
};

use crate::common::loss_of;

/// One env with scripted scores and measurements. The control loss is .02 per point below 100.
pub(super) struct Env {
    pub(super) index: usize,
    pub(super) host: Host,
    pub(super) scores_pp: Vec<f32>,
    pub(super) losses: Vec<f32>,
    pub(super) train_losses: Vec<f32>,
    /// Control loss over training loss.
    pub(super) gap: f32,
    pub(super) measured: Vec<GateInputs>,
    pub(super) width_scores: WidthScores,
    pub(super) step: u32,
}

impl Env {
    pub(super) fn new(index: usize, slots: &str, rules: Rules) -> Self {
        let spec: HostSpec = "baseline".parse().unwrap();
        let image = TaskShape { channels: 1, height: 28, width: 28, classes: 10 };
        let (slots, set) =
            (spec.select_slots(slots.split(',')).unwrap(), Arc::new(BlueprintSet::standard()));
        let measured = vec![worth(None); slots.len()];
        let host = Host::new(spec, image, &slots, set, rules).unwrap();
        let (scores_pp, losses, train_losses) = (vec![], vec![], vec![]);
        Self {
            index,
            host,
            scores_pp,
            losses,
            train_losses,
            gap: 1.0,
            measured,
            width_scores: WidthScores::default(),
            step: 0,
        }
    }

    /// A step: an epoch that ends at this score, a decision, and its action.
    pub(super) fn step(
        &mut self,
        controller: &mut dyn Controller,
        score_pp: f32,
    ) -> (Action, ActionOutcome) {
        self.host.step();
        self.scores_pp.push(score_pp);
        let loss = 0.02 * (100.0 - score_pp);
        self.losses.push(self.gap * loss);
        self.train_losses.push(loss);
        let view = EnvView {
            env: self.index,
            host: &self.host,
            step: self.step,
            episode_steps: 100,
            scores_pp: &self.scores_pp,
            losses: &self.losses,
            twin_loss: None,
            train_losses: &self.train_losses,
            measured: &self.measured,
            history: &[],
            width_scores: &self.width_scores,
            facts: EnvFacts::default(),
            last: None,
        };
        let action = controller.decide_all(&[view]).unwrap()[0];
        legal(&action, &self.host).unwrap();
        self.step += 1;
        (action, apply(&action, &mut self.host, &self.measured, Some(score_pp)).unwrap())
    }

    pub(super) fn op(&mut self, controller: &mut dyn Controller, score_pp: f32) -> ActionOp {
        self.step(controller, score_pp).0.op()
    }

    /// Steps at a constant score until the heuristic chooses an op other than WAIT.
    pub(super) fn until_action(
        &mut self,
        controller: &mut dyn Controller,
        score_pp: f32,
    ) -> (u32, Action) {
        for waited in 0..50 {
            let (action, _) = self.step(controller, score_pp);
            if action != Action::Wait {
                return (waited, action);
            }
        }
        panic!("waits for ever");
    }
}

pub(super) fn worth(contribution_pp: Option<f32>) -> GateInputs {
    GateInputs {
        gradient_health: GradientHealth::from_norms(&[1.0, 2.0]),
        contribution_pp,
        contribution_loss: contribution_pp.map(loss_of),
    }
}

pub(super) fn quick() -> Rules {
    Rules { gates: Gates::default().quick(), ..Rules::default() }
}

pub(super) fn with(change: impl Fn(&mut HeuristicConfig)) -> Heuristic {
    let mut config = HeuristicConfig::default();
    change(&mut config);
    Heuristic::new(config)
}

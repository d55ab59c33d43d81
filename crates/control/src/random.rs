//! A controller that draws legal actions at random.

use meristem_device::random::{Purpose, Rng};
use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::controller::Controller;
use crate::error::Result;
use crate::heads::Floors;
use crate::masks::{HeadLayout, Legality};
use crate::sampling::{SamplingMode, sample_action};
use crate::state::ControllerState;
use crate::view::EnvView;

/// Draws the op uniformly among the legal ops, the slot uniformly among its legal slots, and every
/// other choice uniformly, as an untrained policy does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RandomController {
    seed: u64,
    /// Number of decisions per env; part of the key of the next draw.
    decisions: Vec<u64>,
}

impl RandomController {
    /// A controller with this seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, decisions: vec![] }
    }

    pub(crate) fn decide(&mut self, view: &EnvView<'_>, seed: u64) -> Action {
        if self.decisions.len() <= view.env {
            self.decisions.resize(view.env + 1, 0);
        }
        let decision = &mut self.decisions[view.env];
        let mut rng = Rng::new(seed, Purpose::Controller, view.env as u64, *decision);
        *decision += 1;
        let layout = HeadLayout::new(view.host.slots().len(), view.host.blueprints().len());
        let (mut logits, mut mask) = (vec![0.0; layout.total()], vec![0; layout.total()]);
        let legality = Legality::from_host(view.host);
        let (floors, pick) = (Floors::default(), SamplingMode::Sample(&mut rng));
        sample_action(&layout, &legality, &floors, &mut logits, &mut mask, pick).action()
    }
}

impl Controller for RandomController {
    fn name(&self) -> &str {
        "random"
    }

    fn save(&self) -> Result<ControllerState> {
        ControllerState::from_memory(self.name(), &self.decisions)
    }

    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        self.decisions = state.memory(self.name())?;
        Ok(())
    }

    fn copy_env(&mut self, from: usize, to: usize) {
        let made = self.decisions.get(from).copied().unwrap_or(0);
        if self.decisions.len() <= to {
            self.decisions.resize(to + 1, 0);
        }
        self.decisions[to] = made;
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        let seed = self.seed;
        Ok(views.iter().map(|view| self.decide(view, seed)).collect())
    }
}

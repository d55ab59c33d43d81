//! Calls of an external controller, which may read the envs and their weights.

use std::path::Path;

use meristem_grow::Topology;

use crate::env::{Population, TrainedHost};
use crate::error::Result;
use crate::external::{Continuation, Envs, SeenEnv, StepFigures};
use crate::position::StepPosition;
use crate::setup::{Setup, weights};
use crate::step::context::StepContext;

/// Calls an external controller, if there is one, before a step. Returns how the run continues.
///
/// # Errors
/// The controller's error.
pub(crate) fn before_step(context: &mut StepContext<'_, '_>) -> Result<Continuation> {
    let StepContext { when, population, setup, .. } = context;
    let mut envs = Visited { setup, population, when: *when };
    let external = context.controller.external();
    external.map_or(Ok(Continuation::Step), |external| external.before_step(&mut envs))
}

/// Calls an external controller, if there is one, before the decision.
///
/// # Errors
/// The controller's error.
pub(super) fn before_decision(context: &mut StepContext<'_, '_>) -> Result<()> {
    let StepContext { when, population, setup, .. } = context;
    let mut envs = Visited { setup, population, when: *when };
    let external = context.controller.external();
    external.map_or(Ok(()), |external| external.before_decision(&mut envs))
}

/// The envs of this process, for an external controller.
struct Visited<'a> {
    setup: &'a Setup,
    population: &'a mut Population,
    when: StepPosition,
}

impl Envs for Visited<'_> {
    fn seen(&self) -> Vec<SeenEnv> {
        let StepPosition { round, step } = self.when;
        let views = self.population.views(step, self.setup.config.steps);
        let all = views.iter().zip(&self.population.envs);
        all.map(|(view, env)| {
            SeenEnv::from_view(view, round, figures(&env.grown), env.reward.total() as f32)
        })
        .collect()
    }

    fn weights(&mut self, env: usize) -> Result<Vec<u8>> {
        let grown = &mut self.population.envs[env].grown;
        grown.sync(self.setup)?;
        let (state, topology) = (grown.network.state_dict()?, Topology::from_host(&grown.host));
        weights::to_bytes(Path::new("weights"), &state, &topology, &self.setup.interface)
    }
}

/// Losses, scores and parameters of a host after a step.
pub(crate) fn figures(grown: &TrainedHost) -> StepFigures {
    StepFigures {
        train_loss: grown.train_loss(),
        score_kind: grown.score.kind(),
        train_score: grown.train_score(),
        control_loss: grown.control_loss(),
        control_score: grown.control_score(),
        host_parameters: grown.parameters.host,
        grown_parameters: grown.parameters.grown(),
    }
}

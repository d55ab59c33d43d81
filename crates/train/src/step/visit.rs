//! Visits of an external controller to the envs.

use std::path::Path;

use meristem_grow::Topology;

use crate::env::Env;
use crate::error::Result;
use crate::external::{Envs, Figures, Next, SeenEnv};
use crate::position::Position;
use crate::setup::{Setup, weights};
use crate::step::context::Context;

/// Asks an external controller, if there is one, how the run goes on.
///
/// # Errors
/// The controller's error.
pub(crate) fn before_step(
    context: &mut Context<'_, '_>,
    envs: &mut [Env],
    when: Position,
) -> Result<Next> {
    let setup = context.setup;
    let external = context.controller.external();
    external
        .map_or(Ok(Next::Step), |external| external.before_step(&mut Visited { setup, envs, when }))
}

/// Shows the envs to an external controller, if there is one, before their decision.
///
/// # Errors
/// The controller's error.
pub(super) fn before_decision(
    context: &mut Context<'_, '_>,
    envs: &mut [Env],
    when: Position,
) -> Result<()> {
    let setup = context.setup;
    let external = context.controller.external();
    external.map_or(Ok(()), |external| external.before_decision(&mut Visited { setup, envs, when }))
}

/// The envs of this process during a visit.
struct Visited<'a> {
    setup: &'a Setup,
    envs: &'a mut [Env],
    when: Position,
}

impl Envs for Visited<'_> {
    fn seen(&self) -> Vec<SeenEnv> {
        self.envs.iter().map(|env| seen(env, self.setup, self.when)).collect()
    }

    fn weights(&mut self, env: usize) -> Result<Vec<u8>> {
        let env = &mut self.envs[env];
        env.sync_network(self.setup)?;
        let (state, topology) = (env.network.state_dict()?, Topology::of(&env.host));
        weights::to_bytes(Path::new("weights"), &state, &topology, &self.setup.interface)
    }
}

fn seen(env: &Env, setup: &Setup, Position { round, step }: Position) -> SeenEnv {
    let view = env.view(step, setup.config.steps);
    let samples = env.train.samples.max(1) as f64;
    let figures = Figures {
        train_loss: env.train.loss_sum / samples,
        train_accuracy: env.train.correct as f64 / samples,
        control_loss: env.control.and_then(|control| control.loss()),
        control_accuracy: env.control.and_then(|control| control.accuracy()),
        host_parameters: env.parameters().host,
        grown_parameters: env.parameters().grown(),
    };
    SeenEnv::of(&view, round, figures, env.reward.total() as f32)
}

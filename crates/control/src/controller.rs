//! Who decides.

use crate::action::Action;
use crate::view::EnvView;

/// Decides what happens in each env, once per step. Deterministic: the same views in the same order give
/// the same actions. Holds no device state of its own making; what it remembers, it remembers per env.
pub trait Controller: Send {
    /// Name, as in configuration.
    fn name(&self) -> &str;

    /// A new episode begins in this env, with a fresh host.
    fn begin_episode(&mut self, _env: usize) {}

    /// The action of one env; always a legal one ([`crate::legal`]).
    fn decide(&mut self, env: usize, view: &EnvView<'_>) -> Action;

    /// The actions of all envs of a step, in order. The training loop calls this one, so that a policy can
    /// answer with one forward pass and one read-back (H1); by default each env is decided on its own.
    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Vec<Action> {
        views.iter().map(|view| self.decide(view.env, view)).collect()
    }
}

/// Never grows anything.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoController;

impl Controller for NoController {
    fn name(&self) -> &str {
        "none"
    }

    fn decide(&mut self, _env: usize, _view: &EnvView<'_>) -> Action {
        Action::Wait
    }
}

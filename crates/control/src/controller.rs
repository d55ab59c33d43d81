//! Who decides.

use crate::action::Action;
use crate::error::Result;
use crate::state::ControllerState;
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
    ///
    /// # Errors
    /// A failed device.
    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        Ok(views.iter().map(|view| self.decide(view.env, view)).collect())
    }

    /// Everything that its next decision depends on. May wait for a device.
    ///
    /// # Errors
    /// A failed device.
    fn save(&self) -> Result<ControllerState> {
        Ok(ControllerState::default())
    }

    /// Goes on from what [`Controller::save`] gave: the decisions that follow are the same, bit for bit.
    ///
    /// # Errors
    /// [`Error::BadState`](crate::Error::BadState) if it is another controller's; it is then as it was.
    fn restore(&mut self, _state: &ControllerState) -> Result<()> {
        Ok(())
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

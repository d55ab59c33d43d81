//! The interface of controllers.

use crate::action::Action;
use crate::error::Result;
use crate::report::RoundReport;
use crate::state::ControllerState;
use crate::view::EnvView;

/// Decides the action of each env, once per step. Deterministic: the same calls in the same order
/// give the same actions. Its memory is per env.
///
/// A round consists of [`Controller::begin_episode`] for each env; then, for each step,
/// [`Controller::decide_all`], the actions themselves, and [`Controller::reward_all`]; and at the
/// end [`Controller::end_round`]. A controller that does not learn implements `decide_all` alone.
pub trait Controller: Send {
    /// Name, as in configuration.
    fn name(&self) -> &str;

    /// A new episode begins in this env, with a fresh host.
    fn begin_episode(&mut self, _env: usize) {}

    /// Decides the actions of all envs of a step, in order of the views; each is legal
    /// ([`crate::legal`]). A policy runs one forward pass and one read-back, for which this waits
    /// (H1).
    ///
    /// # Errors
    /// [`crate::Error`]: a script that asks for an illegal action, a failed device.
    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>>;

    /// Receives the rewards of the actions just decided, in the same order.
    ///
    /// # Errors
    /// [`crate::Error`]: a number of rewards other than that of the actions, a failed device.
    fn reward_all(&mut self, _rewards: &[f32]) -> Result<()> {
        Ok(())
    }

    /// Ends an env's trajectory after the governor rolled it back, between the rewards of one step
    /// and the decision of the next. It ends, as a termination, with the last transition, and the
    /// memory of the env is reset. `penalty` is added to the reward of the transition of step
    /// `cause` of this episode, which may be any earlier one; `cause` is `None` before the
    /// episode's first transition, where there is nothing to end or to penalise.
    ///
    /// # Errors
    /// [`crate::Error`]: a cause that is not among the transitions so far, a failed device.
    fn roll_back(&mut self, _env: usize, _cause: Option<usize>, _penalty: f32) -> Result<()> {
        Ok(())
    }

    /// Saves the state that the next decision depends on. May wait for a device.
    ///
    /// # Errors
    /// A failed device.
    fn save(&self) -> Result<ControllerState> {
        Ok(ControllerState::default())
    }

    /// Restores the state that [`Controller::save`] returned: the decisions that follow are the
    /// same, bit for bit.
    ///
    /// # Errors
    /// [`Error::BadState`](crate::Error::BadState) if it is another controller's state; this one is
    /// then unchanged.
    fn restore(&mut self, _state: &ControllerState) -> Result<()> {
        Ok(())
    }

    /// Ends the episodes of all envs by their length. The views are the observations after the last
    /// transition. A policy learns now and returns its report.
    ///
    /// # Errors
    /// [`crate::Error`]: a policy that diverged, a failed device.
    fn end_round(&mut self, _last: &[EnvView<'_>]) -> Result<Option<RoundReport>> {
        Ok(None)
    }
}

/// A controller that never grows anything.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoController;

impl Controller for NoController {
    fn name(&self) -> &str {
        "none"
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        Ok(vec![Action::Wait; views.len()])
    }
}

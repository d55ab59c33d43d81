//! The interface of controllers.

use crate::action::Action;
use crate::error::Result;
use crate::report::RoundReport;
use crate::state::ControllerState;
use crate::view::EnvView;

/// Decides the action of each env, once per step. Deterministic: the same calls in the same order
/// give the same actions. A controller keeps separate memory for each env.
///
/// The caller calls [`Controller::begin_episode`] for each env at the start of a round, and between
/// two steps for the env of a member that begins in a free place (`docs/sweeps.md`, Places). In
/// every step it calls [`Controller::decide_all`] for the envs in training, executes the actions,
/// and calls [`Controller::reward_all`]. [`Controller::end_round`] ends the round.
///
/// Every controller implements `name` and `decide_all`. A controller with memory also implements
/// `begin_episode`, `copy_env`, `save` and `restore`; one that learns, `reward_all`, `roll_back`
/// and `end_round` as well, and no `copy_env`.
pub trait Controller: Send {
    /// Name, as in configuration.
    fn name(&self) -> &str;

    /// A new episode begins in this env, with a fresh host.
    fn begin_episode(&mut self, _env: usize) {}

    /// Copies the memory of env `from` to env `to`. Called between two steps, after env `to` became
    /// a copy of env `from`. No env is copied in a run whose controller is a policy or comes from
    /// the calling program; every other controller with memory for each env implements this method.
    fn copy_env(&mut self, _from: usize, _to: usize) {}

    /// Decides the actions of all envs of a step, in the order of the views. Every action is legal
    /// ([`crate::legal`]). A policy runs one forward pass for all envs and waits for one read-back.
    ///
    /// # Errors
    /// [`crate::Error`]: an illegal action in a script, a failed device.
    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>>;

    /// Receives the rewards of the actions just decided, in the same order.
    ///
    /// # Errors
    /// [`crate::Error`]: a different number of rewards than actions, a failed device.
    fn reward_all(&mut self, _rewards: &[f32]) -> Result<()> {
        Ok(())
    }

    /// Ends an env's trajectory after the governor rolled it back. The call comes after the rewards
    /// of one step and before the decision of the next. In a controller that learns, the last
    /// transition becomes a termination, and the policy's memory of the env is reset. The default
    /// does nothing.
    ///
    /// `penalty` is added to the reward of the transition that caused the failure: step `cause` of
    /// this episode, at most the last one. `cause` is `None` before the first transition of the
    /// episode; then nothing ends and no reward changes.
    ///
    /// # Errors
    /// [`crate::Error`]: a `cause` without a transition, a failed device.
    fn roll_back(&mut self, _env: usize, _cause: Option<usize>, _penalty: f32) -> Result<()> {
        Ok(())
    }

    /// Saves the state that determines the next decisions. May wait for a device.
    ///
    /// # Errors
    /// A failed device.
    fn save(&self) -> Result<ControllerState> {
        Ok(ControllerState::default())
    }

    /// Restores a state from [`Controller::save`]. The decisions after it are the same, bit for
    /// bit.
    ///
    /// # Errors
    /// [`Error::BadState`](crate::Error::BadState) for the state of another controller; this
    /// controller is then unchanged.
    fn restore(&mut self, _state: &ControllerState) -> Result<()> {
        Ok(())
    }

    /// Ends the episodes of all envs at their step limit. `last` has the observations after the
    /// last transition. A policy learns now and returns its report.
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

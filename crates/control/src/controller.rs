//! Who decides.

use crate::action::Action;
use crate::error::Result;
use crate::report::RoundReport;
use crate::state::ControllerState;
use crate::view::EnvView;

/// Decides what happens in each env, once per step. Deterministic: the same calls in the same order give
/// the same actions. What it remembers, it remembers per env.
///
/// A round is, for each env, [`Controller::begin_episode`]; then for each step [`Controller::decide_all`],
/// the deeds, and [`Controller::reward_all`]; and at the end [`Controller::end_round`]. A controller that
/// does not learn implements `decide_all` alone.
pub trait Controller: Send {
    /// Name, as in configuration.
    fn name(&self) -> &str;

    /// A new episode begins in this env, with a fresh host.
    fn begin_episode(&mut self, _env: usize) {}

    /// The actions of all envs of a step, in order of the views; each a legal one ([`crate::legal`]). A
    /// policy answers with one forward pass and one read-back, for which this waits (H1).
    ///
    /// # Errors
    /// [`crate::Error`]: a script that wants what is not legal, a failed device.
    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>>;

    /// The rewards of the actions just decided, in the same order.
    ///
    /// # Errors
    /// [`crate::Error`]: not one reward per action, a failed device.
    fn reward_all(&mut self, _rewards: &[f32]) -> Result<()> {
        Ok(())
    }

    /// The governor rolled an env back, between the rewards of one step and the decision of the next: its
    /// trajectory ends, as a termination, with the last transition, and what is remembered of the env begins
    /// anew. `penalty` is added to the reward of the transition of step `cause` of this episode, whichever
    /// that was; `None` before the episode's first transition, where there is nothing to end or to punish.
    ///
    /// # Errors
    /// [`crate::Error`]: a cause that is not among the transitions so far, a failed device.
    fn roll_back(&mut self, _env: usize, _cause: Option<usize>, _penalty: f32) -> Result<()> {
        Ok(())
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

    /// All envs have ended their episode, by its length: a truncation. The views are what came after the
    /// last transition. A policy learns now; the report is what there is to tell of it.
    ///
    /// # Errors
    /// [`crate::Error`]: a policy that diverged, a failed device.
    fn end_round(&mut self, _last: &[EnvView<'_>]) -> Result<Option<RoundReport>> {
        Ok(None)
    }
}

/// Never grows anything.
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

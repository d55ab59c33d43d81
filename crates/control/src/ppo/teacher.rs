//! Demonstrations: rounds in which the heuristic acts, and the policy learns to act alike.
//!
//! The policy observes each step as in any round. Its draw is then replaced, in the rollout, by the
//! heuristic's action with the masks of that action, so that the update maximises the likelihood of
//! the choices of the heuristic (behaviour cloning: Pomerleau, "Efficient training of artificial
//! neural networks for autonomous navigation", 1991), and V learns the returns of the heuristic.

use super::Ppo;
use crate::action::{Action, Choices};
use crate::controller::Controller;
use crate::error::Result;
use crate::heuristic::Heuristic;
use crate::masks::{HEAD_COUNT, HeadLayout, Legality};
use crate::view::EnvView;

/// Passes over a round of demonstrations. An env's steps are alike from episode to episode, and a
/// round costs far more than passes over it.
pub(super) const PASSES: usize = 32;

/// The controller that demonstrates.
#[derive(Debug)]
pub(super) struct Teacher {
    pub(super) heuristic: Heuristic,
    /// Rounds of demonstrations, from the first round of the run on.
    pub(super) rounds: usize,
}

impl Ppo {
    /// Lets the heuristic act in the first rounds of the run, from which the policy learns to act
    /// alike.
    pub fn taught(self, heuristic: Heuristic, rounds: usize) -> Self {
        Self { teacher: Some(Teacher { heuristic, rounds }), ..self }
    }

    /// Whether this round, which may just have ended, is one of demonstrations.
    pub(super) fn is_taught(&self) -> bool {
        self.teacher.as_ref().is_some_and(|teacher| self.round() < teacher.rounds as u64)
    }

    /// Replaces the decisions of the step by the teacher's. Two copies to the device; does not
    /// wait.
    pub(super) fn follow_teacher(&mut self, views: &[EnvView<'_>]) -> Result<()> {
        let taught = self.is_taught();
        let Some(teacher) = self.teacher.as_mut().filter(|_| taught) else { return Ok(()) };
        let actions = teacher.heuristic.decide_all(views)?;
        let layout = HeadLayout::new(self.domain.slots.len(), self.domain.blueprints.len());
        let mut legal = vec![0; actions.len() * layout.total()];
        let rows = legal.chunks_exact_mut(layout.total());
        for ((view, action), row) in views.iter().zip(&actions).zip(rows) {
            Legality::from_host(view.host).write_all(&layout, &action.choices(), row);
        }
        let choices: Vec<Choices> = actions.iter().map(Action::choices).collect();
        let words: Vec<u32> = choices.as_flattened().iter().map(|choice| *choice as u32).collect();
        self.rollout.replace(self.step, &words, &legal)?;
        // They were not drawn: nothing is known of a probability.
        self.decided.log_probs = vec![[0.0; HEAD_COUNT]; choices.len()];
        self.decided.choices = choices;
        Ok(())
    }
}

//! Demonstrations: rounds in which the heuristic acts and the policy learns to imitate it.
//!
//! The policy observes each step as usual. The rollout then stores the heuristic's action and its
//! masks in place of the policy's draw. The update maximises the likelihood of these choices
//! (behaviour cloning: Pomerleau, "Efficient training of artificial neural networks for autonomous
//! navigation", 1991), and V learns the returns of the heuristic.

use super::Ppo;
use crate::action::{Action, Choices};
use crate::error::Result;
use crate::heuristic::Heuristic;
use crate::heuristic_config::HeuristicConfig;
use crate::masks::{HEAD_COUNT, Legality};
use crate::view::{EnvFacts, EnvView};

/// Passes over a round of demonstrations. They are many because a pass costs far less than another
/// round, and another round would demonstrate much the same: the episodes of an env are similar.
pub(super) const PASSES: usize = 32;

/// Rules by which the heuristic demonstrates in one env.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TeacherRules {
    /// The constants.
    pub heuristic: HeuristicConfig,
    /// Largest number of parameters of a host and its modules for each training sample. It replaces
    /// `max_parameters` of the constants.
    pub parameters_per_image: f64,
}

impl TeacherRules {
    fn config(&self, train_samples: usize) -> HeuristicConfig {
        let max_parameters = Some((self.parameters_per_image * train_samples as f64) as usize);
        HeuristicConfig { max_parameters, ..self.heuristic }
    }
}

/// The controller that demonstrates.
#[derive(Debug)]
pub(super) struct Teacher {
    pub(super) heuristic: Heuristic,
    /// Number of rounds with demonstrations, at the start of the run.
    pub(super) rounds: usize,
    /// Rules of each env, which replace the constants of `heuristic`; empty if all envs have those.
    rules: Vec<TeacherRules>,
}

impl Teacher {
    /// The action that the heuristic demonstrates. If the policy can choose WIDEN (`widens`), the
    /// heuristic makes layers wider within the limits that the env sets to the policy, and
    /// otherwise not at all.
    fn decide(&mut self, view: &EnvView<'_>, widens: bool) -> Action {
        let config = match self.rules.get(view.env) {
            Some(rules) => rules.config(view.facts.train_samples),
            None => *self.heuristic.config(),
        };
        let EnvFacts { widen_by, widen_up_to, .. } = view.facts;
        let widen_by = if widens { widen_by } else { 0.0 };
        self.heuristic.decide(view, &HeuristicConfig { widen_by, widen_up_to, ..config })
    }
}

impl Ppo {
    /// Lets the heuristic act in the first `rounds` rounds, while the policy learns to imitate it.
    pub fn with_teacher(self, heuristic: Heuristic, rounds: usize) -> Self {
        Self { teacher: Some(Teacher { heuristic, rounds, rules: vec![] }), ..self }
    }

    /// Sets the rules of each env for the demonstrations of the next rounds, and clears the memory
    /// of the teacher. Has no effect without a teacher.
    pub fn set_teacher_rules(&mut self, rules: Vec<TeacherRules>) {
        if let Some(teacher) = &mut self.teacher {
            let heuristic = Heuristic::new(*teacher.heuristic.config());
            *teacher = Teacher { heuristic, rules, ..*teacher };
        }
    }

    /// Whether the current round is a demonstration. During an update the current round is the one
    /// that has just ended.
    pub(super) fn is_demonstration(&self) -> bool {
        self.teacher.as_ref().is_some_and(|teacher| self.round() < teacher.rounds as u64)
    }

    /// Replaces the decisions of the step by the teacher's, in a round of demonstrations. Two
    /// copies to the device; does not wait.
    pub(super) fn replace_by_teacher(&mut self, views: &[EnvView<'_>]) -> Result<()> {
        let with_teacher = self.is_demonstration();
        let Some(teacher) = self.teacher.as_mut().filter(|_| with_teacher) else { return Ok(()) };
        let widens = self.policy.shape().layers().is_some();
        let decide = |view| teacher.decide(view, widens);
        let actions: Vec<Action> = views.iter().map(decide).collect();
        let choices: Vec<Choices> = actions.iter().map(|action| self.choices(action)).collect();
        let layout = self.policy.shape().layout();
        let mut legal = vec![0; actions.len() * layout.total()];
        let rows = legal.chunks_exact_mut(layout.total());
        for ((view, choices), row) in views.iter().zip(&choices).zip(rows) {
            let legality =
                if widens { Legality::with_layers(view) } else { Legality::from_host(view.host) };
            legality.write_all(&layout, choices, row);
        }
        let words: Vec<u32> = choices.as_flattened().iter().map(|choice| *choice as u32).collect();
        self.rollout.replace(self.step, &words, &legal)?;
        // These choices were not drawn, so they have no probabilities.
        self.outputs.log_probs = vec![[0.0; HEAD_COUNT]; choices.len()];
        self.outputs.choices = choices;
        Ok(())
    }
}

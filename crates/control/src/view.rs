//! A controller's view of an env.

use meristem_grow::{GateInputs, Host, Module};
use meristem_nn::ScoreKind;

use crate::action::ActionOp;
use crate::heuristic_config::WidthScore;
use crate::history::SlotHistory;

/// Facts about the training of an env that do not follow from its host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EnvFacts {
    /// Samples that the env trains on.
    pub train_samples: usize,
    /// Factor of the schedule on the learning rates in this step.
    pub lr_factor: f32,
    /// Kind of the task's score.
    pub score_kind: ScoreKind,
    /// Number of further features that a policy gives a layer at once, as a share of its initial
    /// features; 0 if the policy may make no layer wider.
    pub widen_by: f64,
    /// Largest number of features of a layer that a policy widens, as a multiple of its initial
    /// number.
    pub widen_up_to: f64,
}

/// Scores of each layer that can become wider ([`Host::widenable`]), as rules of growth in width
/// compare them ([`WidthScore`]); NaN where a score could not be measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WidthScores {
    /// [`WidthScore::Orthogonality`]; empty unless a rule needs it.
    pub orthogonality: Vec<f32>,
    /// [`WidthScore::GradientRatio`]; empty unless a rule needs it.
    pub gradient_ratio: Vec<f32>,
    /// [`WidthScore::NaturalGradient`]; empty unless a rule needs it.
    pub natural_gradient: Vec<f32>,
}

impl WidthScores {
    /// No scores.
    pub const NONE: &'static Self = &Self {
        orthogonality: Vec::new(),
        gradient_ratio: Vec::new(),
        natural_gradient: Vec::new(),
    };

    /// The scores of this kind.
    pub fn of(&self, score: WidthScore) -> &[f32] {
        match score {
            WidthScore::Orthogonality => &self.orthogonality,
            WidthScore::GradientRatio => &self.gradient_ratio,
            WidthScore::NaturalGradient => &self.natural_gradient,
        }
    }

    /// The scores of this kind, to be measured.
    pub fn of_mut(&mut self, score: WidthScore) -> &mut Vec<f32> {
        match score {
            WidthScore::Orthogonality => &mut self.orthogonality,
            WidthScore::GradientRatio => &mut self.gradient_ratio,
            WidthScore::NaturalGradient => &mut self.natural_gradient,
        }
    }
}

/// An env at the time of its decision: after the epoch of training and the measurements of this
/// step.
#[derive(Clone, Copy, Debug)]
pub struct EnvView<'a> {
    /// Number of the env, under which a controller keeps its memory of the env.
    pub env: usize,
    /// The host and its modules.
    pub host: &'a Host,
    /// Step within the episode, from 0.
    pub step: u32,
    /// Steps per episode, T.
    pub episode_steps: u32,
    /// Control score after each step since the start of the episode or the last rollback, in
    /// percentage points, the current one last; empty without a control split. With learners
    /// (`docs/learners.md`), each score that the program measured.
    pub scores_pp: &'a [f32],
    /// Mean control loss after each step since the start of the episode or the last rollback, the
    /// current one last; empty without a control split, and with learners.
    pub losses: &'a [f32],
    /// Current mean control loss of the bare twin: the same host without growth, with the same
    /// initial weights and batches. `None` without a twin, or once the twin has diverged.
    pub twin_loss: Option<f32>,
    /// Mean training loss of each step since the start of the episode or the last rollback, the
    /// current one last; empty in the step of a rollback, and with learners. A loss is measured
    /// before the update.
    pub train_losses: &'a [f32],
    /// Gradient health and contribution of each enabled slot, as the gates receive them.
    pub measured: &'a [GateInputs],
    /// Earlier and current measurements of each enabled slot ([`crate::SlotHistories`]).
    pub history: &'a [SlotHistory],
    /// Scores of the layers that can become wider, after this step, as far as rules need them.
    pub width_scores: &'a WidthScores,
    /// Facts about the training of the env.
    pub facts: EnvFacts,
    /// The last op of this env and whether it succeeded; `None` in the first step, and in the step
    /// of a rollback.
    pub last: Option<(ActionOp, bool)>,
}

impl EnvView<'_> {
    /// Current control score, in percentage points.
    pub fn score_pp(&self) -> Option<f32> {
        self.scores_pp.last().copied()
    }

    /// Lead over the twin: control loss of the twin minus control loss of this env, in nats; `None`
    /// unless both are finite.
    pub fn twin_lead(&self) -> Option<f64> {
        let lead = f64::from(self.twin_loss?) - f64::from(*self.losses.last()?);
        lead.is_finite().then_some(lead)
    }

    /// Measurements of a slot; none beyond the end of the list.
    pub fn measured(&self, slot: usize) -> GateInputs {
        self.measured.get(slot).copied().unwrap_or_default()
    }

    /// Whether the gate to the next stage of a slot would pass now.
    pub fn gate_passes(&self, slot: usize) -> bool {
        self.host.gate(slot, &self.measured(slot)).is_some_and(|report| report.passed)
    }

    /// Change of the control score since a module germinated, in percentage points; `None`
    /// unless both scores are known.
    pub fn gain_since_germination_pp(&self, module: &Module) -> Option<f32> {
        Some(self.score_pp()? - module.score_at_germination_pp?)
    }
}

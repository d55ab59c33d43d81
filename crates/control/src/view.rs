//! A controller's view of an env.

use meristem_grow::{GateInputs, Host, Module};

use crate::action::Op;
use crate::history::SlotHistory;

/// An env at the moment of its action: after the epoch of training and the measurements of this
/// step.
#[derive(Clone, Copy, Debug)]
pub struct EnvView<'a> {
    /// Index of the env.
    pub env: usize,
    /// The host and its modules.
    pub host: &'a Host,
    /// Step within the episode, from 0.
    pub step: u32,
    /// Steps of the episode (T).
    pub episode_steps: u32,
    /// Control accuracy after each step of the episode so far, in percentage points; the last is
    /// now.
    pub accuracies_pp: &'a [f32],
    /// Mean control loss after each step of the episode so far; the last is now.
    pub losses: &'a [f32],
    /// Mean control loss of the bare twin now, if there is one.
    pub twin_loss: Option<f32>,
    /// Mean training loss over each step of the episode so far, before each update; the last is
    /// now.
    pub train_losses: &'a [f32],
    /// Measurements of each enabled slot: gradient health and contribution. The gates get the same
    /// numbers.
    pub measured: &'a [GateInputs],
    /// Memory of each enabled slot ([`crate::History`]), this step included.
    pub history: &'a [SlotHistory],
    /// The last op of this env and whether it succeeded; `None` at the first step.
    pub last: Option<(Op, bool)>,
}

impl EnvView<'_> {
    /// Current control accuracy, in percentage points.
    pub fn accuracy_pp(&self) -> Option<f32> {
        self.accuracies_pp.last().copied()
    }

    /// Control loss of the twin minus the control loss of this env, in nats, if both are finite.
    pub fn advantage(&self) -> Option<f64> {
        let advantage = f64::from(self.twin_loss?) - f64::from(*self.losses.last()?);
        advantage.is_finite().then_some(advantage)
    }

    /// Measurements of a slot; none if the list is too short.
    pub fn measured(&self, slot: usize) -> GateInputs {
        self.measured.get(slot).copied().unwrap_or_default()
    }

    /// Whether the gate that leads on from a slot's stage would pass now.
    pub fn gate_passes(&self, slot: usize) -> bool {
        self.host.gate(slot, &self.measured(slot)).is_some_and(|report| report.passed)
    }

    /// Change of the control accuracy since a module germinated, in percentage points, if both are
    /// known.
    pub fn gain_since_germination_pp(&self, module: &Module) -> Option<f32> {
        Some(self.accuracy_pp()? - module.accuracy_at_germination_pp?)
    }
}

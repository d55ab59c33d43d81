//! Per-slot measurements of earlier steps, for features that compare a value with an earlier one.

use meristem_grow::{GateInputs, Host};
use serde::{Deserialize, Serialize};

/// Two values of a quantity: unless a field says otherwise, the last two that were measured; `None`
/// before the module was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LastTwo {
    /// The latest value.
    pub now: Option<f32>,
    /// The value before `now`.
    pub before: Option<f32>,
}

impl LastTwo {
    fn push(&mut self, measured: Option<f32>) {
        if measured.is_some() {
            *self = Self { now: measured, before: self.now };
        }
    }

    /// Change between the two values; 0 if fewer than two were measured.
    pub fn change(&self) -> f32 {
        self.now.zip(self.before).map_or(0.0, |(now, before)| now - before)
    }
}

/// Measurements of the module in one slot. Cleared when the slot is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotHistory {
    /// Alpha.
    pub alpha: LastTwo,
    /// Leave-one-out contribution in percentage points.
    pub contribution_pp: LastTwo,
    /// Gradient health in this step and in the step before; `None` in a step without a measurement.
    pub health: LastTwo,
    /// Sum of the interactions with all other live modules in percentage points; the latest
    /// measured.
    pub interaction_sum_pp: Option<f32>,
    /// Steps since the contribution was measured: 0 if measured in this step, `None` if never.
    pub steps_since_counterfactual: Option<u32>,
}

impl SlotHistory {
    /// Records a step of one slot.
    fn record(&mut self, alpha: f32, measured: &GateInputs, interaction_sum_pp: Option<f32>) {
        self.alpha.push(Some(alpha));
        self.contribution_pp.push(measured.contribution_pp);
        self.health.before = self.health.now;
        self.health.now = measured.gradient_health.map(|health| health.health as f32);
        self.interaction_sum_pp = interaction_sum_pp.or(self.interaction_sum_pp);
        self.steps_since_counterfactual = match measured.contribution_pp {
            Some(_) => Some(0),
            None => self.steps_since_counterfactual.map(|steps| steps.saturating_add(1)),
        };
    }
}

/// Memory of all slots of an env.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotHistories {
    slots: Vec<SlotHistory>,
}

impl SlotHistories {
    /// Records a step: call it once per step, after the measurements and before the decision. Slots
    /// beyond the end of a list count as not measured.
    pub fn note(
        &mut self,
        host: &Host,
        measured: &[GateInputs],
        interaction_sums_pp: &[Option<f32>],
    ) {
        self.slots.resize(host.slots().len(), SlotHistory::default());
        for (index, slot) in host.slots().iter().enumerate() {
            let history = &mut self.slots[index];
            if slot.module.is_none() {
                *history = SlotHistory::default();
                continue;
            }
            let inputs = measured.get(index).copied().unwrap_or_default();
            let interaction = interaction_sums_pp.get(index).copied().flatten();
            history.record(slot.alpha(), &inputs, interaction);
        }
    }

    /// Measurements per enabled slot; empty before the first step.
    pub fn slots(&self) -> &[SlotHistory] {
        &self.slots
    }
}

//! Gates: the conditions for a module to enter its next stage.

use meristem_nn::PairedLoss;
use serde::{Deserialize, Serialize};

use super::health::GradientHealth;
use super::slot::Slot;
use super::stage::Stage;

/// A gate, named after the stage it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Germinated -> Training.
    Training,
    /// Training -> Blending.
    Blending,
    /// Blending -> Holding.
    Holding,
    /// Holding -> Fossilized.
    Fossilized,
}

impl Gate {
    /// The stage after the gate.
    pub fn target(self) -> Stage {
        match self {
            Gate::Training => Stage::Training,
            Gate::Blending => Stage::Blending,
            Gate::Holding => Stage::Holding,
            Gate::Fossilized => Stage::Fossilized,
        }
    }

    /// The stage before the gate.
    pub fn source(self) -> Stage {
        match self {
            Gate::Training => Stage::Germinated,
            Gate::Blending => Stage::Training,
            Gate::Holding => Stage::Blending,
            Gate::Fossilized => Stage::Holding,
        }
    }

    /// The gate after a stage; `None` for a stage without a gate.
    pub fn from_stage(stage: Stage) -> Option<Self> {
        [Gate::Training, Gate::Blending, Gate::Holding, Gate::Fossilized]
            .into_iter()
            .find(|gate| gate.source() == stage)
    }
}

/// Thresholds of the gates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gates {
    /// Smallest number of steps in Training before Blending: 10, or 3 with [`Gates::quick`].
    pub min_training_steps: u32,
    /// Smallest gradient health before Blending: .7.
    pub min_gradient_health: f64,
    /// Largest share of exploding gradients before Blending, over the module's tensors and the
    /// batches of the step: .1. It is not 0, because in a young module a few batches in hundreds
    /// have large gradients, and these are clipped.
    pub max_exploding_share: f64,
    /// Largest distance of alpha from its target before Holding: 1e-6.
    pub alpha_tolerance: f64,
    /// Smallest contribution before Fossilized, in percentage points: 1.0, or 0 with
    /// [`Gates::permissive`].
    pub min_contribution_pp: f64,
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            min_training_steps: 10,
            min_gradient_health: 0.7,
            max_exploding_share: 0.1,
            alpha_tolerance: 1e-6,
            min_contribution_pp: 1.0,
        }
    }
}

impl Gates {
    /// These gates with 3 training steps, for short runs.
    pub fn quick(self) -> Self {
        Self { min_training_steps: 3, ..self }
    }

    /// These gates with a smallest contribution of 0.
    pub fn permissive(self) -> Self {
        Self { min_contribution_pp: 0.0, ..self }
    }
}

/// Measurements of a module. A gate fails if a measurement that it needs is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GateInputs {
    /// Gradient health.
    pub gradient_health: Option<GradientHealth>,
    /// Contribution in percentage points: control score with the module minus control score
    /// without it.
    pub contribution_pp: Option<f32>,
    /// Contribution in loss: mean control loss without the module minus mean control loss with it,
    /// on the same images. Positive for a module that helps.
    #[serde(default)]
    pub contribution_loss: Option<PairedLoss>,
}

/// Comparison of a condition's value with its threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// `value >= threshold`.
    AtLeast,
    /// `value <= threshold`.
    AtMost,
}

/// One condition of a gate, and whether it held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// Name of the compared value.
    pub name: String,
    /// The value; `None` without a measurement.
    pub value: Option<f64>,
    /// The comparison.
    pub comparison: Comparison,
    /// The threshold.
    pub threshold: f64,
    /// Whether the condition held; false for a value that is missing or NaN.
    pub passed: bool,
}

impl Condition {
    fn new(name: &str, value: Option<f64>, comparison: Comparison, threshold: f64) -> Self {
        let passed = value.is_some_and(|value| match comparison {
            Comparison::AtLeast => value >= threshold,
            Comparison::AtMost => value <= threshold,
        });
        Self { name: name.into(), value, comparison, threshold, passed }
    }
}

/// Result of a gate's evaluation, with all conditions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateReport {
    /// The gate.
    pub gate: Gate,
    /// The gate's conditions.
    pub conditions: Vec<Condition>,
    /// Whether all conditions held.
    pub passed: bool,
}

impl GateReport {
    /// The conditions that did not hold.
    pub fn failed(&self) -> impl Iterator<Item = &Condition> {
        self.conditions.iter().filter(|condition| !condition.passed)
    }
}

impl Gates {
    /// Evaluates a gate for a slot. The first condition of every gate is that the slot is in the
    /// stage before the gate. If the slot is in another stage, its steps and its alpha count as not
    /// measured; the values of `inputs` are compared all the same.
    pub fn evaluate(&self, gate: Gate, slot: &Slot, inputs: &GateInputs) -> GateReport {
        use Comparison::{AtLeast, AtMost};
        let is_before = slot.stage == gate.source();
        let module = slot.module.as_ref().filter(|_| is_before);
        let truth = |holds: bool| if holds { 1.0 } else { 0.0 };
        let name = format!("is_{}", gate.source());
        let mut conditions = vec![Condition::new(&name, Some(truth(is_before)), AtLeast, 1.0)];
        match gate {
            Gate::Training => {}
            Gate::Blending => {
                let steps = module.map(|_| f64::from(slot.stage_steps));
                let health = inputs.gradient_health;
                let least = f64::from(self.min_training_steps);
                let (healthy, exploding) = (health.map(|h| h.health), health.map(|h| h.exploding));
                conditions.push(Condition::new("training_steps", steps, AtLeast, least));
                let least = self.min_gradient_health;
                conditions.push(Condition::new("gradient_health", healthy, AtLeast, least));
                let most = self.max_exploding_share;
                conditions.push(Condition::new("exploding_share", exploding, AtMost, most));
            }
            Gate::Holding => {
                let alpha = module.map(|module| &module.alpha);
                let distance = alpha.map(|a| (f64::from(a.alpha()) - f64::from(a.target())).abs());
                let at_rest = alpha.map(|a| truth(a.is_at_rest()));
                let most = self.alpha_tolerance;
                conditions.push(Condition::new("alpha_distance", distance, AtMost, most));
                conditions.push(Condition::new("alpha_at_rest", at_rest, AtLeast, 1.0));
            }
            Gate::Fossilized => {
                let contribution = inputs.contribution_pp.map(f64::from);
                let least = self.min_contribution_pp;
                conditions.push(Condition::new("contribution_pp", contribution, AtLeast, least));
            }
        }
        let passed = conditions.iter().all(|condition| condition.passed);
        GateReport { gate, conditions, passed }
    }
}

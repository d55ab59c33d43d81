//! Errors of rules, and reasons for illegal actions.

use super::stage::Stage;
use crate::spec::SlotName;

/// A rule of growth outside its range.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("rule `{what}` must be {}, got {got}", range(*least, *most))]
pub struct RuleError {
    /// Name of the rule.
    pub what: &'static str,
    /// Smallest valid value.
    pub least: f64,
    /// Largest valid value.
    pub most: f64,
    /// The value.
    pub got: f64,
}

/// A range in words; the largest value may be infinite.
fn range(least: f64, most: f64) -> String {
    if most.is_finite() { format!("from {least} to {most}") } else { format!("at least {least}") }
}

/// Errors of alpha controllers.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AlphaError {
    /// A new target during a move.
    #[error(
        "alpha moves to {target} for another {steps_to_go} steps; \
         set a new target when it is at rest"
    )]
    NotAtRest {
        /// Current target.
        target: f32,
        /// Steps left.
        steps_to_go: u32,
    },
    /// A target outside `[0, 1]`.
    #[error("alpha target must be from 0 to 1, got {0}")]
    BadTarget(f32),
}

/// Reason why an action is illegal.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LifecycleError {
    /// A transition that the lifecycle does not contain.
    #[error("slot {slot}: a module cannot go from {from} to {to}")]
    Transition {
        /// The slot.
        slot: SlotName,
        /// Its current stage.
        from: Stage,
        /// The requested stage.
        to: Stage,
    },
    /// An index beyond the enabled slots.
    #[error("slot index {index} is out of range: {slots} slots are enabled")]
    NoSuchSlot {
        /// The index.
        index: usize,
        /// Number of enabled slots.
        slots: usize,
    },
    /// An index beyond the blueprints of the set.
    #[error("blueprint index {index} is out of range: there are {blueprints} blueprints")]
    NoSuchBlueprint {
        /// The index.
        index: usize,
        /// Number of blueprints in the set.
        blueprints: usize,
    },
    /// An action that is illegal in the slot's stage.
    #[error("slot {slot}: {action} needs {needs}, but it is {stage}")]
    WrongStage {
        /// The slot.
        slot: SlotName,
        /// The action.
        action: &'static str,
        /// Stages in which the action is legal, in words.
        needs: &'static str,
        /// The slot's stage.
        stage: Stage,
    },
    /// The host already has its largest number of modules.
    #[error("the host has {modules} modules, and its limit is {limit}")]
    Full {
        /// Number of modules.
        modules: usize,
        /// Largest number of modules.
        limit: usize,
    },
    /// The host with the new module would exceed a size limit.
    #[error("slot {slot}: with {blueprint} the host has {needs} {what}, and its limit is {limit}")]
    TooLarge {
        /// The slot.
        slot: SlotName,
        /// The blueprint.
        blueprint: String,
        /// Unit of the size: `parameters` or `MACs`.
        what: &'static str,
        /// Size with the module.
        needs: u64,
        /// Largest size.
        limit: u64,
    },
    /// A blueprint that does not fit the shape of a slot, or cannot learn in it.
    #[error(
        "slot {slot}: {blueprint} does not fit there: its layers need another shape, or a group of \
         its group norm has one value, whose normalised value is always 0"
    )]
    DoesNotFit {
        /// The slot.
        slot: SlotName,
        /// The blueprint.
        blueprint: String,
    },
    /// Another module has not yet reached Blending.
    #[error("slot {slot} is still {stage}; another module may germinate once this one blends")]
    NotYet {
        /// The slot of the other module.
        slot: SlotName,
        /// The stage of the other module.
        stage: Stage,
    },
    /// The module is below the smallest age for pruning.
    #[error(
        "slot {slot}: its module is {age_steps} steps old, and may be pruned after {min_steps} \
         steps"
    )]
    TooYoung {
        /// The slot.
        slot: SlotName,
        /// Age of the module.
        age_steps: u32,
        /// Smallest age for pruning.
        min_steps: u32,
    },
    /// The module is already being removed.
    #[error("slot {slot} is being pruned")]
    BeingPruned {
        /// The slot.
        slot: SlotName,
    },
    /// A layer that cannot become wider.
    #[error("layer {layer}: {problem}")]
    Widen {
        /// The layer.
        layer: String,
        /// Reason.
        problem: String,
    },
    /// Alpha cannot move.
    #[error("slot {slot}: {source}")]
    Alpha {
        /// The slot.
        slot: SlotName,
        /// Reason.
        source: AlphaError,
    },
}

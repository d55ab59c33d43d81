//! Errors of rules, and refused actions, each with its reason.

use crate::spec::SlotName;

use super::stage::Stage;

/// A rule of growth that is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("rule `{what}` must be {}, got {got}", range(*least, *most))]
pub struct RuleError {
    /// Name of the rule.
    pub what: &'static str,
    /// Least value.
    pub least: f64,
    /// Largest value.
    pub most: f64,
    /// The value.
    pub got: f64,
}

/// A range in words; the largest value may be infinite.
fn range(least: f64, most: f64) -> String {
    match most.is_finite() {
        true => format!("from {least} to {most}"),
        false => format!("at least {least}"),
    }
}

/// Errors of alpha controllers.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AlphaError {
    /// `retarget` while moving.
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

/// An action that is refused, with the reason.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LifecycleError {
    /// A transition that the lifecycle does not have.
    #[error("slot {slot}: a module cannot go from {from} to {to}")]
    Transition {
        /// The slot.
        slot: SlotName,
        /// Its current stage.
        from: Stage,
        /// The stage asked for.
        to: Stage,
    },
    /// No slot of this index is enabled.
    #[error("slot index {index} is out of range: {slots} slots are enabled")]
    NoSuchSlot {
        /// The index.
        index: usize,
        /// Enabled slots.
        slots: usize,
    },
    /// The set has no blueprint with this index.
    #[error("blueprint index {index} is out of range: there are {blueprints} blueprints")]
    NoSuchBlueprint {
        /// The index.
        index: usize,
        /// Blueprints of the set.
        blueprints: usize,
    },
    /// The action is not allowed in the slot's stage.
    #[error("slot {slot}: {action} needs {needs}, but it is {stage}")]
    WrongStage {
        /// The slot.
        slot: SlotName,
        /// The action.
        action: &'static str,
        /// Stages in which it is allowed, in words.
        needs: &'static str,
        /// The slot's stage.
        stage: Stage,
    },
    /// The host has its largest number of modules already.
    #[error("the host has {modules} modules, and its limit is {limit}")]
    Full {
        /// Modules now.
        modules: usize,
        /// Largest number allowed.
        limit: usize,
    },
    /// With the module the host would exceed a limit of its size.
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
        /// Largest size allowed.
        limit: u64,
    },
    /// Another module has not begun to blend.
    #[error("slot {slot} is still {stage}; another module may germinate once this one blends")]
    NotYet {
        /// The slot of the other module.
        slot: SlotName,
        /// Its stage.
        stage: Stage,
    },
    /// The module is younger than the least age for pruning.
    #[error(
        "slot {slot}: its module is {age_steps} steps old, and may be pruned after {min_steps} \
         steps"
    )]
    TooYoung {
        /// The slot.
        slot: SlotName,
        /// Age.
        age_steps: u32,
        /// The least age.
        min_steps: u32,
    },
    /// The module is being removed already.
    #[error("slot {slot} is being pruned")]
    BeingPruned {
        /// The slot.
        slot: SlotName,
    },
    /// The alpha controller refused.
    #[error("slot {slot}: {source}")]
    Alpha {
        /// The slot.
        slot: SlotName,
        /// Its reason.
        source: AlphaError,
    },
}

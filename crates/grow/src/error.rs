//! Errors of this crate: invalid descriptions and refused actions, each with its reason.

use crate::slot_name::SlotName;
use crate::spec::{HostSpec, ImageShape};
use crate::stage::Stage;
use crate::suggest::hint;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A host description is invalid, or the host does not fit the image.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A blueprint is invalid.
    #[error(transparent)]
    Blueprint(#[from] BlueprintError),
    /// The lifecycle does not allow an action.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// A topology read from a file is invalid.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The network could not be built.
    #[error(transparent)]
    Graph(#[from] meristem_nn::Error),
}

/// Errors of host descriptions and slot names.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// Neither a preset nor `cnn:…`.
    #[error(
        "unknown host `{given}`{}\n  presets: {}; or a description such as \
         `cnn:channels=12,blocks=4,kernel=5,pools=3`",
        hint(nearest),
        crate::spec::PRESETS.map(|(name, _)| name).join(", ")
    )]
    UnknownHost {
        /// The text given.
        given: String,
        /// The nearest preset.
        nearest: Option<String>,
    },
    /// A key of a `cnn:` description that does not exist.
    #[error(
        "host `{given}`: unknown key `{key}`{}\n  keys: channels, blocks, kernel, pools",
        hint(nearest)
    )]
    UnknownKey {
        /// The text given.
        given: String,
        /// The key.
        key: String,
        /// The nearest known key.
        nearest: Option<String>,
    },
    /// A part of a `cnn:` description that is not `key=value` with a whole number.
    #[error("host `{given}`: expected `key=number`, got `{part}`")]
    BadPart {
        /// The text given.
        given: String,
        /// The part.
        part: String,
    },
    /// A key given twice.
    #[error("host `{given}`: `{key}` is given twice")]
    DuplicateKey {
        /// The text given.
        given: String,
        /// The key.
        key: String,
    },
    /// A size that is zero or beyond what is supported.
    #[error("`{what}` must be {expected}, got {got}")]
    Size {
        /// Name of the size.
        what: &'static str,
        /// Allowed range, in words.
        expected: String,
        /// The value.
        got: usize,
    },
    /// A rule of growth that is out of its range.
    #[error("rule `{what}` must be within {least} and {most}, got {got}")]
    Rule {
        /// Name of the rule.
        what: &'static str,
        /// Least value.
        least: f64,
        /// Largest value.
        most: f64,
        /// The value.
        got: f64,
    },
    /// A network with more parameters than are supported.
    #[error(
        "host `{host}` would have {parameters} parameters, more than the {limit} that are \
         supported; use fewer channels or blocks, or a smaller kernel"
    )]
    TooLarge {
        /// The host.
        host: HostSpec,
        /// Its parameters (saturating).
        parameters: usize,
        /// Largest number supported.
        limit: usize,
    },
    /// More pools than the image's sides can be halved.
    #[error(
        "host `{host}` is too deep for {image} images: {} 2×2 pools need at least {side}×{side} \
         pixels, and {fits} fit; try `--host {suggestion}`",
        host.pools,
        side = 1usize << host.pools.min(30)
    )]
    TooDeep {
        /// The host.
        host: HostSpec,
        /// The image.
        image: ImageShape,
        /// Pools that fit.
        fits: usize,
        /// The same host with as many pools as fit.
        suggestion: HostSpec,
    },
    /// A name that is no slot of this host.
    #[error("unknown slot `{given}`{}\n  slots of this host: {known}", hint(nearest))]
    UnknownSlot {
        /// The text given.
        given: String,
        /// The nearest slot.
        nearest: Option<String>,
        /// Names of the host's slots.
        known: String,
    },
    /// A slot listed twice.
    #[error("slot `{0}` is listed twice")]
    DuplicateSlot(SlotName),
}

/// Errors of blueprints.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlueprintError {
    /// An empty name, or one with characters other than `a-z`, `0-9`, `_`.
    #[error("blueprint name `{name}`: expected letters a-z, digits and `_` only, and at least one")]
    BadName {
        /// The name.
        name: String,
    },
    /// Two blueprints of one name.
    #[error("there is already a blueprint `{name}`; give yours another name")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A name that is not in the set.
    #[error("unknown blueprint `{name}`{}", hint(nearest))]
    Unknown {
        /// The name.
        name: String,
        /// The nearest known name.
        nearest: Option<String>,
    },
    /// A module that would not be the identity at birth, or would never learn.
    #[error("blueprint `{name}`: {problem}")]
    Birth {
        /// The blueprint.
        name: String,
        /// Reason, and what to write instead.
        problem: String,
    },
    /// Layers that do not fit together.
    #[error("blueprint `{name}` at {channels} channels: {problem}")]
    Shape {
        /// The blueprint.
        name: String,
        /// Channels of the slot.
        channels: usize,
        /// Reason.
        problem: String,
    },
}

/// Errors of alpha controllers.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AlphaError {
    /// `retarget` while moving.
    #[error(
        "alpha is on its way to {target} ({steps_to_go} steps to go); retarget it when it is at \
         rest"
    )]
    NotAtRest {
        /// Current target.
        target: f32,
        /// Steps left.
        steps_to_go: u32,
    },
    /// A target outside `[0, 1]`.
    #[error("alpha target must be within 0 and 1, got {0}")]
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
    #[error("the host has {modules} modules and may have {limit}")]
    Full {
        /// Modules now.
        modules: usize,
        /// Largest number allowed.
        limit: usize,
    },
    /// Another module has not begun to blend.
    #[error("slot {slot} is still {stage}: the next module may germinate once it blends")]
    NotYet {
        /// The slot of the other module.
        slot: SlotName,
        /// Its stage.
        stage: Stage,
    },
    /// The module is younger than the least age for pruning.
    #[error(
        "slot {slot}: a module of age {age_steps} is too young to be pruned, that takes \
         {min_steps} steps"
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

/// Errors of topologies read from a file. Each says what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// Invalid JSON, or JSON with other fields.
    #[error(
        "`topology` of the weights file does not parse: {0}; it was not written by Meristem, or \
         is damaged"
    )]
    Parse(#[from] serde_json::Error),
    /// A version that this build does not read.
    #[error(
        "`topology` has version {found}, this build reads version {supported}; use the build that \
         wrote the file"
    )]
    Version {
        /// Version of the file.
        found: u32,
        /// Version of this build.
        supported: u32,
    },
    /// A slot whose fields contradict each other.
    #[error("`topology`, slot {slot}: {problem}")]
    Slot {
        /// The slot.
        slot: SlotName,
        /// The contradiction.
        problem: String,
    },
}

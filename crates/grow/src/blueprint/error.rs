//! Errors of blueprints.

use crate::suggest::hint;

/// Errors of blueprints.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlueprintError {
    /// An empty name, or one with characters other than `a-z`, `0-9`, `_`.
    #[error("blueprint name `{name}`: expected one or more of the letters a-z, digits and `_`")]
    BadName {
        /// The name.
        name: String,
    },
    /// Two blueprints with the same name.
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
    /// A module that is not the identity at germination, or whose parameters never get a gradient.
    #[error("blueprint `{name}`: {problem}")]
    Birth {
        /// The blueprint.
        name: String,
        /// Reason and remedy.
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

//! Errors of host descriptions and slots, and of hosts that do not fit an image.

use super::slot_name::SlotName;
use super::task_shape::TaskShape;
use crate::suggest::hint;

/// Errors of host descriptions and slots, and of hosts that do not fit an image.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// Neither the name of a host nor a description.
    #[error(
        "unknown host `{given}`{}\n  hosts: {presets}; or a description such as \
         `cnn:channels=12,blocks=4,kernel=5,pools=3`, `mlp:256,256` or `conv1d:16,32,64`, or a \
         file that ends in .toml or .json",
        hint(nearest)
    )]
    UnknownHost {
        /// The text given.
        given: String,
        /// The nearest name.
        nearest: Option<String>,
        /// Names of the presets, and of the ready-made hosts where they are allowed.
        presets: String,
    },
    /// An unknown key in a `cnn:` description.
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
    /// A part of a `cnn:` description that is not `key=value` with a whole number, or of an `mlp:`
    /// or `conv1d:` description that is no whole number.
    #[error("host `{given}`: expected {expected}, got `{part}`")]
    BadPart {
        /// The text given.
        given: String,
        /// Meaning and form of the part.
        expected: &'static str,
        /// The part.
        part: String,
    },
    /// A key that is given twice.
    #[error("host `{given}`: `{key}` is given twice")]
    DuplicateKey {
        /// The text given.
        given: String,
        /// The key.
        key: String,
    },
    /// A size outside its range.
    #[error("`{what}` must be {expected}, got {got}")]
    Size {
        /// Name of the size.
        what: &'static str,
        /// Allowed range, in words.
        expected: String,
        /// The value.
        got: usize,
    },
    /// A network above the supported number of parameters.
    #[error(
        "host `{host}` would have {parameters} parameters, at most {limit} are supported; use \
         fewer channels or blocks, or a smaller kernel"
    )]
    TooLarge {
        /// The host.
        host: String,
        /// Number of parameters (saturating).
        parameters: usize,
        /// Largest number supported.
        limit: usize,
    },
    /// More pools than fit the image.
    #[error(
        "host `{host}` is too deep for {image} images: {pools} 2×2 pools need at least \
         {side}×{side} pixels, and {fits} fit; try `--host {suggestion}`",
        side = 1usize << pools.min(&30)
    )]
    TooDeep {
        /// The host.
        host: String,
        /// The image.
        image: TaskShape,
        /// Number of pools of the host.
        pools: usize,
        /// Number of pools that fit.
        fits: usize,
        /// The same host with the number of pools that fit.
        suggestion: String,
    },
    /// A description that cannot be used.
    #[error("host {host}: {problem}\n  docs/hosts.md has the layers and their keys")]
    Description {
        /// Name of the host.
        host: String,
        /// The problem, with its place in the description.
        problem: String,
    },
    /// A layer that does not fit its input.
    #[error("host `{host}`, layer {place}: {problem}")]
    Layer {
        /// The host.
        host: String,
        /// Position of the layer, and its name.
        place: String,
        /// The problem, and its remedy.
        problem: String,
    },
    /// The last layer has another shape than one value per class.
    #[error(
        "host `{host}`: its last layer gives {output}, and the data needs {classes}×1×1, a value \
         per class; end it with {{ linear = {{ out = \"classes\" }} }}"
    )]
    Output {
        /// The host.
        host: String,
        /// Shape of the output: channels, rows and columns.
        output: String,
        /// Classes of the dataset.
        classes: usize,
    },
    /// Widths that do not result from a host by widening its layers.
    #[error("host `{host}` is not `{first}` with more features of some layers")]
    Widths {
        /// The host.
        host: String,
        /// The host before any layer was widened.
        first: String,
    },
    /// A name that is not a slot of this host.
    #[error("unknown slot `{given}`{}\n  slots of this host: {known}", hint(nearest))]
    UnknownSlot {
        /// The text given.
        given: String,
        /// The nearest slot.
        nearest: Option<String>,
        /// Names of the host's slots.
        known: String,
    },
    /// A slot that is listed twice.
    #[error("slot `{0}` is listed twice")]
    DuplicateSlot(SlotName),
}

impl HostError {
    /// Checks that a size is in `least..=most`.
    pub(super) fn check_size(
        what: &'static str,
        got: usize,
        least: usize,
        most: usize,
    ) -> Result<(), HostError> {
        if (least..=most).contains(&got) {
            return Ok(());
        }
        Err(HostError::Size { what, expected: format!("{least} to {most}"), got })
    }
}

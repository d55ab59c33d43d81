//! Host descriptions: presets, `cnn:…`, and whether a host fits an image.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::suggest::{hint, nearest};

use super::image::ImageShape;
use super::slot_name::SlotName;

/// Largest number of blocks of a host.
const MAX_BLOCKS: usize = 12;
/// Largest number of channels of a block.
const MAX_CHANNELS: usize = 8192;
/// Largest kernel.
const MAX_KERNEL: usize = 31;
/// Largest number of parameters (1 GiB of f32).
const MAX_PARAMETERS: usize = 1 << 28;
/// Largest height or width of an image, and largest number of image channels and of classes.
const MAX_IMAGE_SIDE: usize = 1 << 16;

/// The presets of `docs/growth.md` by name.
pub const PRESETS: [(&str, HostSpec); 6] = [
    ("baseline", HostSpec { channels: 8, blocks: 3, kernel: 3, pools: 3 }),
    ("wide", HostSpec { channels: 16, blocks: 3, kernel: 3, pools: 3 }),
    ("deep", HostSpec { channels: 8, blocks: 5, kernel: 3, pools: 5 }),
    ("large", HostSpec { channels: 32, blocks: 3, kernel: 3, pools: 3 }),
    ("impaired", HostSpec { channels: 1, blocks: 3, kernel: 1, pools: 3 }),
    ("minimal", HostSpec { channels: 2, blocks: 3, kernel: 1, pools: 0 }),
];

const KEYS: [&str; 4] = ["channels", "blocks", "kernel", "pools"];

/// A CNN host: block i is a k×k convolution (same padding, no bias) to `channels · 2^i` channels,
/// batch norm, ReLU, and a 2×2 max-pool while `i < pools`; then global average pool and a linear
/// classifier.
///
/// Parsed from a preset's name or from `cnn:channels=12,blocks=4,kernel=5,pools=3`; keys left out
/// are the baseline's (8 channels, 3 blocks, kernel 3) and as many pools as blocks. Files store
/// this text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct HostSpec {
    /// Channels of the first block; each further block doubles them.
    pub channels: usize,
    /// Blocks, at least 2.
    pub blocks: usize,
    /// Kernel size, odd.
    pub kernel: usize,
    /// Blocks that are followed by a pool, counted from the first.
    pub pools: usize,
}

impl HostSpec {
    /// The preset with this name.
    ///
    /// # Errors
    /// [`HostError::UnknownHost`] naming the nearest preset.
    pub fn preset(name: &str) -> Result<Self, HostError> {
        let found = PRESETS.iter().find(|(known, _)| *known == name);
        found.map(|(_, spec)| *spec).ok_or_else(|| HostError::UnknownHost {
            given: name.into(),
            nearest: nearest(name, PRESETS.iter().map(|(known, _)| *known)).map(Into::into),
        })
    }

    /// The preset's name if it is one, else the `cnn:…` description. [`fmt::Display`] writes the
    /// same.
    pub fn name(&self) -> String {
        match PRESETS.iter().find(|(_, spec)| spec == self) {
            Some((name, _)) => (*name).into(),
            None => self.description(),
        }
    }

    /// The description `cnn:channels=…,blocks=…,kernel=…,pools=…`.
    pub fn description(&self) -> String {
        let Self { channels, blocks, kernel, pools } = self;
        format!("cnn:channels={channels},blocks={blocks},kernel={kernel},pools={pools}")
    }

    /// Channels of block `block`, which are those of its two slots.
    pub fn block_channels(&self, block: usize) -> usize {
        self.channels << block
    }

    /// All slots in action-index order: `r0c0 … r0c(n−1), r1c0 … r1c(n−1)`.
    pub fn slots(&self) -> Vec<SlotName> {
        let before = (0..self.blocks).map(SlotName::before_pool);
        before.chain((0..self.blocks).map(SlotName::after_pool)).collect()
    }

    /// All slots in forward order: `r0c0, r1c0, r0c1, r1c1, …`.
    pub fn forward_order(&self) -> Vec<SlotName> {
        let of_block = |i| [SlotName::before_pool(i), SlotName::after_pool(i)];
        (0..self.blocks).flat_map(of_block).collect()
    }

    /// Parses a list of slots such as `r0c0,r1c2`, or `all`; returned in action-index order.
    ///
    /// # Errors
    /// [`HostError::UnknownSlot`] with the names of the host's slots, [`HostError::DuplicateSlot`].
    pub fn parse_slots(&self, text: &str) -> Result<Vec<SlotName>, HostError> {
        if text.trim() == "all" {
            return Ok(self.slots());
        }
        let names: Vec<&str> = text.split(',').map(str::trim).collect();
        let parsed: Vec<SlotName> = names
            .iter()
            .map(|name| name.parse().map_err(|_| self.unknown_slot(name)))
            .collect::<Result<_, _>>()?;
        self.order_slots(&parsed)
    }

    /// Sorts `slots` in action-index order, after checking that each is a slot of this host and
    /// listed once.
    pub(crate) fn order_slots(&self, slots: &[SlotName]) -> Result<Vec<SlotName>, HostError> {
        let mut ordered = slots.to_vec();
        ordered.sort();
        if let Some(bad) = ordered.iter().find(|slot| slot.block >= self.blocks) {
            return Err(self.unknown_slot(&bad.to_string()));
        }
        match ordered.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(HostError::DuplicateSlot(pair[0])),
            None => Ok(ordered),
        }
    }

    fn unknown_slot(&self, given: &str) -> HostError {
        let known: Vec<String> = self.slots().iter().map(SlotName::to_string).collect();
        let nearest = nearest(given, known.iter().map(String::as_str)).map(Into::into);
        HostError::UnknownSlot { given: given.into(), nearest, known: known.join(", ") }
    }

    /// Trained parameters of the bare host for images of this shape (saturating).
    pub fn parameters(&self, image: &ImageShape) -> usize {
        let mut input = image.channels;
        let mut total = 0usize;
        for block in 0..self.blocks {
            let output = self
                .channels
                .saturating_mul(1usize.checked_shl(block as u32).unwrap_or(usize::MAX));
            let conv = input.saturating_mul(output).saturating_mul(self.kernel * self.kernel);
            total = total.saturating_add(conv).saturating_add(2 * output);
            input = output;
        }
        total.saturating_add(input.saturating_mul(image.classes)).saturating_add(image.classes)
    }

    /// Checks that each size is in its range.
    ///
    /// # Errors
    /// [`HostError::Size`] naming the size, its range and the value.
    pub fn check(&self) -> Result<(), HostError> {
        size("blocks", self.blocks, 2, MAX_BLOCKS)?;
        size("channels", self.channels, 1, MAX_CHANNELS >> (self.blocks - 1))?;
        size("kernel", self.kernel, 1, MAX_KERNEL)?;
        size("pools", self.pools, 0, self.blocks)?;
        if self.kernel.is_multiple_of(2) {
            let expected = "odd, so that the padding keeps the image's size".into();
            return Err(HostError::Size { what: "kernel", expected, got: self.kernel });
        }
        Ok(())
    }

    /// Checks the sizes, the image, and that the host fits the image.
    ///
    /// # Errors
    /// [`HostError::Size`], [`HostError::TooLarge`], or [`HostError::TooDeep`] with a host that
    /// would fit.
    pub fn validate(&self, image: &ImageShape) -> Result<(), HostError> {
        self.check()?;
        size("image channels", image.channels, 1, MAX_IMAGE_SIDE)?;
        size("image height", image.height, 1, MAX_IMAGE_SIDE)?;
        size("image width", image.width, 1, MAX_IMAGE_SIDE)?;
        size("classes", image.classes, 1, MAX_IMAGE_SIDE)?;
        let parameters = self.parameters(image);
        if parameters > MAX_PARAMETERS {
            return Err(HostError::TooLarge { host: *self, parameters, limit: MAX_PARAMETERS });
        }
        let fits = image.height.min(image.width).ilog2() as usize;
        if self.pools > fits {
            let suggestion = Self { pools: fits, ..*self };
            return Err(HostError::TooDeep { host: *self, image: *image, fits, suggestion });
        }
        Ok(())
    }
}

fn size(what: &'static str, got: usize, least: usize, most: usize) -> Result<(), HostError> {
    if (least..=most).contains(&got) {
        return Ok(());
    }
    Err(HostError::Size { what, expected: format!("{least} to {most}"), got })
}

impl Default for HostSpec {
    /// The preset `baseline`.
    fn default() -> Self {
        PRESETS[0].1
    }
}

impl fmt::Display for HostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl FromStr for HostSpec {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        let given = text.trim();
        let Some(list) = given.strip_prefix("cnn:") else {
            return Self::preset(given);
        };
        let mut values: [Option<usize>; 4] = [None; 4];
        for part in list.split(',').map(str::trim) {
            let bad = || HostError::BadPart { given: given.into(), part: part.into() };
            let (key, value) = part.split_once('=').ok_or_else(bad)?;
            let (key, value) = (key.trim(), value.trim());
            let Some(at) = KEYS.iter().position(|known| *known == key) else {
                let (given, nearest) = (given.into(), nearest(key, KEYS).map(Into::into));
                return Err(HostError::UnknownKey { given, key: key.into(), nearest });
            };
            if values[at].is_some() {
                return Err(HostError::DuplicateKey { given: given.into(), key: key.into() });
            }
            let digits = value.bytes().all(|b| b.is_ascii_digit());
            values[at] = Some(digits.then(|| value.parse().ok()).flatten().ok_or_else(bad)?);
        }
        let [channels, blocks, kernel, pools] = values;
        let base = Self::default();
        let blocks = blocks.unwrap_or(base.blocks);
        let spec = Self {
            channels: channels.unwrap_or(base.channels),
            blocks,
            kernel: kernel.unwrap_or(base.kernel),
            pools: pools.unwrap_or(blocks),
        };
        spec.check()?;
        Ok(spec)
    }
}

impl From<HostSpec> for String {
    fn from(spec: HostSpec) -> Self {
        spec.name()
    }
}

impl TryFrom<String> for HostSpec {
    type Error = HostError;

    fn try_from(text: String) -> Result<Self, HostError> {
        text.parse()
    }
}

/// Errors of host descriptions, of their slots, and of hosts that do not fit an image.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// Neither a preset nor `cnn:…`.
    #[error(
        "unknown host `{given}`{}\n  presets: {}; or a description such as \
         `cnn:channels=12,blocks=4,kernel=5,pools=3`",
        hint(nearest),
        PRESETS.map(|(name, _)| name).join(", ")
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

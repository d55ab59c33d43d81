//! The family `cnn` of hosts and its presets: their text form and their layers.

use std::fmt;
use std::str::FromStr;

use super::error::HostError;
use super::host_layer::HostLayer;
use super::layer_values::Features;
use super::per_axis::PerAxis;
use super::slot_name::SlotName;
use crate::suggest::nearest;

/// Largest number of blocks.
const MAX_BLOCKS: usize = 12;
/// Largest number of channels of a block.
const MAX_CHANNELS: usize = 8192;
/// Largest kernel.
const MAX_KERNEL: usize = 31;

/// The presets of `docs/hosts.md` by name.
pub const PRESETS: [(&str, Cnn); 6] = [
    ("baseline", Cnn { channels: 8, blocks: 3, kernel: 3, pools: 3 }),
    ("wide", Cnn { channels: 16, blocks: 3, kernel: 3, pools: 3 }),
    ("deep", Cnn { channels: 8, blocks: 5, kernel: 3, pools: 5 }),
    ("large", Cnn { channels: 32, blocks: 3, kernel: 3, pools: 3 }),
    ("impaired", Cnn { channels: 1, blocks: 3, kernel: 1, pools: 3 }),
    ("minimal", Cnn { channels: 2, blocks: 3, kernel: 1, pools: 0 }),
];

const KEYS: [&str; 4] = ["channels", "blocks", "kernel", "pools"];

/// A plain convolutional host: block i is a k×k convolution (same padding, no bias) to
/// `channels · 2^i` channels, batch norm, ReLU, the slot `r0c{i}`, a 2×2 max-pool while
/// `i < pools`, and the slot `r1c{i}`; then global average pool and a linear classifier.
///
/// A `Cnn` is parsed from a preset's name, or from text such as
/// `cnn:channels=12,blocks=4,kernel=5,pools=3`. If `channels`, `blocks` or `kernel` is missing, the
/// value of `baseline` is used. If `pools` is missing, every block is followed by a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cnn {
    /// Channels of the first block; each further block doubles them.
    pub channels: usize,
    /// Number of blocks, at least 2.
    pub blocks: usize,
    /// Kernel size, odd.
    pub kernel: usize,
    /// Number of blocks followed by a pool, from the first block on.
    pub pools: usize,
}

impl Cnn {
    /// Checks that every size is in its range.
    ///
    /// # Errors
    /// [`HostError::Size`] with the size, its range and the value.
    pub fn check(&self) -> Result<(), HostError> {
        HostError::check_size("blocks", self.blocks, 2, MAX_BLOCKS)?;
        HostError::check_size("channels", self.channels, 1, MAX_CHANNELS >> (self.blocks - 1))?;
        HostError::check_size("kernel", self.kernel, 1, MAX_KERNEL)?;
        HostError::check_size("pools", self.pools, 0, self.blocks)?;
        if self.kernel.is_multiple_of(2) {
            let expected = "odd, so that the padding keeps the image's size".into();
            return Err(HostError::Size { what: "kernel", expected, got: self.kernel });
        }
        Ok(())
    }

    /// Layers in forward order. Sizes must be checked before.
    pub(super) fn layers(&self) -> Vec<HostLayer> {
        let mut layers = vec![];
        for i in 0..self.blocks {
            let (out, kernel) = (self.channels << i, self.kernel);
            layers.push(HostLayer::conv2d(format!("blocks.{i}.conv"), out, kernel));
            layers.push(HostLayer::BatchNorm { name: format!("blocks.{i}.bn") });
            layers.push(HostLayer::Relu);
            layers.push(HostLayer::Slot { name: before_pool(i) });
            if i < self.pools {
                let name = format!("blocks.{i}.pool");
                let [kernel, padding] = [2, 0].map(PerAxis::both);
                layers.push(HostLayer::MaxPool2d { name, kernel, stride: None, padding });
            }
            layers.push(HostLayer::Slot { name: after_pool(i) });
        }
        layers.push(HostLayer::GlobalAvgPool);
        let (name, out) = ("classifier".into(), Features::Classes);
        layers.push(HostLayer::Linear { name, out, bias: true });
        layers
    }

    /// Slots in action-index order: `r0c0, r0c1, …, r1c0, r1c1, …`.
    pub(super) fn slots(&self) -> Vec<SlotName> {
        (0..self.blocks).map(before_pool).chain((0..self.blocks).map(after_pool)).collect()
    }

    fn preset(name: &str) -> Result<Self, HostError> {
        let names = PRESETS.map(|(known, _)| known);
        let found = PRESETS.iter().find(|(known, _)| *known == name);
        found.map(|(_, preset)| *preset).ok_or_else(|| HostError::UnknownHost {
            given: name.into(),
            nearest: nearest(name, names).map(Into::into),
            presets: names.join(", "),
        })
    }
}

fn before_pool(block: usize) -> SlotName {
    format!("r0c{block}").into()
}

fn after_pool(block: usize) -> SlotName {
    format!("r1c{block}").into()
}

impl Default for Cnn {
    /// The preset `baseline`.
    fn default() -> Self {
        PRESETS[0].1
    }
}

impl fmt::Display for Cnn {
    /// Writes the description `cnn:channels=…,blocks=…,kernel=…,pools=…`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { channels, blocks, kernel, pools } = self;
        write!(f, "cnn:channels={channels},blocks={blocks},kernel={kernel},pools={pools}")
    }
}

impl FromStr for Cnn {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        let given = text.trim();
        let Some(list) = given.strip_prefix("cnn:") else {
            return Self::preset(given);
        };
        let mut values: [Option<usize>; 4] = [None; 4];
        for part in list.split(',').map(str::trim) {
            let expected = "`key=number`";
            let bad = || HostError::BadPart { given: given.into(), expected, part: part.into() };
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
        let cnn = Self {
            channels: channels.unwrap_or(base.channels),
            blocks,
            kernel: kernel.unwrap_or(base.kernel),
            pools: pools.unwrap_or(blocks),
        };
        cnn.check()?;
        Ok(cnn)
    }
}

//! Names of slots.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Side of a block's pool that a slot is on. Where a block has no pool both slots still exist, one
/// after the other on the same tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// `r0`: after the block, before its pool.
    BeforePool,
    /// `r1`: after the pool.
    AfterPool,
}

/// Name of a slot, `r{region}c{block}`. The derived order is the action-index order: all of `r0`,
/// then all of `r1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct SlotName {
    /// Side of the pool.
    pub region: Region,
    /// Block, from 0.
    pub block: usize,
}

impl SlotName {
    /// The slot `r0c{block}`.
    pub fn before_pool(block: usize) -> Self {
        Self { region: Region::BeforePool, block }
    }

    /// The slot `r1c{block}`.
    pub fn after_pool(block: usize) -> Self {
        Self { region: Region::AfterPool, block }
    }

    /// Position in the action-index order of a host of `blocks` blocks: `r0c0 … r0c(n−1), r1c0 …`.
    pub fn index(self, blocks: usize) -> usize {
        self.region as usize * blocks + self.block
    }

    /// Position in the forward order: `r0c0, r1c0, r0c1, r1c1, …`.
    pub fn forward_position(self) -> usize {
        2 * self.block + self.region as usize
    }
}

impl fmt::Display for SlotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}c{}", self.region as usize, self.block)
    }
}

impl FromStr for SlotName {
    type Err = SlotNameError;

    fn from_str(text: &str) -> Result<Self, SlotNameError> {
        let parse = || {
            let (region, block) = text.strip_prefix('r')?.split_once('c')?;
            let region = match region {
                "0" => Region::BeforePool,
                "1" => Region::AfterPool,
                _ => return None,
            };
            let digits = block.bytes().all(|b| b.is_ascii_digit());
            let plain = block == "0" || !block.starts_with('0');
            (digits && plain)
                .then(|| block.parse().ok())
                .flatten()
                .map(|block| Self { region, block })
        };
        parse().ok_or_else(|| SlotNameError { given: text.into() })
    }
}

impl From<SlotName> for String {
    fn from(name: SlotName) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for SlotName {
    type Error = SlotNameError;

    fn try_from(text: String) -> Result<Self, SlotNameError> {
        text.parse()
    }
}

/// A text that is no name of a slot in any host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown slot `{given}`\n  slots: r0c0, r0c1, … before the pools, r1c0, r1c1, … after them"
)]
pub struct SlotNameError {
    /// The text given.
    pub given: String,
}

#[cfg(test)]
mod tests {
    use super::{SlotName, SlotNameError};

    #[test]
    fn names_round_trip_and_nothing_else_parses() {
        for block in [0, 1, 9, 10, 123] {
            for name in [SlotName::before_pool(block), SlotName::after_pool(block)] {
                assert_eq!(name.to_string().parse::<SlotName>().unwrap(), name);
            }
        }
        for bad in
            ["", "r0", "r0c", "r2c0", "r0c-1", "r0c+1", "r0c01", "R0C0", "r0c1 ", "c0r0", "r00c1"]
        {
            let error = bad.parse::<SlotName>().unwrap_err();
            assert_eq!(error, SlotNameError { given: bad.into() });
        }
        assert_eq!(
            "r0".parse::<SlotName>().unwrap_err().to_string(),
            "unknown slot `r0`\n  slots: r0c0, r0c1, … before the pools, r1c0, r1c1, … after them"
        );
    }
}

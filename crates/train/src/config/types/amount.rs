//! Amounts: counts that may be unlimited, sizes with units, norms.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::BadValue;
use crate::config::value::{LimitedNumber, value_as_text};

/// Maximum number of batches, or all. Text form: a number, or `all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub enum BatchLimit {
    /// No limit.
    #[default]
    All,
    /// A maximum number of batches.
    Count(usize),
}

impl BatchLimit {
    /// The limit as a number, `None` for all.
    pub fn count(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Count(n) => Some(n),
        }
    }
}

impl FromStr for BatchLimit {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        match (text, text.parse::<usize>()) {
            ("all", _) => Ok(Self::All),
            (_, Ok(n)) => Ok(Self::Count(n)),
            _ => Err(BadValue::new(text, "a number of batches, or `all`")),
        }
    }
}

impl fmt::Display for BatchLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Count(n) => n.fmt(f),
        }
    }
}

/// Value of a setting in a file: a number or a word.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number or a text")]
enum NumberOrText {
    Number(u64),
    Text(String),
}

impl NumberOrText {
    fn parse<T: FromStr<Err = BadValue>>(self) -> Result<T, BadValue> {
        match self {
            Self::Number(n) => n.to_string().parse(),
            Self::Text(text) => text.parse(),
        }
    }
}

impl TryFrom<NumberOrText> for BatchLimit {
    type Error = BadValue;
    fn try_from(value: NumberOrText) -> Result<Self, BadValue> {
        value.parse()
    }
}

impl From<BatchLimit> for String {
    fn from(value: BatchLimit) -> String {
        value.to_string()
    }
}

/// Maximum L2 norm of a gradient; a longer one is scaled down. Text form: a number, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RealOrText", into = "String")]
pub struct ClipNorm(Option<f32>);

impl ClipNorm {
    /// Clips to this norm.
    pub fn at(norm: f32) -> Self {
        Self(Some(norm))
    }

    /// The norm as a number: infinite if off.
    pub fn norm(self) -> f32 {
        self.0.unwrap_or(f32::INFINITY)
    }
}

/// Value of a [`ClipNorm`] in a file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number or `off`")]
enum RealOrText {
    Real(f64),
    Text(String),
}

impl TryFrom<RealOrText> for ClipNorm {
    type Error = BadValue;
    fn try_from(value: RealOrText) -> Result<Self, BadValue> {
        match value {
            RealOrText::Real(norm) => norm.to_string().parse(),
            RealOrText::Text(text) => text.parse(),
        }
    }
}

impl FromStr for ClipNorm {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        match (text, text.parse::<f32>()) {
            ("off", _) => Ok(Self(None)),
            (_, Ok(norm)) if norm > 0.0 && norm.is_finite() => Ok(Self(Some(norm))),
            _ => Err(BadValue::new(text, "a number above 0, or `off`")),
        }
    }
}

impl fmt::Display for ClipNorm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("off"),
            Some(norm) => norm.fmt(f),
        }
    }
}

impl From<ClipNorm> for String {
    fn from(value: ClipNorm) -> String {
        value.to_string()
    }
}

/// A number of bytes. Text form: a number, or a number with `kB`, `MB`, `GB`, `KiB`, `MiB`, `GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub struct ByteSize(pub usize);

impl FromStr for ByteSize {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
        let unit = match text[digits.len()..].trim() {
            "" | "B" => Some(1),
            "kB" | "KB" | "k" | "K" => Some(1_000),
            "MB" | "M" => Some(1_000_000),
            "GB" | "G" => Some(1_000_000_000),
            "KiB" => Some(1 << 10),
            "MiB" => Some(1 << 20),
            "GiB" => Some(1 << 30),
            _ => None,
        };
        let bytes = digits.parse::<usize>().ok().zip(unit).and_then(|(n, u)| n.checked_mul(u));
        bytes.map(Self).ok_or_else(|| BadValue::new(text, "a size such as 64MiB or 200MB"))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<NumberOrText> for ByteSize {
    type Error = BadValue;
    fn try_from(value: NumberOrText) -> Result<Self, BadValue> {
        value.parse()
    }
}

impl From<ByteSize> for String {
    fn from(value: ByteSize) -> String {
        value.to_string()
    }
}

value_as_text!(BatchLimit, "whole number, or all", |limit: &Self| {
    limit.count().map(|count| LimitedNumber::Whole(count as u64))
});
value_as_text!(ClipNorm, "number above 0, or off");
value_as_text!(ByteSize, "whole number, with kB, MB, GB, KiB, MiB or GiB", |size: &Self| {
    Some(LimitedNumber::Whole(size.0 as u64))
});

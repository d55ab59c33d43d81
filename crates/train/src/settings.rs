//! The types of single settings: choices by name, limits, sizes, lists.
//!
//! Each has one text form, used alike by the flags, the configuration file and the messages.

use std::fmt;
use std::str::FromStr;

use meristem_control::RewardMode;
use meristem_device::Policy;
use meristem_grow::{Tempo, nearest};
use serde::{Deserialize, Serialize};

pub use crate::controller_kind::ControllerKind;
pub use crate::ranks::{CommKind, ExchangeKind};

/// Text that no setting type accepts, with what would have been right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BadValue {
    message: String,
}

impl BadValue {
    /// `expected` says what is accepted.
    pub fn new(got: &str, expected: impl fmt::Display) -> Self {
        Self { message: format!("got `{got}`, expected {expected}") }
    }
}

/// A choice among `known` names.
pub(crate) fn choose<T: Copy>(got: &str, known: &[(&'static str, T)]) -> Result<T, BadValue> {
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let found = known.iter().find(|(name, _)| *name == got);
    found.map(|&(_, value)| value).ok_or_else(|| unknown(got, &names))
}

/// Something that is none of `names`: they are listed, and the nearest is asked for.
pub(crate) fn unknown(got: &str, names: &[&str]) -> BadValue {
    let mut expected = names.join(" | ");
    if let Some(name) = nearest(got, names.iter().copied()) {
        expected.push_str(&format!("; did you mean `{name}`?"));
    }
    BadValue::new(got, format!("one of {expected}"))
}

/// Implements serde through the text form.
macro_rules! serde_as_text {
    ($type:ty) => {
        impl TryFrom<String> for $type {
            type Error = BadValue;
            fn try_from(text: String) -> Result<Self, BadValue> {
                text.parse()
            }
        }
        impl From<$type> for String {
            fn from(value: $type) -> String {
                value.to_string()
            }
        }
    };
}

pub(crate) use serde_as_text;

/// A tempo of blending by its name: fast, standard or slow.
///
/// # Errors
/// Another name.
pub fn tempo(text: &str) -> Result<Tempo, BadValue> {
    let known: Vec<(&'static str, Tempo)> = Tempo::ALL.iter().map(|t| (t.name(), *t)).collect();
    choose(text, &known)
}

/// A reward by its name: basic, contribution or sparse.
///
/// # Errors
/// Another name.
pub fn reward(text: &str) -> Result<RewardMode, BadValue> {
    choose(text, &RewardMode::NAMES)
}

/// What becomes of a copy, a wait or an allocation on the hot path (V2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HotScopePolicy(pub Policy);

impl FromStr for HotScopePolicy {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        choose(text, &Policy::ALL.map(|policy| (policy.name(), Self(policy))))
    }
}

impl fmt::Display for HotScopePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
serde_as_text!(HotScopePolicy);

/// The named starting points of a configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Preset {
    /// A minute on two cores; shows growth.
    #[default]
    Default,
    /// Ten seconds; shows that everything works.
    Quick,
    /// Whole episodes over the whole training set, with the gates of `docs/growth.md`.
    Full,
}

impl Preset {
    /// Every preset with its name.
    pub const NAMES: [(&'static str, Self); 3] =
        [("default", Self::Default), ("quick", Self::Quick), ("full", Self::Full)];
}

impl FromStr for Preset {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        choose(text, &Self::NAMES)
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Quick => "quick",
            Self::Full => "full",
        })
    }
}
serde_as_text!(Preset);

/// Amount of detail in a run's events that nothing but a reader needs. No result depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Telemetry {
    /// No times and no gradient statistics.
    Off,
    /// Time and throughput of a step, the norm of the host's gradient, the gradient health of modules.
    #[default]
    Basic,
    /// Also the time of each phase of a step, and the gradient statistics of every parameter group.
    Full,
}

impl Telemetry {
    /// Every level with its name.
    pub const NAMES: [(&'static str, Self); 3] =
        [("off", Self::Off), ("basic", Self::Basic), ("full", Self::Full)];
}

impl FromStr for Telemetry {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        choose(text, &Self::NAMES)
    }
}

impl fmt::Display for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Basic => "basic",
            Self::Full => "full",
        })
    }
}
serde_as_text!(Telemetry);

/// A count with an upper end, or all there is. Text form: a number, or `all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub enum Limit {
    /// No limit.
    #[default]
    All,
    /// At most this many.
    Count(usize),
}

impl Limit {
    /// The limit as a number, `None` for all.
    pub fn count(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Count(n) => Some(n),
        }
    }
}

impl FromStr for Limit {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        match (text, text.parse::<usize>()) {
            ("all", _) => Ok(Self::All),
            (_, Ok(n)) => Ok(Self::Count(n)),
            _ => Err(BadValue::new(text, "a number of batches, or `all`")),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Count(n) => n.fmt(f),
        }
    }
}

/// What a file may hold where a setting takes a number or a word.
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

impl TryFrom<NumberOrText> for Limit {
    type Error = BadValue;
    fn try_from(value: NumberOrText) -> Result<Self, BadValue> {
        value.parse()
    }
}

impl From<Limit> for String {
    fn from(value: Limit) -> String {
        value.to_string()
    }
}

/// Largest L2 norm of a gradient; a longer one is scaled down. Text form: a number, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RealOrText", into = "String")]
pub struct ClipNorm(Option<f32>);

impl ClipNorm {
    /// Clips to this norm.
    pub fn at(norm: f32) -> Self {
        Self(Some(norm))
    }

    /// The norm in force: infinite when off.
    pub fn norm(self) -> f32 {
        self.0.unwrap_or(f32::INFINITY)
    }
}

/// What a file may hold for a [`ClipNorm`].
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

/// Which augmentations the gather applies (D8). Text form: `none`, or any of `crop,flip,cutout`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Augmentations {
    /// Random crop from the image padded by four pixels.
    pub crop: bool,
    /// Horizontal flip, half of the time.
    pub flip: bool,
    /// One square hole.
    pub cutout: bool,
}

impl FromStr for Augmentations {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let mut chosen = Self::default();
        if text == "none" {
            return Ok(chosen);
        }
        for name in text.split(',') {
            match choose(name.trim(), &[("crop", 0), ("flip", 1), ("cutout", 2), ("none", 3)])? {
                0 => chosen.crop = true,
                1 => chosen.flip = true,
                2 => chosen.cutout = true,
                _ => return Err(BadValue::new(text, "`none` alone, or any of crop,flip,cutout")),
            }
        }
        Ok(chosen)
    }
}

impl fmt::Display for Augmentations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(self.crop, "crop"), (self.flip, "flip"), (self.cutout, "cutout")];
        let chosen: Vec<&str> = names.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        match chosen.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&chosen.join(",")),
        }
    }
}
serde_as_text!(Augmentations);

/// `on` or `off`. In a file a plain boolean does as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BoolOrText", into = "String")]
pub struct Switch(pub bool);

/// What a file may hold for a [`Switch`].
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected `on` or `off`")]
enum BoolOrText {
    Bool(bool),
    Text(String),
}

impl TryFrom<BoolOrText> for Switch {
    type Error = BadValue;
    fn try_from(value: BoolOrText) -> Result<Self, BadValue> {
        match value {
            BoolOrText::Bool(on) => Ok(Self(on)),
            BoolOrText::Text(text) => text.parse(),
        }
    }
}

impl FromStr for Switch {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        choose(text, &[("on", Self(true)), ("off", Self(false))])
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { "on" } else { "off" })
    }
}

impl From<Switch> for String {
    fn from(value: Switch) -> String {
        value.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        for text in ["none", "crop", "crop,flip", "crop,flip,cutout"] {
            assert_eq!(text.parse::<Augmentations>().unwrap().to_string(), text);
        }
        for text in ["all", "12"] {
            assert_eq!(text.parse::<Limit>().unwrap().to_string(), text);
        }
        for (name, preset) in Preset::NAMES {
            assert_eq!(preset.to_string(), name);
        }
        for (name, level) in Telemetry::NAMES {
            assert_eq!(level.to_string(), name);
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!("3MiB".parse::<ByteSize>().unwrap().0, 3 << 20);
        assert_eq!("200 MB".parse::<ByteSize>().unwrap().0, 200_000_000);
        assert!("3 parsecs".parse::<ByteSize>().is_err());
        assert!("99999999999999GB".parse::<ByteSize>().is_err());
    }

    #[test]
    fn a_wrong_name_is_answered_with_the_nearest() {
        let message = "flop".parse::<Augmentations>().unwrap_err().to_string();
        assert!(message.contains("did you mean `flip`?"), "{message}");
        assert!("none,flip".parse::<Augmentations>().is_err());
        let message = "dney".parse::<HotScopePolicy>().unwrap_err().to_string();
        assert!(message.contains("off | warn | deny; did you mean `deny`?"), "{message}");
    }
}

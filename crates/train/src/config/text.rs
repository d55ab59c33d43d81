//! Text forms: parsing of choices, and errors of texts that cannot be parsed.

use std::fmt;

use meristem_grow::nearest;

/// Error of a text that is not a value of a setting, with the accepted values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BadValue {
    message: String,
}

impl BadValue {
    /// An error for `got`; `expected` describes the accepted values.
    pub fn new(got: &str, expected: impl fmt::Display) -> Self {
        Self { message: format!("got `{got}`, expected {expected}") }
    }
}

/// Looks up `got` among `known` names.
pub(crate) fn choose<T: Copy>(got: &str, known: &[(&'static str, T)]) -> Result<T, BadValue> {
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let found = known.iter().find(|(name, _)| *name == got);
    found.map(|&(_, value)| value).ok_or_else(|| unknown(got, &names))
}

/// An error for a name that is not among `names`; lists them and suggests the nearest.
pub(crate) fn unknown(got: &str, names: &[&str]) -> BadValue {
    BadValue::new(got, one_of(got, names))
}

/// Description of the accepted names, with the one that is nearest to `got`.
pub(crate) fn one_of(got: &str, names: &[&str]) -> String {
    let mut expected = format!("one of {}", names.join(" | "));
    if let Some(name) = nearest(got, names.iter().copied()) {
        expected.push_str(&format!("; did you mean `{name}`?"));
    }
    expected
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

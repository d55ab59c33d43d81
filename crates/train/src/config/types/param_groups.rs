//! Groups of parameters by name, with other hyperparameters of the optimiser.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text};
use crate::config::value::value_as_text;

/// Largest number of groups.
const GROUPS_MAX: usize = 64;

/// A value, or a factor of the value that applies without the group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaled {
    /// The value itself.
    Value(f32),
    /// A factor of the value that applies without the group. Text form: `0.1x`.
    Factor(f32),
}

impl Scaled {
    fn parse(text: &str) -> Result<Self, BadValue> {
        let (number, of) = match text.strip_suffix('x') {
            Some(factor) => (factor, Self::Factor as fn(f32) -> Self),
            None => (text, Self::Value as fn(f32) -> Self),
        };
        let number = number.parse().ok().filter(|number| (0.0..=1e6).contains(number));
        let expected = "a number from 0 to 1000000, or a factor such as 0.1x";
        number.map(of).ok_or_else(|| BadValue::new(text, expected))
    }
}

impl fmt::Display for Scaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(value) => write!(f, "{value}"),
            Self::Factor(factor) => write!(f, "{factor}x"),
        }
    }
}

/// Parameters whose names match a pattern, and their hyperparameters.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup {
    /// Name in which `*` stands for any text.
    pub pattern: String,
    /// Learning rate.
    pub lr: Option<Scaled>,
    /// Weight decay.
    pub weight_decay: Option<Scaled>,
}

/// Groups of parameters in order: a parameter belongs to the first whose pattern matches its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ParamGroups(Vec<ParamGroup>);

impl ParamGroups {
    /// The group of a parameter, with its position.
    pub(crate) fn find(&self, name: &str) -> Option<(usize, &ParamGroup)> {
        self.0.iter().enumerate().find(|(_, group)| matches(&group.pattern, name))
    }

    /// The first pattern that matches none of these names.
    pub(crate) fn unmatched(&self, names: &BTreeSet<String>) -> Option<&str> {
        let mut patterns = self.0.iter().map(|group| &*group.pattern);
        patterns.find(|pattern| !names.iter().any(|name| matches(pattern, name)))
    }
}

/// Whether a pattern matches a whole name.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    // Without a star the pattern is the name.
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

impl FromStr for ParamGroup {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let expected = "a pattern with numbers, such as *.bias: weight_decay=0, lr=0.1x";
        let (pattern, numbers) =
            text.split_once(':').ok_or_else(|| BadValue::new(text, expected))?;
        let pattern = pattern.trim().to_string();
        let mut group = Self { pattern, lr: None, weight_decay: None };
        for entry in numbers.split(',') {
            let (key, value) =
                entry.split_once('=').ok_or_else(|| BadValue::new(text, expected))?;
            let to = match key.trim() {
                "lr" => &mut group.lr,
                "weight_decay" | "weight-decay" => &mut group.weight_decay,
                other => return Err(BadValue::new(other, "lr or weight_decay")),
            };
            if to.replace(Scaled::parse(value.trim())?).is_some() {
                return Err(BadValue::new(text, "each number once"));
            }
        }
        if group.pattern.is_empty() {
            return Err(BadValue::new(text, expected));
        }
        Ok(group)
    }
}

impl fmt::Display for ParamGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pattern, lr, weight_decay } = self;
        let numbers = [("lr", lr), ("weight_decay", weight_decay)].into_iter();
        let numbers = numbers.filter_map(|(key, number)| Some(format!("{key}={}", (*number)?)));
        write!(f, "{pattern}: {}", numbers.collect::<Vec<_>>().join(", "))
    }
}

impl FromStr for ParamGroups {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let groups: Vec<ParamGroup> = text.split(';').map(str::parse).collect::<Result<_, _>>()?;
        if groups.len() > GROUPS_MAX {
            return Err(BadValue::new(text, format!("at most {GROUPS_MAX} groups")));
        }
        Ok(Self(groups))
    }
}

impl fmt::Display for ParamGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups: Vec<_> = self.0.iter().map(ParamGroup::to_string).collect();
        // Without a space: members separate their settings by "; ".
        f.write_str(&groups.join(";"))
    }
}

serde_as_text!(ParamGroups);
value_as_text!(ParamGroups, "PATTERN: lr=NUMBER, weight_decay=NUMBER; …");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, is_match) in [
            ("*.bias", "classifier.bias", true),
            ("*.bias", "classifier.bias.step", false),
            ("*.bn.*", "blocks.0.bn.weight", true),
            ("*.bn.*", "blocks.0.conv.weight", false),
            ("classifier.weight", "classifier.weight", true),
            ("classifier", "classifier.weight", false),
            ("*", "any", true),
            ("a*a", "a", false),
            ("blocks.*.conv.*", "blocks.10.conv.weight", true),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern} {name}");
        }
    }

    #[test]
    fn text_forms_round_trip_and_the_first_match_counts() {
        let text = "*.bias: weight_decay=0;classifier.*: lr=0.1x, weight_decay=0.5";
        let groups: ParamGroups = text.parse().unwrap();
        assert_eq!(groups.to_string(), text);
        assert_eq!(groups.find("classifier.bias").unwrap().0, 0);
        assert_eq!(groups.find("classifier.weight").unwrap().1.lr, Some(Scaled::Factor(0.1)));
        assert_eq!(groups.find("blocks.0.conv.weight"), None);
    }

    #[test]
    fn wrong_groups_say_why() {
        for (text, words) in [
            ("*.bias", "a pattern with numbers"),
            (": lr=1", "a pattern with numbers"),
            ("*.bias: lr", "a pattern with numbers"),
            ("*: momentum=0.9", "lr or weight_decay"),
            ("*: lr=fast", "0.1x"),
            ("*: lr=-1", "0.1x"),
            ("*: lr=1, lr=2", "each number once"),
        ] {
            let message = text.parse::<ParamGroups>().unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }
}

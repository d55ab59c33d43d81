//! Planned changes of members, and numbers of envs or members. With both settings, some members of
//! a run can be trained again without the others.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Member;
use crate::config::text::{BadValue, serde_as_text};
use crate::config::value::value_as_text;

/// Change of a member.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedChange {
    /// Number of the member.
    pub member: usize,
    /// Number of completed steps after which the change takes effect.
    pub steps: usize,
    /// The origin of the copy, and the settings of the copy; `None` if the member ends.
    pub copy: Option<(usize, Member)>,
}

impl FromStr for PlannedChange {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let wrong = || BadValue::new(text, "`end 3@9` or `copy 17 from 5@4: lr=0.1; momentum=0.5`");
        let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
        if let Some(end) = text.strip_prefix("end ") {
            let (member, steps) = end.split_once('@').ok_or_else(wrong)?;
            return Ok(Self { member: number(member)?, steps: number(steps)?, copy: None });
        }
        let copy = text.strip_prefix("copy ").ok_or_else(wrong)?;
        let (numbers, settings) = copy.split_once(": ").ok_or_else(wrong)?;
        let (numbers, steps) = numbers.split_once('@').ok_or_else(wrong)?;
        let (member, from) = numbers.split_once(" from ").ok_or_else(wrong)?;
        let copy = Some((number(from)?, Member::parse(settings)?));
        Ok(Self { member: number(member)?, steps: number(steps)?, copy })
    }
}

impl fmt::Display for PlannedChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { member, steps, copy } = self;
        match copy {
            None => write!(f, "end {member}@{steps}"),
            Some((from, settings)) => write!(f, "copy {member} from {from}@{steps}: {settings}"),
        }
    }
}

/// Changes of members in the order in which they take effect, instead of the decisions of a
/// scheduler. Text form: a JSON list of texts such as `end 3@9`: member 3 ends after 9 steps, and
/// `copy 17 from 5@4: lr=0.1; momentum=0.5`: after 4 steps member 17 becomes a copy of member 5,
/// with these settings. A member that ends after 0 steps is trained only once it is a copy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlannedChanges(Vec<PlannedChange>);

impl PlannedChanges {
    /// A list of changes, in the order in which they take effect.
    pub fn new(changes: Vec<PlannedChange>) -> Self {
        Self(changes)
    }

    /// All changes.
    pub fn all(&self) -> &[PlannedChange] {
        &self.0
    }
}

impl<'de> Deserialize<'de> for PlannedChanges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let changes = texts.iter().map(|text| text.parse()).collect::<Result<_, _>>();
        let wrong = |error| de::Error::custom(format!("member_changes: {error}"));
        changes.map(Self).map_err(wrong)
    }
}

impl Serialize for PlannedChanges {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(PlannedChange::to_string))
    }
}

impl FromStr for PlannedChanges {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        serde_json::from_str(text).map_err(|error| BadValue::new(text, error))
    }
}

impl fmt::Display for PlannedChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}
value_as_text!(PlannedChanges, "a JSON list such as [\"end 3@9\"]");

/// Distinct numbers of envs or members. Text form: `5,17`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Numbers(Vec<usize>);

impl Numbers {
    /// Largest number: a run has at most 4096 envs, numbered from 0.
    const MOST: usize = 4095;

    /// A list of numbers, in the given order.
    ///
    /// # Errors
    /// An empty list, a number that occurs twice, or a number above 4095.
    pub fn new(numbers: Vec<usize>) -> Result<Self, BadValue> {
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        sorted.dedup();
        let own = Self(numbers);
        if sorted.is_empty() || sorted.len() < own.0.len() || sorted.last() > Some(&Self::MOST) {
            let expected = format!("distinct numbers from 0 to {}", Self::MOST);
            return Err(BadValue::new(&own.to_string(), expected));
        }
        Ok(own)
    }

    /// All numbers, in the given order.
    pub fn all(&self) -> &[usize] {
        &self.0
    }
}

impl FromStr for Numbers {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let numbers = text.split(',').map(|number| number.trim().parse::<usize>());
        let numbers = numbers.collect::<Result<Vec<_>, _>>();
        numbers.map_err(|_| BadValue::new(text, "numbers such as 5,17")).and_then(Self::new)
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
    }
}
serde_as_text!(Numbers);
value_as_text!(Numbers, "numbers separated by commas");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_round_trip_and_wrong_ones_are_refused() {
        let text = r#"["end 3@9","copy 17 from 5@4: lr=0.1; momentum=0.5"]"#;
        let changes = text.parse::<PlannedChanges>().unwrap();
        assert_eq!(changes.to_string(), text);
        let [end, copy] = changes.all() else { panic!("{changes}") };
        assert_eq!((end.member, end.steps, &end.copy), (3, 9, &None));
        assert_eq!((copy.member, copy.steps, copy.copy.as_ref().unwrap().0), (17, 4, 5));
        for wrong in [
            "end 3",
            "end a@9",
            "stop 3@9",
            "copy 17 from 5@4",
            "copy 17@4: lr=1",
            "copy 17 from 5: lr=1",
            "copy 17 from 5@4: lr",
        ] {
            let message = wrong.parse::<PlannedChange>().unwrap_err().to_string();
            assert!(message.contains(wrong) || message.contains("KEY=VALUE"), "{message}");
        }
        assert!("end 3@9".parse::<PlannedChanges>().is_err(), "no list");
    }

    #[test]
    fn numbers_of_envs_are_different() {
        assert_eq!("5,17".parse::<Numbers>().unwrap().to_string(), "5,17");
        for wrong in ["", "5,5", "-1", "4096", "a"] {
            assert!(wrong.parse::<Numbers>().is_err(), "{wrong}");
        }
    }
}

//! Search space of members: a distribution for each setting that varies.

use std::fmt;
use std::str::FromStr;

use meristem_device::random::Rng;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Distribution;
use super::members::{Entries, Member, text_of};
use crate::config::text::BadValue;
use crate::config::value::{FlagForm, SettingValue};

/// Separator of the values of a choice.
const OR: char = '|';

/// Keyword before the condition of a dimension.
const WHEN: &str = " when ";

/// Description of the forms of a space.
const FORMS: &str = "a table of distributions such as lr = { log_uniform = [0.001, 1] }, or text \
                     such as \"lr=log_uniform:0.001,1\"";

/// Settings that [`Space::perturb`] never changes. A copy has the weights, the optimiser's state
/// and the controller's memory of its origin. More data is always better, so the share would only
/// grow from copy to copy. A seed is not better near a good one.
const KEPT_BY_COPIES: [&str; 8] =
    ["host", "slots", "optimizer", "init", "controller", "seed", "train_share", "bootstrap"];

/// Condition of a dimension: another setting has one of some values.
#[derive(Clone, Debug, PartialEq)]
struct Condition {
    key: String,
    values: Vec<String>,
}

/// A setting with the distribution of its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Dimension {
    key: String,
    distribution: Distribution,
    condition: Option<Condition>,
}

impl Dimension {
    /// Key of the setting.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Distribution of its values.
    pub fn distribution(&self) -> &Distribution {
        &self.distribution
    }

    /// Values by which to check that the setting accepts the whole distribution, as texts: all
    /// values of a choice, or both bounds of a range of numbers.
    pub(crate) fn extremes(&self) -> Vec<String> {
        match &self.distribution {
            Distribution::Choice(values) => values.clone(),
            Distribution::Int(low, high) => [low, high].map(i64::to_string).into(),
            Distribution::Uniform(low, high) | Distribution::LogUniform(low, high) => {
                [low, high].map(f64::to_string).into()
            }
        }
    }

    fn new(
        key: &str,
        distribution: &str,
        values: &[String],
        when: Option<&str>,
    ) -> Result<Self, BadValue> {
        let condition = when.map(|text| {
            let expected = "KEY=VALUE|VALUE after `when`";
            let (key, values) =
                text.split_once('=').ok_or_else(|| BadValue::new(text, expected))?;
            let values = values.split(OR).map(|value| value.trim().to_string()).collect();
            Ok(Condition { key: normalized_key(key), values })
        });
        let key = normalized_key(key);
        let distribution = Distribution::new(&key, distribution, values)?;
        Ok(Self { key, distribution, condition: condition.transpose()? })
    }

    /// The values of the condition that the dimension `other` never has.
    fn impossible<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a str> {
        let is_condition = |condition: &&Condition| condition.key == other.key;
        let values = self.condition.iter().filter(is_condition).flat_map(|own| &own.values);
        values.map(String::as_str).filter(|value| match &other.distribution {
            Distribution::Choice(all) => !all.iter().any(|own| own == value),
            _ => false,
        })
    }

    /// Whether the condition holds among the drawn values.
    fn holds(&self, drawn: &[Option<String>], all: &[Self]) -> bool {
        self.condition.as_ref().is_none_or(|Condition { key, values }| {
            let other = all.iter().position(|dimension| dimension.key == *key);
            other.is_some_and(|other| drawn[other].as_ref().is_some_and(|own| values.contains(own)))
        })
    }
}

fn normalized_key(key: &str) -> String {
    key.trim().replace('-', "_")
}

impl FromStr for Dimension {
    type Err = BadValue;

    /// Parses `KEY=DISTRIBUTION:VALUES`, with ` when KEY=VALUES` after it if it has a condition.
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let wrong =
            || BadValue::new(text, format!("KEY=DISTRIBUTION:VALUES with {}", Distribution::FORMS));
        let (own, when) = match text.split_once(WHEN) {
            Some((own, when)) => (own, Some(when)),
            None => (text, None),
        };
        let (key, distribution) = own.split_once('=').ok_or_else(wrong)?;
        let (name, values) = distribution.split_once(':').ok_or_else(wrong)?;
        let separator = if name.trim() == "choice" { OR } else { ',' };
        let values: Vec<String> = match values.trim() {
            "" => vec![],
            values => values.split(separator).map(String::from).collect(),
        };
        Self::new(key, name.trim(), &values, when)
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.distribution)?;
        self.condition.as_ref().map_or(Ok(()), |Condition { key, values }| {
            write!(f, "{WHEN}{key}={}", values.join("|"))
        })
    }
}

/// Search space of members. Forms: texts such as `lr=log_uniform:0.001,1`, separated by `;` or in a
/// list; and in files a table such as `lr = { log_uniform = [0.001, 1] }`, with the condition as
/// `when = "host=minimal"`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Space(Vec<Dimension>);

impl Space {
    /// The dimensions, in the order in which they were given.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.0
    }

    /// Whether it has no dimension, as the space of a file that gives none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The dimension of a setting.
    pub fn dimension(&self, key: &str) -> Option<&Dimension> {
        self.0.iter().find(|dimension| dimension.key == key)
    }

    /// The first condition on a value that its setting never has in the space, with the values that
    /// it has.
    pub(crate) fn impossible_condition(&self) -> Option<(&Dimension, &str, String)> {
        let pairs = self.0.iter().flat_map(|own| self.0.iter().map(move |other| (own, other)));
        let mut found = pairs.flat_map(|(own, other)| {
            own.impossible(other).map(move |value| (own, value, other.extremes().join(", ")))
        });
        found.next()
    }

    fn new(dimensions: Vec<Dimension>) -> Result<Self, BadValue> {
        let text = |dimension: &Dimension| dimension.to_string();
        if dimensions.is_empty() {
            return Err(BadValue::new("", "at least one setting"));
        }
        for (nth, dimension) in dimensions.iter().enumerate() {
            let before = &dimensions[..nth];
            if before.iter().any(|other| other.key == dimension.key) {
                return Err(BadValue::new(&text(dimension), "each setting once"));
            }
            // A condition refers to an earlier dimension, so that conditions form no cycle.
            let known = |key: &str| before.iter().any(|other| other.key == key);
            if let Some(condition) = &dimension.condition
                && !known(&condition.key)
            {
                let expected =
                    format!("`{}` in the space, before `{}`", condition.key, dimension.key);
                return Err(BadValue::new(&text(dimension), expected));
            }
        }
        Ok(Self(dimensions))
    }

    /// This space with the dimensions of `other`, which replace dimensions of the same setting.
    ///
    /// # Errors
    /// A condition on a setting that the space does not have before.
    pub(crate) fn with(&self, other: &Self) -> Result<Self, BadValue> {
        let mut dimensions = self.0.clone();
        for dimension in &other.0 {
            match dimensions.iter_mut().find(|own| own.key == dimension.key) {
                Some(own) => *own = dimension.clone(),
                None => dimensions.push(dimension.clone()),
            }
        }
        if dimensions.is_empty() { Ok(Self::default()) } else { Self::new(dimensions) }
    }

    /// The member at the position `at(dimension)` in 0..1 of each dimension. A setting whose
    /// condition does not hold keeps the value of the run.
    ///
    /// # Errors
    /// As [`Member::push`].
    pub(crate) fn member(&self, at: impl Fn(usize) -> f64) -> Result<Member, BadValue> {
        let mut drawn: Vec<Option<String>> = vec![None; self.0.len()];
        let mut member = Member::default();
        for (nth, dimension) in self.0.iter().enumerate() {
            if dimension.holds(&drawn, &self.0) {
                let value = dimension.distribution.at(at(nth));
                member.push(&dimension.key, &value)?;
                drawn[nth] = Some(value);
            }
        }
        Ok(member)
    }

    /// A member near `member`: each of its settings that the space has gets a value near its own
    /// ([`Distribution::near`]). Unchanged are the settings in `KEPT_BY_COPIES`, and those to which
    /// a condition refers.
    pub(crate) fn perturb(&self, member: &Member, random: &mut Rng) -> Member {
        let mut other = member.clone();
        let conditions = || self.0.iter().filter_map(|dimension| dimension.condition.as_ref());
        for Dimension { key, distribution, .. } in &self.0 {
            let decides = conditions().any(|condition| condition.key == *key);
            if decides || KEPT_BY_COPIES.contains(&&**key) {
                continue;
            }
            if let Some(value) = member.get(key) {
                other.replace(key, distribution.near(value, random));
            }
        }
        other
    }
}

/// The forms in files.
#[derive(Deserialize)]
#[serde(untagged)]
enum Form {
    Text(String),
    Texts(Vec<String>),
    Table(Entries),
}

/// The dimension of a table such as `{ log_uniform = [0.001, 1], when = "host=minimal" }`.
fn of_table(key: &str, value: &toml::Value) -> Result<Dimension, BadValue> {
    let expected = "a table with one distribution, such as { uniform = [0, 1] }";
    let wrong = || BadValue::new(&format!("{key} = {value}"), expected);
    let mut table = value.as_table().ok_or_else(wrong)?.clone();
    let when = table.remove("when");
    let when = when.as_ref().map(|when| when.as_str().ok_or_else(wrong)).transpose()?;
    let mut entries = table.iter();
    let (Some((name, values)), None) = (entries.next(), entries.next()) else {
        return Err(wrong());
    };
    let values = values.as_array().ok_or_else(wrong)?;
    let values = values.iter().map(text_of).collect::<Result<Vec<_>, _>>()?;
    Dimension::new(key, name, &values, when)
}

impl TryFrom<Form> for Space {
    type Error = BadValue;

    fn try_from(form: Form) -> Result<Self, BadValue> {
        match form {
            Form::Text(text) => text.parse(),
            Form::Texts(texts) => {
                Self::new(texts.iter().map(|text| text.parse()).collect::<Result<_, _>>()?)
            }
            Form::Table(Entries(table)) => {
                let dimensions = table.iter().map(|(key, value)| of_table(key, value));
                let mut dimensions = dimensions.collect::<Result<Vec<_>, _>>()?;
                // TOML sorts keys. Dimensions with a condition come last, so that a condition on a
                // dimension without one refers to an earlier dimension, as `new` requires.
                dimensions.sort_by_key(|dimension| dimension.condition.is_some());
                Self::new(dimensions)
            }
        }
    }
}

impl FromStr for Space {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let texts = text.split(';').filter(|text| !text.trim().is_empty());
        Self::new(texts.map(|text| text.trim().parse()).collect::<Result<_, _>>()?)
    }
}

impl<'de> Deserialize<'de> for Space {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let form = Form::deserialize(deserializer)
            .map_err(|_| de::Error::custom(format!("space: expected {FORMS}")))?;
        Self::try_from(form).map_err(|error| de::Error::custom(format!("space: {error}")))
    }
}

impl Serialize for Space {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Dimension::to_string))
    }
}

impl SettingValue for Space {
    const FORM: FlagForm = FlagForm::Axes;

    fn kind() -> String {
        format!("KEY=DISTRIBUTION with {}", Distribution::FORMS)
    }

    /// Texts separated by `;`, or the JSON of any form.
    fn parse(text: &str) -> Result<Self, BadValue> {
        if text.trim_start().starts_with(['[', '{']) {
            let form: Form = serde_json::from_str(text).map_err(|_| BadValue::new(text, FORMS))?;
            return Self::try_from(form);
        }
        text.parse()
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use meristem_device::random::Purpose;

    use super::*;

    fn member(space: &str, at: f64) -> String {
        space.parse::<Space>().unwrap().member(|_| at).unwrap().to_string()
    }

    #[test]
    fn forms_are_the_same_space() {
        let text = "host=choice:minimal|mlp:8,8; lr=log_uniform:0.001,1; \
                    momentum=uniform:0,0.9 when host=minimal";
        let json = r#"{"host": {"choice": ["minimal", "mlp:8,8"]},
                       "momentum": {"uniform": [0, 0.9], "when": "host=minimal"},
                       "lr": {"log_uniform": [0.001, 1]}}"#;
        let space = Space::parse(text).unwrap();
        assert_eq!(Space::parse(json).unwrap(), space);
        assert_eq!(Space::parse(&space.text()).unwrap(), space);
        let file = "[space]
            momentum = { uniform = [0, 0.9], when = \"host=minimal\" }
            lr = { log_uniform = [1e-3, 1] }
            host = { choice = [\"minimal\", \"mlp:8,8\"] }";
        let file: BTreeMap<String, Space> = toml::from_str(file).unwrap();
        assert_eq!(file["space"], space);
    }

    #[test]
    fn values_are_at_their_quantiles() {
        assert_eq!(member("lr=log_uniform:0.001,1", 0.0), "lr=0.001");
        assert_eq!(member("lr=log_uniform:0.0001,1", 0.5), "lr=0.01");
        assert_eq!(member("lr=log_uniform:0.001,1", 1.0 / 3.0), "lr=0.01");
        assert_eq!(member("momentum=uniform:0,0.9", 0.123_456), "momentum=0.1111");
        // Rounding does not leave the bounds.
        assert_eq!(member("momentum=uniform:0.9999,0.99999", 0.99), "momentum=0.99999");
        assert_eq!(member("lr=uniform:123451,123454", 0.5), "lr=123454");
        assert_eq!(member("max_macs=int:1,3", 0.34), "max_macs=2");
        assert_eq!(member("max_macs=int:1,3", 0.999_999), "max_macs=3");
        assert_eq!(member("host=choice:a|b|c,d", 0.7), "host=c,d");
        let conditional = "host=choice:a|b; lr=uniform:0,1 when host=b";
        assert_eq!(member(conditional, 0.25), "host=a");
        assert_eq!(member(conditional, 0.75), "host=b; lr=0.75");
    }

    #[test]
    fn perturbed_members_stay_within_the_space() {
        let space: Space = "lr=log_uniform:0.01,1; momentum=uniform:0.5,0.9; max_macs=int:1,4; \
                            lr_schedule=choice:constant|cosine"
            .parse()
            .unwrap();
        let start: Member = space.member(|_| 0.5).unwrap();
        let mut seen = BTreeMap::<String, Vec<String>>::new();
        for n in 0..200 {
            let mut random = Rng::new(1, Purpose::Test, 0, n);
            for (key, value) in space.perturb(&start, &mut random).settings() {
                seen.entry(key.into()).or_default().push(value.into());
            }
        }
        for (key, expected) in [
            ("lr", &["0.08", "0.12"][..]),
            ("momentum", &["0.56", "0.84"]),
            ("max_macs", &["2", "4"]),
            ("lr_schedule", &["constant", "cosine"]),
        ] {
            let own = seen.get_mut(key).unwrap();
            own.sort();
            own.dedup();
            assert_eq!(own, expected, "{key}");
        }
        let member = Member::parse("lr=1").unwrap();
        for n in 0..20 {
            let near = space.perturb(&member, &mut Rng::new(1, Purpose::Test, 1, n));
            assert!(["lr=1", "lr=0.8"].contains(&&*near.to_string()), "{near}");
        }
    }

    #[test]
    fn what_weights_and_conditions_depend_on_is_not_perturbed() {
        let space: Space = "host=choice:a|b; optimizer=choice:sgd|adam; slots=choice:x|y; \
                            lr_schedule=choice:constant|cosine; \
                            momentum=uniform:0.1,0.9 when lr_schedule=cosine"
            .parse()
            .unwrap();
        let start = space.member(|_| 0.75).unwrap();
        for n in 0..50 {
            let near = space.perturb(&start, &mut Rng::new(1, Purpose::Test, 2, n));
            for key in ["host", "optimizer", "slots", "lr_schedule"] {
                assert_eq!(near.get(key), start.get(key), "{key}");
            }
            assert_ne!(near.get("momentum"), start.get("momentum"));
        }
    }

    #[test]
    fn wrong_spaces_say_why() {
        for (text, words) in [
            ("", "at least one setting"),
            ("lr", "KEY=DISTRIBUTION"),
            ("lr=0.1,0.2", "KEY=DISTRIBUTION"),
            ("lr=normal:0,1", "choice:A|B"),
            ("lr=uniform:1,0", "the lower first"),
            ("lr=uniform:0,inf", "finite"),
            ("lr=uniform:0", "two finite numbers"),
            ("lr=log_uniform:0,1", "above 0"),
            ("lr=int:0.5,2", "whole numbers"),
            ("host=choice:", "got `host=choice:`, expected at least one value"),
            (r#"{"lr": {"uniform": [1, 0]}}"#, "got `lr=uniform:1,0`, expected two finite"),
            (r#"{"lr": {"normal": [1, 0]}}"#, "got `lr=normal:1,0`, expected choice:A|B"),
            ("lr=uniform:0,1;lr=uniform:0,2", "once"),
            ("lr=uniform:0,1 when host=a", "`host` in the space"),
            ("host=choice:a|b; lr=uniform:0,1 when host", "after `when`"),
            (r#"{"lr": 3}"#, "one distribution"),
            (r#"{"lr": {"uniform": [0, 1], "int": [0, 1]}}"#, "one distribution"),
            (r#"{"lr": {"uniform": 1}}"#, "one distribution"),
        ] {
            let message = Space::parse(text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }
}

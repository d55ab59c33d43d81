//! Settings that differ from env to env.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::config::text::BadValue;
use crate::config::value::{FlagForm, SettingValue};

/// Most members of a run, as many as a run may have envs.
pub(crate) const MEMBERS_MAX: usize = 4096;

/// Description of the forms of members.
const FORMS: &str = "a list of tables, a table of lists, or text such as \"lr=0.1,0.03\"";

/// Separator of the settings of a member in its text form.
pub(crate) const SEPARATOR: &str = "; ";

/// Settings of one member, as keys and the text forms of their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member(Vec<(String, String)>);

/// Members of a run: env i has the settings of member i modulo the number of members; all other
/// settings are the run's.
///
/// Forms: a grid as text, `lr=0.1,0.03;host=a.toml|mlp:64,64`, whose values are separated by `|`,
/// or by commas if there is no `|`; a grid as a table of lists; a list of tables; and the form that
/// a run writes, a list of texts such as `lr=0.1; host=mlp:64,64`. In a grid the last setting
/// varies fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members(Vec<Member>);

impl Member {
    /// The keys and values, in the order in which they were given.
    pub fn settings(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// Adds a setting. This does not check whether members may have the setting, or whether the
    /// value is valid: both are checked when the settings of the run are resolved.
    ///
    /// # Errors
    /// A key that the member has already; a value that contains `; `, the separator of settings.
    pub fn push(&mut self, key: &str, value: &str) -> Result<(), BadValue> {
        let (key, value) = (key.trim().replace('-', "_"), value.trim());
        if self.get(&key).is_some() {
            return Err(BadValue::new(&key, "each setting of a member once"));
        }
        if value.contains(SEPARATOR) {
            let expected = format!("a value without `{SEPARATOR}`, which separates settings");
            return Err(BadValue::new(value, expected));
        }
        self.0.push((key, value.into()));
        Ok(())
    }

    /// The value of a setting, if the member has it.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.settings().find(|(known, _)| *known == key).map(|(_, value)| value)
    }

    /// Replaces the value of a setting that the member has.
    pub(crate) fn replace(&mut self, key: &str, value: String) {
        if let Some((_, old)) = self.0.iter_mut().find(|(known, _)| known == key) {
            *old = value;
        }
    }

    /// Parses the form that a run writes, such as `lr=0.1; host=mlp:64,64`.
    ///
    /// # Errors
    /// Text that is not a list of settings with values.
    pub(crate) fn parse(text: &str) -> Result<Self, BadValue> {
        let mut member = Self::default();
        for setting in text.split(SEPARATOR).filter(|setting| !setting.trim().is_empty()) {
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| BadValue::new(setting, "KEY=VALUE, such as lr=0.1"))?;
            member.push(key, value)?;
        }
        Ok(member)
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, value)) in self.settings().enumerate() {
            write!(f, "{}{key}={value}", if i > 0 { SEPARATOR } else { "" })?;
        }
        Ok(())
    }
}

impl Members {
    /// All members, in order; at least one.
    pub fn all(&self) -> &[Member] {
        &self.0
    }

    /// All members, to change them.
    pub(crate) fn all_mut(&mut self) -> &mut [Member] {
        &mut self.0
    }

    /// The member of env `env`: number `env` modulo the number of members.
    pub fn of_env(&self, env: usize) -> &Member {
        &self.0[env % self.0.len()]
    }

    pub(crate) fn new(members: Vec<Member>) -> Result<Self, BadValue> {
        if members.is_empty() || members.len() > MEMBERS_MAX {
            let expected = format!("1 to {MEMBERS_MAX} members");
            return Err(BadValue::new(&format!("{} members", members.len()), expected));
        }
        Ok(Self(members))
    }

    /// All combinations of the values of the axes.
    fn grid(axes: &[(String, Vec<String>)]) -> Result<Self, BadValue> {
        let mut members = vec![Member::default()];
        for (key, values) in axes {
            if values.is_empty() {
                return Err(BadValue::new(key, "at least one value for each setting"));
            }
            if members.len().saturating_mul(values.len()) > MEMBERS_MAX {
                let expected = format!("a grid of at most {MEMBERS_MAX} members");
                return Err(BadValue::new(key, expected));
            }
            let mut longer = vec![];
            for member in &members {
                for value in values {
                    let mut member = member.clone();
                    member.push(key, value)?;
                    longer.push(member);
                }
            }
            members = longer;
        }
        Self::new(members)
    }

    /// Parses the text form of a grid.
    fn parse_grid(text: &str) -> Result<Self, BadValue> {
        let mut axes = vec![];
        for axis in text.split(';').filter(|axis| !axis.trim().is_empty()) {
            let (key, values) = axis
                .split_once('=')
                .ok_or_else(|| BadValue::new(axis, "KEY=VALUES, such as lr=0.1,0.03"))?;
            let separator = if values.contains('|') { '|' } else { ',' };
            axes.push((
                key.trim().to_string(),
                values.split(separator).map(String::from).collect(),
            ));
        }
        if axes.is_empty() {
            return Err(BadValue::new(text, "at least one setting, such as lr=0.1,0.03"));
        }
        Self::grid(&axes)
    }
}

/// The forms in files.
#[derive(Deserialize)]
#[serde(untagged)]
enum Form {
    Grid(String),
    Members(Vec<MemberForm>),
    Axes(Entries),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum MemberForm {
    Text(String),
    Table(Entries),
}

/// A table in the order of its text, as far as the format keeps it: JSON does, TOML sorts the keys.
pub(super) struct Entries(pub(super) Vec<(String, toml::Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }
            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = vec![];
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

/// Text form of a value in a file. A list is joined with commas.
pub(super) fn text_of(value: &toml::Value) -> Result<String, BadValue> {
    Ok(match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(true) => "on".into(),
        toml::Value::Boolean(false) => "off".into(),
        toml::Value::Array(items) => {
            items.iter().map(text_of).collect::<Result<Vec<_>, _>>()?.join(",")
        }
        other => {
            let expected = "text, a number, true, false or a list";
            return Err(BadValue::new(&other.to_string(), expected));
        }
    })
}

impl TryFrom<Form> for Members {
    type Error = BadValue;

    fn try_from(form: Form) -> Result<Self, BadValue> {
        match form {
            Form::Grid(text) => Self::parse_grid(&text),
            Form::Members(members) => {
                let member = |form| match form {
                    MemberForm::Text(text) => Member::parse(&text),
                    MemberForm::Table(Entries(table)) => {
                        let mut member = Member::default();
                        for (key, value) in &table {
                            member.push(key, &text_of(value)?)?;
                        }
                        Ok(member)
                    }
                };
                Self::new(members.into_iter().map(member).collect::<Result<_, _>>()?)
            }
            Form::Axes(Entries(table)) => {
                let axis = |(key, values): &(String, toml::Value)| {
                    let texts = match values {
                        toml::Value::Array(values) => values.iter().map(text_of).collect(),
                        one => text_of(one).map(|text| vec![text]),
                    };
                    Ok((key.clone(), texts?))
                };
                Self::grid(&table.iter().map(axis).collect::<Result<Vec<_>, BadValue>>()?)
            }
        }
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let form = Form::deserialize(deserializer)
            .map_err(|_| de::Error::custom(format!("members: expected {FORMS}")))?;
        Self::try_from(form).map_err(|error| de::Error::custom(format!("members: {error}")))
    }
}

impl Serialize for Members {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Member::to_string))
    }
}

impl SettingValue for Members {
    const FORM: FlagForm = FlagForm::Axes;

    fn kind() -> String {
        "KEY=VALUE,VALUE,…, or KEY=VALUE|VALUE|… for values with commas".into()
    }

    /// A grid, or the JSON of any form.
    fn parse(text: &str) -> Result<Self, BadValue> {
        if text.trim_start().starts_with(['[', '{']) {
            let form: Form = serde_json::from_str(text).map_err(|_| BadValue::new(text, FORMS))?;
            return Self::try_from(form);
        }
        Self::parse_grid(text)
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn texts(members: &Members) -> Vec<String> {
        members.all().iter().map(Member::to_string).collect()
    }

    #[test]
    fn forms_of_a_grid_are_the_same_members() {
        let wanted = [
            "lr=0.1; host=mlp:8,8",
            "lr=0.1; host=minimal",
            "lr=0.03; host=mlp:8,8",
            "lr=0.03; host=minimal",
        ];
        for text in [
            "lr=0.1,0.03;host=mlp:8,8|minimal",
            r#"{"lr": [0.1, 0.03], "host": ["mlp:8,8", "minimal"]}"#,
            r#"["lr=0.1; host=mlp:8,8", "lr=0.1; host=minimal", "lr=0.03; host=mlp:8,8",
                "lr=0.03; host=minimal"]"#,
        ] {
            let members = Members::parse(text).unwrap();
            assert_eq!(texts(&members), wanted, "{text}");
            assert_eq!(Members::parse(&members.text()).unwrap(), members);
        }
        let tables = "[[members]]\nlr = 0.1\n\n[[members]]\nlr = 0.03\nhost = \"minimal\"\n";
        let file: BTreeMap<String, Members> = toml::from_str(tables).unwrap();
        let members = &file["members"];
        // TOML sorts keys.
        assert_eq!(texts(members), ["lr=0.1", "host=minimal; lr=0.03"]);
        assert_eq!(members.of_env(3).to_string(), "host=minimal; lr=0.03");
    }

    #[test]
    fn wrong_members_say_why() {
        for (text, words) in [
            ("lr", "KEY=VALUES"),
            ("", "at least one setting"),
            ("[]", "1 to 4096 members"),
            ("lr=1;lr=2", "once"),
            (r#"{"lr": []}"#, "at least one value"),
            (r#"[{"lr": {}}]"#, "a list"),
            ("3", "KEY=VALUES"),
            ("[3]", "a list of tables"),
        ] {
            let message = Members::parse(text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
        let many = (0..100).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
        let text = format!("lr={many};momentum={}", ["0.1"; 100].join(","));
        assert!(Members::parse(&text).unwrap_err().to_string().contains("at most 4096"));
    }
}

//! Values of types to which a later version may add variants.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A value in a file of a run, such as a stage. A file of a later version may have a value that is
/// unknown here: readers keep and show its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Recorded<T> {
    /// A known value; the only variant that a run makes.
    Known(T),
    /// Text of a value that this version lacks.
    Later(String),
}

impl<T: Clone> Recorded<T> {
    /// The value, if it is known.
    pub fn known(&self) -> Option<T> {
        match self {
            Self::Known(value) => Some(value.clone()),
            Self::Later(_) => None,
        }
    }
}

impl<T: FromStr> Recorded<T> {
    /// Parses the text form of a value.
    fn parse(text: String) -> Self {
        text.parse().map_or(Self::Later(text), Self::Known)
    }
}

impl<T> From<T> for Recorded<T> {
    fn from(value: T) -> Self {
        Self::Known(value)
    }
}

impl<T: PartialEq> PartialEq<T> for Recorded<T> {
    fn eq(&self, other: &T) -> bool {
        matches!(self, Self::Known(value) if value == other)
    }
}

impl<T: fmt::Display> fmt::Display for Recorded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(value) => value.fmt(f),
            Self::Later(text) => f.pad(text),
        }
    }
}

/// Serde of a value through its text form.
pub(crate) mod as_text {
    use serde::{Deserializer, Serializer};

    use super::*;

    pub(crate) fn serialize<T: fmt::Display, S: Serializer>(
        value: &Recorded<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T: FromStr, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Recorded<T>, D::Error> {
        String::deserialize(from).map(Recorded::parse)
    }
}

/// Serde of a host through the text that it is parsed from.
pub(crate) mod as_host {
    use meristem_grow::HostSpec;
    use serde::Serializer;

    pub(crate) use super::as_text::deserialize;
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        value: &Recorded<HostSpec>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Recorded::Known(host) => to.serialize_str(&host.text()),
            Recorded::Later(text) => to.serialize_str(text),
        }
    }
}

/// Serde of a list of values through their text forms.
pub(crate) mod as_texts {
    use serde::{Deserializer, Serializer};

    use super::*;

    pub(crate) fn serialize<T: fmt::Display, S: Serializer>(
        values: &[Recorded<T>],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(values.iter().map(Recorded::to_string))
    }

    pub(crate) fn deserialize<'de, T: FromStr, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<Recorded<T>>, D::Error> {
        let texts: Vec<String> = Vec::deserialize(from)?;
        Ok(texts.into_iter().map(Recorded::parse).collect())
    }
}

#[cfg(test)]
mod tests {
    use meristem_grow::{Stage, Style};

    use super::*;
    use crate::record::summary::Status;

    fn is_its_name<T>(values: &[T])
    where
        T: Copy + fmt::Display + PartialEq + fmt::Debug + Serialize + serde::de::DeserializeOwned,
    {
        for value in values {
            let text = serde_json::to_string(&Recorded::from(*value)).unwrap();
            assert_eq!(text, format!("\"{value}\""));
            let read: Recorded<T> = serde_json::from_str(&text).unwrap();
            assert_eq!(read.known(), Some(*value));
        }
    }

    #[test]
    fn values_are_written_as_their_names_and_later_ones_are_kept_as_text() {
        is_its_name(&Stage::ALL);
        is_its_name(Style::ALL);
        is_its_name(&[Status::Completed, Status::Interrupted, Status::Failed]);
        let later: Recorded<Stage> = serde_json::from_str("\"dreaming\"").unwrap();
        assert_eq!((later.known(), later.to_string().as_str()), (None, "dreaming"));
        assert!(serde_json::from_str::<Recorded<Stage>>("7").is_err());
    }

    #[test]
    fn text_of_a_later_version_is_kept_and_written_again() {
        #[derive(serde::Serialize, serde::Deserialize)]
        struct Texts {
            #[serde(with = "as_text")]
            one: Recorded<u8>,
            #[serde(with = "as_texts")]
            several: Vec<Recorded<u8>>,
        }
        let text = r#"{"one":"dreaming","several":["7","dozing"]}"#;
        let read: Texts = serde_json::from_str(text).unwrap();
        assert_eq!(read.several[0].known(), Some(7));
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }
}

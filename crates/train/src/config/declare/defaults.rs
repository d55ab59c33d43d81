//! Default values of a setting, and their text.

use std::fmt;

use crate::config::types::Preset;
use crate::config::value::SettingValue;

/// Default values of a setting.
pub(crate) struct Defaults<T> {
    /// By preset, in the order of [`Preset::NAMES`].
    presets: [T; 3],
    /// Defaults for a controller that does not learn, by preset, if they differ.
    without_learning: Option<[T; 3]>,
    /// Description of the behaviour without the setting.
    absent: Option<Absent>,
}

/// Replacement for a setting that is not given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// Description of the value that applies then.
    pub(super) meaning: String,
    /// Values appended to the description, by preset, if they depend on the preset.
    pub(super) by_preset: Option<[String; 3]>,
}

/// The same default in all presets.
pub(crate) fn same<T: Clone>(value: impl Into<T>) -> Defaults<T> {
    let value = value.into();
    presets(value.clone(), value.clone(), value)
}

/// A default for each preset.
pub(crate) fn presets<T>(default: T, quick: T, full: T) -> Defaults<T> {
    Defaults { presets: [default, quick, full], without_learning: None, absent: None }
}

/// No default; `meaning` describes the behaviour without the setting.
pub(crate) fn absent<T>(meaning: impl Into<String>) -> Defaults<Option<T>> {
    let absent = Absent { meaning: meaning.into(), by_preset: None };
    Defaults { presets: [None, None, None], without_learning: None, absent: Some(absent) }
}

/// No default; `meaning` describes the behaviour without the setting, and the value of each preset
/// follows it.
pub(crate) fn absent_by_preset<T, V: ToString>(
    meaning: &str,
    values: [V; 3],
) -> Defaults<Option<T>> {
    let by_preset = Some(values.map(|value| value.to_string()));
    let absent = Absent { meaning: meaning.into(), by_preset };
    Defaults { presets: [None, None, None], without_learning: None, absent: Some(absent) }
}

impl<T> Defaults<T> {
    /// Sets the defaults for a controller that does not learn.
    pub(crate) fn without_learning(self, default: T, quick: T, full: T) -> Self {
        Self { without_learning: Some([default, quick, full]), ..self }
    }

    /// Defaults of one field of the value.
    pub(crate) fn map<U>(self, part: impl Fn(T) -> U) -> Defaults<U> {
        Defaults {
            presets: self.presets.map(&part),
            without_learning: self.without_learning.map(|values| values.map(&part)),
            absent: self.absent,
        }
    }

    /// The default in a preset, for a controller that learns or does not.
    pub(crate) fn pick(self, preset: Preset, learns: bool) -> T {
        let Self { presets, without_learning, .. } = self;
        let [default, quick, full] = match without_learning {
            Some(values) if !learns => values,
            _ => presets,
        };
        match preset {
            Preset::Default => default,
            Preset::Quick => quick,
            Preset::Full => full,
        }
    }
}

impl<T: SettingValue> Defaults<T> {
    pub(super) fn text(&self) -> DefaultText {
        let texts = |values: &[T; 3]| values.each_ref().map(T::text);
        match &self.absent {
            Some(absent) => DefaultText::Absent(absent.clone()),
            None => {
                let without_learning = self.without_learning.as_ref().map(texts);
                DefaultText::Presets(texts(&self.presets), without_learning)
            }
        }
    }
}

/// Default of a setting, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DefaultText {
    /// Replacement for a setting that is not given.
    Absent(Absent),
    /// Defaults by preset, in the order of [`Preset::NAMES`]; then the defaults without learning,
    /// if they differ.
    Presets([String; 3], Option<[String; 3]>),
}

impl DefaultText {
    /// The default in a preset, with a learning controller; `None` for a setting whose default does
    /// not depend on the preset alone.
    pub(crate) fn for_preset(&self, preset: Preset) -> Option<&str> {
        let place = Preset::NAMES.iter().position(|(_, known)| *known == preset)?;
        match self {
            Self::Absent(absent) => Some(&absent.by_preset.as_ref()?[place]),
            Self::Presets(learning, _) => Some(&learning[place]),
        }
    }

    /// The default with a learning controller only.
    pub(super) fn with_learning(&self) -> Self {
        match self {
            Self::Presets(learning, _) => Self::Presets(learning.clone(), None),
            Self::Absent(_) => self.clone(),
        }
    }
}

/// Formats values by preset, such as `4`, or `3, quick 2, full 20` where presets differ.
fn by_preset(texts: &[String; 3]) -> String {
    let [default, others @ ..] = texts;
    let others = Preset::NAMES.iter().skip(1).zip(others).filter(|(_, text)| *text != default);
    let others: String = others.map(|((name, _), text)| format!(", {name} {text}")).collect();
    format!("{default}{others}")
}

impl fmt::Display for DefaultText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(Absent { meaning, by_preset: values }) => {
                let values = values.as_ref().map(by_preset);
                write!(f, "default: {meaning}")?;
                values.map_or(Ok(()), |values| write!(f, " {values}"))
            }
            Self::Presets(learning, without) => {
                write!(f, "default: {}", by_preset(learning))?;
                let without = without.as_ref().map(by_preset);
                without.map_or(Ok(()), |texts| {
                    write!(f, "; if the controller does not learn: {texts}")
                })
            }
        }
    }
}

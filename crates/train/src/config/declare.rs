//! The parts of a setting's declaration, and the macro that derives everything else from it.

use std::fmt;

use super::types::Preset;
use super::value::{FlagForm, LimitedNumber, SettingValue};
use crate::error::{Error, Result};

/// Effect of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingScope {
    /// Results depend on it.
    Result,
    /// It changes how a run proceeds or which records it has, but no result. All processes of a run
    /// have the same value.
    Run,
    /// Like `Run`, but each process of a run may have its own value.
    Process,
}

impl fmt::Display for SettingScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Result => "result",
            Self::Run => "run",
            Self::Process => "process",
        })
    }
}

/// Range of numbers that a setting accepts, inclusive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NumberRange {
    /// Every value of the type.
    Any,
    /// Whole numbers; `u64::MAX` means no upper limit.
    Whole(u64, u64),
    /// Real numbers.
    Real(f64, f64),
}

impl NumberRange {
    fn contains(self, number: LimitedNumber) -> bool {
        match (self, number) {
            (Self::Whole(low, high), LimitedNumber::Whole(number)) => {
                (low..=high).contains(&number)
            }
            (Self::Real(low, high), LimitedNumber::Real(number)) => (low..=high).contains(&number),
            // The bound is rounded like the value, because 0.99 differs between 32 and 64 bits.
            (Self::Real(low, high), LimitedNumber::Single(number)) => {
                (low as f32..=high as f32).contains(&number)
            }
            _ => true,
        }
    }
}

impl fmt::Display for NumberRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Any => Ok(()),
            Self::Whole(low, u64::MAX) => write!(f, "at least {low}"),
            Self::Whole(low, high) => write!(f, "{low} to {high}"),
            Self::Real(low, high) => {
                write_real(f, low)?;
                f.write_str(" to ")?;
                write_real(f, high)
            }
        }
    }
}

/// Writes very small and very large numbers with an exponent.
fn write_real(f: &mut fmt::Formatter<'_>, number: f64) -> fmt::Result {
    match number.abs() {
        size if size == 0.0 || (1e-5..1e10).contains(&size) => write!(f, "{number}"),
        _ => write!(f, "{number:e}"),
    }
}

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
    meaning: String,
    /// Values appended to the description, by preset, if they depend on the preset.
    by_preset: Option<[String; 3]>,
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
    fn with_learning(&self) -> Self {
        match self {
            Self::Presets(learning, _) => Self::Presets(learning.clone(), None),
            Self::Absent(_) => self.clone(),
        }
    }
}

impl<T: SettingValue> Defaults<T> {
    fn text(&self) -> DefaultText {
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

/// Declaration of a setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Key in files.
    pub key: &'static str,
    /// Name of the flag, without leading dashes.
    pub flag: String,
    /// Heading in help and reference page.
    pub heading: &'static str,
    /// Help text.
    pub help: String,
    /// Description of the accepted text forms.
    pub kind: String,
    /// Form of the flag.
    pub form: FlagForm,
    /// Unit or placeholder of the value in a usage line.
    pub unit: Option<&'static str>,
    /// Accepted range.
    pub range: NumberRange,
    /// Default of `train`.
    pub default: DefaultText,
    /// Default of `control eval`, where it differs from the default of `train`.
    pub study_default: Option<String>,
    /// Effect.
    pub scope: SettingScope,
    /// Version of the settings that introduced it.
    pub since: u32,
    /// Value in runs from before that version; `None` if an optional setting has no value there.
    pub before: Option<&'static str>,
    /// Whether it belongs to a single run, so that `control eval` does not accept it.
    pub train_only: bool,
    /// Whether envs may have different values, see [`Members`](super::types::Members).
    pub of_member: bool,
    /// Whether a run may be resumed with another value.
    pub on_resume: bool,
    /// Whether a larger value makes a run longer, which is possible on resume.
    pub extends: bool,
}

impl Setting {
    /// A setting that results depend on, with any value of its type, since the first version.
    pub(crate) fn new<T: SettingValue>(
        key: &'static str,
        heading: &'static str,
        help: &[&str],
        defaults: &Defaults<T>,
    ) -> Self {
        let help: Vec<&str> = help.iter().map(|line| line.trim()).collect();
        Self {
            key,
            flag: key.replace('_', "-"),
            heading,
            help: help.join(" "),
            kind: T::kind(),
            form: T::FORM,
            unit: None,
            range: NumberRange::Any,
            default: defaults.text(),
            study_default: None,
            scope: SettingScope::Result,
            since: 1,
            before: None,
            train_only: false,
            of_member: false,
            on_resume: false,
            extends: false,
        }
    }

    /// Whether the setting may be absent.
    pub fn is_optional(&self) -> bool {
        matches!(self.default, DefaultText::Absent(_))
    }

    pub(crate) fn unit(self, unit: &'static str) -> Self {
        Self { unit: Some(unit), ..self }
    }

    pub(crate) fn whole(self, low: u64, high: u64) -> Self {
        Self { range: NumberRange::Whole(low, high), ..self }
    }

    pub(crate) fn real(self, low: f64, high: f64) -> Self {
        Self { range: NumberRange::Real(low, high), ..self }
    }

    pub(crate) fn scope(self, scope: SettingScope) -> Self {
        Self { scope, ..self }
    }

    /// The version that introduced the setting, and its value in older runs.
    pub(crate) fn since(self, version: u32, before: impl Into<Option<&'static str>>) -> Self {
        Self { since: version, before: before.into(), ..self }
    }

    /// No default; `meaning` describes the behaviour without the setting.
    pub(crate) fn absent(self, meaning: &str) -> Self {
        let absent = Absent { meaning: meaning.into(), by_preset: None };
        Self { default: DefaultText::Absent(absent), ..self }
    }

    pub(crate) fn study_default(self, value: impl ToString) -> Self {
        Self { study_default: Some(value.to_string()), ..self }
    }

    pub(crate) fn train_only(self) -> Self {
        Self { train_only: true, ..self }
    }

    pub(crate) fn of_member(self) -> Self {
        Self { of_member: true, ..self }
    }

    pub(crate) fn on_resume(self) -> Self {
        Self { on_resume: true, ..self }
    }

    pub(crate) fn extends(self) -> Self {
        Self { on_resume: true, extends: true, ..self }
    }

    /// Text of the default of `control eval`, which has the defaults of a controller that learns.
    pub fn default_in_study(&self) -> String {
        let usual = || self.default.with_learning().to_string();
        self.study_default.as_ref().map_or_else(usual, |value| format!("default: {value}"))
    }

    /// Checks a value against the range.
    ///
    /// # Errors
    /// [`Error::Value`] names the setting, the value and the range.
    pub(crate) fn check(&self, value: &impl SettingValue) -> Result<()> {
        match value.measure() {
            Some(number) if !self.range.contains(number) => {
                Err(Error::value(&self.flag, value.text(), self.range))
            }
            _ => Ok(()),
        }
    }
}

/// Derives from the declarations the struct of all values, the struct of the values from one
/// source, and the table of [`Setting`]s.
///
/// A declaration is a doc comment with the help text, then `key: type = defaults, attribute(…),
/// …;`. Defaults are [`same`], [`presets`] or [`absent`]; attributes are methods of [`Setting`].
/// A setting that is a field of a configuration of another crate is declared as `key in
/// group.field: type, attribute(…), …;`. The group's configuration holds its value and its default.
macro_rules! settings {
    (
        groups { $(
            $(#[doc = $about:literal])+
            $name:ident : $config:ty = $initial:expr ;
        )+ }
        $( $heading:literal { $(
            $(#[doc = $help:literal])+
            $key:ident
            $( in $group:ident $( . $field:ident )+ $( [ $index:expr ] )? : $type:ty )?
            $( : $own:ty = $default:expr )?
            $(, $attribute:ident ( $($value:expr),* ) )* ;
        )+ } )+
    ) => {
        /// Every setting of a run, resolved.
        #[derive(Clone, Debug, PartialEq)]
        pub struct TrainConfig {
            $($($(
                #[doc = concat!("Value of [`ConfigLayer::", stringify!($key), "`].")]
                pub $key: $own,
            )?)+)+
            $( $(#[doc = $about])+ pub $name: $config, )+
        }

        /// Settings given by one source; the others come from sources of lower priority.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(default)]
        pub struct ConfigLayer {
            $($( $(#[doc = $help])+ pub $key: Option<$($type)? $($own)?>, )+)+
        }

        /// Defaults of the groups.
        mod defaults {
            use super::*;
            $( pub(super) fn $name() -> Defaults<$config> { $initial } )+
        }

        static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| vec![$($({
            $( let defaults: Defaults<$own> = $default; )?
            $( let defaults: Defaults<$type> = defaults::$group()
                .map(|$group| place!($group $(.$field)+ $([$index])?)); )?
            Setting::new(stringify!($key), $heading, &[$($help),+], &defaults)
                $( .$attribute($($value),*) )*
        }),+),+]);

        impl ConfigLayer {
            /// Every known key, in the order of the reference page.
            pub const KEYS: &'static [&'static str] = &[$($( stringify!($key) ),+),+];

            /// Sets `key` to the value of `text`.
            ///
            /// # Errors
            /// An unknown key, or text that is not a value of the setting's type.
            pub fn set(&mut self, key: &str, text: &str) -> Result<(), BadValue> {
                match key {
                    $($( stringify!($key) => self.$key = Some(SettingValue::parse(text)?), )+)+
                    _ => return Err(unknown(key, Self::KEYS)),
                }
                Ok(())
            }

            /// Keys that have a value.
            pub fn given(&self) -> Vec<&'static str> {
                let all = [$($( self.$key.is_some() ),+),+];
                let given = Self::KEYS.iter().zip(all).filter(|(_, given)| *given);
                given.map(|(key, _)| *key).collect()
            }
        }

        impl TrainConfig {
            /// Defaults of a preset, for a controller that learns or does not.
            pub(crate) fn of_preset(preset: Preset, learns: bool) -> Self {
                Self {
                    $($($( $key: {
                        let defaults: Defaults<$own> = $default;
                        defaults.pick(preset, learns)
                    }, )?)+)+
                    $( $name: defaults::$name().pick(preset, learns), )+
                }
            }

            /// Overrides the settings that `layer` has.
            pub fn apply(&mut self, layer: ConfigLayer) {
                $($( if let Some(value) = layer.$key {
                    place!(self $( .$group $(.$field)+ $([$index])? )? ; $key) = value;
                } )+)+
            }

            /// Checks every number against its range.
            ///
            /// # Errors
            /// [`Error::Value`](crate::Error::Value) names the first value outside its range.
            pub(crate) fn check_ranges(&self) -> crate::error::Result<()> {
                $($( setting(stringify!($key))
                    .check(&place!(self $( .$group $(.$field)+ $([$index])? )? ; $key))?; )+)+
                Ok(())
            }
        }

        #[cfg(test)]
        impl TrainConfig {
            /// Keys of the settings that are kept in a group, each with the name of its group.
            pub(crate) const GROUPED: &'static [(&'static str, &'static str)] =
                &[$($($( (stringify!($key), stringify!($group)), )?)+)+];

            /// All groups by name, as JSON.
            pub(crate) fn groups(&self) -> Vec<(&'static str, serde_json::Value)> {
                vec![$( (stringify!($name), serde_json::to_value(self.$name).unwrap()) ),+]
            }
        }

        /// A map of all keys, in the order of the reference page.
        impl Serialize for TrainConfig {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_struct("TrainConfig", ConfigLayer::KEYS.len())?;
                $($( map.serialize_field(
                    stringify!($key),
                    &place!(self $( .$group $(.$field)+ $([$index])? )? ; $key),
                )?; )+)+
                map.end()
            }
        }
    };
}

/// The place of a setting's value: in a group, or else the field of its key.
macro_rules! place {
    ($config:ident $(.$field:ident)+ $([$index:expr])? $(; $key:ident)?) => {
        $config $(.$field)+ $([$index])?
    };
    ($config:ident ; $key:ident) => {
        $config.$key
    };
}

pub(crate) use {place, settings};

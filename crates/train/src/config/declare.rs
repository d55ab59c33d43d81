//! The parts of a setting's declaration, and the macro that makes everything else from it.

use std::fmt;

use super::types::Preset;
use super::value::{Form, Measure, Value};
use crate::error::{Error, Result};

/// The consequences of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Results depend on it.
    Result,
    /// It changes how a run proceeds and what is recorded, and no result. Every process of a run has the same.
    Run,
    /// As `Run`, and each process of a run may have its own.
    Process,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Result => "result",
            Self::Run => "run",
            Self::Process => "process",
        })
    }
}

/// The numbers that a setting may be, ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Range {
    /// Whatever its type accepts.
    Any,
    /// Whole numbers; `u64::MAX` stands for no upper end.
    Whole(u64, u64),
    /// Real numbers.
    Real(f64, f64),
}

impl Range {
    fn contains(self, number: Measure) -> bool {
        match (self, number) {
            (Self::Whole(low, high), Measure::Whole(number)) => (low..=high).contains(&number),
            (Self::Real(low, high), Measure::Real(number)) => (low..=high).contains(&number),
            _ => true,
        }
    }
}

impl fmt::Display for Range {
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

/// Numbers that are very small or large are written with an exponent.
fn write_real(f: &mut fmt::Formatter<'_>, number: f64) -> fmt::Result {
    match number.abs() {
        size if size == 0.0 || (1e-5..1e10).contains(&size) => write!(f, "{number}"),
        _ => write!(f, "{number:e}"),
    }
}

/// Values of a setting that nobody gave.
pub(crate) struct Defaults<T> {
    /// By preset, in the order of [`Preset::NAMES`].
    presets: [T; 3],
    /// The same under a controller that does not learn, where it differs.
    without_learning: Option<[T; 3]>,
    /// Effect of leaving it open.
    absent: Option<String>,
}

/// One value in all presets.
pub(crate) fn same<T: Clone>(value: impl Into<T>) -> Defaults<T> {
    let value = value.into();
    presets(value.clone(), value.clone(), value)
}

/// A value by preset.
pub(crate) fn presets<T>(default: T, quick: T, full: T) -> Defaults<T> {
    Defaults { presets: [default, quick, full], without_learning: None, absent: None }
}

/// Left open; `meaning` says what happens then.
pub(crate) fn absent<T>(meaning: impl Into<String>) -> Defaults<Option<T>> {
    let presets = [None, None, None];
    Defaults { presets, without_learning: None, absent: Some(meaning.into()) }
}

impl<T> Defaults<T> {
    /// Other values under a controller that does not learn.
    pub(crate) fn without_learning(self, default: T, quick: T, full: T) -> Self {
        Self { without_learning: Some([default, quick, full]), ..self }
    }

    /// The value of a preset, for a controller that learns or does not.
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
    /// Meaning of a setting that is left open.
    Absent(String),
    /// By preset, in the order of [`Preset::NAMES`], and the same without learning, where it differs.
    Presets([String; 3], Option<[String; 3]>),
}

impl DefaultText {
    /// Default in a preset, under a controller that learns; `None` for a setting that is left open.
    pub(crate) fn of(&self, preset: Preset) -> Option<&str> {
        let place = Preset::NAMES.iter().position(|(_, known)| *known == preset)?;
        match self {
            Self::Absent(_) => None,
            Self::Presets(learning, _) => Some(&learning[place]),
        }
    }
}

impl<T: Value> Defaults<T> {
    fn text(&self) -> DefaultText {
        let texts = |values: &[T; 3]| values.each_ref().map(T::text);
        match &self.absent {
            Some(meaning) => DefaultText::Absent(meaning.clone()),
            None => {
                let without_learning = self.without_learning.as_ref().map(texts);
                DefaultText::Presets(texts(&self.presets), without_learning)
            }
        }
    }
}

/// `4`, or `3, quick 2, full 20` where presets differ.
fn by_preset(texts: &[String; 3]) -> String {
    let [default, others @ ..] = texts;
    let others = Preset::NAMES.iter().skip(1).zip(others).filter(|(_, text)| *text != default);
    let others: String = others.map(|((name, _), text)| format!(", {name} {text}")).collect();
    format!("{default}{others}")
}

impl fmt::Display for DefaultText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(meaning) => write!(f, "when absent: {meaning}"),
            Self::Presets(learning, without) => {
                write!(f, "default: {}", by_preset(learning))?;
                let without = without.as_ref().map(by_preset);
                without.map_or(Ok(()), |texts| write!(f, "; without learning {texts}"))
            }
        }
    }
}

/// A setting: everything about it but its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Name in files.
    pub key: &'static str,
    /// Name of the flag, without the dashes before it.
    pub flag: String,
    /// Heading that it stands under.
    pub heading: &'static str,
    /// Meaning.
    pub help: String,
    /// Text forms that it accepts.
    pub kind: String,
    /// How its flag looks.
    pub form: Form,
    /// Unit, or the kind of thing that stands for the value in a usage line.
    pub unit: Option<&'static str>,
    /// Numbers that it may be.
    pub range: Range,
    /// Default.
    pub default: DefaultText,
    /// Consequences.
    pub scope: Scope,
    /// Version of the settings that it came with.
    pub since: u32,
    /// Value of runs from before it came, where that is not the default.
    pub before: Option<&'static str>,
    /// Whether it belongs to a single run: comparisons of controllers do not take it.
    pub train_only: bool,
    /// Whether a run may be resumed with another value.
    pub on_resume: bool,
}

impl Setting {
    /// A setting that all results depend on, of any value, from the first version on.
    pub(crate) fn new<T: Value>(
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
            range: Range::Any,
            default: defaults.text(),
            scope: Scope::Result,
            since: 1,
            before: None,
            train_only: false,
            on_resume: false,
        }
    }

    /// Whether it may be left open.
    pub fn is_optional(&self) -> bool {
        matches!(self.default, DefaultText::Absent(_))
    }

    pub(crate) fn unit(self, unit: &'static str) -> Self {
        Self { unit: Some(unit), ..self }
    }

    pub(crate) fn whole(self, low: u64, high: u64) -> Self {
        Self { range: Range::Whole(low, high), ..self }
    }

    pub(crate) fn real(self, low: f64, high: f64) -> Self {
        Self { range: Range::Real(low, high), ..self }
    }

    pub(crate) fn scope(self, scope: Scope) -> Self {
        Self { scope, ..self }
    }

    pub(crate) fn since(self, version: u32) -> Self {
        Self { since: version, ..self }
    }

    pub(crate) fn before(self, value: &'static str) -> Self {
        Self { before: Some(value), ..self }
    }

    pub(crate) fn train_only(self) -> Self {
        Self { train_only: true, ..self }
    }

    pub(crate) fn on_resume(self) -> Self {
        Self { on_resume: true, ..self }
    }

    /// Checks a value against the range.
    ///
    /// # Errors
    /// [`Error::Value`] names the setting, the value and the range.
    pub(crate) fn check(&self, value: &impl Value) -> Result<()> {
        match value.measure() {
            Some(number) if !self.range.contains(number) => {
                Err(Error::value(&self.flag, value.text(), self.range))
            }
            _ => Ok(()),
        }
    }
}

/// Makes of declarations the struct of all values, that of the values which one source gives, and the table of
/// [`Setting`]s.
///
/// A declaration is the help as a doc comment, then `key: type = defaults, attribute(…), …;`. Defaults are
/// [`same`], [`presets`] or [`absent`]; the attributes are the methods of [`Setting`].
macro_rules! settings {
    ($( $heading:literal { $(
        $(#[doc = $help:literal])+
        $key:ident : $type:ty = $default:expr $(, $attribute:ident ( $($value:expr),* ) )* ;
    )+ } )+) => {
        /// Every setting of a run, resolved.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        pub struct TrainConfig {
            $($( $(#[doc = $help])+ pub $key: $type, )+)+
        }

        /// The settings that one source gives; the others are decided by the sources below it.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(default)]
        pub struct Layer {
            $($( $(#[doc = $help])+ pub $key: Option<$type>, )+)+
        }

        static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| vec![$($({
            let defaults: Defaults<$type> = $default;
            Setting::new(stringify!($key), $heading, &[$($help),+], &defaults)
                $( .$attribute($($value),*) )*
        }),+),+]);

        impl Layer {
            /// Every known key, in the order of the reference page.
            pub const KEYS: &'static [&'static str] = &[$($( stringify!($key) ),+),+];

            /// Gives the setting `key` the value that `text` stands for.
            ///
            /// # Errors
            /// Text that is no such value; a key that is not known.
            pub fn set(&mut self, key: &str, text: &str) -> Result<(), BadValue> {
                match key {
                    $($( stringify!($key) => self.$key = Some(Value::parse(text)?), )+)+
                    _ => return Err(unknown(key, Self::KEYS)),
                }
                Ok(())
            }

            /// Keys that it gives a value.
            pub fn given(&self) -> Vec<&'static str> {
                let all = [$($( self.$key.is_some() ),+),+];
                Self::KEYS.iter().zip(all).filter(|(_, given)| *given).map(|(key, _)| *key).collect()
            }
        }

        impl TrainConfig {
            /// Values of a preset, for a controller that learns or does not.
            pub(crate) fn of_preset(preset: Preset, learns: bool) -> Self {
                Self { $($( $key: { let it: Defaults<$type> = $default; it.pick(preset, learns) }, )+)+ }
            }

            /// Lets `layer` override what it gives.
            pub fn apply(&mut self, layer: Layer) {
                $($( if let Some(value) = layer.$key { self.$key = value; } )+)+
            }

            /// Checks every number against its range.
            ///
            /// # Errors
            /// [`Error::Value`](crate::Error::Value) names the first that is outside.
            pub(crate) fn check_ranges(&self) -> crate::error::Result<()> {
                $($( setting(stringify!($key)).check(&self.$key)?; )+)+
                Ok(())
            }
        }
    };
}

pub(crate) use settings;

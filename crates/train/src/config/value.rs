//! Types of settings: text forms, and the number that a range limits.

use std::path::PathBuf;

use meristem_control::{KeepRule, RewardMode, WidenPlace};
use meristem_data::MissingValues;
use meristem_data::order::EpochMode;
use meristem_grow::{Birth, Tempo};
use meristem_nn::Precision;
use meristem_nn::graph::WidthInit;

use super::text::{BadValue, choose};

/// Number that a [`NumberRange`](super::declare::NumberRange) limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LimitedNumber {
    /// A count.
    Whole(u64),
    /// A real number of 32 bits.
    Single(f32),
    /// A real number of 64 bits.
    Real(f64),
}

/// Form of a setting on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagForm {
    /// A flag with a value.
    Value,
    /// A flag with values separated by commas.
    List,
    /// A flag that is given once for each setting that varies.
    Axes,
    /// A flag without a value, off by default.
    Switch,
}

/// Type of a setting. Flags, reference page and messages use its text form.
pub(crate) trait SettingValue: Sized {
    /// Form of the flag.
    const FORM: FlagForm = FlagForm::Value;

    /// Description of the accepted values, for the reference page.
    fn kind() -> String;

    /// Reads the text form.
    ///
    /// # Errors
    /// Text that is not a value of this type.
    fn parse(text: &str) -> Result<Self, BadValue>;

    /// Writes the text form.
    fn text(&self) -> String;

    /// The number that must be within the setting's range, if any.
    fn limited_number(&self) -> Option<LimitedNumber> {
        None
    }
}

/// Implements [`SettingValue`] through `FromStr` and `Display`, with a description of the accepted
/// values and, if a range limits the setting, its number.
macro_rules! value_as_text {
    ($type:ty, $kind:expr $(, $number:expr)?) => {
        impl $crate::config::value::SettingValue for $type {
            fn kind() -> String {
                $kind.into()
            }
            fn parse(text: &str) -> Result<Self, $crate::config::text::BadValue> {
                text.parse()
            }
            fn text(&self) -> String {
                self.to_string()
            }
            $(fn limited_number(&self) -> Option<$crate::config::value::LimitedNumber> {
                let number: fn(&Self) -> _ = $number;
                number(self)
            })?
        }
    };
}
pub(crate) use value_as_text;

/// Implements [`SettingValue`] for types of numbers, all of which a range may limit.
macro_rules! numbers {
    ($($type:ty: $kind:literal, $variant:ident($as:ty);)+) => {$(
        impl SettingValue for $type {
            fn kind() -> String {
                $kind.into()
            }
            fn parse(text: &str) -> Result<Self, BadValue> {
                text.parse().map_err(|_| BadValue::new(text, concat!("a ", $kind)))
            }
            fn text(&self) -> String {
                self.to_string()
            }
            fn limited_number(&self) -> Option<LimitedNumber> {
                Some(LimitedNumber::$variant(*self as $as))
            }
        }
    )+};
}

numbers! {
    usize: "whole number", Whole(u64);
    u32: "whole number", Whole(u64);
    u64: "whole number", Whole(u64);
    f32: "number", Single(f32);
    f64: "number", Real(f64);
}

impl SettingValue for bool {
    const FORM: FlagForm = FlagForm::Switch;

    fn kind() -> String {
        "true or false; the flag has no value".into()
    }
    fn parse(text: &str) -> Result<Self, BadValue> {
        choose(text, &[("true", true), ("false", false), ("on", true), ("off", false)])
    }
    fn text(&self) -> String {
        self.to_string()
    }
}

impl SettingValue for String {
    fn kind() -> String {
        "text".into()
    }
    fn parse(text: &str) -> Result<Self, BadValue> {
        Ok(text.into())
    }
    fn text(&self) -> String {
        self.clone()
    }
}

impl SettingValue for PathBuf {
    fn kind() -> String {
        "path".into()
    }
    fn parse(text: &str) -> Result<Self, BadValue> {
        Ok(text.into())
    }
    fn text(&self) -> String {
        self.display().to_string()
    }
}

impl SettingValue for Vec<String> {
    const FORM: FlagForm = FlagForm::List;

    fn kind() -> String {
        "list of texts".into()
    }
    fn parse(text: &str) -> Result<Self, BadValue> {
        Ok(text.split(',').map(String::from).collect())
    }
    fn text(&self) -> String {
        self.join(",")
    }
}

/// Implements [`SettingValue`] for types of other crates that are chosen by name.
macro_rules! named {
    ($($type:ty: $all:expr;)+) => {$(
        impl SettingValue for $type {
            fn kind() -> String {
                $all.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ")
            }
            fn parse(text: &str) -> Result<Self, BadValue> {
                let known: Vec<_> = $all.iter().map(|one| (one.name(), *one)).collect();
                choose(text, &known)
            }
            fn text(&self) -> String {
                self.name().into()
            }
        }
    )+};
}

named! {
    RewardMode: RewardMode::NAMES.map(|(_, mode)| mode);
    EpochMode: EpochMode::NAMES.map(|(_, mode)| mode);
    MissingValues: MissingValues::NAMES.map(|(_, missing)| missing);
    Precision: Precision::ALL;
    Tempo: Tempo::ALL;
    Birth: Birth::ALL;
    WidthInit: WidthInit::ALL;
    WidenPlace: WidenPlace::ALL;
    KeepRule: KeepRule::ALL;
}

/// A setting that may be absent; a value has the text form of `T`.
impl<T: SettingValue> SettingValue for Option<T> {
    const FORM: FlagForm = T::FORM;

    fn kind() -> String {
        T::kind()
    }
    fn parse(text: &str) -> Result<Self, BadValue> {
        T::parse(text).map(Some)
    }
    fn text(&self) -> String {
        self.as_ref().map(T::text).unwrap_or_default()
    }
    fn limited_number(&self) -> Option<LimitedNumber> {
        self.as_ref().and_then(T::limited_number)
    }
}

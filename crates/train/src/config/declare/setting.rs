//! Declaration of a setting.

use std::fmt;

use super::defaults::{Absent, DefaultText, Defaults};
use super::range::NumberRange;
use crate::config::value::{FlagForm, SettingValue};
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
    /// Version of the settings that introduced it, or gave it another default.
    pub since: u32,
    /// Value in runs from before that version; `None` if an optional setting has no value there.
    pub before: Option<&'static str>,
    /// Whether it belongs to a single run, so that `control eval` does not accept it.
    pub train_only: bool,
    /// Whether envs may have different values, see [`Members`](crate::config::types::Members).
    pub of_member: bool,
    /// Whether [`learners`](crate::learners) have it.
    pub of_learner: bool,
    /// Whether it has an effect only where something grows.
    pub of_growth: bool,
    /// Whether it is a rule of the heuristic. It then also is a setting of growth.
    pub of_heuristic: bool,
    /// Whether it has an effect only where layers become wider.
    pub of_width: bool,
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
            of_learner: false,
            of_growth: false,
            of_heuristic: false,
            of_width: false,
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

    /// The version that introduced the setting or gave it another default, and its value in older
    /// runs that do not store it.
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

    pub(crate) fn of_learner(self) -> Self {
        Self { of_learner: true, ..self }
    }

    pub(crate) fn of_growth(self) -> Self {
        Self { of_growth: true, ..self }
    }

    pub(crate) fn of_heuristic(self) -> Self {
        Self { of_heuristic: true, of_growth: true, ..self }
    }

    pub(crate) fn of_width(self) -> Self {
        Self { of_width: true, ..self }
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
        match value.limited_number() {
            Some(number) if !self.range.contains(number) => {
                Err(Error::value(&self.flag, value.text(), self.range))
            }
            _ => Ok(()),
        }
    }
}

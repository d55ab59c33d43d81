//! The settings of members over those of the run.

use std::path::Path;

use meristem_grow::nearest;

use super::table::{ConfigLayer, TrainConfig, all};
use super::types::{ControllerKind, MEMBERS_MAX, Member, SEPARATOR, Sampler, Scheduler, Space};
use super::validate::check_member;
use super::value::SettingValue;
use crate::error::{Error, Result};
use crate::hosts::{is_file, read_host};
use crate::input_file::{absolute, not_utf8};

/// The settings of a member as a layer that overrides those of the run.
///
/// # Errors
/// [`Error::Value`]: an unknown key, a setting that belongs to the run, a value that its setting
/// does not accept.
pub(super) fn layer(member: &Member) -> Result<ConfigLayer> {
    let mut layer = ConfigLayer::default();
    for (key, value) in member.settings() {
        check_key("members", key)?;
        layer.set(key, value).map_err(|error| {
            Error::value("members", format!("{key}={value}"), format!("other values: {error}"))
        })?;
    }
    Ok(layer)
}

/// Checks that members may have the setting `key`. The error is about `setting`, in which `key` was
/// given.
fn check_key(setting: &str, key: &str) -> Result<()> {
    if all().iter().any(|setting| setting.of_member && setting.key == key) {
        return Ok(());
    }
    let of_members = || all().iter().filter(|setting| setting.of_member).map(|known| known.key);
    let known = of_members().collect::<Vec<_>>().join(", ");
    let expected = match nearest(key, of_members()) {
        _ if ConfigLayer::KEYS.contains(&key) => {
            format!("a setting of a member, because it belongs to the run: {known}")
        }
        Some(near) => format!("a setting of a member; did you mean `{near}`?"),
        None => format!("a setting of a member: {known}"),
    };
    Err(Error::value(setting, format!("`{key}`"), expected))
}

/// A host, with the description in place of the path of a file: the run keeps the description, so
/// that a changed file does not change the run.
pub(super) fn described(host: impl AsRef<str>) -> Result<String> {
    let host = host.as_ref();
    Ok(if is_file(host) { read_host(host)?.description().into() } else { host.into() })
}

/// Replaces the path of a host by its description, and the paths of initial weights and of a
/// controller's script by absolute ones, so that the settings mean the same in every working
/// directory.
///
/// # Errors
/// An unreadable host; a path that has no absolute form, or one that is not UTF-8 or contains `; `.
pub(crate) fn make_portable(member: &mut Member) -> Result<()> {
    let replace = |member: &mut Member, key, value: String| {
        if value.contains(SEPARATOR) {
            let expected = format!("a value without `{SEPARATOR}`, which separates settings");
            return Err(Error::value(key, value, expected));
        }
        member.replace(key, value);
        Ok(())
    };
    if let Some(host) = member.get("host").map(described).transpose()? {
        replace(member, "host", host)?;
    }
    if let Some(init) = member.get("init").map(str::to_owned) {
        replace(member, "init", absolute_text("init", Path::new(&init))?)?;
    }
    // A text that is not a controller is refused later, when the settings are checked.
    let controller = member.get("controller").and_then(|text| text.parse().ok());
    if let Some(mut controller @ ControllerKind::Fixed(_)) = controller {
        if let Some(path) = controller.path_mut() {
            *path = absolute_text("controller", path)?.into();
        }
        replace(member, "controller", controller.to_string())?;
    }
    Ok(())
}

/// The absolute form of a path, as text.
fn absolute_text(key: &'static str, path: &Path) -> Result<String> {
    let path = absolute(key, path)?;
    path.to_str().map(Into::into).ok_or_else(|| not_utf8(key, &path))
}

impl TrainConfig {
    /// Draws `samples` members and stores them in `members`, so that the settings in the folder of
    /// a run do not depend on the sampler.
    ///
    /// # Errors
    /// [`Error::Value`]: both members and samples, samples without a space, a space that nothing
    /// uses, or settings that members cannot have.
    pub(super) fn draw_members(&mut self) -> Result<()> {
        for dimension in self.space.iter().flat_map(Space::dimensions) {
            check_key("space", dimension.key())?;
        }
        let Some(samples) = self.samples else {
            return match &self.space {
                Some(_) if self.members.is_none() => {
                    let expected = "`samples`, the number of members to draw from the space";
                    Err(Error::value("samples", "none", expected))
                }
                _ => Ok(()),
            };
        };
        if self.members.is_some() {
            let expected = "none with members, which are not drawn";
            return Err(Error::value("samples", samples, expected));
        }
        let none = Space::default();
        let space = match &self.space {
            Some(space) => space,
            None if self.sampler == Sampler::External => &none,
            None => {
                let expected =
                    "none without a space to draw from; give --space lr=log_uniform:0.001,1";
                return Err(Error::value("samples", samples, expected));
            }
        };
        if !(1..=MEMBERS_MAX).contains(&samples) {
            return Err(Error::value("samples", samples, format!("1 to {MEMBERS_MAX}")));
        }
        self.check_space(space)?;
        let drawn = self.sampler.draw(space, samples, self.seed);
        let drawn = drawn.map_err(|error| Error::value("space", space.text(), error));
        (self.members, self.samples) = (Some(drawn?), None);
        Ok(())
    }

    /// Checks that settings accept all values of a choice and the bounds of numbers, whichever are
    /// drawn, and that no condition names a value that its setting never has.
    fn check_space(&self, space: &Space) -> Result<()> {
        for dimension in space.dimensions() {
            let key = dimension.key();
            for value in dimension.extremes() {
                let unfit = |error: Error| {
                    let expected = format!("values that the setting accepts: {error}");
                    Error::value("space", format!("`{dimension}`"), expected)
                };
                let mut member = Member::default();
                member.push(key, &value).map_err(|error| Error::value("space", key, error))?;
                layer(&member).map_err(unfit)?;
                self.of_member(&member).check_ranges().map_err(unfit)?;
                if key == "host" {
                    read_host(&value).map_err(unfit)?;
                }
            }
        }
        match space.impossible_condition() {
            None => Ok(()),
            Some((dimension, value, known)) => {
                let expected = format!("a condition that may hold: `{value}` is none of {known}");
                Err(Error::value("space", format!("`{dimension}`"), expected))
            }
        }
    }

    /// The number of an env, on which its random numbers depend.
    pub(crate) fn env_number(&self, env: usize) -> usize {
        self.env_numbers.as_ref().map_or(env, |numbers| numbers.all()[env])
    }

    /// Number of members in training at a time.
    pub(crate) fn places(&self) -> usize {
        self.places.unwrap_or(usize::MAX)
    }

    /// Upper limit of the steps of a round. In each place the members train one after the other,
    /// each for `steps` steps.
    pub(crate) fn steps_of_round(&self) -> usize {
        let turns = self.places.map_or(1, |places| self.members_len().div_ceil(places));
        self.steps.saturating_mul(turns)
    }

    /// Number of members; 1 for a run without members.
    pub(crate) fn members_len(&self) -> usize {
        self.members.as_ref().map_or(1, |members| members.all().len())
    }

    /// Like [`Self::of_member`], but checks the settings of `member` first. Use it for settings
    /// that were not checked together with those of the run.
    ///
    /// # Errors
    /// [`Error::Value`]: settings that a member cannot have.
    pub(crate) fn of_new_member(&self, member: &Member) -> Result<Self> {
        layer(member)?;
        let config = self.of_member(member);
        config.validate()?;
        check_member(self, &config)?;
        Ok(config)
    }

    /// The settings of the run, overridden by those of `member`.
    pub(crate) fn of_member(&self, member: &Member) -> Self {
        self.below_members().with(member)
    }

    /// The settings of the run that the settings of a member override. The share of the control
    /// split is the run's, even if the controller of a member has another default.
    fn below_members(&self) -> Self {
        let mut config = self.clone();
        (config.members, config.space, config.member_changes) = (None, None, None);
        (config.scheduler, config.places) = (Scheduler::None, None);
        config.control_split = config.folds.is_none().then(|| self.control_share());
        config
    }

    /// These settings, overridden by those of `member`.
    fn with(mut self, member: &Member) -> Self {
        // `validate` has checked the settings of all members.
        layer(member).into_iter().for_each(|layer| self.apply(layer));
        self
    }

    /// The controllers of the run: its own, and those of its members.
    pub(crate) fn controllers(&self) -> Vec<ControllerKind> {
        let own = self.members.iter().flat_map(|members| members.all());
        let own = own.filter_map(|member| member.get("controller")?.parse().ok());
        [self.controller.clone()].into_iter().chain(own).collect()
    }

    /// Whether the run or one of its members has a controller.
    pub(crate) fn is_controlled(&self) -> bool {
        self.controllers().iter().any(|controller| *controller != ControllerKind::None)
    }

    /// The settings of each member; in a run without members, only the settings of the run.
    pub(crate) fn of_members(&self) -> Vec<Self> {
        match &self.members {
            None => vec![self.clone()],
            Some(members) => {
                let run = self.below_members();
                members.all().iter().map(|member| run.clone().with(member)).collect()
            }
        }
    }
}

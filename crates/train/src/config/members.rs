//! The settings of members over those of the run.

use meristem_grow::nearest;

use super::table::{ConfigLayer, TrainConfig, all};
use super::types::Member;
use crate::error::{Error, Result};

/// The settings of a member as a layer over those of the run.
///
/// # Errors
/// [`Error::Value`]: an unknown key, a setting that belongs to the run, a value that its setting
/// does not accept.
pub(super) fn layer(member: &Member) -> Result<ConfigLayer> {
    let mut layer = ConfigLayer::default();
    for (key, value) in member.settings() {
        check_key(key)?;
        layer.set(key, value).map_err(|error| {
            Error::value("members", format!("{key}={value}"), format!("other values: {error}"))
        })?;
    }
    Ok(layer)
}

/// Checks that members may have a setting.
fn check_key(key: &str) -> Result<()> {
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
    Err(Error::value("members", format!("`{key}`"), expected))
}

impl TrainConfig {
    /// Number of members; 1 for a run without members.
    pub(crate) fn members_len(&self) -> usize {
        self.members.as_ref().map_or(1, |members| members.all().len())
    }

    /// The settings of env `env`: those of the run, and its member's over them.
    pub(crate) fn of_env(&self, env: usize) -> Self {
        let member = self.members.as_ref().map(|members| members.of_env(env));
        // `validate` has checked the layers.
        let layer = member.and_then(|member| layer(member).ok());
        let mut config = Self { members: None, ..self.clone() };
        layer.into_iter().for_each(|layer| config.apply(layer));
        config
    }

    /// The settings of each member, and at least the run's.
    pub(crate) fn of_members(&self) -> Vec<Self> {
        (0..self.members_len()).map(|env| self.of_env(env)).collect()
    }
}

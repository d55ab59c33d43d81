//! Settings of a run: their table, and the way presets, a file and flags combine.
//!
//! Every setting is declared once, in `table`; everything else about it follows from the
//! declaration, by the macro of [`declare`]. A [`ConfigLayer`] has the values from one source, a
//! file or the flags, and [`TrainConfig::resolve`] combines the layers with a preset.

#[cfg(test)]
mod bounds;
pub mod declare;
mod default_values;
pub(crate) mod devices;
pub mod file;
mod identity;
mod idle;
mod members;
mod open;
mod optimizer;
mod paths;
mod policy_file;
pub mod reference;
mod table;
#[cfg(test)]
mod tests;
mod text;
pub mod types;
mod validate;
mod value;
mod written;

use std::time::Duration;

use meristem_comm::CommOptions;
use meristem_control::{HeuristicConfig, PpoConfig, RewardConfig};
use meristem_data::parts::SampleDraw;
use meristem_device::{DeviceOptions, Trace};

pub(crate) use self::default_values::{FIRST_STUDY_SEED, STATISTICS_BATCHES};
pub(crate) use self::identity::{
    add_rates_from_before, add_values_from_before, changed_line, changed_result, first_difference,
    identity, settings_version, values_from_before, without_length,
};
pub(crate) use self::idle::IdleSetting;
pub(crate) use self::members::make_portable;
pub(crate) use self::policy_file::PolicyFile;
pub use self::table::{ConfigLayer, TrainConfig, all};
use self::types::{ControllerKind, Preset};
pub use self::validate::check_precision;
pub(crate) use self::validate::{check_loss, check_searcher};
pub use self::value::FlagForm;
use crate::error::Result;

impl TrainConfig {
    /// Combines three sources, lowest priority first: the preset that `flags` or else `file` names,
    /// `file`, `flags`.
    ///
    /// # Errors
    /// A value outside its range, settings that contradict each other, an unreadable host, or an
    /// unknown device.
    pub fn resolve(file: ConfigLayer, flags: ConfigLayer) -> Result<Self> {
        let preset = flags.preset.or(file.preset).unwrap_or_default();
        let controller = flags.controller.clone().or(file.controller.clone()).unwrap_or_default();
        let mut config = Self::base(preset, &controller);
        if flags.data_parallel.or(file.data_parallel).unwrap_or(false) {
            config.envs = 1;
        }
        let envs = flags.envs.or(file.envs);
        config.apply(file);
        config.apply(flags);
        config.preset = preset;
        config.host = members::described(&config.host)?;
        config.draw_members()?;
        if let Some(members) = &mut config.members {
            for member in members.all_mut() {
                members::make_portable(member)?;
            }
        }
        if envs.is_none() && (config.members.is_some() || config.folds.is_some()) {
            config.envs = config.members_len() * config.folds.unwrap_or(1);
        }
        config.validate()?;
        Ok(config)
    }

    /// Settings of a preset under a controller, before file and flags. A learning controller gets
    /// several rounds to learn in; the others get one long round.
    pub(crate) fn base(preset: Preset, controller: &ControllerKind) -> Self {
        let learns = *controller == ControllerKind::Ppo;
        Self { preset, controller: controller.clone(), ..Self::of_preset(preset, learns) }
    }

    /// Checks every number against its range, and settings against each other.
    ///
    /// # Errors
    /// [`Error::Value`] names the setting, its value and the accepted values.
    pub(crate) fn validate(&self) -> Result<()> {
        self.check_ranges()?;
        self.check_paths()?;
        validate::together(self)?;
        for member in self.members.iter().flat_map(|members| members.all()) {
            members::layer(member)?;
        }
        for (n, config) in self.of_members().iter().enumerate() {
            let checked = config.check_ranges().and_then(|()| validate::together(config));
            checked.map_err(|error| error.in_member(n))?;
        }
        Ok(())
    }

    /// Draw of an env's training samples from those that it does not hold out.
    pub(crate) fn sample_draw(&self) -> SampleDraw {
        SampleDraw { share: self.train_share, bootstrap: self.bootstrap }
    }

    /// Options for opening the devices.
    pub(crate) fn device_options(&self, trace: Option<Trace>) -> DeviceOptions {
        let memory_limit = self.device_memory.map(|limit| limit.0);
        DeviceOptions { threads: self.threads, memory_limit, trace, ..DeviceOptions::default() }
    }

    /// Options of the communication between ranks.
    pub(crate) fn comm_options(&self) -> CommOptions {
        CommOptions { deadline: Duration::from_secs(self.comm_deadline as u64) }
    }

    /// Number of ranks that divide the envs and learn one policy.
    pub(crate) fn policy_ranks(&self) -> usize {
        if self.data_parallel { 1 } else { self.ranks() }
    }

    /// Number of ranks that each have a replica of every host.
    pub(crate) fn replicas(&self) -> usize {
        if self.data_parallel { self.ranks() } else { 1 }
    }

    /// Number of ranks that train one host as threads of this process; 0 if there are none.
    pub(crate) fn replica_threads(&self) -> usize {
        let are_threads = self.data_parallel && !self.comm.is_processes();
        if are_threads { self.ranks() } else { 0 }
    }

    /// Factor of the learning rates in a step of an episode.
    pub(crate) fn lr_factor(&self, step: usize) -> f64 {
        self.lr_schedule.factor(step, self.steps, self.lr_warmup)
    }

    /// Settings of PPO, including `hidden` and `bootstrap`, which depend on other settings.
    pub(crate) fn ppo_config(&self) -> PpoConfig {
        PpoConfig { hidden: self.policy_width(), bootstrap: self.ppo_bootstrap(), ..self.ppo }
    }

    /// Weights of the reward, with PPO's discount factor.
    pub(crate) fn reward_config(&self) -> RewardConfig {
        RewardConfig { gamma: self.ppo.gamma, ..self.reward }
    }

    /// Rules of the heuristic in a run with `train_samples` training images.
    pub(crate) fn heuristic_config(&self, train_samples: usize) -> HeuristicConfig {
        let max_parameters = Some((self.parameters_per_image * train_samples as f64) as usize);
        let plateau_gain_pp = self.plateau_gain as f32;
        HeuristicConfig { plateau_gain_pp, max_parameters, ..self.heuristic }
    }
}

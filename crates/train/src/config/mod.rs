//! Settings of a run: their table, and the way presets, a file and flags combine.
//!
//! Every setting is declared once, in `table`; everything else about it follows from the
//! declaration, by the macro of [`declare`]. A [`ConfigLayer`] has the values from one source, a
//! file or the flags, and [`TrainConfig::resolve`] combines the layers with a preset.

#[cfg(test)]
mod bounds;
pub mod declare;
pub(crate) mod devices;
pub mod file;
mod identity;
mod idle;
mod members;
mod optimizer;
mod policy_file;
pub mod reference;
mod table;
mod text;
pub mod types;
mod validate;
mod value;

use std::path::{Path, PathBuf};
use std::time::Duration;

use meristem_comm::CommOptions;
use meristem_control::{HeuristicConfig, PpoConfig, RewardConfig, RewardMode};
use meristem_data::parts::SampleDraw;
use meristem_data::path_text;
use meristem_device::{DeviceOptions, Trace};

pub(crate) use self::identity::{
    changed_line, changed_result, first_difference, identity, values_from_before, without_length,
};
pub(crate) use self::idle::IdleSetting;
pub(crate) use self::members::make_portable;
pub(crate) use self::policy_file::PolicyFile;
pub use self::table::{ConfigLayer, TrainConfig, all};
pub(crate) use self::table::{FIRST_STUDY_SEED, STATISTICS_BATCHES};
use self::types::{CommKind, ControllerKind, ObservationForm, PolicyStart, Preset, Switch};
pub use self::validate::check_precision;
pub(crate) use self::validate::{check_loss, check_searcher};
pub use self::value::FlagForm;
use crate::error::Result;
use crate::hosts::read_host;
use crate::input_file::{Moved, absolute, lossy};

/// Slots before the pools of a host of the family `cnn`.
const FIRST_ROW: &str = "r0";

impl TrainConfig {
    /// Combines three sources, lowest priority first: the preset that `flags` or else `file` names,
    /// `file`, `flags`.
    ///
    /// # Errors
    /// A value outside its range, or settings that contradict each other.
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

    /// The share of the control split: one fold with `folds`; else as set, else the controller's
    /// default.
    pub fn control_share(&self) -> f64 {
        if let Some(folds) = self.folds {
            return 1.0 / folds as f64;
        }
        let by_default = || if self.is_controlled() { table::CONTROL_SHARE } else { 0.0 };
        self.control_split.unwrap_or_else(by_default)
    }

    /// Draw of an env's training samples from those that it does not hold out.
    pub(crate) fn sample_draw(&self) -> SampleDraw {
        SampleDraw { share: self.train_share, bootstrap: self.bootstrap }
    }

    /// The slots that may grow: as set, else the first row of slots of a host of the family `cnn`,
    /// and all slots of any other host.
    pub(crate) fn slots(&self) -> Vec<String> {
        self.slots.clone().unwrap_or_else(|| {
            let host = read_host(&self.host);
            let has_rows = host.is_ok_and(|host| host.select_slots([FIRST_ROW]).is_ok());
            vec![if has_rows { FIRST_ROW.into() } else { "all".into() }]
        })
    }

    /// Whether every env has a twin: as set, else with a controller and without data parallelism.
    pub(crate) fn twin(&self) -> bool {
        let by_default = || self.is_controlled() && !self.data_parallel;
        self.twin.map_or_else(by_default, |twin| twin.0)
    }

    /// The width of the policy: as set, else the width of a new policy.
    pub(crate) fn policy_width(&self) -> usize {
        self.policy_hidden.unwrap_or_else(|| table::policy_width(self.preset))
    }

    /// The form of the policy: as set, else that of a new policy.
    pub(crate) fn policy_form(&self) -> ObservationForm {
        self.policy_form.unwrap_or_default()
    }

    /// Whether a policy decides that can make layers wider, and may do so.
    pub(crate) fn policy_widens(&self) -> bool {
        let widens = self.policy_form() == ObservationForm::SetWiden;
        self.controller.is_policy() && widens && self.heuristic.widen_by > 0.0
    }

    /// The policy that the run starts from: [`PolicyStart::New`] for a controller without a policy;
    /// `None` if a learning controller has no such setting.
    pub(crate) fn policy_start(&self) -> Option<PolicyStart> {
        match &self.controller {
            ControllerKind::Policy(file) | ControllerKind::Greedy(file) => {
                Some(PolicyStart::named(file))
            }
            ControllerKind::Ppo => self.policy.clone(),
            _ => Some(PolicyStart::New),
        }
    }

    /// The number of ranks: as set, else 1.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.unwrap_or(1)
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

    /// The run's name: as set, else made from host and dataset.
    pub fn run_name(&self) -> String {
        let name = self.name.clone().unwrap_or_else(|| {
            let described =
                self.host.starts_with('{').then(|| read_host(&self.host).ok()).flatten();
            let host = described.map_or(self.host.clone(), |host| host.name());
            format!("{host}-{}", self.dataset)
        });
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        name.chars().map(plain).take(60).collect()
    }

    /// The settings with absolute paths.
    ///
    /// # Errors
    /// As [`absolute`].
    pub(crate) fn with_absolute_paths(&self) -> Result<Self> {
        let mut written = self.clone();
        for (key, path) in written.paths_mut() {
            *path = absolute(key, path)?;
        }
        Ok(written)
    }

    /// The settings with the present paths of the files of a moved study.
    pub(crate) fn moved(&self, moved: &Moved) -> Self {
        self.with_paths(|path| moved.now(path))
    }

    /// The settings with the paths that files of a moved study had when a run began.
    ///
    /// # Errors
    /// As [`absolute`].
    pub(crate) fn before_move(&self, moved: &Moved) -> Result<Self> {
        Ok(self.with_absolute_paths()?.with_paths(|path| moved.then(path)))
    }

    /// The settings with each path replaced by `replace(path)`.
    fn with_paths(&self, replace: impl Fn(&Path) -> PathBuf) -> Self {
        let mut config = self.clone();
        config.paths_mut().for_each(|(_, path)| *path = replace(path));
        config
    }

    /// The paths that are written to the run folder, each with the key of its setting.
    fn paths_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        // Older runs wrote an empty root for the embedded dataset, which needs none.
        let data_root = self.data_root.as_mut().filter(|root| !root.as_os_str().is_empty());
        let paths = [
            ("data-root", data_root),
            ("init", self.init.as_mut()),
            ("start-topology", self.start_topology.as_mut()),
            ("export", self.export.as_mut()),
            ("controller", self.controller.path_mut()),
            (
                "policy",
                match &mut self.policy {
                    Some(PolicyStart::File(path)) => Some(path),
                    _ => None,
                },
            ),
        ];
        let blueprints = self.blueprints.iter_mut().flatten();
        let blueprints = blueprints.map(|source| ("blueprints", source.path_mut()));
        let paths = paths.into_iter().chain(blueprints);
        paths.filter_map(|(key, path)| Some((key, path?)))
    }

    /// Checks that `config.toml`, which is text, can have the paths.
    ///
    /// # Errors
    /// [`Error::Value`]: the absolute form of a path is not UTF-8; or as [`absolute`].
    pub(crate) fn check_paths(&self) -> Result<()> {
        match self.with_absolute_paths()?.paths_mut().find(|(_, path)| path_text::is_lossy(path)) {
            None => Ok(()),
            Some((key, path)) => Err(lossy(key, path)),
        }
    }

    /// The settings as written to the run folder. Open settings are filled in, paths are absolute,
    /// and settings of a single process are left out. The unchanged file therefore starts a new run
    /// from any working directory.
    pub fn resolved_toml(&self) -> String {
        // Relative paths that cannot be made absolute were refused by `check_paths`.
        let written = self.with_absolute_paths().unwrap_or_else(|_| self.clone());
        let mut written = written.with_optimizer_numbers();
        written.run_dir = None;
        written.trace = None;
        (written.stop_after, written.end_members) = (None, None);
        written.name = Some(self.run_name());
        if self.members.is_none() {
            // Members may have hosts with other slots.
            written.slots = Some(self.slots());
        }
        written.control_split = self.folds.is_none().then(|| self.control_share());
        if self.controller != ControllerKind::Ppo {
            written.policy.get_or_insert(PolicyStart::New);
        }
        written.policy_hidden = Some(self.policy_width());
        written.policy_form = Some(self.policy_form());
        written.twin = Some(Switch(self.twin()));
        written.ppo_bootstrap = Some(Switch(self.ppo_bootstrap()));
        if self.comm == CommKind::Threads {
            written.ranks = Some(self.ranks());
        }
        toml::to_string(&written).unwrap_or_default()
    }

    /// The settings with the result of [`PolicyFile::find`] filled in: width and form of the
    /// policy, and the setting `policy` if a learning controller is to choose its policy.
    pub(crate) fn starting_from(&self, policy: Option<&PolicyFile>) -> Self {
        let is_open = self.controller == ControllerKind::Ppo && self.policy.is_none();
        let choice = || if policy.is_some() { PolicyStart::Shipped } else { PolicyStart::New };
        Self {
            policy: if is_open { Some(choice()) } else { self.policy.clone() },
            policy_hidden: policy.map(|policy| policy.hidden).or(self.policy_hidden),
            policy_form: policy.map(|policy| policy.form).or(self.policy_form),
            ..self.clone()
        }
    }

    /// Settings that results depend on, as text. Runs with equal texts have equal results on the
    /// same data and machine, whatever the kind of ranks.
    pub(crate) fn identity(&self) -> String {
        identity(&Self { ranks: Some(self.ranks()), ..self.clone() }.resolved_toml())
    }

    /// Settings that all processes of a run share, as text.
    pub(crate) fn in_common(&self) -> String {
        identity::in_common(&self.resolved_toml())
    }

    /// Number of ranks that divide the envs and learn one policy.
    pub(crate) fn policy_ranks(&self) -> usize {
        if self.data_parallel { 1 } else { self.ranks() }
    }

    /// Number of ranks that each have a replica of every host.
    pub(crate) fn replicas(&self) -> usize {
        if self.data_parallel { self.ranks() } else { 1 }
    }

    /// Factor of the learning rates in a step of an episode.
    pub(crate) fn rate(&self, step: usize) -> f64 {
        self.lr_schedule.factor(step, self.steps, self.lr_warmup)
    }

    /// Settings of PPO, including `hidden` and `bootstrap`, which depend on other settings.
    pub(crate) fn ppo_config(&self) -> PpoConfig {
        PpoConfig { hidden: self.policy_width(), bootstrap: self.ppo_bootstrap(), ..self.ppo }
    }

    /// Whether PPO bootstraps the return of an episode with the value after its last step: as set,
    /// else with every reward but `shaped`.
    fn ppo_bootstrap(&self) -> bool {
        self.ppo_bootstrap.map_or(self.reward.mode != RewardMode::Shaped, |set| set.0)
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::declare::NumberRange;
    use super::types::BatchLimit;
    use super::*;

    fn resolve(file: ConfigLayer, flags: ConfigLayer) -> Result<TrainConfig> {
        TrainConfig::resolve(file, flags)
    }

    #[test]
    fn flags_lie_over_the_file_and_the_file_over_the_preset() {
        let file = ConfigLayer { batch: Some(64), envs: Some(2), ..ConfigLayer::default() };
        let flags =
            ConfigLayer { batch: Some(32), preset: Some(Preset::Quick), ..ConfigLayer::default() };
        let config = resolve(file, flags).unwrap();
        assert_eq!((config.batch, config.envs, config.preset), (32, 2, Preset::Quick));
        assert_eq!(
            config.steps,
            TrainConfig::base(Preset::Quick, &ControllerKind::default()).steps
        );
    }

    /// Only a learning controller benefits from several rounds; the others have all steps in one.
    #[test]
    fn a_preset_divides_its_steps_by_who_decides() {
        for (name, preset) in Preset::NAMES {
            let [learns, rules] = [ControllerKind::Ppo, ControllerKind::Heuristic]
                .map(|controller| TrainConfig::base(preset, &controller));
            assert!(learns.rounds > 1 && rules.rounds == 1, "{name}");
        }
        let file =
            ConfigLayer { controller: Some(ControllerKind::Random), ..ConfigLayer::default() };
        assert_eq!(resolve(file, ConfigLayer::default()).unwrap().rounds, 1);
    }

    #[test]
    fn absurd_values_are_named_with_their_range() {
        let bad = [
            (ConfigLayer { batch: Some(0), ..ConfigLayer::default() }, "batch"),
            (ConfigLayer { envs: Some(0), ..ConfigLayer::default() }, "envs"),
            (ConfigLayer { steps: Some(0), ..ConfigLayer::default() }, "steps"),
            (
                ConfigLayer { max_batches: Some(BatchLimit::Count(0)), ..ConfigLayer::default() },
                "max-batches",
            ),
            (ConfigLayer { lr: Some(Some(f32::NAN)), ..ConfigLayer::default() }, "lr"),
            (ConfigLayer { lr: Some(Some(-1.0)), ..ConfigLayer::default() }, "lr"),
            (ConfigLayer { momentum: Some(Some(1.0)), ..ConfigLayer::default() }, "momentum"),
            (
                ConfigLayer { control_split: Some(Some(1.0)), ..ConfigLayer::default() },
                "control-split",
            ),
            (
                ConfigLayer { control_split: Some(Some(0.0)), ..ConfigLayer::default() },
                "control-split",
            ),
            (ConfigLayer { devices: Some(vec![]), ..ConfigLayer::default() }, "devices"),
            (ConfigLayer { ppo_gamma: Some(1.5), ..ConfigLayer::default() }, "ppo-gamma"),
            (ConfigLayer { ppo_clip: Some(0.0), ..ConfigLayer::default() }, "ppo-clip"),
            (ConfigLayer { ppo_lr: Some(f32::INFINITY), ..ConfigLayer::default() }, "ppo-lr"),
            (
                ConfigLayer { governor_penalty: Some(1.0), ..ConfigLayer::default() },
                "governor-penalty",
            ),
            (
                ConfigLayer { governor_failures_max: Some(0), ..ConfigLayer::default() },
                "governor-failures-max",
            ),
            (ConfigLayer { ppo_epochs: Some(0), ..ConfigLayer::default() }, "ppo-epochs"),
            (
                ConfigLayer { gradient_stats_every: Some(0), ..ConfigLayer::default() },
                "gradient-stats-every",
            ),
            (ConfigLayer { time_every: Some(0), ..ConfigLayer::default() }, "time-every"),
        ];
        for (layer, key) in bad {
            let error = resolve(ConfigLayer::default(), layer).unwrap_err();
            assert!(
                matches!(&error, crate::error::Error::Value { key: of, .. } if of == key),
                "{error:?}"
            );
            assert!(error.to_string().contains(", expected "), "{error}");
        }
    }

    #[test]
    fn without_a_controller_the_whole_training_set_is_used() {
        let none = ConfigLayer { controller: Some(ControllerKind::None), ..ConfigLayer::default() };
        assert_eq!(resolve(ConfigLayer::default(), none).unwrap().control_share(), 0.0);
        assert_eq!(
            resolve(ConfigLayer::default(), ConfigLayer::default()).unwrap().control_share(),
            0.1
        );
    }

    /// Runs of the embedded dataset may have `data_root = ""`, as a shell makes it of a variable
    /// that is not set.
    #[test]
    fn an_empty_data_root_stays_empty() {
        let flags = ConfigLayer { data_root: Some(Some("".into())), ..ConfigLayer::default() };
        let text = resolve(ConfigLayer::default(), flags).unwrap().resolved_toml();
        assert!(text.lines().any(|line| line == "data_root = \"\""), "{text}");
        let flags = ConfigLayer { init: Some(Some("".into())), ..ConfigLayer::default() };
        let error = resolve(ConfigLayer::default(), flags).unwrap_err().to_string();
        assert!(error.contains("init"), "{error}");
    }

    #[test]
    fn a_written_configuration_means_the_same_files_everywhere() {
        let flags = ConfigLayer {
            data_root: Some(Some("data".into())),
            init: Some(Some("w.safetensors".into())),
            controller: Some(ControllerKind::Fixed("script.jsonl".into())),
            ..ConfigLayer::default()
        };
        let text = resolve(ConfigLayer::default(), flags).unwrap().resolved_toml();
        let here = std::env::current_dir().unwrap();
        for (key, before, name) in [
            ("data_root", "", "data"),
            ("init", "", "w.safetensors"),
            ("controller", "fixed:", "script.jsonl"),
        ] {
            let line = format!("{key} = \"{before}{}\"", here.join(name).display());
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }

    /// Fields of a group by name, with the fields of nested structs.
    fn fields(group: &serde_json::Value) -> BTreeMap<&str, &serde_json::Value> {
        let entries = group.as_object().into_iter().flatten();
        entries
            .flat_map(|(name, value)| match value {
                serde_json::Value::Object(_) => fields(value),
                _ => [(&**name, value)].into(),
            })
            .collect()
    }

    #[test]
    fn every_setting_of_a_group_changes_the_field_of_its_name() {
        let usual = resolve(ConfigLayer::default(), ConfigLayer::default()).unwrap();
        let groups: BTreeSet<&str> = TrainConfig::GROUPED.iter().map(|(_, group)| *group).collect();
        assert!(usual.groups().iter().all(|(name, _)| groups.contains(name)), "{groups:?}");
        for (key, group) in TrainConfig::GROUPED {
            let setting = all().iter().find(|setting| setting.key == *key).unwrap();
            let text = match (setting.range, *key) {
                (NumberRange::Whole(low, _), _) => (low + 7).to_string(),
                (NumberRange::Real(low, high), _) => (high - (high - low) / 64.0).to_string(),
                (NumberRange::Any, "reward") => "sparse".into(),
                (NumberRange::Any, "tempo") => "slow".into(),
                (NumberRange::Any, "birth") => "joint".into(),
                (NumberRange::Any, "width_init") => "net2wider".into(),
                (NumberRange::Any, "widen_trigger" | "widen_place") => "orthogonality".into(),
                (NumberRange::Any, "keep_modules") => "all".into(),
                (NumberRange::Any, _) => panic!("{key}: give this test a value that is no default"),
            };
            let mut flags = ConfigLayer::default();
            flags.set(key, &text).unwrap();
            let mut other = usual.clone();
            other.apply(flags);
            for ((name, before), (_, after)) in usual.groups().iter().zip(&other.groups()) {
                let (before, after) = (fields(before), fields(after));
                let changed: Vec<&str> =
                    before.keys().copied().filter(|name| before[name] != after[name]).collect();
                if name != group {
                    assert!(changed.is_empty(), "{key} changes {changed:?} of {name}");
                    continue;
                }
                let [field] = changed[..] else { panic!("{key} changes {changed:?}") };
                let fits = match field {
                    "mode" => key == name,
                    "floors" => key.starts_with("ppo_floor_"),
                    _ => [field, &format!("{name}_{field}"), field.trim_end_matches("_pp")]
                        .contains(key),
                };
                assert!(fits, "{key} changes {field}");
            }
        }
    }

    #[test]
    fn the_name_of_a_run_is_a_plain_file_name() {
        let host = Some("cnn:channels=12,blocks=4".to_string());
        let config =
            resolve(ConfigLayer::default(), ConfigLayer { host, ..ConfigLayer::default() })
                .unwrap();
        assert_eq!(config.run_name(), "cnn-channels-12-blocks-4-embedded");
    }
}

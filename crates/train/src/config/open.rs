//! Values of open settings: settings that are not given, and whose values follow from other
//! settings.

use meristem_control::RewardMode;

use super::default_values::{self, CONTROL_SHARE};
use super::policy_file::PolicyFile;
use super::table::TrainConfig;
use super::types::{ControllerKind, ObservationForm, PolicyStart};
use crate::hosts::read_host;

/// Slots before the pools of a host of the family `cnn`.
const FIRST_ROW: &str = "r0";

impl TrainConfig {
    /// The share of the control split: one fold with `folds`; else as set, else the controller's
    /// default.
    pub fn control_share(&self) -> f64 {
        if let Some(folds) = self.folds {
            return 1.0 / folds as f64;
        }
        let by_default = || if self.is_controlled() { CONTROL_SHARE } else { 0.0 };
        self.control_split.unwrap_or_else(by_default)
    }

    /// The slots that may grow: as set, else the slots `r0…`, the first row in the family `cnn`, or
    /// all slots of a host without such names.
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
        self.policy_hidden.unwrap_or_else(|| default_values::policy_width(self.preset))
    }

    /// The form of the policy: as set, else that of a new policy.
    pub(crate) fn policy_form(&self) -> ObservationForm {
        self.policy_form.unwrap_or_default()
    }

    /// Whether the controller may make layers wider: scripts and programs at any time, the
    /// heuristic and policies of the form `set-widen` only with `widen_by`.
    pub(crate) fn may_widen(&self) -> bool {
        let at_any_time =
            matches!(self.controller, ControllerKind::Fixed(_) | ControllerKind::External);
        at_any_time || self.widens_by_setting()
    }

    /// Whether the controller makes layers wider by `widen_by`.
    pub(crate) fn widens_by_setting(&self) -> bool {
        let by_rule = self.controller == ControllerKind::Heuristic && self.heuristic.widen_by > 0.0;
        by_rule || self.policy_widens()
    }

    /// Whether the controller is a policy of the form `set-widen`, and `widen_by` allows it to make
    /// layers wider.
    pub(crate) fn policy_widens(&self) -> bool {
        let widens = self.policy_form() == ObservationForm::SetWiden;
        self.controller.is_policy() && widens && self.heuristic.widen_by > 0.0
    }

    /// The policy that the run starts from; [`PolicyStart::New`] for a controller without a policy.
    /// `None` if the controller learns and the setting `policy` is not given.
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

    /// Whether PPO bootstraps the return of an episode with the value after its last step: as set,
    /// else with every reward but `shaped`.
    pub(super) fn ppo_bootstrap(&self) -> bool {
        self.ppo_bootstrap.map_or(self.reward.mode != RewardMode::Shaped, |set| set.0)
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

    /// The settings with the result of [`PolicyFile::find`] filled in: width and form of the
    /// policy, and the setting `policy` if a learning controller is to choose its policy.
    pub(crate) fn starting_from(&self, policy: Option<&PolicyFile>) -> Self {
        let is_open = self.controller == ControllerKind::Ppo && self.policy.is_none();
        let choice = || policy.map_or(PolicyStart::New, PolicyFile::start);
        Self {
            policy: if is_open { Some(choice()) } else { self.policy.clone() },
            policy_hidden: policy.map(|policy| policy.hidden).or(self.policy_hidden),
            policy_form: policy.map(|policy| policy.form).or(self.policy_form),
            ..self.clone()
        }
    }
}

//! The settings as text: in the run folder, for the identity of a run, and for its processes.

use super::identity;
use super::table::TrainConfig;
use super::types::{CommKind, ControllerKind, PolicyStart, Switch};

impl TrainConfig {
    /// The settings as written to the run folder. Open settings are filled in, paths are absolute,
    /// and `run_dir`, `trace`, `stop_after` and `end_members` are left out; other settings of one
    /// process, such as `threads`, are included. The unchanged file therefore starts a new run from
    /// any working directory.
    pub fn resolved_toml(&self) -> String {
        // Relative paths that cannot be made absolute were refused by `check_paths`.
        let written = self.with_absolute_paths().unwrap_or_else(|_| self.clone());
        let mut written = written.with_hyperparameters();
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

    /// Settings that results depend on, as text. Runs with equal texts have equal results on the
    /// same data, machine, kinds of devices and precision, whatever the kind of ranks.
    pub(crate) fn identity(&self) -> String {
        identity(&Self { ranks: Some(self.ranks()), ..self.clone() }.resolved_toml())
    }

    /// Settings that all processes of a run share, as text.
    pub(crate) fn in_common(&self) -> String {
        identity::in_common(&self.resolved_toml())
    }
}

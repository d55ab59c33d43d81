//! Context of a step: everything that its parts use.

use meristem_device::{Counts, HotScope, ScopePolicy};

use crate::env::Population;
use crate::error::Error;
use crate::position::StepPosition;
use crate::record::journal::Journal;
use crate::record::totals::Totals;
use crate::resources::{Resources, ScopedDevice};
use crate::setup::Setup;
use crate::setup::controllers::AnyController;

/// Everything in this process that a step uses.
pub(crate) struct StepContext<'a, 'j> {
    pub(crate) when: StepPosition,
    pub(crate) population: &'a mut Population,
    pub(crate) setup: &'a Setup,
    pub(crate) resources: &'a mut Resources,
    pub(crate) controller: &'a mut AnyController,
    pub(crate) journal: &'a mut Journal<'j>,
    /// Number of processes of the run.
    pub(crate) processes: usize,
    /// Totals of the current step.
    pub(crate) spent: Totals,
    /// Envs that reached the limit of failures in this step, with the errors that end their
    /// members.
    pub(crate) diverged: Vec<(usize, Error)>,
    /// Whether this process has completed a step. Its first step may allocate what later steps
    /// reuse.
    pub(crate) warm: &'a mut bool,
}

impl StepContext<'_, '_> {
    /// Opens a scope on each device. In this process's first step the scopes only count.
    #[track_caller]
    pub(crate) fn hot_scopes(
        &self,
        name: &'static str,
        permitted: impl Fn(&ScopedDevice) -> Counts,
    ) -> Vec<HotScope> {
        self.resources.devices.hot_scopes(name, self.hot_policy(), permitted)
    }

    /// Whether a member whose training fails too often ends without ending the run. This is so in a
    /// run with other members, and in a run that trains some members of another run. It is not so
    /// in several processes, with a policy, which learns from all envs or from none, and with a
    /// program as controller, which relies on all envs.
    pub(super) fn ends_members(&mut self) -> bool {
        let decides =
            matches!(self.controller, AnyController::Envs(_) | AnyController::Deciding(_));
        let config = &self.setup.config;
        let decides = decides && !config.controller.sees_all_envs();
        let has_others = config.members_len() > 1 || config.env_numbers.is_some();
        decides && self.processes == 1 && has_others
    }

    /// Policy of the hot scopes of an epoch. Replicas in several processes or on several devices
    /// wait for each other's data in the inner loop, so there the scopes only count.
    pub(super) fn epoch_policy(&self) -> ScopePolicy {
        let apart = self.processes > 1 || self.resources.devices.are_ranks_apart();
        let sends = self.resources.replicas.is_some() && apart;
        if sends { ScopePolicy::Off } else { self.hot_policy() }
    }

    /// Policy of hot scopes: the setting, except in this process's first step, in which
    /// the scopes only count.
    pub(super) fn hot_policy(&self) -> ScopePolicy {
        if *self.warm { self.setup.config.hot_scope.0 } else { ScopePolicy::Off }
    }
}

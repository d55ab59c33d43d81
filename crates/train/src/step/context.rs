//! Context of a step: everything that its parts use.

use meristem_device::{Counts, HotScope, ScopePolicy};

use crate::fleet::Fleet;
use crate::record::journal::Journal;
use crate::record::totals::Totals;
use crate::setup::Setup;
use crate::setup::controllers::AnyController;

/// Everything in this process that a step uses, apart from the envs.
pub(crate) struct Context<'a, 'j> {
    pub(crate) setup: &'a Setup,
    pub(crate) fleet: &'a mut Fleet,
    pub(crate) controller: &'a mut AnyController,
    pub(crate) journal: &'a mut Journal<'j>,
    /// Number of processes of the run.
    pub(crate) processes: usize,
    /// Totals of the current step.
    pub(crate) spent: Totals,
    /// Whether this process has completed a step. Its first step may allocate what later steps
    /// reuse.
    pub(crate) warm: &'a mut bool,
}

impl Context<'_, '_> {
    /// Opens a scope on each device. This process's first step is only counted.
    #[track_caller]
    pub(crate) fn hot_scopes(
        &self,
        name: &'static str,
        permitted: impl Fn(u64) -> Counts,
    ) -> Vec<HotScope> {
        self.fleet.machine.hot_scopes(name, self.hot_policy(), permitted)
    }

    fn hot_policy(&self) -> ScopePolicy {
        if *self.warm { self.setup.config.hot_scope.0 } else { ScopePolicy::Off }
    }
}

//! Assembly and writing of a run's checkpoints. A checkpoint has parts that are constant during an
//! episode, parts that change with every step, and the parts of other processes.

use meristem_control::ControllerState;

use super::{Checkpoint, Identity, Progress, Store};
use crate::env::SavedEnv;
use crate::error::Result;
use crate::position::StepPosition;
use crate::processes::World;
use crate::record::events::Extension;
use crate::record::journal::Journal;
use crate::record::summary::{EnvSummary, RoundSummary, Stretch};
use crate::record::totals::Totals;
use crate::sweep::Sweep;

/// Parts that all checkpoints of an episode share, and the store.
pub(crate) struct Checkpoints {
    /// The store, on rank 0.
    pub(crate) store: Option<Store>,
    pub(crate) identity: Identity,
    /// Devices and precision of the steps so far.
    pub(crate) computed: Vec<Stretch>,
    /// Extensions of the run so far.
    pub(crate) extended: Vec<Extension>,
    /// Results of the completed rounds.
    pub(crate) rounds: Vec<RoundSummary>,
    /// Results of the envs in the last completed round.
    pub(crate) envs: Vec<EnvSummary>,
}

/// Parts that change from one checkpoint to the next.
pub(crate) struct Current {
    /// Position of the next step.
    pub(crate) next: StepPosition,
    /// The envs of this process; empty between rounds.
    pub(crate) envs: Vec<SavedEnv>,
    /// Results of the envs whose members have ended.
    pub(crate) ended_envs: Vec<EnvSummary>,
    pub(crate) totals: Totals,
    pub(crate) controller: ControllerState,
    pub(crate) sweep: Sweep,
}

impl Checkpoints {
    /// Writes a checkpoint from which the run resumes at step `next`. If the ranks divide the envs,
    /// each contributes a part; otherwise rank 0 has all of it. Earlier events are written to the
    /// disk first.
    ///
    /// # Errors
    /// A write failed, or a rank is gone.
    pub(crate) fn write(
        &self,
        current: Current,
        world: &mut World,
        journal: &mut Journal<'_>,
    ) -> Result<()> {
        let Current { next, envs, ended_envs, totals, controller, sweep } = current;
        let (states, tensors) = envs.into_iter().map(|env| (env.state, env.tensors)).unzip();
        let progress = Progress {
            identity: self.identity.clone(),
            computed: self.computed.clone(),
            extended: self.extended.clone(),
            next,
            totals,
            rounds: self.rounds.clone(),
            last_envs: self.envs.clone(),
            envs: states,
            ended_envs,
            sweep,
            events: journal.sync()?,
        };
        let own = Checkpoint { progress, envs: tensors, controller };
        let parts = world.gather_env_bytes(|| own.to_bytes())?;
        let Some(store) = &self.store else { return Ok(()) };
        store.write(next, &Checkpoint::join(parts)?)
    }
}

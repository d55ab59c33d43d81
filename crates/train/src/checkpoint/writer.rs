//! The checkpoints of a run: put together from what does not change in an episode, what does, and
//! what the other processes have, and written.

use meristem_control::ControllerState;

use super::{Checkpoint, Identity, Progress, Store};
use crate::env::SavedEnv;
use crate::error::Result;
use crate::position::Position;
use crate::processes::World;
use crate::record::journal::Journal;
use crate::record::summary::{EnvSummary, RoundSummary};
use crate::record::totals::Totals;

/// The parts that all checkpoints of an episode have in common, and where they are written.
pub(crate) struct Checkpoints {
    /// Where they are, on the first rank.
    pub(crate) store: Option<Store>,
    pub(crate) identity: Identity,
    /// Rounds that ended.
    pub(crate) rounds: Vec<RoundSummary>,
    /// Envs of the last of them.
    pub(crate) envs: Vec<EnvSummary>,
}

/// The parts that change from one checkpoint to the next.
pub(crate) struct Current {
    /// The next step.
    pub(crate) next: Position,
    /// The envs of this process; none between two rounds.
    pub(crate) envs: Vec<SavedEnv>,
    pub(crate) totals: Totals,
    pub(crate) controller: ControllerState,
}

impl Checkpoints {
    /// Writes a checkpoint from which the run goes on with step `next`; every rank has a part of
    /// it. Everything that was told before is on the disk first.
    ///
    /// # Errors
    /// The disk refused; a rank is gone.
    pub(crate) fn write(
        &self,
        current: Current,
        world: &mut World,
        journal: &mut Journal<'_>,
    ) -> Result<()> {
        let Current { next, envs, totals, controller } = current;
        let (states, tensors) = envs.into_iter().map(|env| (env.state, env.tensors)).unzip();
        let progress = Progress {
            identity: self.identity.clone(),
            next,
            totals,
            rounds: self.rounds.clone(),
            last_envs: self.envs.clone(),
            envs: states,
            events: journal.sync()?,
        };
        let own = Checkpoint { progress, envs: tensors, controller };
        let parts = world.gather_env_bytes(|| own.to_bytes())?;
        let Some(store) = &self.store else { return Ok(()) };
        store.write(next, &Checkpoint::join(parts)?)
    }
}

//! Keeps a run's checkpoints: puts one together with what does not change in an episode, and writes it.

use meristem_control::ControllerState;

use crate::checkpoint::{Checkpoint, EnvState, EnvTensors, Identity, Position, Progress, Store};
use crate::episode::Totals;
use crate::error::Result;
use crate::observer::Journal;
use crate::summary::{EnvSummary, RoundSummary};

/// What every checkpoint of an episode has in common.
pub(crate) struct Keeper {
    pub(crate) store: Store,
    pub(crate) identity: Identity,
    /// Rounds that ended.
    pub(crate) rounds: Vec<RoundSummary>,
    /// Envs of the last of them.
    pub(crate) envs: Vec<EnvSummary>,
}

impl Keeper {
    /// Writes a checkpoint from which the run goes on with step `next`. Everything that was told before is on the
    /// disk first.
    ///
    /// # Errors
    /// The disk refused.
    pub(crate) fn write(
        &self,
        next: Position,
        saved: Vec<(EnvState, EnvTensors)>,
        (totals, controller): (Totals, ControllerState),
        journal: &mut Journal<'_>,
    ) -> Result<()> {
        let (states, tensors) = saved.into_iter().unzip();
        let progress = Progress {
            identity: self.identity.clone(),
            next,
            totals,
            rounds: self.rounds.clone(),
            last_envs: self.envs.clone(),
            envs: states,
            events: journal.sync()?,
        };
        self.store.write(&Checkpoint { progress, envs: tensors, controller })
    }
}

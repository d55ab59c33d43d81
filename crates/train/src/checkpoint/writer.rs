//! Keeps a run's checkpoints: puts one together with what does not change in an episode and what the other processes
//! have, and writes it.

use meristem_control::ControllerState;

use crate::checkpoint::{Checkpoint, EnvState, EnvTensors, Identity, Position, Progress, Store};
use crate::error::Result;
use crate::processes::world::World;
use crate::record::observer::Journal;
use crate::record::summary::{EnvSummary, RoundSummary};
use crate::run::episode::Totals;

/// What every checkpoint of an episode has in common.
pub(crate) struct Keeper {
    /// Where they are, on the first rank.
    pub(crate) store: Option<Store>,
    pub(crate) identity: Identity,
    /// Rounds that ended.
    pub(crate) rounds: Vec<RoundSummary>,
    /// Envs of the last of them.
    pub(crate) envs: Vec<EnvSummary>,
}

impl Keeper {
    /// Writes a checkpoint from which the run goes on with step `next`; every rank has a part of it. Everything that was
    /// told before is on the disk first.
    ///
    /// # Errors
    /// The disk refused; a rank is gone.
    pub(crate) fn write(
        &self,
        next: Position,
        saved: Vec<(EnvState, EnvTensors)>,
        (totals, controller): (Totals, ControllerState),
        (world, journal): (&mut World, &mut Journal<'_>),
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
        let own = Checkpoint { progress, envs: tensors, controller };
        let parts = world.bytes_of_envs(|| own.to_bytes())?;
        let Some(store) = &self.store else { return Ok(()) };
        store.write(next, &Checkpoint::join(parts)?)
    }
}

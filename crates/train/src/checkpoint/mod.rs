//! Checkpoints (U4): everything that the next step of a run depends on, in one file.
//!
//! - here: the contents of a checkpoint;
//! - `identity`: the run that it is of;
//! - `file`: the form of the file, and what is refused;
//! - `store`: which files a run folder keeps, and which one to resume from;
//! - `writer`: puts a checkpoint together and writes it.
//!
//! Everything else follows from the configuration and the position: random numbers are keyed by
//! (seed, purpose, env, step), so that there is no generator whose state could be lost.

mod file;
mod identity;
mod store;
mod writer;

use std::path::Path;

use meristem_control::{ControllerState, PpoGroup};
use serde::{Deserialize, Serialize};

pub(crate) use self::file::checksum;
pub(crate) use self::identity::{Identity, RunInputs};
pub(crate) use self::store::Store;
pub(crate) use self::writer::{Checkpoints, Current};
use crate::env::{EnvState, EnvTensors};
use crate::error::Result;
use crate::position::Position;
use crate::record::event_writer::EventsPosition;
use crate::record::summary::{EnvSummary, RoundSummary};
use crate::record::totals::Totals;

/// A run between two steps.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Checkpoint {
    /// Everything but tensors.
    pub(crate) progress: Progress,
    /// Tensors of each env of the episode in progress; none between two rounds.
    pub(crate) envs: Vec<EnvTensors>,
    pub(crate) controller: ControllerState,
}

impl Checkpoint {
    /// As its file has it; and so it goes from one process to another.
    ///
    /// # Errors
    /// None of what a run makes.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
        file::to_bytes(Path::new(&store::file_name(self.progress.next)), self)
    }

    /// Parses the bytes of the file at `path`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`](crate::Error::Checkpoint): it is no checkpoint, or is damaged.
    /// [`Error::CheckpointVersion`](crate::Error::CheckpointVersion): it is of another version of
    /// this program.
    pub(crate) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        file::from_bytes(path, bytes)
    }

    /// The whole of parts that ranks made, by rank, as one process would have made it. All of it
    /// but envs and policy is the first's.
    ///
    /// # Errors
    /// A controller that does not learn over ranks.
    pub(crate) fn join(mut parts: Vec<Vec<u8>>) -> Result<Vec<u8>> {
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let parts = parts.iter().map(|bytes| Self::from_bytes(Path::new("of a rank"), bytes));
        let mut parts: Vec<Self> = parts.collect::<Result<_>>()?;
        let controllers = parts.iter_mut().map(|part| std::mem::take(&mut part.controller));
        let controller = PpoGroup::join(controllers.collect())?;
        let join = |mut whole: Self, part: Self| {
            whole.progress.envs.extend(part.progress.envs);
            whole.envs.extend(part.envs);
            whole
        };
        let whole = parts.into_iter().reduce(join).map(|whole| Self { controller, ..whole });
        whole.map_or(Ok(vec![]), |whole| whole.to_bytes())
    }
}

/// Everything but tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Progress {
    pub(crate) identity: Identity,
    /// The next step.
    pub(crate) next: Position,
    pub(crate) totals: Totals,
    /// Rounds that ended.
    pub(crate) rounds: Vec<RoundSummary>,
    /// Envs of the last round that ended.
    pub(crate) last_envs: Vec<EnvSummary>,
    /// Envs of the episode in progress.
    pub(crate) envs: Vec<EnvState>,
    pub(crate) events: EventsPosition,
}

//! Checkpoints: everything that the next step of a run depends on, in one file.
//!
//! - here: the contents of a checkpoint;
//! - `identity`: the run that it belongs to;
//! - `file`: the format of the file;
//! - `store`: the files in a run folder, and the one to resume from;
//! - `writer`: assembles checkpoints and writes them.
//!
//! The configuration and the position determine all that the file lacks. Random numbers are keyed
//! by (seed, purpose, env, step), so there is no generator with a state to save.

mod file;
mod identity;
mod store;
mod writer;

use std::path::Path;

use meristem_control::{ControllerState, PpoGroup};
use serde::{Deserialize, Serialize};

pub(crate) use self::file::{env_tensors, put_env};
pub(crate) use self::identity::{Identity, RunInputs, check_instruction_set};
pub(crate) use self::store::Store;
pub(crate) use self::writer::{Checkpoints, Current};
use crate::config::TrainConfig;
use crate::env::{EnvState, EnvTensors};
use crate::error::Result;
use crate::position::StepPosition;
use crate::record::event_writer::EventsPosition;
use crate::record::events::Extension;
use crate::record::summary::{EnvSummary, RoundSummary, Stretch};
use crate::record::totals::Totals;
use crate::sweep::Sweep;

/// State of a run between two steps.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Checkpoint {
    /// Everything except tensors.
    pub(crate) progress: Progress,
    /// Tensors of each env in training, in older checkpoints of each env; empty between rounds.
    pub(crate) envs: Vec<EnvTensors>,
    pub(crate) controller: ControllerState,
}

impl Checkpoint {
    /// Serialises the checkpoint, for its file and for other processes.
    ///
    /// # Errors
    /// Never for the checkpoints that a run makes.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
        file::to_bytes(Path::new(&store::file_name(self.progress.next)), self)
    }

    /// Deserialises the bytes of the file at `path`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`](crate::Error::Checkpoint): the file is not a checkpoint, or is
    /// damaged. [`Error::CheckpointVersion`](crate::Error::CheckpointVersion): another version
    /// wrote it.
    pub(crate) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        file::from_bytes(path, bytes)
    }

    /// Devices, precision and rounding at the checkpoint's position. An older checkpoint does not
    /// store them; then they are the devices and the precision of `began`, and rounding 0.
    pub(crate) fn last_stretch(&mut self, began: &TrainConfig) -> Stretch {
        let computed = &mut self.progress.computed;
        if computed.is_empty() {
            let first = Stretch::new(StepPosition { round: 0, step: 0 }, began);
            computed.push(Stretch { rounding: 0, ..first });
        }
        computed[computed.len() - 1].clone()
    }

    /// Indices of the envs in this checkpoint, for a run of `all` envs. A checkpoint of an older
    /// version has all envs, any other has only the envs in training.
    pub(crate) fn env_indices(&self, all: usize) -> Vec<usize> {
        let sweep = &self.progress.sweep;
        let has_all = self.envs.len() == all;
        (0..all).filter(|env| has_all || sweep.trains_env(*env)).collect()
    }

    /// Joins the ranks' parts, by rank, to the checkpoint that a single process would write.
    /// Everything except envs and policy comes from rank 0.
    ///
    /// # Errors
    /// A controller that does not learn over ranks.
    pub(crate) fn join(mut parts: Vec<Vec<u8>>) -> Result<Vec<u8>> {
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let parts = parts.iter().map(|bytes| Self::from_bytes(Path::new("part of a rank"), bytes));
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

/// Everything in a checkpoint except tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Progress {
    pub(crate) identity: Identity,
    /// Devices and precision of the steps so far; empty in older checkpoints.
    #[serde(default)]
    pub(crate) computed: Vec<Stretch>,
    /// Extensions of the run before `next`.
    #[serde(default)]
    pub(crate) extended: Vec<Extension>,
    /// Position of the next step.
    pub(crate) next: StepPosition,
    pub(crate) totals: Totals,
    /// Results of the completed rounds.
    pub(crate) rounds: Vec<RoundSummary>,
    /// Results of the envs in the last completed round.
    pub(crate) last_envs: Vec<EnvSummary>,
    /// States of the envs in training.
    pub(crate) envs: Vec<EnvState>,
    /// Results of the envs whose members have ended in the current round. Their weights are in the
    /// folder of the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) ended_envs: Vec<EnvSummary>,
    /// State of the members; the empty state in older checkpoints.
    #[serde(default, skip_serializing_if = "Sweep::is_without_members")]
    pub(crate) sweep: Sweep,
    pub(crate) events: EventsPosition,
}

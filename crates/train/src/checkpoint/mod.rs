//! Checkpoints (U4): everything that the next step of a run depends on, in one file.
//!
//! - here: what a checkpoint holds;
//! - `file`: the form of the file, and what is refused;
//! - `store`: which files a run folder keeps, and which one to resume from.
//!
//! What is not here follows from the configuration and the position: random numbers are keyed by (seed,
//! purpose, env, step), so that there is no generator whose state could be lost.

mod file;
mod store;
pub(crate) mod writer;

use std::path::Path;

use meristem_control::{ControllerState, History, Op, PpoGroup, RewardState};
use meristem_grow::{GateInputs, Topology};
use meristem_nn::{EvalMetrics, Metrics, StateDict};
use serde::{Deserialize, Serialize};

pub(crate) use self::file::checksum;
pub(crate) use self::store::Store;
use crate::error::{Error, Result};
use crate::record::summary::{DatasetSummary, EnvSummary, ModuleCounts, RoundSummary};
use crate::run::episode::Totals;
use crate::step::governor::Guard;

/// A run between two steps.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Checkpoint {
    /// Everything but tensors.
    pub(crate) progress: Progress,
    /// Of each env of the episode in progress; none between two rounds.
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

    /// Of the bytes of the file at `path`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: it is no checkpoint, or is damaged. [`Error::CheckpointVersion`].
    pub(crate) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        file::from_bytes(path, bytes)
    }

    /// The whole of parts that ranks made, by rank, as one process would have made it. All of it but envs and policy is
    /// the first's.
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
    /// Of the episode in progress.
    pub(crate) envs: Vec<EnvState>,
    pub(crate) events: EventsPosition,
}

/// What must be the same for a run to go on with the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The resolved configuration, without what no result depends on.
    pub(crate) config: String,
    pub(crate) dataset: DatasetSummary,
    /// Instruction set of the kernels: another one rounds differently.
    pub(crate) instruction_set: String,
}

impl Identity {
    /// Whether a run that is `self` may go on from the checkpoint in `file`, which is of `other`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for one of another run; [`Error::Value`] where this machine's kernels or the data are
    /// others.
    pub(crate) fn check(&self, file: &Path, other: &Identity) -> Result<()> {
        let theirs = other.config.lines().find(|line| !self.config.lines().any(|l| l == *line));
        if let Some(line) = theirs {
            let problem = format!("it is of another run: there `{line}`, here not");
            return Err(Error::Checkpoint { path: file.into(), problem });
        }
        if self.instruction_set != other.instruction_set {
            let expected = format!(
                "{}, which the run began with: others round differently",
                other.instruction_set
            );
            return Err(Error::value("MERISTEM_ISA", &self.instruction_set, expected));
        }
        match self.dataset == other.dataset {
            true => Ok(()),
            false => Err(Error::value("dataset", "other data", "the data that the run began with")),
        }
    }
}

/// A place in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) round: usize,
    pub(crate) step: usize,
}

/// Where `events.jsonl` stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventsPosition {
    /// Length of the file: what comes later is cut off by a resume, and happens again.
    pub(crate) bytes: u64,
    /// Number of the next event.
    pub(crate) seq: u64,
    /// Events lost so far.
    pub(crate) dropped: u64,
    /// Seconds since the run started, without the time between kill and resume.
    pub(crate) seconds: f64,
}

/// An env, without its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EnvState {
    pub(crate) topology: Topology,
    pub(crate) measured: Vec<GateInputs>,
    pub(crate) interactions_pp: Vec<Option<f32>>,
    pub(crate) accuracies_pp: Vec<f32>,
    pub(crate) losses: Vec<f32>,
    pub(crate) slot_history: History,
    pub(crate) reward_state: RewardState,
    pub(crate) last: Option<(Op, bool)>,
    pub(crate) train: Metrics,
    pub(crate) control: Option<EvalMetrics>,
    pub(crate) history: ModuleCounts,
    pub(crate) guard: Guard,
}

/// The tensors of an env, under PyTorch's names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct EnvTensors {
    /// Parameters and running statistics.
    pub(crate) weights: StateDict,
    /// What the optimiser remembers.
    pub(crate) optimiser: StateDict,
    /// What the governor goes back to.
    pub(crate) snapshot: StateDict,
    /// What the ranks that train it have not sent yet, as [`Replicas`](crate::fleet::replicas::Replicas) names it.
    pub(crate) exchange: StateDict,
}

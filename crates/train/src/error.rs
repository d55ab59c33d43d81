//! What can go wrong in a run, what to do about it, and the exit code it means (U6).

use std::io;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of configuring and running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting's value cannot be used.
    #[error("`{key}`: got {got}, expected {expected}")]
    Value {
        /// Setting, as its flag is called.
        key: String,
        /// Value found.
        got: String,
        /// What is accepted.
        expected: String,
    },
    /// A configuration file cannot be used.
    #[error("configuration file {}: {message}", path.display())]
    ConfigFile {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A new run was pointed at something that is there already.
    #[error("the run folder {} exists", path.display())]
    RunFolderExists {
        /// Folder.
        path: PathBuf,
    },
    /// The run folder cannot be written.
    #[error("cannot {action} {}: {source}", path.display())]
    RunFolder {
        /// What was tried.
        action: &'static str,
        /// File or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A weights file does not fit.
    #[error("weights {}: {message}", path.display())]
    Weights {
        /// File.
        path: PathBuf,
        /// Everything that is wrong with it.
        message: String,
    },
    /// A checkpoint cannot be used.
    #[error("checkpoint {}: {problem}", path.display())]
    Checkpoint {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A checkpoint is in order, but another version's.
    #[error("checkpoint {}: it is of version {version}, this program reads version {own}", path.display())]
    CheckpointVersion {
        /// File.
        path: PathBuf,
        /// Its version.
        version: String,
        /// The one that can be read.
        own: u32,
    },
    /// A checkpoint is in order, but `config.toml` has other settings than the run began with.
    #[error("checkpoint {}: its run began with `{began}`, and config.toml has `{now}`", path.display())]
    OtherSettings {
        /// File of the checkpoint.
        path: PathBuf,
        /// Line of the settings that the run began with.
        began: String,
        /// What stands there now.
        now: String,
    },
    /// A folder cannot be resumed.
    #[error("cannot resume {}: {problem}", path.display())]
    Resume {
        /// Folder.
        path: PathBuf,
        /// Why not.
        problem: String,
    },
    /// An env fails whenever it goes back to the last weights that were in order.
    #[error(
        "env {env} diverged in round {round}, step {step}: {}; failures in a row, each from the last weights \
         that were in order: {failures}",
        failure.describe()
    )]
    Diverged {
        /// Env.
        env: usize,
        /// Round, from 0.
        round: usize,
        /// Step, from 0.
        step: usize,
        /// What it failed by.
        failure: meristem_control::Failure,
        /// How often, with no snapshot between.
        failures: u32,
    },
    /// Another rank failed, or this one, where it is not the first.
    #[error("rank {rank}: {problem}")]
    OfRank {
        /// The rank.
        rank: usize,
        /// What went wrong there.
        problem: String,
        /// What to do about it.
        remedy: Option<String>,
        /// What it means, as [`Error::exit_code`].
        exit_code: u8,
    },
    /// Ranks could not be made, or do not hear of each other any more.
    #[error(transparent)]
    Ranks(#[from] meristem_comm::Error),
    /// Replicas of one host are not the same.
    #[error(
        "the ranks' replicas of the host differ: {fingerprints}; this is a fault of the program"
    )]
    ReplicasDiffer {
        /// Of weights, statistics and optimiser, by rank.
        fingerprints: String,
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] meristem_device::Error),
    /// The dataset cannot be used.
    #[error(transparent)]
    Data(#[from] meristem_data::Error),
    /// The network or its weights cannot be used.
    #[error(transparent)]
    Nn(#[from] meristem_nn::Error),
    /// The controller failed.
    #[error(transparent)]
    Control(#[from] meristem_control::Error),
    /// A host description or a lifecycle transition is not possible.
    #[error(transparent)]
    Grow(#[from] meristem_grow::Error),
}

impl Error {
    /// A value outside of what its setting accepts.
    pub fn value(key: &str, got: impl ToString, expected: impl ToString) -> Self {
        Self::Value { key: key.into(), got: got.to_string(), expected: expected.to_string() }
    }

    /// Whether a hot scope refused something (V2).
    pub fn is_hot_scope(&self) -> bool {
        matches!(self.device_error(), Some(meristem_device::Error::HotScope { .. }))
    }

    /// Whether a device had no more memory.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self.device_error(), Some(meristem_device::Error::OutOfMemory { .. }))
    }

    /// Whether it is for what became of another rank.
    pub(crate) fn is_of_another_rank(&self) -> bool {
        match self {
            Self::Ranks(error) | Self::Control(meristem_control::Error::Ranks(error)) => {
                !error.is_own()
            }
            _ => false,
        }
    }

    /// Whether it is for a rank that did not come in time.
    pub(crate) fn is_of_a_late_rank(&self) -> bool {
        use meristem_comm::Error::RankLate;
        use meristem_control::Error::Ranks;
        matches!(self, Self::Ranks(RankLate { .. }) | Self::Control(Ranks(RankLate { .. })))
    }

    /// The device's error below this one.
    fn device_error(&self) -> Option<&meristem_device::Error> {
        match self {
            Self::Device(error)
            | Self::Data(meristem_data::Error::Device(error))
            | Self::Nn(meristem_nn::Error::Device(error))
            | Self::Control(
                meristem_control::Error::Device(error)
                | meristem_control::Error::Network(meristem_nn::Error::Device(error)),
            ) => Some(error),
            Self::Ranks(meristem_comm::Error::Device(error)) => Some(error),
            _ => None,
        }
    }

    /// 2 when the request itself is wrong, 1 when a run of it failed (U6).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Value { .. } | Self::ConfigFile { .. } | Self::RunFolderExists { .. } => 2,
            Self::Resume { .. } | Self::OtherSettings { .. } => 2,
            Self::OfRank { exit_code, .. } => *exit_code,
            // Of this build: another flag, or another build.
            Self::Ranks(meristem_comm::Error::Unavailable { .. }) => 2,
            Self::Grow(_) => 2,
            Self::Device(
                meristem_device::Error::BadEnvironment { .. }
                | meristem_device::Error::Isa(_)
                | meristem_device::Error::BadDeviceName { .. }
                | meristem_device::Error::NotCompiled { .. },
            ) => 2,
            Self::Control(meristem_control::Error::Policy { .. }) => 2,
            // A flag with the wrong value, or one that is missing; the files are not to blame.
            Self::Data(
                meristem_data::Error::Argument { .. }
                | meristem_data::Error::Hole { .. }
                | meristem_data::Error::RootNotGiven { .. },
            ) => 2,
            _ => 1,
        }
    }

    /// What to do about it, where the message does not say so itself.
    pub fn remedy(&self) -> Option<String> {
        let text = match self {
            Self::Value { key, .. } => {
                format!("give `{key}` another value, or leave it out")
            }
            Self::ConfigFile { .. } => {
                "keys are the flags' names with `_` for `-`; every run folder holds a config.toml"
                    .into()
            }
            Self::RunFolderExists { .. } => {
                "give another --run-dir, or leave it out: a run never writes over another".into()
            }
            Self::RunFolder { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull => {
                    "free some space and start again; what was written so far is readable".into()
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    "give a --run-dir below a folder that you may write to".into()
                }
                _ => "check the path and the space left on its disk".into(),
            },
            Self::Weights { .. } => {
                "--host and --dataset must be those the weights were made with; \
                 a grown network needs the `topology` in the file's metadata"
                    .into()
            }
            Self::Control(_) if self.is_out_of_memory() => {
                "give devices more with --device-memory, or the policy fewer units with --policy-hidden".into()
            }
            error if error.is_out_of_memory() => {
                "give devices more with --device-memory, or use fewer --envs or a smaller --batch; a run that had begun \
                 goes on: `meristem train --resume RUN --device-memory LIMIT`"
                    .into()
            }
            error if error.is_hot_scope() => {
                "do it between steps, or go on from the last checkpoint and let it pass: `meristem train --resume \
                 RUN --hot-scope warn`; without an extension of yours in the run, report it"
                    .into()
            }
            Self::Checkpoint { .. } => {
                "remove this file to resume from the checkpoint before it; nothing was overwritten"
                    .into()
            }
            Self::CheckpointVersion { .. } => {
                "resume the run with the program that wrote it (its version is in the first event of events.jsonl), \
                 or start anew with --config RUN/config.toml; nothing was overwritten"
                    .into()
            }
            Self::OtherSettings { path, began, .. } => {
                let folder = path.parent().and_then(Path::parent).unwrap_or(Path::new("RUN"));
                let config = folder.join("config.toml");
                format!(
                    "restore `{began}` in {}: a run goes on with its own settings, and its checkpoints are sound; for \
                     others start a new run with --config and another --run-dir; nothing was overwritten",
                    config.display()
                )
            }
            Self::Resume { .. } => "nothing was changed; put it in order, or start a new run".into(),
            Self::Device(
                meristem_device::Error::BadEnvironment { .. } | meristem_device::Error::Isa(_),
            ) => "set the variable right, or unset it; `meristem --help` lists all of them".into(),
            Self::OfRank { remedy, .. } => return remedy.clone(),
            Self::Ranks(error) | Self::Control(meristem_control::Error::Ranks(error)) => match error {
                meristem_comm::Error::RankGone { .. } => {
                    "see what that rank said last, then go on: `meristem train --resume RUN`, under mpirun as before"
                        .into()
                }
                meristem_comm::Error::RankLate { .. } => {
                    "if that rank lives, give ranks longer than a step may take (--comm-deadline SECONDS); go on with \
                     `meristem train --resume RUN`, under mpirun as before"
                        .into()
                }
                _ => return None,
            },
            Self::Diverged { .. } => {
                "lower --lr, keep --clip-norm on, or start from other weights; what was done is in the run's events"
                    .into()
            }
            _ => return None,
        };
        Some(text)
    }
}

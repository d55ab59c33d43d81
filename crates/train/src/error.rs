//! Errors of a run, with their remedies and exit codes.

use std::io;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of configuring and running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting has an unusable value.
    #[error("`{key}`: got {got}, expected {expected}")]
    Value {
        /// Name of the setting's flag, or of another argument.
        key: String,
        /// Value found.
        got: String,
        /// Description of the accepted values.
        expected: String,
    },
    /// Settings of a member name something unusable, such as an unknown host.
    #[error("member {member}: {error}")]
    InMember {
        /// Number of the member.
        member: usize,
        /// The problem.
        error: Box<Error>,
    },
    /// A configuration file is unusable.
    #[error("configuration file {}: {message}", path.display())]
    ConfigFile {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        message: String,
    },
    /// A description of a host is unusable.
    #[error("host {}: {message}", path.display())]
    Host {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem, with its place in the file.
        message: String,
    },
    /// A source of blueprints is unusable.
    #[error("blueprints {}: {message}", path.display())]
    Blueprints {
        /// Path of the file, or `standard` or `vectors`.
        path: PathBuf,
        /// Description of the problem, with its place in the file.
        message: String,
    },
    /// The folder of a new run exists already.
    #[error("the run folder {} exists", path.display())]
    RunFolderExists {
        /// Path of the folder.
        path: PathBuf,
    },
    /// An operation on a file or folder of a run failed.
    #[error("cannot {action} {}: {source}", path.display())]
    RunFolder {
        /// Action that failed, as a verb.
        action: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A weights file does not fit.
    #[error("weights {}: {message}", path.display())]
    Weights {
        /// Path of the file.
        path: PathBuf,
        /// List of everything that does not fit.
        message: String,
    },
    /// A network has no ONNX model.
    #[error(transparent)]
    Onnx(#[from] meristem_export::onnx::OnnxError),
    /// A checkpoint is unusable.
    #[error("checkpoint {}: {problem}", path.display())]
    Checkpoint {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A sound checkpoint has a format version that this program does not read.
    #[error(
        "checkpoint {}: its format has version {version}, this program reads version {own}",
        path.display()
    )]
    CheckpointVersion {
        /// Path of the file.
        path: PathBuf,
        /// Version of the checkpoint.
        version: String,
        /// Version that this program reads.
        own: u32,
    },
    /// A checkpoint is sound, but its run began with other settings than `config.toml` has.
    #[error(
        "checkpoint {}: its run began with `{began}`, but config.toml has `{now}`",
        path.display()
    )]
    OtherSettings {
        /// Path of the checkpoint.
        path: PathBuf,
        /// Line of the settings that the run began with.
        began: String,
        /// The same line in `config.toml`.
        now: String,
    },
    /// A run began with another input than it has now: data, a file, or the instruction set.
    #[error("cannot {action} {}: {input}: {now}, but the run began with {began}", path.display())]
    OtherInput {
        /// Action that is refused, such as "resume".
        action: &'static str,
        /// Path of the checkpoint, of a file of learners, or of the folder of a complete run.
        path: PathBuf,
        /// Description of the input.
        input: Box<str>,
        /// The input that the run began with.
        began: String,
        /// The current input.
        now: String,
        /// The remedy.
        remedy: Box<str>,
    },
    /// The folder of a run, study or training, or a file of learners, cannot be resumed.
    #[error("cannot resume {}: {problem}", path.display())]
    Resume {
        /// Path of the folder or file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// The folder to read is not a run folder.
    #[error("{} is not the folder of a run: {problem}", path.display())]
    NotARun {
        /// Path of the folder.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A file or folder of a run cannot be read.
    #[error("cannot read {}: {problem}", path.display())]
    Unreadable {
        /// Path of the file or folder.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A call of a session or of learners at the wrong point, or with an unusable argument.
    #[error("{problem}")]
    Session {
        /// Expected and actual use.
        problem: String,
    },
    /// The program's search over settings of members failed.
    #[error("the searcher of the program failed: {problem}")]
    Searcher {
        /// Description of the problem.
        problem: String,
    },
    /// The program's loss failed.
    #[error("the loss of the program failed: {problem}")]
    OwnLoss {
        /// Description of the problem.
        problem: String,
    },
    /// An env failed too often since its last snapshot.
    #[error(
        "env {env} diverged in round {round}, step {step}: {}; \
         {failures} failures since its last snapshot",
        failure.describe()
    )]
    Diverged {
        /// Index of the env in the run.
        env: usize,
        /// Round, from 0.
        round: usize,
        /// Step, from 0.
        step: usize,
        /// Kind of failure.
        failure: meristem_control::TrainingFailure,
        /// Failures since the last snapshot.
        failures: u32,
    },
    /// A rank failed. On rank 0 `rank` is another rank; on other ranks it may be the rank itself.
    #[error("rank {rank}: {problem}")]
    OfRank {
        /// Number of the rank that failed.
        rank: usize,
        /// Its error, as text.
        problem: String,
        /// Its error's remedy.
        remedy: Option<String>,
        /// Its error's exit code, as in [`Error::exit_code`].
        exit_code: u8,
    },
    /// Ranks could not be started, or lost contact.
    #[error(transparent)]
    Ranks(#[from] meristem_comm::Error),
    /// Replicas of one host differ.
    #[error(
        "the replicas of the host differ between ranks: {fingerprints}; \
         this is a bug in meristem, please report it"
    )]
    ReplicasDiffer {
        /// Fingerprints by rank: of the network, or of the results of a step.
        fingerprints: String,
    },
    /// A device refused an operation or failed.
    #[error(transparent)]
    Device(#[from] meristem_device::Error),
    /// The dataset is unusable.
    #[error(transparent)]
    Data(#[from] meristem_data::Error),
    /// The network or its weights are unusable.
    #[error(transparent)]
    Nn(#[from] meristem_nn::Error),
    /// The controller failed.
    #[error(transparent)]
    Control(#[from] meristem_control::Error),
    /// A host description or a lifecycle transition is impossible.
    #[error(transparent)]
    Grow(#[from] meristem_grow::Error),
}

/// Whether an error of reading means that the named file does not exist or is not a plain file.
pub(crate) fn is_no_file(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | InvalidInput)
}

impl Error {
    /// An error for a value that its setting does not accept.
    pub fn value(key: &str, got: impl ToString, expected: impl ToString) -> Self {
        Self::Value { key: key.into(), got: got.to_string(), expected: expected.to_string() }
    }

    /// The same error with the number of the member whose settings caused it; errors that do not
    /// depend on settings stay as they are.
    pub(crate) fn in_member(self, member: usize) -> Self {
        match self {
            Self::Value { key, got, expected } => {
                Self::Value { key, got: format!("{got} in member {member}"), expected }
            }
            Self::Grow(_) | Self::Host { .. } | Self::Weights { .. } | Self::Nn(_)
                if self.device_error().is_none() =>
            {
                Self::InMember { member, error: Box::new(self) }
            }
            other => other,
        }
    }

    /// Whether a hot scope refused an operation.
    pub fn is_hot_scope(&self) -> bool {
        matches!(self.device_error(), Some(meristem_device::Error::HotScope { .. }))
    }

    /// Whether a device ran out of memory.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self.device_error(), Some(meristem_device::Error::OutOfMemory { .. }))
    }

    /// Whether the error only reports that another rank failed or is gone.
    pub(crate) fn is_of_another_rank(&self) -> bool {
        match self {
            Self::Ranks(error) | Self::Control(meristem_control::Error::Ranks(error)) => {
                !error.is_own()
            }
            _ => false,
        }
    }

    /// Whether the error reports a rank that missed the deadline.
    pub(crate) fn is_of_a_late_rank(&self) -> bool {
        use meristem_comm::Error::RankLate;
        use meristem_control::Error::Ranks;
        matches!(self, Self::Ranks(RankLate { .. }) | Self::Control(Ranks(RankLate { .. })))
    }

    /// The underlying error of a device, if any.
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

    /// The exit code: 2 if the request is wrong, 1 if the run failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Value { .. } | Self::ConfigFile { .. } | Self::RunFolderExists { .. } => 2,
            Self::Host { .. } | Self::Blueprints { .. } => 2,
            Self::Resume { .. } | Self::OtherSettings { .. } | Self::NotARun { .. } => 2,
            Self::Session { .. } | Self::OtherInput { .. } => 2,
            // Missing files, or sound files that do not fit the request.
            Self::Weights { .. } => 2,
            Self::Nn(meristem_nn::Error::Io { action: "read", source, .. })
                if is_no_file(source) =>
            {
                2
            }
            Self::OfRank { exit_code, .. } => *exit_code,
            Self::InMember { error, .. } => error.exit_code(),
            // Not in this build: another flag or another build is needed.
            Self::Ranks(meristem_comm::Error::Unavailable { .. }) => 2,
            // Environment variables that do not fit.
            Self::Ranks(meristem_comm::Error::BadArgument {
                operation: "Communicator::rendezvous",
                ..
            }) => 2,
            Self::Grow(_) => 2,
            Self::Device(
                meristem_device::Error::BadEnvironment { .. }
                | meristem_device::Error::Isa(_)
                | meristem_device::Error::BadDeviceName { .. }
                | meristem_device::Error::NotCompiled { .. },
            ) => 2,
            Self::Control(meristem_control::Error::Policy { .. }) => 2,
            // A wrong or missing flag; the data files are sound.
            Self::Data(
                meristem_data::Error::Argument { .. }
                | meristem_data::Error::Hole { .. }
                | meristem_data::Error::NoTestSplit { .. }
                | meristem_data::Error::RootNotGiven { .. },
            ) => 2,
            _ => 1,
        }
    }

    /// The remedy, unless the message contains it.
    pub fn remedy(&self) -> Option<String> {
        let text = match self {
            Self::Value { key, .. } => {
                format!("give `{key}` another value, or leave it out")
            }
            Self::ConfigFile { .. } => {
                "give a .toml or .json file; its keys are the names of the flags with `_` for `-`, \
                 as in the config.toml of every run"
                    .into()
            }
            Self::Host { .. } => "docs/hosts.md describes a file for --host".into(),
            Self::Blueprints { .. } => {
                "docs/growth.md, Blueprints from files, describes a file for --blueprints".into()
            }
            Self::RunFolderExists { .. } => {
                "give another --run-dir, or none; a run never overwrites another".into()
            }
            Self::Nn(meristem_nn::Error::Io { action: "read", .. }) => {
                "give a .safetensors file that exists and is readable; a run writes its weights to \
                 RUN/weights"
                    .into()
            }
            Self::RunFolder { source, .. }
            | Self::Nn(meristem_nn::Error::Io { source, .. })
            | Self::Device(meristem_device::Error::Trace { source, .. }) => match source.kind() {
                io::ErrorKind::StorageFull => {
                    "free some space and start again; the files written so far are readable".into()
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    "give a path in a writable folder".into()
                }
                _ => "check the path and the free space on its disk".into(),
            },
            Self::Weights { .. } => {
                "give the --host and --dataset that the weights were trained with; \
                 a grown network also needs the `topology` in the file's metadata"
                    .into()
            }
            Self::Control(_) if self.is_out_of_memory() => {
                "raise --device-memory, or lower --policy-hidden".into()
            }
            error if error.is_out_of_memory() => {
                "raise --device-memory, or lower --envs or --batch; an interrupted run continues \
                 with `meristem train --resume RUN --device-memory LIMIT`"
                    .into()
            }
            error if error.is_hot_scope() => {
                "if your own code did this, move it out of the step; otherwise report a bug; \
                 `meristem train --resume RUN --hot-scope warn` continues from the last checkpoint"
                    .into()
            }
            Self::Checkpoint { .. } => {
                "remove this file to resume from the previous checkpoint; nothing was overwritten"
                    .into()
            }
            Self::CheckpointVersion { .. } => {
                "resume with the version of meristem in the first event of events.jsonl, or start \
                 a new run with --config RUN/config.toml; nothing was overwritten"
                    .into()
            }
            Self::OtherSettings { path, began, .. } => {
                let folder = path.parent().and_then(Path::parent).unwrap_or(Path::new("RUN"));
                let config = folder.join("config.toml");
                format!(
                    "restore `{began}` in {}, because a run resumes with its own settings; \
                     other settings need a new run, with --config and another --run-dir; \
                     nothing was overwritten",
                    config.display()
                )
            }
            Self::OtherInput { remedy, .. } => format!("{remedy}; nothing was overwritten"),
            Self::Resume { .. } => {
                "correct the folder or the command, or start a new run; nothing was changed".into()
            }
            Self::NotARun { .. } => {
                "give a folder that `meristem train` wrote; `meristem runs DIR` lists those in DIR"
                    .into()
            }
            Self::Unreadable { .. } => "check the path; nothing was changed".into(),
            Self::Device(
                meristem_device::Error::BadEnvironment { .. } | meristem_device::Error::Isa(_),
            ) => "correct or unset the variable; `meristem --help` lists all variables".into(),
            Self::OfRank { remedy, .. } => return remedy.clone(),
            Self::InMember { error, .. } => return error.remedy(),
            Self::Ranks(error) | Self::Control(meristem_control::Error::Ranks(error)) => {
                rank_remedy(error)?.into()
            }
            Self::Diverged { .. } => {
                "lower --lr, keep --clip-norm on, or start from other weights; \
                 the run's events show what happened"
                    .into()
            }
            _ => return None,
        };
        Some(text)
    }
}

/// The remedy for an error between ranks.
fn rank_remedy(error: &meristem_comm::Error) -> Option<&'static str> {
    match error {
        meristem_comm::Error::RankGone { .. } => Some(
            "read the last output of that rank, then continue with \
             `meristem train --resume RUN`, under mpirun as before",
        ),
        meristem_comm::Error::RankLate { .. } => Some(
            "if that rank still runs, raise --comm-deadline above the duration of a step; \
             continue with `meristem train --resume RUN`, under mpirun as before",
        ),
        meristem_comm::Error::BadArgument { operation: "Communicator::rendezvous", .. } => Some(
            "start all processes with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and \
             MASTER_PORT for each",
        ),
        _ => None,
    }
}

//! Errors of the engine as exceptions. `meristem.errors` defines the classes.

use std::error::Error;

use meristem_train as train;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Kind of an error: the name of its class in `meristem.errors`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Argument,
    Setting,
    RunFolder,
    Resume,
    Data,
    Weights,
    Device,
    OutOfMemory,
    Diverged,
    Controller,
    Rank,
    State,
    Internal,
}

impl Kind {
    fn class(self) -> &'static str {
        match self {
            Self::Argument => "ArgumentError",
            Self::Setting => "SettingError",
            Self::RunFolder => "RunFolderError",
            Self::Resume => "ResumeError",
            Self::Data => "DataError",
            Self::Weights => "WeightsError",
            Self::Device => "DeviceError",
            Self::OutOfMemory => "OutOfMemory",
            Self::Diverged => "DivergedError",
            Self::Controller => "ControllerError",
            Self::Rank => "RankError",
            Self::State => "StateError",
            Self::Internal => "InternalError",
        }
    }

    fn of(error: &train::Error) -> Self {
        use meristem_control::Error as Control;
        use meristem_device::Error as Device;
        match error {
            train::Error::Value { .. }
            | train::Error::ConfigFile { .. }
            | train::Error::Host { .. }
            | train::Error::Blueprints { .. } => Self::Setting,
            train::Error::RunFolderExists { .. }
            | train::Error::RunFolder { .. }
            | train::Error::NotARun { .. }
            | train::Error::Unreadable { .. } => Self::RunFolder,
            train::Error::Resume { .. }
            | train::Error::OtherSettings { .. }
            | train::Error::OtherInput { .. }
            | train::Error::Checkpoint { .. }
            | train::Error::CheckpointVersion { .. } => Self::Resume,
            train::Error::Session { .. } => Self::State,
            train::Error::Diverged { .. } | train::Error::Control(Control::Diverged { .. }) => {
                Self::Diverged
            }
            train::Error::OfRank { .. }
            | train::Error::Ranks(_)
            | train::Error::ReplicasDiffer { .. } => Self::Rank,
            train::Error::Device(Device::OutOfMemory { .. }) => Self::OutOfMemory,
            train::Error::Device(_) if error.exit_code() == 2 => Self::Setting,
            train::Error::Device(_) => Self::Device,
            train::Error::Data(_) => Self::Data,
            train::Error::Nn(meristem_nn::Error::Argument { .. }) => Self::Argument,
            train::Error::Weights { .. } | train::Error::Nn(_) => Self::Weights,
            train::Error::Control(_) => Self::Controller,
            train::Error::Grow(_) => Self::Setting,
            train::Error::InMember { error, .. } => Self::of(error),
            _ => Self::Internal,
        }
    }
}

/// An error to be raised in Python.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    message: String,
    causes: Vec<String>,
    remedy: Option<String>,
    exit_code: u8,
}

impl Failure {
    /// A wrong use of the package.
    pub(crate) fn usage(kind: Kind, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (message, remedy) = (message.into(), Some(remedy.into()));
        Self { kind, message, causes: vec![], remedy, exit_code: 2 }
    }

    /// A panic, with its message.
    pub(crate) fn panic(message: &str) -> Self {
        let message = format!("a panic in the engine: {message}");
        let remedy = "this is a bug in meristem, please report it";
        Self { exit_code: 1, ..Self::usage(Kind::Internal, message, remedy) }
    }
}

impl From<train::Error> for Failure {
    fn from(error: train::Error) -> Self {
        let message = error.to_string();
        let (mut causes, mut next) = (vec![], error.source());
        while let Some(cause) = next {
            let text = cause.to_string();
            // Many messages already end with their cause.
            if !message.contains(&text) {
                causes.push(text);
            }
            next = cause.source();
        }
        let (kind, remedy) = (Kind::of(&error), error.remedy());
        Self { kind, message, causes, remedy, exit_code: error.exit_code() }
    }
}

/// Converts errors of other crates through the training crate's error, as the command line does.
macro_rules! through_train {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                train::Error::from(error).into()
            }
        }
    )*};
}
through_train!(meristem_device::Error, meristem_data::Error);

/// Converts errors of collectives that the program calls directly. A run has errors of the training
/// crate.
impl From<meristem_comm::Error> for Failure {
    fn from(error: meristem_comm::Error) -> Self {
        use meristem_comm::Error as Comm;
        let remedy = match &error {
            Comm::Device(_) | Comm::Disagreement { .. } => None,
            Comm::BadArgument { .. } => Some("give an argument as expected; nothing was sent"),
            Comm::RankLate { .. } => Some(
                "if that rank still works, raise `deadline`; a rank that raises tells the others \
                 at once if it uses its Comm in a `with` block",
            ),
            Comm::Unavailable { .. } if cfg!(feature = "mpi") => None,
            Comm::Unavailable { .. } => Some(
                "build the package with it, from a clone: \
                 `MATURIN_PEP517_ARGS=\"--features mpi\" pip install .`",
            ),
            _ => Some("read the error of that rank, and start all of them again"),
        };
        let wrong = matches!(&error, Comm::BadArgument { .. } | Comm::Unavailable { .. });
        let argument = matches!(&error, Comm::BadArgument { .. });
        let mut failure = Self::from(train::Error::from(error));
        if let Some(remedy) = remedy {
            failure.remedy = Some(remedy.into());
        }
        if argument {
            failure.kind = Kind::Argument;
        }
        failure.exit_code = if wrong { 2 } else { failure.exit_code };
        failure
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| raised(py, failure).unwrap_or_else(|error| error))
    }
}

fn raised(py: Python<'_>, failure: Failure) -> PyResult<PyErr> {
    let Failure { kind, message, causes, remedy, exit_code } = failure;
    let class = py.import("meristem.errors")?.getattr(kind.class())?;
    let named = PyDict::new(py);
    named.set_item("causes", causes)?;
    named.set_item("remedy", remedy)?;
    named.set_item("exit_code", exit_code)?;
    Ok(PyErr::from_value(class.call((message,), Some(&named))?))
}

//! The trace of a command (H8): opened before anything else happens, ended with a report.

use std::path::{Path, PathBuf};

use meristem_device::{Error as DeviceError, Trace};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::record::output::check_output;

/// A trace that is being written to the file that a user named.
#[derive(Debug)]
pub struct RunTrace {
    trace: Trace,
    path: PathBuf,
}

/// Report of a trace that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSummary {
    /// The file.
    pub path: PathBuf,
    /// Events in it: slices, spans and samples of the memory in use.
    pub events: u64,
    /// Events that found no room.
    pub dropped: u64,
}

impl RunTrace {
    /// Begins the trace, if one was asked for. Whatever happens later, the file is whole.
    ///
    /// # Errors
    /// As [`check_output`].
    pub fn open(path: Option<&Path>) -> Result<Option<Self>> {
        let Some(path) = path else { return Ok(None) };
        check_output("trace", path)?;
        let trace = Trace::create(path).map_err(|error| {
            let why = match &error {
                DeviceError::Trace { source, .. } => source.to_string(),
                other => other.to_string(),
            };
            Error::value("trace", path.display(), format!("a file that can be written ({why})"))
        })?;
        Ok(Some(Self { trace, path: path.to_owned() }))
    }

    /// Goes on with what was prepared under a trace; if that was refused, the trace goes too.
    ///
    /// # Errors
    /// The preparation's.
    pub fn unless_refused<T, E>(
        trace: Option<Self>,
        prepared: Result<T, E>,
    ) -> Result<(T, Option<Self>), E> {
        match prepared {
            Ok(prepared) => Ok((prepared, trace)),
            Err(error) => {
                trace.into_iter().for_each(Self::discard);
                Err(error)
            }
        }
    }

    /// Ends the trace and removes its file. One that cannot be removed stays: the error that led
    /// here is the one to report.
    pub(crate) fn discard(self) {
        let _ = self.trace.finish();
        let _ = std::fs::remove_file(&self.path);
    }

    /// The handle that devices are given.
    pub fn trace(&self) -> Trace {
        self.trace.clone()
    }

    /// Ends the trace. Waits until it is written.
    ///
    /// # Errors
    /// The file could not be written any more.
    pub fn finish(self) -> Result<TraceSummary> {
        let report = self.trace.finish()?;
        Ok(TraceSummary { path: self.path, events: report.events, dropped: report.dropped })
    }
}

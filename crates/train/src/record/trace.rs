//! Trace of a command: opened before the work, closed with a report.

use std::path::{Path, PathBuf};

use meristem_data::path_text;
use meristem_device::{Error as DeviceError, Trace};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::record::output::check_output;

/// A trace that is being written to a file that the user named.
#[derive(Debug)]
pub struct RunTrace {
    trace: Trace,
    path: PathBuf,
}

/// Report of a finished trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSummary {
    /// Path of the file.
    #[serde(serialize_with = "path_text::serialize")]
    pub path: PathBuf,
    /// Whether the path is not UTF-8, so that its text in JSON is not the path.
    #[serde(default, skip_serializing_if = "path_text::is_exact")]
    pub path_is_lossy: bool,
    /// Events in the trace: slices, spans and samples of the memory in use.
    pub events: u64,
    /// Events dropped for lack of room.
    pub dropped: u64,
}

impl RunTrace {
    /// Opens the trace, if one was requested. The file is valid after any later failure.
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
            Error::value("trace", path.display(), format!("a writable file ({why})"))
        })?;
        Ok(Some(Self { trace, path: path.to_owned() }))
    }

    /// Pairs the prepared work with its trace; if the preparation failed, removes the trace.
    ///
    /// # Errors
    /// The error of the preparation.
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

    /// Ends the trace and removes its file. A file that cannot be removed stays, because the
    /// original error is the one to report.
    pub(crate) fn discard(self) {
        let _ = self.trace.finish();
        let _ = std::fs::remove_file(&self.path);
    }

    /// The handle for devices.
    pub fn trace(&self) -> Trace {
        self.trace.clone()
    }

    /// Ends the trace and waits until it is written.
    ///
    /// # Errors
    /// Writing the file failed.
    pub fn finish(self) -> Result<TraceSummary> {
        let report = self.trace.finish()?;
        Ok(TraceSummary {
            path_is_lossy: path_text::is_lossy(&self.path),
            path: self.path,
            events: report.events,
            dropped: report.dropped,
        })
    }
}

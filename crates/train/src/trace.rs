//! The trace of a command (H8): opened before anything else happens, ended with a report.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use meristem_device::{Error as DeviceError, Trace};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How every trace begins.
const TRACE_START: &[u8; 21] = b"{\"displayTimeUnit\":\"n";

/// A trace that is being written to the file that a user named.
#[derive(Debug)]
pub struct RunTrace {
    trace: Trace,
    path: PathBuf,
}

/// What became of a trace.
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
    /// A file that cannot be written, or that is there and is no trace: it would be lost.
    pub fn open(path: Option<&Path>) -> Result<Option<Self>> {
        let Some(path) = path else { return Ok(None) };
        if !is_free(path) {
            let expected = "a new file, or a trace to replace: this one holds something else";
            return Err(Error::value("trace", path.display(), expected));
        }
        let trace = Trace::create(path).map_err(|error| {
            let why = match &error {
                DeviceError::Trace { source, .. } => source.to_string(),
                other => other.to_string(),
            };
            Error::value("trace", path.display(), format!("a file that can be written ({why})"))
        })?;
        Ok(Some(Self { trace, path: path.to_owned() }))
    }

    /// What devices are given.
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

/// Whether nothing but a trace would be lost by writing to `path`.
fn is_free(path: &Path) -> bool {
    let mut start = [0; TRACE_START.len()];
    let read = |mut file: File| file.read(&mut start);
    match path.metadata() {
        Ok(meta) if meta.is_file() && meta.len() > 0 => {
            File::open(path).and_then(read).is_ok() && start == *TRACE_START
        }
        _ => true,
    }
}

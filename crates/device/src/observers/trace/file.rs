//! A JSON file that is complete after every write: each write replaces the end of the document by
//! more events and a new end, in one system call. So an interrupted process leaves a valid file,
//! too.

use std::fs::File;
use std::io::{Result, Seek, SeekFrom, Write};
use std::path::Path;

pub(super) struct TraceFile {
    file: File,
    /// Offset at which the end of the document begins.
    end: u64,
}

impl TraceFile {
    /// Creates or overwrites a file.
    pub(super) fn create(path: &Path) -> Result<Self> {
        Ok(TraceFile { file: File::create(path)?, end: 0 })
    }

    /// Adds `more`, and after it `tail`, which the next call overwrites; the file never gets
    /// shorter.
    pub(super) fn append(&mut self, mut more: Vec<u8>, tail: &str) -> Result<()> {
        let len = more.len() as u64;
        more.extend_from_slice(tail.as_bytes());
        self.file.seek(SeekFrom::Start(self.end))?;
        self.file.write_all(&more)?;
        self.end += len;
        Ok(())
    }
}

//! `meristem export`.

mod csv;
mod members;
mod onnx;
#[cfg(feature = "parquet")]
mod parquet;
mod rows;
mod table;
mod tensorboard;

use std::fmt::Display;
use std::fs::File;
use std::path::Path;

use meristem::train::check_output;
use meristem::train::reading::Skipped;

use super::Outcome;
use crate::cli::ExportCommand;
use crate::failure::Failure;
use crate::page::skipped;
use crate::plain;

pub(crate) fn run(command: &ExportCommand) -> Outcome {
    match command {
        ExportCommand::Csv(arguments) => csv::run(arguments),
        ExportCommand::Parquet(arguments) => parquet::run(arguments),
        ExportCommand::Onnx(arguments) => onnx::run(arguments),
        ExportCommand::Tensorboard(arguments) => tensorboard::run(arguments),
    }
}

/// Prints a warning about the skipped lines of the events.
fn warn_skipped(lines: Skipped) {
    if let Some(words) = skipped(lines) {
        plain::err(&format!("warning: {words}"));
    }
}

/// `export parquet` in a build without the feature `parquet`.
#[cfg(not(feature = "parquet"))]
mod parquet {
    /// Refuses: this build does not write Parquet.
    pub(super) fn run(_: &crate::cli::ParquetArguments) -> super::Outcome {
        Err(crate::failure::Failure::usage(
            "this build does not write Parquet",
            "build with `--features parquet`; `meristem export csv` writes the same table",
        ))
    }
}

/// Temporary files with the permissions of new files. The default permits only the owner to read.
#[cfg(unix)]
fn builder() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder
}

#[cfg(not(unix))]
fn builder() -> tempfile::Builder<'static, 'static> {
    tempfile::Builder::new()
}

/// Writes the file `out`, which must not exist, under a temporary name, and renames it when it is
/// complete.
fn written_whole<T>(
    out: &Path,
    write: impl FnOnce(&mut File) -> Result<T, Failure>,
) -> Result<T, Failure> {
    check_output("out", out)?;
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    let failed = |error: &dyn Display| {
        let message = format!("cannot write {}: {error}", out.display());
        Failure::failed(message, "free some space, or write to another disk")
    };
    let file = builder().tempfile_in(folder.unwrap_or(Path::new(".")));
    let mut file = file.map_err(|error| failed(&error))?;
    let written = write(file.as_file_mut())?;
    file.persist(out).map_err(|error| failed(&error))?;
    Ok(written)
}

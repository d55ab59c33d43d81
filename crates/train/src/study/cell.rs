//! Runs of a study that an earlier process left in its folder: complete ones are read, others go
//! on. The folders of the runs are all that a study remembers, so that more seeds or contenders
//! continue it as well.

use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint::check_instruction_set;
use crate::config::{TrainConfig, changed_result};
use crate::config_file;
use crate::error::{Error, Result};
use crate::input_file::check_files;
use crate::record::observer::Observer;
use crate::record::plain_file;
use crate::record::reading;
use crate::record::run_folder::{CONFIG, CONFIG_BYTES_MAX};
use crate::record::summary::{Status, Summary};
use crate::resources::OpenDevices;
use crate::run::{resume_on, run_on};
use crate::setup::Names;

/// Inputs that all runs of a study share.
pub(super) struct Inputs {
    /// Checksums of the training and test images.
    pub(super) checksums: Vec<String>,
    pub(super) instruction_set: String,
}

/// Checks that a study can begin or go on in a folder.
///
/// # Errors
/// [`Error::RunFolderExists`]: something else is there.
pub(super) fn check_folder(folder: &Path) -> Result<()> {
    let is_of_study = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.map(|entry| entry.file_name()).unwrap_or_default();
        name == "study.json" || name.as_encoded_bytes().starts_with(b"seed-")
    };
    let there = folder.symlink_metadata().is_ok();
    match there && !folder.read_dir().is_ok_and(|mut entries| entries.any(is_of_study)) {
        true => Err(Error::RunFolderExists { path: folder.into() }),
        false => Ok(()),
    }
}

/// The results of a run that is complete; `None` if it is not, or does not exist.
///
/// # Errors
/// [`Error::Resume`], [`Error::OtherInput`] or [`Error::Value`]: the folder has a run with other
/// settings, other data or another instruction set.
pub(super) fn complete(run: &TrainConfig, inputs: &Inputs) -> Result<Option<Summary>> {
    let Some(folder) = begun(run) else { return Ok(None) };
    let (run, names) = Names::of_new(run, None)?;
    check_settings(&run, &folder)?;
    let complete = reading::read_summary(&folder)?.filter(|s| s.status == Status::Completed);
    let Some(summary) = complete else { return Ok(None) };
    let Inputs { checksums, instruction_set } = inputs;
    check_instruction_set(&folder, instruction_set, &summary.instruction_set)?;
    check_data(&summary, checksums, &folder)?;
    check_files(&folder, &names.input_files()?, &summary.input_files)?;
    Ok(Some(summary))
}

/// Checks that the run in `folder` had the data of the study.
pub(super) fn check_data(summary: &Summary, checksums: &[String], folder: &Path) -> Result<()> {
    let data = &summary.dataset.checksums;
    let differs = |split: usize| data.get(split) != checksums.get(split);
    let splits = match [differs(0), differs(1)] {
        _ if data.is_empty() => return Ok(()),
        [false, false] => return Ok(()),
        [true, false] => "training",
        [false, true] => "test",
        [true, true] => "training and test",
    };
    let expected = format!("the data of {}", folder.display());
    Err(Error::value("dataset", format!("other {splits} images or labels"), expected))
}

/// Runs a run that is not complete, from its newest checkpoint if it has one.
///
/// # Errors
/// As [`run`](crate::run()) and [`resume`](crate::resume).
pub(super) fn finish(
    devices: &OpenDevices,
    run: &TrainConfig,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    match begun(run) {
        Some(folder) => resume_on(devices, &folder, observer),
        None => run_on(devices, run, observer),
    }
}

/// The folder of a run that was begun.
fn begun(run: &TrainConfig) -> Option<PathBuf> {
    run.run_dir.clone().filter(|folder| folder.join(CONFIG).exists())
}

/// Checks that the run in a folder began with the settings of `run`.
fn check_settings(run: &TrainConfig, folder: &Path) -> Result<()> {
    let path = folder.join(CONFIG);
    let written = plain_file::text(&path, CONFIG_BYTES_MAX);
    let written = written.and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()));
    let written = written.map_err(|source| Error::RunFolder { action: "read", path, source })?;
    let mut run = run.clone();
    if let Some(policy) = run.controller.path_mut()
        && let Some(began) = path_before_a_move(policy, folder, &written)
    {
        *policy = began;
    }
    match changed_result(&written, &run.resolved_toml()) {
        None => Ok(()),
        Some((began, now)) => {
            let problem = format!(
                "it has `{began}`, but the comparison now has `{now}`; give the settings that it \
                 began with, or another --run-dir"
            );
            Err(Error::Resume { path: folder.into(), problem })
        }
    }
}

/// The path of a policy that a study has learned, in the settings `written` of a run of the study,
/// if the study has been moved since: its end, below the folder of the study, is the same.
fn path_before_a_move(policy: &Path, run: &Path, written: &str) -> Option<PathBuf> {
    let study = std::path::absolute(run.parent()?.parent()?).ok()?;
    let policy = std::path::absolute(policy).ok()?;
    let mut began = config_file::parse(&run.join(CONFIG), written).ok()?;
    let began = began.controller.as_mut()?.path_mut()?;
    began.ends_with(policy.strip_prefix(study).ok()?).then(|| began.clone())
}

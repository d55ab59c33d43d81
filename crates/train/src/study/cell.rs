//! Cells of a study: the run of one contender with one seed, in its own folder.
//!
//! A run that an earlier process left is read if it is complete, and resumed otherwise. A study has
//! no other state than the folders of its runs, so it can be continued with more seeds or
//! contenders.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};

use meristem_data::{DatasetInfo, Split, cache};

use crate::checkpoint::check_instruction_set;
use crate::config::{TrainConfig, changed_result};
use crate::config_file;
use crate::error::{Error, Result};
use crate::input_file::{Moved, check_files};
use crate::processes::World;
use crate::record::observer::{Notice, Observer};
use crate::record::plain_file;
use crate::record::reading;
use crate::record::run_folder::{CONFIG, CONFIG_BYTES_MAX};
use crate::record::summary::{Status, Summary};
use crate::resources::OpenDevices;
use crate::run::{resume_on, run_on};
use crate::setup::controllers::AnyController;
use crate::setup::{OtherInputs, ResolvedNames, Setup, residency};

/// Beginning of the names of the folders of a study, one for each seed.
pub(crate) const SEED: &str = "seed-";

/// Inputs that all runs of a study share.
struct Inputs {
    /// Checksums of the images and labels of the training and of the test split.
    checksums: Vec<String>,
    instruction_set: String,
}

/// Devices with the data of a study, on which its runs are completed.
pub(crate) struct Cells {
    devices: OpenDevices,
    inputs: Inputs,
    info: DatasetInfo,
    /// Whether the different rounding of complete runs was reported.
    rounding_reported: Cell<bool>,
}

impl Cells {
    /// Opens the devices of `settings` and loads both splits of the dataset.
    ///
    /// # Errors
    /// A device that cannot be opened; data that cannot be read, or that has no test split.
    pub(crate) fn open(settings: &TrainConfig, names: &ResolvedNames) -> Result<Self> {
        let devices =
            OpenDevices::open(&names.devices, 0..settings.envs, &settings.device_options(None))?;
        let files = cache::files(&names.spec)?;
        let load = |split| devices.load(&files, split, residency(settings));
        let train = load(Split::Train)?;
        files.check_has(Split::Test)?;
        let test = load(Split::Test)?;
        let loaded = [train, test];
        let checksums = loaded.iter().filter_map(|of_devices| of_devices.first());
        let checksums = checksums.map(|data| Ok(format!("{:08x}", data.checksum()?)));
        let inputs = Inputs {
            checksums: checksums.collect::<Result<_>>()?,
            instruction_set: names.isa.to_string(),
        };
        let info = files.info()?.clone();
        Ok(Self { devices, inputs, info, rounding_reported: Cell::new(false) })
    }

    /// Creates the controller of a run to check it. Returns the seeds that its policy was trained
    /// with, if it has one.
    ///
    /// # Errors
    /// A policy or a script that does not fit the host.
    pub(crate) fn check_controller(&self, run: &TrainConfig) -> Result<Vec<u64>> {
        let (run, names) = ResolvedNames::of_new(run, OtherInputs::default())?;
        let seeds = names.policy.as_ref().map_or(vec![], |policy| policy.seeds.clone());
        let setup = Setup::new(&run, names, self.info.clone())?;
        // The checks do not depend on the number of images.
        let samples = self.info.train_len;
        AnyController::new(
            &setup,
            samples,
            &self.devices.of_policies(),
            None,
            &mut World::alone(),
        )?;
        Ok(seeds)
    }

    /// Description of the dataset.
    pub(crate) fn info(&self) -> &DatasetInfo {
        &self.info
    }

    /// The results of a run that is complete already; `None` if it is not.
    ///
    /// # Errors
    /// As [`complete`].
    pub(crate) fn read(
        &self,
        run: &TrainConfig,
        observer: &mut dyn Observer,
    ) -> Result<Option<Summary>> {
        let summary = complete(run, &self.inputs)?;
        let rounds_otherwise = summary.as_ref().is_some_and(|summary| !summary.rounds_as_now());
        if rounds_otherwise && !self.rounding_reported.replace(true) {
            observer.notice(&Notice::RoundingChanged);
        }
        Ok(summary)
    }

    /// Starts or resumes a run; `None` if it was stopped.
    ///
    /// # Errors
    /// As [`finish`], and if the data changed.
    pub(crate) fn finish(
        &self,
        run: &TrainConfig,
        observer: &mut dyn Observer,
    ) -> Result<Option<Summary>> {
        let summary = finish(&self.devices, run, observer)?;
        // The files may have changed since the study began.
        let folder = run.run_dir.as_deref().unwrap_or(Path::new(""));
        check_data(&summary, &self.inputs.checksums, folder)?;
        Ok(Some(summary).filter(|summary| summary.status == Status::Completed))
    }
}

/// Checks that a study with the results `report` can begin or go on in a folder.
///
/// # Errors
/// [`Error::RunFolderExists`]: something else is there.
pub(crate) fn check_folder(folder: &Path, report: &str) -> Result<()> {
    let is_of_study = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.map(|entry| entry.file_name()).unwrap_or_default();
        name == report || name.as_encoded_bytes().starts_with(SEED.as_bytes())
    };
    let there = folder.symlink_metadata().is_ok();
    // A study that was killed as it began may have left an empty folder.
    let is_usable = |entries: std::fs::ReadDir| {
        let mut entries = entries.peekable();
        entries.peek().is_none() || entries.any(is_of_study)
    };
    if there && !folder.read_dir().is_ok_and(is_usable) {
        Err(Error::RunFolderExists { path: folder.into() })
    } else {
        Ok(())
    }
}

/// The results of a run that is complete; `None` if it is not, or does not exist.
///
/// # Errors
/// [`Error::Resume`], [`Error::OtherInput`] or [`Error::Value`]: the folder has a run with other
/// settings, other data or another instruction set.
fn complete(run: &TrainConfig, inputs: &Inputs) -> Result<Option<Summary>> {
    let Some(BegunCell { folder, settings }) = BegunCell::of(run)? else { return Ok(None) };
    let moved = study_move(run, &folder, &settings);
    let before_move = moved.as_ref().map(|moved| run.before_move(moved)).transpose()?;
    let others = OtherInputs { blueprints: None, moved: moved.as_ref() };
    let (run, names) = ResolvedNames::of_new(before_move.as_ref().unwrap_or(run), others)?;
    check_settings(&run, &folder, &settings)?;
    let complete = reading::read_summary(&folder)?.filter(|s| s.status == Status::Completed);
    let Some(summary) = complete else { return Ok(None) };
    let Inputs { checksums, instruction_set } = inputs;
    check_instruction_set(&folder, instruction_set, &summary.instruction_set)?;
    check_data(&summary, checksums, &folder)?;
    check_files(&folder, &names.input_files()?, &summary.input_files)?;
    Ok(Some(summary))
}

/// Checks that the run in `folder` had the data of the study.
fn check_data(summary: &Summary, checksums: &[String], folder: &Path) -> Result<()> {
    let data = &summary.dataset.checksums;
    let differs = |split: usize| data.get(split) != checksums.get(split);
    let splits = match [differs(0), differs(1)] {
        // An older summary without checksums.
        _ if data.is_empty() => return Ok(()),
        [false, false] => return Ok(()),
        [true, false] => "training",
        [false, true] => "test",
        [true, true] => "training and test",
    };
    let expected = format!("the data of {}", folder.display());
    Err(Error::value("dataset", format!("other {splits} images or labels"), expected))
}

/// Completes a run, from its newest checkpoint if it has one.
///
/// # Errors
/// As [`run`](crate::run()) and [`resume`](crate::resume).
fn finish(
    devices: &OpenDevices,
    run: &TrainConfig,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    match BegunCell::of(run)? {
        Some(BegunCell { folder, settings }) => {
            let moved = study_move(run, &folder, &settings);
            resume_on(devices, &folder, moved.as_ref(), observer)
        }
        None => run_on(devices, run, observer),
    }
}

/// A run whose folder exists.
struct BegunCell {
    folder: PathBuf,
    /// The text of its settings.
    settings: String,
}

impl BegunCell {
    /// Looks for the folder of the run with the settings `run`.
    ///
    /// # Errors
    /// [`Error::RunFolder`]: its settings cannot be read.
    fn of(run: &TrainConfig) -> Result<Option<Self>> {
        let folder = run.run_dir.clone().filter(|folder| folder.join(CONFIG).exists());
        let Some(folder) = folder else { return Ok(None) };
        let path = folder.join(CONFIG);
        let read = plain_file::text(&path, CONFIG_BYTES_MAX);
        let read = read.and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()));
        match read {
            Ok(settings) => Ok(Some(Self { folder, settings })),
            Err(source) => Err(Error::RunFolder { action: "read", path, source }),
        }
    }
}

/// Checks that the settings `written` in the folder of a run give the results of the settings
/// `run`.
fn check_settings(run: &TrainConfig, folder: &Path, written: &str) -> Result<()> {
    match changed_result(written, &run.resolved_toml()) {
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

/// The move of the study's folder since a run began, if there was one. `folder` is the folder of
/// the run, `written` are the settings that it began with, and `run` its settings now.
///
/// Some runs read a file that another run of the study has made: a policy or a topology. The old
/// and the new settings have the same path of this file below the study's folder, and so give the
/// study's old and new folder. A run without such a file is not affected by a move.
fn study_move(run: &TrainConfig, folder: &Path, written: &str) -> Option<Moved> {
    let study = std::path::absolute(folder.parent()?.parent()?).ok()?;
    let began = config_file::parse(&folder.join(CONFIG), written).ok()?;
    let (mut now, mut then) = (run.controller.clone(), began.controller.unwrap_or_default());
    let pairs = [
        (now.path_mut().map(|path| &*path), then.path_mut().map(|path| &*path)),
        (run.start_topology.as_ref(), began.start_topology.iter().flatten().next()),
    ];
    let is_of_study = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        let inner = path.strip_prefix(&study).ok()?.components().next()?;
        Some(inner.as_os_str().as_encoded_bytes().starts_with(SEED.as_bytes()))
    };
    let mut pairs = pairs.into_iter().filter_map(|(now, then)| Some((now?, then?)));
    let (now, then) = pairs.find(|(now, _)| is_of_study(now) == Some(true))?;
    Moved::of(&study, then, now).filter(Moved::is_elsewhere)
}

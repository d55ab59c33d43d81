//! Folder of a run: `config.toml`, `events.jsonl`, `checkpoints/`, `summary.json`, `weights/`.
//!
//! Files that are not streamed are written under a temporary name and then renamed, so that a
//! killed run or a full disk leaves no partial file behind.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use meristem_nn::ScoreKind;
use serde::Serialize;

use crate::config::{TrainConfig, first_difference};
use crate::error::{Error, Result};
use crate::record::directory::{Directory, part_of};
use crate::record::score_keys::name_scores;
use crate::record::summary::{self, SUMMARY, Summary};
use crate::record::{lines, sealed};

/// File that a process locks while it writes to the folder.
pub(crate) const LOCK: &str = ".lock";

/// File of the settings.
pub(crate) const CONFIG: &str = "config.toml";

/// Largest file of settings that is read.
pub(crate) const CONFIG_BYTES_MAX: u64 = 1_000_000;

/// File of the events.
pub(crate) const EVENTS: &str = "events.jsonl";

/// Folder of the checkpoints in a run folder.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

/// Time after which a reader has released its lock.
const READERS_LOCK: Duration = Duration::from_millis(100);

/// File of the policy at the end of a run.
pub(crate) const POLICY: &str = "policy.safetensors";

/// Folder of the weights in a run folder.
pub(crate) const WEIGHTS: &str = "weights";

/// File name of an env's weights.
pub(crate) fn weights_name(env: usize) -> String {
    format!("env-{env}.safetensors")
}

/// Folder of one run. Its files are opened below it, without following links.
#[derive(Debug)]
pub(crate) struct RunFolder {
    directory: Directory,
    weights: Directory,
    /// Whether this run created the folder.
    is_made: bool,
    /// Parent folders that were created for it, nearest first.
    above: Vec<PathBuf>,
    /// Held while this process writes to the folder; the system releases it when the process ends
    /// in any way.
    _lock: File,
}

impl RunFolder {
    /// Creates the folder `wanted`, or `runs/<time>-<name>` (in UTC) if that is `None`. An empty
    /// folder is reused, and so is the folder of a run that was killed before it had settings.
    ///
    /// # Errors
    /// Something else exists at `wanted`, another process begins a run there, or the folder cannot
    /// be created.
    pub(crate) fn create(wanted: Option<&Path>, name: &str) -> Result<Self> {
        let base = match wanted {
            Some(path) => path.parent().unwrap_or(Path::new("")),
            None => Path::new("runs"),
        };
        let is_new = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
        let above = base.ancestors().take_while(is_new).map(Path::to_path_buf).collect();
        let (path, is_made) = match wanted {
            Some(path) => make(path)?,
            None => (first_free(base, &format!("{}-{name}", utc_stamp(SystemTime::now())))?, true),
        };
        let fail = |source| Error::RunFolder { action: "create", path: path.clone(), source };
        let directory = Directory::open(&path).map_err(fail)?;
        let exists = || Error::RunFolderExists { path: path.clone() };
        // A folder with other files gets no file, not even a lock.
        if !is_unfilled(&directory).unwrap_or(false) {
            return Err(exists());
        }
        let lock = lock(&directory)?;
        // Another process may have had the lock until now.
        if !is_unfilled(&directory).unwrap_or(false) {
            return Err(exists());
        }
        let weights = directory.create_below(WEIGHTS).map_err(fail)?;
        let folder = Self { directory, weights, is_made, above, _lock: lock };
        folder.remove_parts().map_err(fail)?;
        Ok(folder)
    }

    /// Opens the folder of a run that was stopped or killed, and removes files that a kill has left
    /// unfinished.
    ///
    /// # Errors
    /// [`Error::Resume`]: it is not the folder of a run, one of its files is a link, or another
    /// process writes to it. [`Error::RunFolder`]: its lock file cannot be opened.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let problem = |problem: String| Error::Resume { path: path.to_owned(), problem };
        if !path.is_dir() {
            return Err(problem("it is not a folder".into()));
        }
        let unreadable = |error: io::Error| problem(format!("it cannot be read: {error}"));
        let directory = Directory::open(path).map_err(unreadable)?;
        let is_begun = directory.open_file(LOCK).is_ok_and(|lock| lock.is_some());
        if is_begun && is_unfilled(&directory).unwrap_or(false) {
            let why = "it was killed before it had settings, so nothing is lost: give the command \
                       that began it once more";
            return Err(problem(why.into()));
        }
        let in_it = |name: &str, error: io::Error| problem(format!("its {name}: {error}"));
        let config = directory.open_file(CONFIG).map_err(|error| in_it(CONFIG, error))?;
        let weights = directory.below(WEIGHTS).map_err(|error| in_it(WEIGHTS, error))?;
        let (Some(_), Some(weights)) = (config, weights) else {
            let why = "it is not the folder of a run: config.toml or weights/ is missing";
            return Err(problem(why.into()));
        };
        let lock = lock(&directory)?;
        let folder = Self { directory, weights, is_made: false, above: vec![], _lock: lock };
        folder.remove_parts().map_err(unreadable)?;
        Ok(folder)
    }

    /// Path of the folder.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The open folder itself.
    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The open folder of weights.
    pub(crate) fn weights(&self) -> &Directory {
        &self.weights
    }

    /// Writes a file of the folder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_in(&self.directory, name, bytes)
    }

    /// Writes the weights of an env.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write_weights(&self, env: usize, bytes: &[u8]) -> Result<()> {
        write_in(&self.weights, &weights_name(env), bytes)
    }

    /// Writes `config.toml`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write_config(&self, text: &str) -> Result<()> {
        self.write(CONFIG, text.as_bytes())
    }

    /// Writes `summary.json`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write_summary(&self, summary: &Summary) -> Result<()> {
        let path = self.path().join(SUMMARY);
        self.write(SUMMARY, &to_json(&path, summary, summary.task.score())?)
    }

    /// The text of `config.toml`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read_config(&self) -> Result<String> {
        let fail = |source| {
            let path = self.path().join(CONFIG);
            Error::RunFolder { action: "read", path, source }
        };
        let bytes = self.directory.read(CONFIG, CONFIG_BYTES_MAX).map_err(fail)?;
        String::from_utf8(bytes.unwrap_or_default()).map_err(|e| fail(io::Error::other(e)))
    }

    /// Checks, in a folder without checkpoints, that the events report at most one.
    ///
    /// # Errors
    /// [`Error::Resume`]: checkpoints are missing, and starting anew would overwrite the run.
    pub(crate) fn check_no_checkpoint_is_lost(&self) -> Result<()> {
        let fail = |problem: String| Error::Resume { path: self.path().to_owned(), problem };
        let events = self.directory.open_file(EVENTS);
        let marks = events.and_then(|file| {
            file.map_or(Ok(0), |file| lines::count(&file, b"\"event\":\"checkpoint_written\""))
        });
        // An event comes just before its checkpoint, so a kill in between leaves one event without.
        match marks.map_err(|error| fail(format!("its {EVENTS}: {error}")))? {
            0 | 1 => Ok(()),
            _ => Err(fail("its events report checkpoints, but checkpoints/ has none".into())),
        }
    }

    /// The summary of a run that ended; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Resume`]: it cannot be read, is damaged, or has another version.
    pub(crate) fn read_summary(&self) -> Result<Option<Summary>> {
        summary::read_in(&self.directory).map_err(|error| Error::Resume {
            path: self.path().to_owned(),
            problem: format!("its summary.json cannot be read: {error}"),
        })
    }

    /// Removes the summary of a run that continues.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(crate) fn remove_summary(&self) -> Result<()> {
        self.directory.remove_file(SUMMARY).map_err(|source| {
            let path = self.path().join(SUMMARY);
            Error::RunFolder { action: "remove", path, source }
        })
    }

    /// Removes the files that killed processes have left unfinished.
    fn remove_parts(&self) -> io::Result<()> {
        self.directory.remove_parts(is_of_run)?;
        self.weights.remove_parts(is_of_run)?;
        let checkpoints = self.directory.below(CHECKPOINTS)?;
        checkpoints.map_or(Ok(()), |folder| folder.remove_parts(is_of_run))
    }

    /// Removes the folder of a run that could not start, so that the same command works again.
    /// Files that cannot be removed stay, because the original error is the one to report.
    pub(crate) fn discard(self) {
        let removed = self
            .remove_parts()
            .and_then(|()| self.directory.remove_file(CONFIG))
            .and_then(|()| self.directory.remove_file(LOCK))
            .and_then(|()| self.directory.remove_below(WEIGHTS))
            .and_then(|()| if self.is_made { fs::remove_dir(self.path()) } else { Ok(()) })
            .and_then(|()| self.above.iter().try_for_each(fs::remove_dir));
        if let Err(error) = removed {
            tracing::debug!(path = %self.path().display(), %error, "run folder not removed");
        }
    }
}

/// Whether `name` is the name of a file that a run writes as a whole.
fn is_of_run(name: &str) -> bool {
    let is_tensors = |beginning| name.starts_with(beginning) && name.ends_with(".safetensors");
    [CONFIG, SUMMARY, POLICY].contains(&name) || is_tensors("env-") || is_tensors("round-")
}

/// Whether a folder is empty, or has only files of a run that was killed before it had settings.
pub(crate) fn is_unfilled(directory: &Directory) -> io::Result<bool> {
    let names = directory.names()?;
    let own = |name: &String| {
        [LOCK, WEIGHTS].contains(&name.as_str()) || part_of(name).is_some_and(is_of_run)
    };
    if !names.iter().all(own) || !(names.is_empty() || names.iter().any(|name| name == LOCK)) {
        return Ok(false);
    }
    directory.below(WEIGHTS)?.map_or(Ok(true), |weights| Ok(weights.names()?.is_empty()))
}

/// Checks that `text`, the `config.toml` of `folder`, is as this program wrote it. `config` is its
/// contents.
///
/// # Errors
/// [`Error::Resume`] with the first line that differs, because other settings make another run.
pub(crate) fn check_config(folder: &Path, text: &str, config: &TrainConfig) -> Result<()> {
    let Some(what) = first_difference(text, &config.resolved_toml()) else { return Ok(()) };
    let problem = format!("its config.toml was changed or damaged: it {what}");
    Err(Error::Resume { path: folder.to_owned(), problem })
}

/// Locks the folder for this process.
pub(crate) fn lock(directory: &Directory) -> Result<File> {
    let folder = directory.path();
    let fail = |source| Error::RunFolder { action: "lock", path: folder.join(LOCK), source };
    let file = directory.open_or_create(LOCK).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => {
            let problem = format!("its {LOCK}: {error}");
            Error::Resume { path: folder.to_owned(), problem }
        }
        _ => fail(error),
    })?;
    for last in [false, true] {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            // A reader that checks whether the run is in progress holds a lock for an instant.
            Err(TryLockError::WouldBlock) if !last => std::thread::sleep(READERS_LOCK),
            Err(TryLockError::WouldBlock) => break,
            Err(TryLockError::Error(source)) => return Err(fail(source)),
        }
    }
    let problem = "another process is writing to it; wait until that ends, or stop it".into();
    Err(Error::Resume { path: folder.to_owned(), problem })
}

/// Creates the folder `path` and its parents. Returns the path, and whether the folder is new.
fn make(path: &Path) -> Result<(PathBuf, bool)> {
    let fail =
        |source| Error::RunFolder { action: "create the run folder", path: path.into(), source };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(fail)?;
    }
    match fs::create_dir(path) {
        Ok(()) => Ok((path.to_owned(), true)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            Ok((path.to_owned(), false))
        }
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            Err(Error::RunFolderExists { path: path.to_owned() })
        }
        Err(e) => Err(fail(e)),
    }
}

/// Creates `base/stem`, or `base/stem-2` and so on if several runs start in one second.
fn first_free(base: &Path, stem: &str) -> Result<PathBuf> {
    let mut path = base.join(stem);
    for number in 2..1000 {
        match make(&path) {
            Ok((made, true)) => return Ok(made),
            Ok((_, false)) | Err(Error::RunFolderExists { .. }) => {
                path = base.join(format!("{stem}-{number}"));
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::RunFolderExists { path })
}

/// A value as indented JSON that ends with its checksum; its scores have the name of `score`.
/// `path` is for the error.
fn to_json(path: &Path, value: &impl Serialize, score: ScoreKind) -> Result<Vec<u8>> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::RunFolder {
        action: "write",
        path: path.to_owned(),
        source: io::Error::other(e),
    })?;
    let mut text = name_scores(text, score);
    sealed::seal(&mut text, "\n  ");
    text.push('\n');
    Ok(text.into_bytes())
}

/// Writes a value, whose scores are of the kind `score`, as indented JSON that ends with its
/// checksum, with [`write_whole`].
pub(crate) fn write_json(path: &Path, value: &impl Serialize, score: ScoreKind) -> Result<()> {
    write_whole(path, &to_json(path, value, score)?)
}

/// Writes a file that appears only once it is complete, and removes unfinished versions that killed
/// processes left behind. A link at `path` is replaced, not followed.
///
/// # Errors
/// The folder is not writable, `path` is a folder, or the disk is full. No unfinished file is left
/// behind.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = Directory::parent_of(path).and_then(|(folder, name)| {
        folder.remove_abandoned_parts(name);
        folder.write_whole(name, bytes)
    });
    written.map_err(|source| Error::RunFolder { action: "write", path: path.to_owned(), source })
}

/// Writes a file of an open folder, as [`write_whole`] does.
pub(crate) fn write_in(folder: &Directory, name: &str, bytes: &[u8]) -> Result<()> {
    folder.write_whole(name, bytes).map_err(|source| Error::RunFolder {
        action: "write",
        path: folder.path().join(name),
        source,
    })
}

/// Formats a time as `20260131T235959` in UTC, which sorts by time and is a valid file name.
fn utc_stamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}")
}

/// Converts days since 1970-01-01 to year, month, day (Howard Hinnant, `civil_from_days`).
fn civil_date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        let stamp = |seconds| utc_stamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(stamp(0), "19700101T000000");
        assert_eq!(stamp(951_782_399), "20000228T235959");
        assert_eq!(stamp(951_782_400), "20000229T000000");
        assert_eq!(stamp(1_709_251_200), "20240301T000000");
        assert_eq!(stamp(4_107_542_399), "21000228T235959");
        assert_eq!(stamp(4_107_542_400), "21000301T000000");
    }

    #[test]
    fn a_folder_that_exists_is_refused_and_left_alone() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("a/run");
        let folder = RunFolder::create(Some(&path), "x").unwrap();
        folder.write_config("seed = 1\n").unwrap();
        let error = RunFolder::create(Some(&path), "x").unwrap_err();
        assert!(matches!(error, Error::RunFolderExists { .. }));
        assert_eq!(error.exit_code(), 2);
        assert_eq!(fs::read_to_string(path.join("config.toml")).unwrap(), "seed = 1\n");
        folder.discard();
        assert!(base.path().exists() && !base.path().join("a").exists());
    }

    #[test]
    fn two_runs_of_one_second_get_two_folders() {
        let base = tempfile::tempdir().unwrap();
        let first = first_free(base.path(), "t-x").unwrap();
        let second = first_free(base.path(), "t-x").unwrap();
        assert!(first.ends_with("t-x") && second.ends_with("t-x-2"));
    }

    fn refused(written: Result<()>, file: &Path) {
        let Err(Error::RunFolder { action: "write", path, .. }) = &written else {
            panic!("{written:?}")
        };
        assert_eq!(path, file);
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let base = tempfile::tempdir().unwrap();
        let target = base.path().join("summary.json");
        fs::create_dir(&target).unwrap();
        refused(write_whole(&target, b"x"), &target);
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1);
    }

    #[test]
    fn writing_a_file_leaves_its_neighbours_alone() {
        let base = tempfile::tempdir().unwrap();
        let [file, neighbour] = ["best.st", "best.part"].map(|name| base.path().join(name));
        fs::write(&neighbour, "mine").unwrap();
        write_whole(&file, b"new").unwrap();
        let nowhere = base.path().join("none/best.st");
        refused(write_whole(&nowhere, b"new"), &nowhere);
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::read(&neighbour).unwrap(), b"mine");
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 2);
    }
}

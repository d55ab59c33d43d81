//! Check of every file of a run against its checksum. Nothing here writes.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use meristem_data::path_text;
use meristem_nn::safetensors;
use serde::Serialize;

use crate::checkpoint::Checkpoint;
use crate::config::{ConfigLayer, TrainConfig};
use crate::config_file;
use crate::error::{Error, Result};
use crate::growth_bench::{GROWTH_TABLE_VERSION, TABLE};
use crate::record::directory::Directory;
use crate::record::lines::{self, Lines};
use crate::record::reading::{FoundRuns, UnreadableFolder, find};
use crate::record::run_folder::{
    CHECKPOINTS, CONFIG, CONFIG_BYTES_MAX, EVENTS, POLICY, WEIGHTS, check_config,
};
use crate::record::sealed::{self, Seal};
use crate::record::summary::{self, SUMMARY, SUMMARY_VERSION};
use crate::study::STUDY_VERSION;

/// Largest file of tensors that is checked, in bytes.
const TENSORS_BYTES_MAX: u64 = 8_000_000_000;
/// Largest report that is checked, in bytes.
const REPORT_BYTES_MAX: u64 = 256_000_000;
/// Files of the results of a study and of a bench of growth, and their versions.
const REPORTS: [(&str, u32); 2] = [("study.json", STUDY_VERSION), (TABLE, GROWTH_TABLE_VERSION)];

/// Result of the check of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileState {
    /// Its contents equal the written ones.
    Whole,
    /// It is readable, but an earlier build wrote it without a checksum.
    Unchecked,
    /// Its contents differ from the written ones, or it is missing.
    Damaged,
}

/// A file that was checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VerifiedFile {
    /// Path of the file.
    #[serde(serialize_with = "path_text::serialize")]
    pub file: PathBuf,
    /// Whether the path is not UTF-8, so that its text in JSON is not the path.
    #[serde(skip_serializing_if = "path_text::is_exact")]
    pub path_is_lossy: bool,
    /// Result of the check.
    pub state: FileState,
    /// Description of the damage.
    pub problem: Option<String>,
}

/// Checks the results of a study or of a bench of growth in `folder`, then all files of the runs
/// in it, or of the run `folder` itself. The runs are in the order of their paths, the files of
/// each in this order: settings, events, summary, policy, weights, checkpoints. Events of a run in
/// progress are checked up to the last whole line.
///
/// # Errors
/// [`Error::Unreadable`]: a folder cannot be read, or the folders have more than 100,000 entries.
/// [`Error::NotARun`]: there is no run in it.
pub fn verify(folder: &Path) -> Result<Vec<VerifiedFile>> {
    let FoundRuns { runs, unreadable, truncated } = find(folder)?;
    if truncated {
        let problem = "it has more entries than the 100,000 that are searched for runs; name a \
                       folder below it";
        return Err(Error::Unreadable { path: folder.into(), problem: problem.into() });
    }
    if let Some(UnreadableFolder { folder: path, problem, .. }) = unreadable.into_iter().next() {
        return Err(Error::Unreadable { path, problem });
    }
    if runs.is_empty() {
        let problem = "neither it nor a folder below it is the folder of a run".into();
        return Err(Error::NotARun { path: folder.into(), problem });
    }
    let mut all = checked(folder, Files::check_study)?;
    for run in &runs {
        all.append(&mut checked(run, Files::check_run)?);
    }
    Ok(all)
}

/// The files of one folder that `check` looks at.
fn checked(path: &Path, check: fn(&mut Files) -> io::Result<()>) -> Result<Vec<VerifiedFile>> {
    let unreadable =
        |error: io::Error| Error::Unreadable { path: path.into(), problem: error.to_string() };
    let directory = Directory::open(path).map_err(unreadable)?;
    let mut files = Files { directory, all: vec![] };
    check(&mut files).map_err(unreadable)?;
    Ok(files.all)
}

/// Files of one folder, as they are checked.
struct Files {
    directory: Directory,
    all: Vec<VerifiedFile>,
}

/// State of a file, or a description of the damage. `None` if there is no such file.
type Checked = Result<Option<FileState>, String>;

impl Files {
    fn push(&mut self, path: PathBuf, checked: Checked) {
        let (state, problem) = match checked {
            Ok(None) => return,
            Ok(Some(state)) => (state, None),
            Err(problem) => (FileState::Damaged, Some(problem)),
        };
        let path_is_lossy = path_text::is_lossy(&path);
        self.all.push(VerifiedFile { file: path, path_is_lossy, state, problem });
    }

    fn check_study(&mut self) -> io::Result<()> {
        for (name, version) in REPORTS {
            let path = self.directory.path().join(name);
            let text = self.directory.read(name, REPORT_BYTES_MAX).map_err(|e| e.to_string());
            let checked = text.and_then(|text| text.map(|text| report(&text, version)).transpose());
            self.push(path, checked);
        }
        Ok(())
    }

    fn check_run(&mut self) -> io::Result<()> {
        let directory = self.directory.try_clone()?;
        let path = |name: &str| directory.path().join(name);
        self.push(path(CONFIG), settings(&directory));
        let summary = summary::read_in(&directory).map_err(|error| error.to_string());
        let dropped = match &summary {
            Ok(Some(summary)) => Some(summary.events_dropped),
            _ => None,
        };
        self.push(path(EVENTS), events(&directory, dropped));
        let text = directory.read(SUMMARY, u64::MAX).unwrap_or_default();
        let state = |text: Vec<u8>| state_of(sealed::check(&text, SUMMARY_VERSION));
        let checked = summary.as_ref().map(|_| text.map(state));
        self.push(path(SUMMARY), checked.map_err(String::clone));
        self.check_tensors(&directory, POLICY, weights);
        if let Some(folder) = self.below(WEIGHTS)? {
            let mut names = folder.names()?;
            names.retain(|name| name.ends_with(".safetensors"));
            // Files that the summary names, to find missing ones.
            let named = summary.ok().flatten().into_iter().flat_map(|summary| summary.envs);
            names.extend(
                named.filter_map(|env| env.weights.file_name()?.to_str().map(str::to_owned)),
            );
            names.sort_unstable();
            names.dedup();
            for name in names {
                let before = self.all.len();
                self.check_tensors(&folder, &name, weights);
                if self.all.len() == before {
                    let missing = "it is missing, but summary.json names it";
                    self.push(folder.path().join(name), Err(missing.into()));
                }
            }
        }
        if let Some(folder) = self.below(CHECKPOINTS)? {
            for name in folder.names()?.iter().filter(|name| name.starts_with("round-")) {
                self.check_tensors(&folder, name, |path, bytes| {
                    let read = Checkpoint::from_bytes(path, bytes);
                    read.map(|_| FileState::Whole).map_err(|error| error.to_string())
                });
            }
        }
        Ok(())
    }

    /// A folder of the run; one that cannot be opened is reported as damaged.
    fn below(&mut self, name: &str) -> io::Result<Option<Directory>> {
        let opened = self.directory.below(name);
        opened.or_else(|error| {
            self.push(self.directory.path().join(name), Err(error.to_string()));
            Ok(None)
        })
    }

    fn check_tensors(
        &mut self,
        folder: &Directory,
        name: &str,
        check: fn(&Path, &[u8]) -> Result<FileState, String>,
    ) {
        let path = folder.path().join(name);
        let bytes = folder.read(name, TENSORS_BYTES_MAX).map_err(|error| error.to_string());
        let checked = bytes.and_then(|bytes| bytes.map(|bytes| check(&path, &bytes)).transpose());
        self.push(path, checked);
    }
}

/// Whether the settings are unchanged since a run wrote them.
fn settings(directory: &Directory) -> Checked {
    let Some(bytes) = directory.read(CONFIG, CONFIG_BYTES_MAX).map_err(|e| e.to_string())? else {
        return Ok(None);
    };
    let text = String::from_utf8(bytes).map_err(|error| error.to_string())?;
    let path = directory.path().join(CONFIG);
    let resolved = config_file::parse(&path, &text)
        .and_then(|settings| TrainConfig::resolve(settings, ConfigLayer::default()))
        .and_then(|config| check_config(directory.path(), &text, &config));
    resolved.map(|()| Some(FileState::Whole)).map_err(|error| error.to_string())
}

/// Whether all whole lines of the events are unchanged, and none is missing. `dropped` is the
/// number of events that were never written, if it is known.
fn events(directory: &Directory, dropped: Option<u64>) -> Checked {
    let unreadable = |error: io::Error| error.to_string();
    let Some(mut file) = directory.open_file(EVENTS).map_err(unreadable)? else { return Ok(None) };
    let bytes = whole_lines(&mut file).map_err(unreadable)?;
    let lines: Lines = lines::check(&file, bytes).map_err(unreadable)??;
    let lines = match dropped {
        Some(dropped) => lines.check_count(lines.next_seq, dropped)?,
        None => lines,
    };
    let has_checksums = lines.sealed == lines.count;
    Ok(Some(if has_checksums { FileState::Whole } else { FileState::Unchecked }))
}

/// Bytes of a file up to the end of its last whole line; all bytes if the last line is longer than
/// a line may be, so that the check finds it.
fn whole_lines(file: &mut std::fs::File) -> io::Result<u64> {
    let end = file.metadata()?.len();
    let from = end.saturating_sub(lines::LINE_BYTES_MAX);
    file.seek(SeekFrom::Start(from))?;
    let mut last = vec![];
    file.take(lines::LINE_BYTES_MAX).read_to_end(&mut last)?;
    let newline = last.iter().rposition(|byte| *byte == b'\n');
    Ok(newline.map_or(if from > 0 { end } else { 0 }, |at| from + at as u64 + 1))
}

/// Whether the text of a report, whose newest version is `version`, is unchanged.
fn report(text: &[u8], version: u32) -> Result<FileState, String> {
    serde_json::from_slice::<serde::de::IgnoredAny>(text).map_err(|error| error.to_string())?;
    match sealed::check(text, version) {
        Seal::Broken => Err(sealed::BROKEN.into()),
        seal => Ok(state_of(seal)),
    }
}

fn state_of(seal: Seal) -> FileState {
    match seal {
        Seal::Whole => FileState::Whole,
        Seal::Absent => FileState::Unchecked,
        Seal::Broken => FileState::Damaged,
    }
}

/// Whether a file of weights or of a policy is unchanged.
fn weights(path: &Path, bytes: &[u8]) -> Result<FileState, String> {
    let read = safetensors::from_bytes(path, bytes);
    let (_, metadata) = read.map_err(|error| error.without_path())?;
    let has_checksum = metadata.contains_key(safetensors::CHECKSUM);
    Ok(if has_checksum { FileState::Whole } else { FileState::Unchecked })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A changed digit leaves JSON that can be read.
    #[test]
    fn a_report_that_differs_from_its_checksum_is_damaged() {
        for (_, version) in REPORTS {
            let mut text = format!("{{\n  \"v\": {version},\n  \"seeds\": 3\n}}\n");
            sealed::seal(&mut text, "\n  ");
            assert_eq!(report(text.as_bytes(), version), Ok(FileState::Whole));
            let changed = text.replace("\"seeds\": 3", "\"seeds\": 4");
            assert_eq!(report(changed.as_bytes(), version), Err(sealed::BROKEN.into()));
        }
    }
}

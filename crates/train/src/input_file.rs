//! Files that settings name, compared by checksum when a run is resumed, and between processes.

use std::io::Read;
use std::path::{Path, PathBuf};

use meristem_device::named_file;
use meristem_nn::StateDict;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A file that a setting names, and from which fresh envs or controllers are made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Name of the setting's flag.
    pub setting: String,
    /// Absolute path of the file, or the name of a policy of the program.
    pub path: PathBuf,
    /// CRC-32 of the bytes of the file; of a weights or policy file, of its tensors instead, and of
    /// weights also of the metadata.
    pub checksum: String,
}

impl InputFile {
    /// The file with an absolute path.
    ///
    /// # Errors
    /// As [`absolute`].
    pub(crate) fn with_absolute_path(self) -> Result<Self> {
        Ok(Self { path: absolute(&self.setting, &self.path)?, ..self })
    }
}

/// Reads a whole file of at most `bytes_max` bytes. Only regular files are read, so that a pipe
/// cannot block.
///
/// # Errors
/// The problem: unreadable, or too large.
pub(crate) fn read_limited(path: &Path, bytes_max: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![];
    let read = named_file::open(path).map(|file| file.take(bytes_max as u64 + 1));
    let read = read.and_then(|mut file| file.read_to_end(&mut bytes));
    read.map_err(|error| format!("cannot be read: {error}"))?;
    if bytes.len() > bytes_max {
        return Err(format!("has more than {bytes_max} bytes"));
    }
    Ok(bytes)
}

/// The absolute path of a file that the setting `key` names.
///
/// # Errors
/// [`Error::Value`]: the path is empty, or relative while there is no working directory.
pub(crate) fn absolute(key: &str, path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        let got = format!("`{}` ({error})", path.display());
        Error::value(key, got, "a path, in a working directory that exists if it is relative")
    })
}

/// The error for a path in the setting `key` that is not UTF-8.
pub(crate) fn not_utf8(key: &str, path: &Path) -> Error {
    let expected = "a path that is UTF-8 from the root on, because config.toml is text";
    Error::value(key, path.display(), expected)
}

/// The move of a study's folder after one of its runs began. A resumed run reads the files that the
/// study has made from the new folder. Its settings and results keep their paths in the old folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Absolute path of the study's folder when the run began.
    from: PathBuf,
    /// Absolute path of the study's folder now.
    to: PathBuf,
}

impl Moved {
    /// The move of a study to the folder `to`, derived from one of its files or folders: when the
    /// run began its path was `began`, and now it is `now`. `None` if `now` is not in `to`, or if
    /// the two paths differ within the study.
    pub(crate) fn of(to: &Path, began: &Path, now: &Path) -> Option<Self> {
        let to = std::path::absolute(to).ok()?;
        let now = std::path::absolute(now).ok()?;
        let inner = now.strip_prefix(&to).ok()?;
        let from = began.ancestors().nth(inner.components().count());
        let from = from.filter(|_| began.ends_with(inner))?.to_owned();
        Some(Self { from, to })
    }

    /// Whether the old folder and the new one differ.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.from != self.to
    }

    /// Converts a path from when the run began to the path of the same file now.
    pub(crate) fn now(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.from).map_or_else(|_| path.to_owned(), |end| self.to.join(end))
    }

    /// Converts an absolute path of now to the path of the same file when the run began.
    pub(crate) fn then(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.to).map_or_else(|_| path.to_owned(), |end| self.from.join(end))
    }
}

/// Checks that every file of a run has the same contents `now` as when the run `began`. A file that
/// is in only one of the lists is not compared: in this case a setting differs, and the settings
/// were compared before.
///
/// # Errors
/// [`Error::OtherInput`] names the first file with other contents, and its setting.
pub(crate) fn check_files(path: &Path, now: &[InputFile], began: &[InputFile]) -> Result<()> {
    let place = |file: &InputFile| (file.setting.clone(), file.path.clone());
    let now_of = |began: &InputFile| now.iter().find(|now| place(now) == place(began));
    let mut pairs = began.iter().filter_map(|began| Some((began, now_of(began)?)));
    let Some((began, now)) = pairs.find(|(began, now)| began.checksum != now.checksum) else {
        return Ok(());
    };
    let named = began.path.display();
    let remedy = if began.path.is_relative() {
        "use the version of meristem with which the run began".to_string()
    } else {
        format!(
            "put the file back that the run began with, or start a new run with --config \
             RUN/config.toml and another --run-dir, which takes {named} as it is now"
        )
    };
    Err(Error::OtherInput {
        action: "resume",
        path: path.into(),
        input: format!("the contents of {named}, which --{} names", began.setting).into(),
        began: format!("those with checksum {}", began.checksum),
        now: format!("checksum {}", now.checksum),
        remedy: remedy.into(),
    })
}

/// Adds files to those that the run in `folder` has read before.
///
/// # Errors
/// As [`check_files`], for a file that the run has read before with other contents.
pub(crate) fn add_files(
    folder: &Path,
    known: &mut Vec<InputFile>,
    files: Vec<InputFile>,
) -> Result<()> {
    check_files(folder, &files, known)?;
    for file in files {
        if !known.contains(&file) {
            known.push(file);
        }
    }
    Ok(())
}

/// CRC-32 of all names, shapes, types and bytes, in the order of the names.
pub(crate) fn checksum(all: &StateDict) -> String {
    let mut crc = crc32fast::Hasher::new();
    for (name, tensor) in all.iter() {
        crc.update(name.as_bytes());
        crc.update(tensor.form().as_bytes());
        tensor.data.le_bytes(|bytes| crc.update(bytes));
    }
    format!("{:08x}", crc.finalize())
}

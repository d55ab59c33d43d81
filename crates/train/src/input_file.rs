//! Files that settings name, compared by checksum when a run goes on and between processes.

use std::path::{Path, PathBuf};

use meristem_nn::StateDict;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A file that a setting names, and that fresh envs or controllers are made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Name of the setting's flag.
    pub setting: String,
    /// Absolute path of the file.
    pub path: PathBuf,
    /// CRC-32 of the contents.
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

/// Folders of a study that was moved: a run of it goes on with the files that the study has made,
/// and keeps their paths in its settings and results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Absolute path of the study when the run began.
    from: PathBuf,
    /// Its absolute path now.
    to: PathBuf,
}

impl Moved {
    /// The move of the study that is now in the folder `to`, in which the file or folder that a run
    /// began with at the path `began` is now at `now`. `None` if they are no file of the study.
    pub(crate) fn of(to: &Path, began: &Path, now: &Path) -> Option<Self> {
        let to = std::path::absolute(to).ok()?;
        let now = std::path::absolute(now).ok()?;
        let inner = now.strip_prefix(&to).ok()?;
        let from = began.ancestors().nth(inner.components().count());
        let from = from.filter(|_| began.ends_with(inner))?.to_owned();
        Some(Self { from, to })
    }

    /// Whether the study is in another folder now.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.from != self.to
    }

    /// The path now of what was at `path` when the run began.
    pub(crate) fn now(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.from).map_or_else(|_| path.to_owned(), |end| self.to.join(end))
    }

    /// The path when the run began of what is at the absolute path `path` now.
    pub(crate) fn then(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.to).map_or_else(|_| path.to_owned(), |end| self.from.join(end))
    }
}

/// Checks that the files that are `now` read are those that a run `began` with. Files that only one
/// of them has are not compared: settings name them, which are compared before.
///
/// # Errors
/// [`Error::OtherInput`] names the first file with other contents, and its setting.
pub(crate) fn check_files(path: &Path, now: &[InputFile], began: &[InputFile]) -> Result<()> {
    let place = |file: &InputFile| (file.setting.clone(), file.path.clone());
    let of_now = |file: &InputFile| now.iter().find(|now| place(now) == place(file));
    let mut pairs = began.iter().filter_map(|began| Some((began, of_now(began)?)));
    let Some((began, now)) = pairs.find(|(began, now)| began.checksum != now.checksum) else {
        return Ok(());
    };
    let named = began.path.display();
    Err(Error::OtherInput {
        path: path.into(),
        input: format!("the contents of {named}, which --{} names", began.setting),
        began: format!("those with checksum {}", began.checksum),
        now: format!("checksum {}", now.checksum),
        remedy: format!(
            "put the file back that the run began with, or start a new run with --config \
             RUN/config.toml and another --run-dir, which takes {named} as it is now"
        ),
    })
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

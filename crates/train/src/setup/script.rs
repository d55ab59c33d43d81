//! The action script of controller `fixed:FILE`, as read from its file.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use meristem_control::Script;
use meristem_device::named_file;
use meristem_grow::Host;

use crate::error::{Error, Result};
use crate::input_file::InputFile;
use crate::settings::ControllerKind;

/// Text of a script and its file.
#[derive(Clone, Debug)]
pub(crate) struct ScriptFile {
    path: PathBuf,
    text: String,
}

impl ScriptFile {
    /// Reads the script at `path`.
    ///
    /// # Errors
    /// [`Error::Value`]: the file cannot be read.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = named_file::text(path).map_err(|error| unusable(path, &error))?;
        Ok(Self { path: path.into(), text })
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file with its checksum.
    pub(super) fn input(&self) -> InputFile {
        InputFile {
            setting: "controller".into(),
            path: self.path.clone(),
            checksum: format!("{:08x}", crc32fast::hash(self.text.as_bytes())),
        }
    }

    /// The script, for hosts that begin like `host`.
    ///
    /// # Errors
    /// [`Error::Value`]: a line is no action of such a host.
    pub(super) fn parse(&self, host: &Host) -> Result<Script> {
        let script = Script::parse(&named(&self.path), &self.text, host);
        script.map_err(|error| unusable(&self.path, &error))
    }
}

/// The controller with this script, as in settings.
fn named(path: &Path) -> String {
    ControllerKind::Fixed(path.into()).to_string()
}

fn unusable(path: &Path, problem: &dyn Display) -> Error {
    let expected = "a readable action script with one JSON object per line";
    Error::value("controller", format!("{} ({problem})", named(path)), expected)
}

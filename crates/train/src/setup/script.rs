//! The action script of controller `fixed:FILE`, as read from its file.

use std::fmt::Display;
use std::path::PathBuf;

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
    /// Reads the script of a controller; `None` if the controller has none.
    ///
    /// # Errors
    /// [`Error::Value`]: the file cannot be read.
    pub(super) fn read(controller: &ControllerKind) -> Result<Option<Self>> {
        let ControllerKind::Fixed(path) = controller else { return Ok(None) };
        let text = named_file::text(path).map_err(|error| unusable(controller, &error))?;
        Ok(Some(Self { path: path.clone(), text }))
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
        let controller = ControllerKind::Fixed(self.path.clone());
        let script = Script::parse(&controller.to_string(), &self.text, host);
        script.map_err(|error| unusable(&controller, &error))
    }
}

fn unusable(controller: &ControllerKind, problem: &dyn Display) -> Error {
    let expected = "a readable action script with one JSON object per line";
    Error::value("controller", format!("{controller} ({problem})"), expected)
}

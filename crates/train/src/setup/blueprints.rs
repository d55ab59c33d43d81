//! The blueprints of a run: the standard ones, and blueprints from files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_grow::{Blueprint, BlueprintSet};
use serde::Deserialize;

use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::input_file::{InputFile, read_limited};
use crate::settings::BlueprintSource;

/// Maximum size of a file of blueprints, in bytes.
const BYTES_MAX: usize = 64 << 10;

/// Contents of a file of blueprints.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BlueprintFile {
    blueprints: Vec<Blueprint>,
}

/// Blueprints of a run, with the files that they were read from.
#[derive(Clone, Debug)]
pub(super) struct Blueprints {
    pub(super) set: Arc<BlueprintSet>,
    pub(super) files: Vec<InputFile>,
}

impl Blueprints {
    /// Reads the blueprints that the settings name, in their order. `own` are the blueprints of the
    /// program, if it brings some.
    ///
    /// # Errors
    /// [`Error::Blueprints`]: an unreadable file, or an unusable blueprint. [`Error::Value`]: both
    /// the settings and the program have blueprints.
    pub(super) fn read(config: &TrainConfig, own: Option<&BlueprintSet>) -> Result<Self> {
        let sources = match (&config.blueprints, own) {
            (None, Some(own)) => return Ok(Self { set: Arc::new(own.clone()), files: vec![] }),
            (None, None) => &[BlueprintSource::Standard][..],
            (Some(sources), None) => sources,
            (Some(_), Some(_)) => {
                let expected = "no such setting, because the program brings its own blueprints";
                return Err(Error::value("blueprints", "a list", expected));
            }
        };
        let (mut set, mut files) = (BlueprintSet::empty(), vec![]);
        for source in sources {
            let path = PathBuf::from(source.to_string());
            let blueprints = match source {
                BlueprintSource::Standard => owned(&BlueprintSet::standard()),
                BlueprintSource::Vectors => owned(&BlueprintSet::vectors()),
                BlueprintSource::File(_) => {
                    let read = read_limited(&path, BYTES_MAX);
                    let bytes = read.map_err(|message| fail(&path, message))?;
                    let (setting, path) = ("blueprints".into(), path.clone());
                    let checksum = format!("{:08x}", crc32fast::hash(&bytes));
                    files.push(InputFile { setting, path: path.clone(), checksum });
                    parse(&path, &bytes)?
                }
            };
            set = add(set, &path, blueprints)?;
        }
        Ok(Self { set: Arc::new(set), files })
    }
}

fn owned(set: &BlueprintSet) -> Vec<Blueprint> {
    set.iter().map(|blueprint| (**blueprint).clone()).collect()
}

fn fail(path: &Path, message: impl Into<String>) -> Error {
    Error::Blueprints { path: path.into(), message: message.into() }
}

/// Parses `bytes`, the contents of the file at `path`, as TOML or JSON by its extension.
///
/// # Errors
/// [`Error::Blueprints`] names the place in the file.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Blueprint>> {
    let text = str::from_utf8(bytes).map_err(|error| fail(path, error.to_string()))?;
    let parsed = match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str(text).map_err(|error| error.to_string()),
        Some("json") => serde_json::from_str(text).map_err(|error| error.to_string()),
        _ => Err("its name must end in .toml or .json".into()),
    };
    let BlueprintFile { blueprints } = parsed.map_err(|message| fail(path, message))?;
    if blueprints.is_empty() {
        return Err(fail(path, "it has no blueprints"));
    }
    Ok(blueprints)
}

/// Adds the blueprints of a source, whose path is `path`, to a set.
///
/// # Errors
/// [`Error::Blueprints`] names the first blueprint that is unusable or has the name of another.
pub(crate) fn add(
    set: BlueprintSet,
    path: &Path,
    blueprints: impl IntoIterator<Item = Blueprint>,
) -> Result<BlueprintSet> {
    (1..).zip(blueprints).try_fold(set, |set, (number, blueprint)| {
        let added = set.with(blueprint);
        added.map_err(|error| fail(path, format!("blueprint {number}: {error}")))
    })
}

//! Configuration files in TOML or JSON; unknown keys are errors.

use std::path::Path;

use meristem_device::named_file;
use meristem_grow::nearest;

use super::identity::upgrade;
use super::table::ConfigLayer;
use crate::error::{Error, Result};

/// Reads the file at `path`, as TOML or JSON by its extension, `.toml` or `.json`.
///
/// # Errors
/// An unreadable file, a pipe, a device or a folder; invalid TOML or JSON; an unknown key, with the
/// nearest known key; a value of the wrong type.
pub fn read(path: &Path) -> Result<ConfigLayer> {
    let text = named_file::text(path).map_err(|error| Error::ConfigFile {
        path: path.to_owned(),
        message: format!("cannot be read: {error}"),
    })?;
    parse(path, &text)
}

/// Parses `text`, the contents of the file at `path`, as [`read`] does.
///
/// # Errors
/// As [`read`].
pub(crate) fn parse(path: &Path, text: &str) -> Result<ConfigLayer> {
    let fail = |message: String| Error::ConfigFile { path: path.to_owned(), message };
    let layer = match path.extension().and_then(|e| e.to_str()) {
        Some("toml") => {
            let table: toml::Table = toml::from_str(text).map_err(|e| fail(e.to_string()))?;
            check_keys(table.keys().map(String::as_str)).map_err(&fail)?;
            // Parsed again from the text, because messages then show the line.
            toml::from_str::<ConfigLayer>(text).map_err(|e| fail(e.to_string()))
        }
        Some("json") => {
            let value = meristem_grow::parse_json(text).map_err(&fail)?;
            let object = value.as_object().ok_or_else(|| fail("expected an object".into()))?;
            check_keys(object.keys().map(String::as_str)).map_err(&fail)?;
            serde_json::from_str(text).map_err(|e| fail(e.to_string()))
        }
        _ => Err(fail("its name must end in .toml or .json".into())),
    };
    let mut layer = layer?;
    upgrade(&mut layer).map_err(|e| fail(e.to_string()))?;
    Ok(layer)
}

/// Checks that every key is the key of a setting.
///
/// # Errors
/// A message that names the first unknown key and the nearest known one.
pub fn check_keys<'a>(mut keys: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let Some(unknown) = keys.find(|key| !ConfigLayer::KEYS.contains(key)) else { return Ok(()) };
    let same_with_underscores = unknown.replace('-', "_");
    Err(match nearest(&same_with_underscores, ConfigLayer::KEYS.iter().copied()) {
        Some(known) => format!("unknown key `{unknown}`; did you mean `{known}`?"),
        None => format!("unknown key `{unknown}`; known keys: {}", ConfigLayer::KEYS.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TrainConfig;
    use crate::config::types::BatchLimit;

    fn read_text(name: &str, text: &str) -> Result<ConfigLayer> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn toml_and_json_say_the_same() {
        let toml = read_text("c.toml", "batch = 64\nshuffle = \"off\"\nmax_batches = 7\n").unwrap();
        let json =
            read_text("c.json", r#"{"batch": 64, "shuffle": false, "max_batches": 7}"#).unwrap();
        assert_eq!(toml, json);
        assert_eq!(toml.max_batches, Some(BatchLimit::Count(7)));
    }

    fn refused(name: &str, text: &str, words: &[&str]) {
        let error = read_text(name, text).unwrap_err();
        assert!(matches!(error, Error::ConfigFile { .. }), "{error:?}");
        let message = error.to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        refused("c.toml", "bacth = 3", &["did you mean `batch`?"]);
        refused("c.toml", "max-batches = 3", &["did you mean `max_batches`?"]);
        refused("c.json", r#"{"batch": 1, "batch": 2}"#, &["the key `batch` is there twice"]);
        refused("c.json", "[1]", &["expected an object"]);
        refused("c.json", r#"{"zzz": 1}"#, &["unknown key `zzz`; known keys: preset"]);
    }

    #[test]
    fn a_wrong_type_shows_where_it_is() {
        refused("c.toml", "envs = 2\nbatch = \"many\"\n", &["line 2"]);
        refused("c.toml", "augment = \"flop\"", &["flip"]);
        refused("c.toml", "batch = -1", &["line 1", "batch"]);
        refused("c.yaml", "batch: 1", &[".toml"]);
    }

    #[test]
    fn what_a_run_writes_configures_the_same_run() {
        let first = TrainConfig::resolve(ConfigLayer::default(), ConfigLayer::default()).unwrap();
        let layer = read_text("config.toml", &first.resolved_toml()).unwrap();
        let second = TrainConfig::resolve(layer, ConfigLayer::default()).unwrap();
        assert_eq!(first.resolved_toml(), second.resolved_toml());
        assert_eq!((first.seed, Some(first.slots())), (second.seed, second.slots.clone()));
    }
}

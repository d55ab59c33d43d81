//! Settings of a run, as text.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;
use toml::{Table, Value};

use crate::config::values_from_before;
use crate::error::{Error, Result};
use crate::record::plain_file;

/// Largest `config.toml` that is read.
const CONFIG_BYTES_MAX: u64 = 1_000_000;

/// Settings of a run by key, as in its `config.toml`, from any version.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Settings(Table);

impl Settings {
    /// Reads `config.toml` of the run folder. Without the file there are no settings.
    ///
    /// # Errors
    /// [`Error::Unreadable`]: the file cannot be read, is larger than 1 MB, or is not TOML.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.toml");
        let unreadable = |problem: String| Error::Unreadable { path: path.clone(), problem };
        let text =
            plain_file::text(&path, CONFIG_BYTES_MAX).map_err(|e| unreadable(e.to_string()))?;
        let table = text.unwrap_or_default().parse().map_err(|error: toml::de::Error| {
            unreadable(format!("it is not TOML: {}", error.message()))
        })?;
        Ok(Self(table))
    }

    /// A setting as text, without quotes.
    pub fn get(&self, key: &str) -> Option<String> {
        self.0.get(key).map(plain)
    }

    /// Keys whose values differ between runs, with the value in each run. A run that is older than
    /// a setting has the value that runs had before the setting existed.
    pub fn differences(runs: &[&Self]) -> Vec<(String, Vec<Option<String>>)> {
        let before = values_from_before();
        let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.0.keys()).collect();
        let row = |key: &String| {
            let value = |run: &&Self| {
                // Nothing is known of a run without settings.
                let before = before.get(key).filter(|_| !run.0.is_empty());
                run.0.get(key).or(before).map(plain)
            };
            (key.clone(), runs.iter().map(value).collect::<Vec<_>>())
        };
        let differs = |values: &[Option<String>]| values.windows(2).any(|two| two[0] != two[1]);
        keys.into_iter().map(row).filter(|(_, values)| differs(values)).collect()
    }

    /// All settings by key.
    pub fn all(&self) -> BTreeMap<&str, String> {
        self.0.iter().map(|(key, value)| (key.as_str(), plain(value))).collect()
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Settings {
        Settings(text.parse().unwrap())
    }

    #[test]
    fn only_settings_that_differ_are_listed() {
        let runs = [
            settings("seed = 1\nlr = 0.1\ncontroller = \"none\"\ndevices = [\"cpu\"]"),
            settings("seed = 2\nlr = 0.1\ncontroller = \"heuristic\"\nnew = true"),
        ];
        let [a, b] = &runs;
        let of = |found: &[(String, Vec<Option<String>>)], key: &str| {
            found.iter().find(|(name, _)| name == key).map(|(_, values)| values.clone())
        };
        let found = Settings::differences(&[a, b]);
        let text = |text: &str| Some(text.to_string());
        assert_eq!(of(&found, "controller"), Some(vec![text("none"), text("heuristic")]));
        assert_eq!(of(&found, "new"), Some(vec![None, text("true")]));
        assert_eq!(of(&found, "lr"), None);
        // The second file is from before the setting `devices` existed.
        assert_eq!(of(&found, "devices"), None, "{found:?}");
    }

    #[test]
    fn what_is_no_toml_is_said() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.toml"), "seed = = 1").unwrap();
        let error = Settings::read(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Unreadable { .. }), "{error:?}");
        assert!(error.to_string().contains("config.toml: it is not TOML"), "{error}");
        std::fs::write(folder.path().join("config.toml"), " ".repeat(1_000_001)).unwrap();
        let error = Settings::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("larger than 1 MB"), "{error}");
    }
}

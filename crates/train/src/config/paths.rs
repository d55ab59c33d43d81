//! The paths among the settings.

use std::path::{Path, PathBuf};

use meristem_data::path_text;

use super::table::TrainConfig;
use super::types::PolicyStart;
use crate::error::Result;
use crate::input_file::{Moved, absolute, not_utf8};

impl TrainConfig {
    /// The settings with absolute paths.
    ///
    /// # Errors
    /// As [`absolute`].
    pub(crate) fn with_absolute_paths(&self) -> Result<Self> {
        let mut written = self.clone();
        for (key, path) in written.paths_mut() {
            *path = absolute(key, path)?;
        }
        Ok(written)
    }

    /// The settings with the present paths of the files of a moved study.
    pub(crate) fn moved(&self, moved: &Moved) -> Self {
        self.with_paths(|path| moved.now(path))
    }

    /// The settings with the paths that files of a moved study had when a run began.
    ///
    /// # Errors
    /// As [`absolute`].
    pub(crate) fn before_move(&self, moved: &Moved) -> Result<Self> {
        Ok(self.with_absolute_paths()?.with_paths(|path| moved.then(path)))
    }

    /// The settings with each path replaced by `replace(path)`.
    fn with_paths(&self, replace: impl Fn(&Path) -> PathBuf) -> Self {
        let mut config = self.clone();
        config.paths_mut().for_each(|(_, path)| *path = replace(path));
        config
    }

    /// The paths that are written to the run folder, each with the key of its setting.
    fn paths_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        // Older runs wrote an empty root for the embedded dataset, which needs none.
        let data_root = self.data_root.as_mut().filter(|root| !root.as_os_str().is_empty());
        let paths = [
            ("data-root", data_root),
            ("init", self.init.as_mut()),
            ("start-topology", self.start_topology.as_mut()),
            ("export", self.export.as_mut()),
            ("controller", self.controller.path_mut()),
            (
                "policy",
                match &mut self.policy {
                    Some(PolicyStart::File(path)) => Some(path),
                    _ => None,
                },
            ),
        ];
        let blueprints = self.blueprints.iter_mut().flatten();
        let blueprints = blueprints.map(|source| ("blueprints", source.path_mut()));
        let paths = paths.into_iter().chain(blueprints);
        paths.filter_map(|(key, path)| Some((key, path?)))
    }

    /// Checks that `config.toml`, which is text, can have the paths.
    ///
    /// # Errors
    /// [`Error::Value`]: the absolute form of a path is not UTF-8; or as [`absolute`].
    pub(crate) fn check_paths(&self) -> Result<()> {
        match self.with_absolute_paths()?.paths_mut().find(|(_, path)| path_text::is_lossy(path)) {
            None => Ok(()),
            Some((key, path)) => Err(not_utf8(key, path)),
        }
    }
}

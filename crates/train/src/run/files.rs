//! Open files of a run: folder and trace.

use crate::config::TrainConfig;
use crate::error::Result;
use crate::processes::World;
use crate::record::output::check_output;
use crate::record::run_folder::RunFolder;
use crate::record::trace::RunTrace;

/// Folder and trace of a run; absent on all ranks but 0.
#[derive(Default)]
pub(crate) struct RunFiles {
    pub(crate) folder: Option<RunFolder>,
    pub(crate) trace: Option<RunTrace>,
}

impl RunFiles {
    /// Creates the files of a new run.
    ///
    /// # Errors
    /// A file or folder exists already, or cannot be written.
    pub(crate) fn create(&mut self, config: &TrainConfig, world: &World) -> Result<()> {
        if world.is_first() {
            config.export.as_deref().map_or(Ok(()), |path| check_output("export", path))?;
            let folder = RunFolder::create(config.run_dir.as_deref(), &config.run_name())?;
            let folder = self.folder.insert(folder);
            self.trace = RunTrace::open(config.trace.as_deref())?;
            folder.write_config(&config.resolved_toml())?;
        }
        Ok(())
    }

    /// Removes the files of a new run that could not start.
    pub(crate) fn discard(mut self) {
        self.discard_trace();
        self.folder.into_iter().for_each(RunFolder::discard);
    }

    /// Removes the trace of a run that could not resume.
    pub(crate) fn discard_trace(&mut self) {
        self.trace.take().into_iter().for_each(RunTrace::discard);
    }
}

//! Where a run is written, and where it begins.

use std::time::Instant;

use crate::checkpoint::{EnvState, EnvTensors, EventsPosition, Position};
use crate::config::TrainConfig;
use crate::error::Result;
use crate::processes::world::World;
use crate::record::event_writer::EventWriter;
use crate::record::output::check_output;
use crate::record::run_folder::RunFolder;
use crate::record::trace::RunTrace;

/// Where a run is written: nowhere, on another rank than the first.
#[derive(Default)]
pub(crate) struct Place {
    pub(crate) folder: Option<RunFolder>,
    pub(crate) trace: Option<RunTrace>,
}

impl Place {
    /// Of a new run.
    pub(crate) fn make(&mut self, config: &TrainConfig, world: &World) -> Result<()> {
        if world.is_first() {
            config.export.as_deref().map_or(Ok(()), |path| check_output("export", path))?;
            let folder = RunFolder::create(config.run_dir.as_deref(), &config.run_name())?;
            let folder = self.folder.insert(folder);
            self.trace = RunTrace::open(config.trace.as_deref())?;
            folder.write_config(&config.resolved_toml())?;
        }
        Ok(())
    }

    /// Of a new run that could not start.
    pub(crate) fn discard(mut self) {
        self.discard_trace();
        self.folder.into_iter().for_each(RunFolder::discard);
    }

    /// Of a run that could not go on.
    pub(crate) fn discard_trace(&mut self) {
        self.trace.take().into_iter().for_each(RunTrace::discard);
    }
}

/// How a run begins.
pub(crate) enum Begin {
    /// At its start.
    New(Instant),
    /// In the middle.
    From(Middle),
}

impl Begin {
    /// What a run begins with in this process, which is the first's if it has the folder. What is left of an end before
    /// goes.
    pub(crate) fn open(self, folder: Option<&RunFolder>) -> Result<Begun> {
        let begun = match self {
            Begin::New(started) => {
                let writer = folder.map(|folder| EventWriter::create(&folder.events(), started));
                let next = Position { round: 0, step: 0 };
                Begun { writer: writer.transpose()?, next, envs: vec![] }
            }
            Begin::From(Middle { next, envs, events }) => {
                let writer = folder.map(|folder| EventWriter::resume(&folder.events(), events));
                Begun { writer: writer.transpose()?, next, envs }
            }
        };
        folder.map_or(Ok(()), RunFolder::remove_summary)?;
        Ok(begun)
    }
}

/// What a run begins with in a process.
pub(crate) struct Begun {
    /// Of the events' file, on the first rank.
    pub(crate) writer: Option<EventWriter>,
    /// The next step.
    pub(crate) next: Position,
    /// The envs of this process in the middle of a round; none at its start.
    pub(crate) envs: Vec<(EnvState, EnvTensors)>,
}

/// Where a run goes on.
pub(crate) struct Middle {
    pub(crate) next: Position,
    pub(crate) envs: Vec<(EnvState, EnvTensors)>,
    pub(crate) events: EventsPosition,
}

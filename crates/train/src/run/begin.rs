//! How a run begins: new, or from a checkpoint.

use std::time::Instant;

use crate::env::SavedEnv;
use crate::error::Result;
use crate::position::Position;
use crate::record::event_writer::{EventWriter, EventsPosition};
use crate::record::run_folder::RunFolder;

/// How a run begins.
pub(crate) enum Begin {
    /// At its start.
    New(Instant),
    /// From a checkpoint.
    Resumed(Resumed),
}

impl Begin {
    /// Opens the events' file in `folder`, which the first rank has, and removes the summary of an
    /// earlier end.
    ///
    /// # Errors
    /// The file cannot be written, or is not as the checkpoint knows it.
    pub(crate) fn open(self, folder: Option<&RunFolder>) -> Result<Begun> {
        let begun = match self {
            Begin::New(started) => {
                let writer = folder.map(|folder| EventWriter::create(&folder.events(), started));
                let next = Position { round: 0, step: 0 };
                Begun { writer: writer.transpose()?, next, envs: vec![] }
            }
            Begin::Resumed(Resumed { next, envs, events }) => {
                let writer = folder.map(|folder| EventWriter::resume(&folder.events(), events));
                Begun { writer: writer.transpose()?, next, envs }
            }
        };
        folder.map_or(Ok(()), RunFolder::remove_summary)?;
        Ok(begun)
    }
}

/// The beginning of a run in one process.
pub(crate) struct Begun {
    /// The writer of the events' file, on the first rank.
    pub(crate) writer: Option<EventWriter>,
    /// The next step.
    pub(crate) next: Position,
    /// The envs of this process in the middle of a round; none at its start.
    pub(crate) envs: Vec<SavedEnv>,
}

/// The part of a checkpoint that is this process'.
pub(crate) struct Resumed {
    pub(crate) next: Position,
    pub(crate) envs: Vec<SavedEnv>,
    pub(crate) events: EventsPosition,
}

//! Beginning of a run: new, or from a checkpoint.

use std::time::Instant;

use crate::env::SavedEnv;
use crate::error::Result;
use crate::position::StepPosition;
use crate::record::event_writer::{EventWriter, EventsPosition};
use crate::record::events::Extension;
use crate::record::run_folder::RunFolder;

/// Beginning of a run.
pub(crate) enum Begin {
    /// A new run, started at this time.
    New(Instant),
    /// A run resumed from a checkpoint.
    Resumed(Resumed),
}

impl Begin {
    /// Opens the file of events in `folder`, which only rank 0 has, and removes the summary of an
    /// interrupted run.
    ///
    /// # Errors
    /// The file cannot be written, or differs from the checkpoint's description.
    pub(crate) fn open(self, folder: Option<&RunFolder>) -> Result<Begun> {
        let begun = match self {
            Begin::New(started) => {
                let writer = folder.map(|folder| EventWriter::create(folder.directory(), started));
                let next = StepPosition { round: 0, step: 0 };
                Begun {
                    writer: writer.transpose()?,
                    next,
                    envs: vec![],
                    extended: None,
                    ended: vec![],
                }
            }
            Begin::Resumed(Resumed { next, envs, events, extended, ended }) => {
                let writer = folder.map(|folder| EventWriter::resume(folder.directory(), events));
                Begun { writer: writer.transpose()?, next, envs, extended, ended }
            }
        };
        folder.map_or(Ok(()), RunFolder::remove_summary)?;
        Ok(begun)
    }
}

/// A run that has begun, in one process.
pub(crate) struct Begun {
    /// Writer of events, on rank 0.
    pub(crate) writer: Option<EventWriter>,
    /// Position of the next step.
    pub(crate) next: StepPosition,
    /// The envs of this process in the middle of a round; empty at the start of a round.
    pub(crate) envs: Vec<SavedEnv>,
    /// The extension of the run, if it is extended.
    pub(crate) extended: Option<Extension>,
    /// Members that the setting `end_members` ends when the run resumes.
    pub(crate) ended: Vec<usize>,
}

/// The part of a checkpoint for this process.
pub(crate) struct Resumed {
    pub(crate) next: StepPosition,
    pub(crate) envs: Vec<SavedEnv>,
    pub(crate) events: EventsPosition,
    /// The extension of the run, unless the events have it.
    pub(crate) extended: Option<Extension>,
    /// Members that the setting `end_members` ends when the run resumes.
    pub(crate) ended: Vec<usize>,
}

//! Reading of run folders, complete or in progress. Nothing here writes, and no file is trusted:
//! it may be damaged, half-written, from another version, of any size, or vanish meanwhile.
//!
//! | item | contents |
//! |---|---|
//! | [`find`], [`Overview`] | the runs in a folder, with a summary row of each |
//! | [`EventTail`] | events as they are appended, line by line |
//! | [`RunHistory`] | events folded into curves, stages and diagnostics, in bounded memory |
//! | [`Run`] | everything about one run |
//! | [`Follower`] | incremental reader of a run in progress |
//! | [`Settings`] | settings of a run as text, comparable across versions |

mod curve;
mod env_history;
mod follower;
mod history;
mod members_history;
mod overview;
mod settings;
mod tail;

use std::path::{Path, PathBuf};

pub use self::curve::Curve;
pub use self::env_history::{EnvHistory, Span};
pub use self::follower::Follower;
pub use self::history::{Incident, PolicyHistory, RunHistory};
pub use self::members_history::{MemberCopy, MemberHistory, MembersHistory, member_settings};
pub(crate) use self::overview::read_summary;
pub use self::overview::{
    FoundRuns, Overview, RunState, UnreadableFolder, check_is_run, find, is_in_progress,
};
pub use self::settings::Settings;
pub use self::tail::{EventLine, EventTail, Reached, Skipped};
use crate::error::Result;
use crate::record::summary::Summary;

/// One run, read as a whole.
#[derive(Debug)]
pub struct Run {
    /// Path of its folder.
    pub path: PathBuf,
    /// State and results in short.
    pub overview: Overview,
    /// Settings; empty if `config.toml` cannot be read ([`Overview::problem`] has the reason).
    pub settings: Settings,
    /// Results; `None` before the run ends, and if they cannot be read.
    pub summary: Option<Summary>,
    /// Events so far.
    pub history: RunHistory,
    /// Lines of `events.jsonl` that were not understood.
    pub skipped: Skipped,
}

impl Run {
    /// Reads a run. Takes memory for its curves only, however long its events are.
    ///
    /// # Errors
    /// [`Error::NotARun`](crate::Error::NotARun), and
    /// [`Error::Unreadable`](crate::Error::Unreadable) if it has neither events nor a summary that
    /// can be read. Other damage is in [`Overview::problem`] and [`Run::skipped`].
    pub fn read(path: &Path) -> Result<Self> {
        check_is_run(path)?;
        let overview = Overview::read(path);
        let settings = Settings::read(path).unwrap_or_default();
        let results = read_summary(path);
        let mut tail = EventTail::new(&path.join("events.jsonl"));
        let history = RunHistory::read(&mut tail);
        let (history, summary) = match (history, results) {
            (Ok(history), results) => (history, results.unwrap_or_default()),
            (Err(_), Ok(Some(summary))) => (RunHistory::default(), Some(summary)),
            (Err(error), _) => return Err(error),
        };
        Ok(Self {
            path: path.into(),
            overview,
            settings,
            summary,
            history,
            skipped: tail.skipped(),
        })
    }
}

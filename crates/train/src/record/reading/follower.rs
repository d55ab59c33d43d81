//! Incremental reading of a run in progress.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::record::reading::overview::{
    Overview, RunState, check_is_run, is_in_progress, read_summary,
};
use crate::record::reading::tail::{EventTail, Reached};
use crate::record::reading::{Run, RunHistory, Settings, Skipped};

/// Time between two checks whether the run's process is alive.
const STATE_EVERY: Duration = Duration::from_secs(2);

/// Incremental reader of a run: each call reads only newly appended events.
#[derive(Debug)]
pub struct Follower {
    /// The run so far.
    pub run: Run,
    /// Whether some of the events are not read yet.
    pub is_reading: bool,
    /// Error that ended the reading.
    pub problem: Option<String>,
    tail: EventTail,
    /// Time of the last check whether the run's process is alive.
    state_asked: Option<Instant>,
}

impl Follower {
    /// A reader at the start of the events.
    ///
    /// # Errors
    /// [`Error::NotARun`](crate::Error::NotARun).
    pub fn open(folder: &Path) -> Result<Self> {
        check_is_run(folder)?;
        let overview = Overview { state: RunState::Running, ..Overview::of_start(folder) };
        let run = Run {
            path: folder.into(),
            overview,
            settings: Settings::read(folder).unwrap_or_default(),
            summary: None,
            history: RunHistory::default(),
            skipped: Skipped::default(),
        };
        let tail = EventTail::new(&folder.join("events.jsonl"));
        Ok(Self { run, is_reading: true, problem: None, tail, state_asked: None })
    }

    /// Reads about `bytes_max` further bytes. Returns true at the current end of the file, or if it
    /// cannot be read.
    pub fn look(&mut self, bytes_max: u64) -> bool {
        let run = &mut self.run;
        let reached = run.history.follow(&mut self.tail, bytes_max);
        run.skipped = self.tail.skipped();
        self.is_reading = matches!(reached, Ok(Reached::Limit | Reached::Restarted));
        self.problem = match reached {
            Ok(_) => None,
            Err(_) if !run.path.is_dir() => Some("the folder of the run was removed".into()),
            // A run that begins has no events yet.
            Err(error) => (run.overview.state != RunState::Running).then(|| error.to_string()),
        };
        if !self.is_reading {
            self.ask_state();
        }
        !self.is_reading
    }

    /// Bytes of the events that were read.
    pub fn bytes_read(&self) -> u64 {
        self.tail.position()
    }

    /// Updates the overview by the newest events, and now and then by the state of the process.
    fn ask_state(&mut self) {
        let run = &mut self.run;
        if run.summary.is_none() {
            run.overview.set_figures(&run.history);
        }
        if self.state_asked.is_some_and(|asked| asked.elapsed() < STATE_EVERY) {
            return;
        }
        self.state_asked = Some(Instant::now());
        let state = match &run.history.ended {
            Some((status, _)) => RunState::from_recorded(status),
            None if is_in_progress(&run.path) => RunState::Running,
            None => RunState::Killed,
        };
        run.overview.state = state;
        if state == RunState::Running {
            run.summary = None;
        } else if run.summary.is_none() {
            match read_summary(&run.path) {
                Ok(Some(summary)) => {
                    run.overview.set_results(summary.clone());
                    run.summary = Some(summary);
                }
                Ok(None) => {}
                Err(error) => run.overview.problem = Some(error.to_string()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    #[test]
    fn a_run_is_followed_from_its_first_event_to_its_removal() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Follower::open(folder.path()).is_err());
        fs::create_dir(folder.path().join("weights")).unwrap();
        fs::write(folder.path().join("config.toml"), "controller = \"none\"").unwrap();
        let mut follower = Follower::open(folder.path()).unwrap();
        assert!(follower.look(1 << 20));
        assert_eq!(follower.problem, None, "it has not begun");
        let path = folder.path().join("events.jsonl");
        let mut events = fs::File::create(&path).unwrap();
        let mut line = |rest: &str| {
            writeln!(events, "{{\"v\":1,\"seq\":0,\"seconds\":2.5,{rest}}}").unwrap();
        };
        line("\"event\":\"round_started\",\"round\":3");
        line("\"event\":\"comet_seen\"");
        assert!(!follower.look(1) && follower.is_reading, "there is more");
        while !follower.look(1) {}
        assert_eq!((follower.run.history.round, follower.run.skipped.unknown), (3, 1));
        assert_eq!(follower.run.overview.wall_seconds, Some(2.5));
        assert_eq!(follower.run.overview.state, RunState::Killed, "no process writes to it");
        assert_eq!(follower.bytes_read(), path.metadata().unwrap().len());
        fs::remove_dir_all(folder.path()).unwrap();
        assert!(follower.look(1 << 20));
        assert_eq!(follower.problem.as_deref(), Some("the folder of the run was removed"));
    }
}

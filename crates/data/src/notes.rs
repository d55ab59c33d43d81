//! Notes for the user, and progress of decoding, as `tracing` events: a program displays the events
//! of the target [`TARGET`].

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Target of the events. A note has the field `message`; progress has `done` and `of`, numbers of
/// samples, which are equal at the end.
pub const TARGET: &str = "meristem::notes";

/// Time between two reports of progress.
const INTERVAL: Duration = Duration::from_millis(200);

/// Emits a note for the user.
pub fn say(message: &str) {
    tracing::warn!(target: TARGET, "{message}");
}

/// The first three names, and the number of the others.
pub(crate) fn some_of(names: impl ExactSizeIterator<Item = String>) -> String {
    const SHOWN: usize = 3;
    let more = names.len().saturating_sub(SHOWN);
    let shown = names.take(SHOWN).collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// Progress of the decoding of a split, which ends when it is dropped.
pub(crate) struct DecodingProgress {
    /// Number of samples.
    of: usize,
    /// Time of the last report.
    reported: Cell<Option<Instant>>,
    started: Instant,
}

impl DecodingProgress {
    pub(crate) fn new(of: usize) -> Self {
        Self { of, reported: Cell::new(None), started: Instant::now() }
    }

    /// Reports that `done` samples are decoded, at most once in an interval.
    pub(crate) fn at(&self, done: usize) {
        let since = self.reported.get().unwrap_or(self.started);
        if since.elapsed() >= INTERVAL {
            self.reported.set(Some(Instant::now()));
            tracing::info!(target: TARGET, done, of = self.of);
        }
    }
}

impl Drop for DecodingProgress {
    fn drop(&mut self) {
        if self.reported.get().is_some() {
            tracing::info!(target: TARGET, done = self.of, of = self.of);
        }
    }
}

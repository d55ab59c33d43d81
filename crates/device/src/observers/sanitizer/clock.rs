//! Vector clocks: the commands of each stream that are ordered before a position.
//!
//! An entry `(stream, n)` of a clock says that the commands of `stream` up to number `n` are
//! ordered before the position. A stream's own commands are ordered among themselves, so a stream
//! only stores its clocks of other streams, each with the command from which on it holds.

use std::collections::VecDeque;

use crate::ground::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock};

/// Number of earlier positions of a stream whose clocks are stored. An older position gets the
/// oldest stored clock, which covers more commands. A race with such an old access may be missed,
/// but no false race is reported.
const PAST: usize = 1024;

/// Key of the next stream. Keys are unique in the process, not only in a device, because events
/// order streams of different devices.
static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

/// Identity of a stream for clocks and reports. It outlives the stream, and does not keep the
/// stream's queue.
#[derive(Debug)]
pub(super) struct Tag {
    key: u64,
    pub(super) name: Arc<str>,
    /// Whether the stream's last handle was dropped, after all of its work. Later launches are
    /// ordered after all commands of the stream.
    gone: AtomicBool,
}

impl Tag {
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

/// Commands that are ordered before a position. Sorted by the streams' keys.
#[derive(Debug, Clone, Default)]
pub(super) struct VectorClock(Vec<(Arc<Tag>, u64)>);

impl VectorClock {
    /// Whether this command is ordered before the position.
    pub(super) fn covers(&self, stream: &Arc<Tag>, seq: u64) -> bool {
        self.seen(stream.key) >= seq || stream.is_gone()
    }

    fn seen(&self, key: u64) -> u64 {
        let found = self.0.binary_search_by_key(&key, |(stream, _)| stream.key);
        found.map_or(0, |i| self.0[i].1)
    }

    fn includes(&self, other: &VectorClock) -> bool {
        other.0.iter().all(|(stream, seq)| self.covers(stream, *seq))
    }

    pub(super) fn see(&mut self, stream: &Arc<Tag>, seq: u64) {
        match self.0.binary_search_by_key(&stream.key, |(stream, _)| stream.key) {
            Ok(i) => self.0[i].1 = self.0[i].1.max(seq),
            Err(i) => self.0.insert(i, (stream.clone(), seq)),
        }
    }

    pub(super) fn join(&mut self, other: &VectorClock) {
        if self.includes(other) {
            return;
        }
        self.0.retain(|(stream, _)| !stream.is_gone());
        for (stream, seq) in &other.0 {
            if !stream.is_gone() {
                self.see(stream, *seq);
            }
        }
    }
}

/// A stream's clocks, now and at earlier commands.
#[derive(Debug)]
pub(super) struct StreamClock {
    tag: Arc<Tag>,
    /// Clocks, each with the command from which on it holds. The first holds from 0 on, until old
    /// clocks are dropped.
    past: Mutex<VecDeque<(u64, Arc<VectorClock>)>>,
}

impl StreamClock {
    pub(super) fn new(name: &Arc<str>) -> Self {
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        let tag = Arc::new(Tag { key, name: name.clone(), gone: AtomicBool::new(false) });
        StreamClock { tag, past: Mutex::new([(0, Arc::default())].into()) }
    }

    pub(super) fn tag(&self) -> &Arc<Tag> {
        &self.tag
    }

    /// The clock at the last command.
    pub(super) fn now(&self) -> Arc<VectorClock> {
        lock(&self.past).back().map(|(_, clock)| clock.clone()).unwrap_or_default()
    }

    /// Adds to `clock` all commands ordered before the end of command `seq`, and `seq` itself.
    pub(super) fn join_into(&self, clock: &mut VectorClock, seq: u64) {
        let then = {
            let past = lock(&self.past);
            let after = past.partition_point(|(from, _)| *from <= seq);
            past.get(after.saturating_sub(1)).map(|(_, clock)| clock.clone()).unwrap_or_default()
        };
        clock.join(&then);
        clock.see(&self.tag, seq);
    }

    /// Sets the clock from command `from` on.
    pub(super) fn learn(&self, from: u64, mut clock: VectorClock) {
        let mut past = lock(&self.past);
        if past.back().is_some_and(|(_, known)| known.includes(&clock)) {
            return;
        }
        clock.0.retain(|(stream, _)| !stream.is_gone());
        if past.len() == PAST {
            past.pop_front();
        }
        past.push_back((from, Arc::new(clock)));
    }
}

impl Drop for StreamClock {
    fn drop(&mut self) {
        self.tag.gone.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(name: &str) -> StreamClock {
        StreamClock::new(&name.into())
    }

    /// Makes command `at` of `to` wait for `from` up to `seq`.
    fn wait(to: &StreamClock, at: u64, from: &StreamClock, seq: u64) {
        let mut clock = (*to.now()).clone();
        from.join_into(&mut clock, seq);
        to.learn(at, clock);
    }

    #[test]
    fn a_place_knows_what_its_stream_knew_then() {
        let (a, b, c) = (stream("a"), stream("b"), stream("c"));
        wait(&b, 3, &a, 7);
        wait(&b, 5, &a, 9);
        for (seq, known) in [(2, 0), (3, 7), (4, 7), (5, 9), (6, 9)] {
            let mut clock = VectorClock::default();
            b.join_into(&mut clock, seq);
            assert_eq!(clock.seen(a.tag.key), known);
            assert_eq!(clock.seen(b.tag.key), seq);
        }
        wait(&c, 1, &b, 4);
        assert!(c.now().covers(&a.tag, 7) && !c.now().covers(&a.tag, 8));
    }

    #[test]
    fn the_past_is_bounded_and_errs_towards_order() {
        let (a, b) = (stream("a"), stream("b"));
        for n in 1..=3 * PAST as u64 {
            wait(&b, n, &a, n);
        }
        assert_eq!(lock(&b.past).len(), PAST);
        let mut clock = VectorClock::default();
        b.join_into(&mut clock, 1);
        assert_eq!(clock.seen(a.tag.key), 2 * PAST as u64 + 1);
    }

    #[test]
    fn streams_that_are_gone_are_ordered_and_leave_the_clocks() {
        let (a, b, c) = (stream("a"), stream("b"), stream("c"));
        wait(&b, 1, &a, 5);
        let tag = a.tag.clone();
        assert!(!c.now().covers(&tag, 1));
        drop(a);
        assert!(c.now().covers(&tag, 1));
        wait(&b, 2, &c, 1);
        assert_eq!(b.now().0.len(), 1);
    }
}

//! Where ranks that are threads of one process meet.
//!
//! Invariants
//! - A round ends when every rank has come; the last to come completes it for all, and nobody comes
//!   to the next round before it has taken its answer of this one.
//! - A round that ended well answers every rank, whatever happens to a rank afterwards.
//! - Once a failure is set no round ends any more: everybody who waits or comes gets it.

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, spin_until, wait_until};
use std::time::{Duration, Instant};

/// A meeting place of a fixed number of ranks: each brings an `A`, and takes a `B`.
pub(crate) struct Board<A, B> {
    size: usize,
    deadline: Duration,
    state: Mutex<State<A, B>>,
    turned: Condvar,
    /// Changes with every end of a round and with the failure, for a look without the lock.
    signal: AtomicU64,
}

struct State<A, B> {
    round: u64,
    arrived: usize,
    /// By rank: what it brought to the present round.
    brought: Vec<Option<A>>,
    /// By rank: whether it came to the present round.
    here: Vec<bool>,
    /// By rank: its answer of the last round, until it takes it.
    answers: Vec<Option<B>>,
    failure: Option<Failure>,
}

/// Why no round ends any more.
#[derive(Clone)]
enum Failure {
    Gone { rank: usize, reason: &'static str },
    Late { rank: usize },
    Other(Error),
}

impl<A, B> Board<A, B> {
    pub(crate) fn new(size: usize, deadline: Duration) -> Self {
        let state = State {
            round: 0,
            arrived: 0,
            brought: (0..size).map(|_| None).collect(),
            here: vec![false; size],
            answers: (0..size).map(|_| None).collect(),
            failure: None,
        };
        let (state, turned) = (Mutex::new(state), Condvar::new());
        Board { size, deadline, state, turned, signal: AtomicU64::new(0) }
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Brings something and waits for the others; the last to come runs `complete`, which sees what
    /// all brought and writes every rank's answer.
    pub(crate) fn meet(
        &self,
        operation: &'static str,
        rank: usize,
        bring: A,
        complete: impl FnOnce(&[Option<A>], &mut [Option<B>]) -> Result<()>,
    ) -> Result<B> {
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            return Err(self.error(operation, failure));
        }
        state.brought[rank] = Some(bring);
        state.here[rank] = true;
        state.arrived += 1;
        let round = state.round;
        let mut state = if state.arrived == self.size {
            self.complete(state, complete)
        } else {
            self.wait(state, round)
        };
        // A round that ended is good for this rank even if another left since.
        match (state.answers.get_mut(rank).and_then(Option::take), &state.failure) {
            (Some(answer), _) => Ok(answer),
            (None, Some(failure)) => Err(self.error(operation, failure)),
            (None, None) => unreachable!("a round ends with an answer for each rank or a failure"),
        }
    }

    /// Ends the round. What was brought is looked at and let go without the lock: that may take
    /// as long as a full stream, and a rank that leaves meanwhile must be able to say so.
    fn complete<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<A, B>>,
        complete: impl FnOnce(&[Option<A>], &mut [Option<B>]) -> Result<()>,
    ) -> MutexGuard<'a, State<A, B>> {
        let mut brought = std::mem::take(&mut state.brought);
        let mut answers = std::mem::take(&mut state.answers);
        drop(state);
        let outcome = complete(&brought, &mut answers);
        brought.iter_mut().for_each(|slot| *slot = None);
        if outcome.is_err() {
            answers.iter_mut().for_each(|slot| *slot = None);
        }
        let mut state = lock(&self.state);
        (state.brought, state.answers) = (brought, answers);
        state.here.fill(false);
        state.arrived = 0;
        state.round += 1;
        if let Err(error) = outcome {
            state.failure = Some(Failure::Other(error));
        }
        self.turn();
        state
    }

    /// Waits for the end of the round, or a failure, or the deadline.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State<A, B>>,
        round: u64,
    ) -> MutexGuard<'a, State<A, B>> {
        let end = Instant::now() + self.deadline;
        let signal = self.signal.load(Ordering::Acquire);
        drop(state);
        spin_until(|| self.signal.load(Ordering::Acquire) != signal);
        let mut state = lock(&self.state);
        while state.round == round && state.failure.is_none() {
            if Instant::now() >= end && state.arrived < self.size {
                let rank = state.here.iter().position(|here| !here).unwrap_or_default();
                state.failure = Some(Failure::Late { rank });
                self.turn();
                break;
            }
            // A round that all came to is being completed: its end is the device's matter.
            let completing = state.arrived == self.size;
            let end = if completing { Instant::now() + self.deadline } else { end };
            state = wait_until(&self.turned, state, end);
        }
        state
    }

    /// A rank will not come any more.
    pub(crate) fn leave(&self, rank: usize, reason: &'static str) {
        let mut state = lock(&self.state);
        if state.failure.is_none() {
            state.failure = Some(Failure::Gone { rank, reason });
            self.turn();
        }
    }

    fn turn(&self) {
        self.signal.fetch_add(1, Ordering::Release);
        self.turned.notify_all();
    }

    fn error(&self, operation: &'static str, failure: &Failure) -> Error {
        match *failure {
            Failure::Gone { rank, reason } => Error::RankGone { operation, rank, reason },
            Failure::Late { rank } => {
                Error::RankLate { operation, rank, seconds: self.deadline.as_secs_f64() }
            }
            Failure::Other(ref error) => error.clone(),
        }
    }
}

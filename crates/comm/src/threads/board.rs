//! Meetings of ranks: every rank brings a value, and gets an answer that depends on all values.
//! Used by ranks that are threads of one process, and by the hub of TCP.
//!
//! Invariants
//! - A meeting ends when every rank has arrived; the last rank to arrive completes it for all. No
//!   rank enters the next meeting before it has taken the answer of this one.
//! - A successful meeting answers every rank, even if a rank is lost afterwards.
//! - After a failure no meeting ends: every waiting or arriving rank gets the failure.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, spin_until, wait_until};
use crate::watch::{ExchangeProblem, GroupStatus, Heartbeat, SILENT, endless};

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;

/// Time for which a device may be overdue while no rank is known to be late. Then the group fails
/// without the name of a rank.
const UNEXPLAINED_MAX: Duration = Duration::from_secs(2);

/// Meetings of a fixed number of ranks, one after the other: each rank contributes an `A` and takes
/// a `B`.
pub(crate) struct RankBoard<A, B> {
    size: usize,
    deadline: Duration,
    state: Mutex<BoardState<A, B>>,
    changed: Condvar,
    /// Changes at the end of every meeting and at a failure, so that ranks can poll without the
    /// lock.
    signal: AtomicU64,
}

struct BoardState<A, B> {
    /// Number of the current meeting.
    meeting: u64,
    /// Number of ranks that have arrived at it.
    arrived: usize,
    /// Contributions to the current meeting, by rank.
    brought: Vec<Option<A>>,
    /// Whether each rank has arrived at the current meeting.
    here: Vec<bool>,
    /// Answers of the last meeting until they are taken, by rank.
    answers: Vec<Option<B>>,
    /// The latest heartbeat of each rank, if ranks are watched.
    heartbeats: Vec<Option<LastHeartbeat>>,
    /// Time of the first heartbeat of any rank.
    watched: Option<Instant>,
    /// Time since which some device has been overdue or stuck, if one is.
    overdue_since: Option<Instant>,
    /// The first failure.
    failure: Option<BoardFailure>,
    /// The first failure that is not an orderly departure. After it the devices of the other ranks
    /// may wait for ever.
    loss: Option<BoardFailure>,
}

/// The latest heartbeat of a rank.
struct LastHeartbeat {
    at: Instant,
    heartbeat: Heartbeat,
    /// Whether more heartbeats will come.
    continues: bool,
}

/// The reason why no meeting ends any more.
#[derive(Clone)]
enum BoardFailure {
    Gone { rank: usize, reason: LeaveReason },
    Late { rank: usize },
    Other(Error),
}

/// How a rank left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaveReason {
    /// The rank ended in order.
    Orderly,
    Panicked,
    /// The connection ended without notice.
    Closed,
    /// The process or machine no longer sends.
    Vanished,
    /// The rank sent invalid bytes.
    InvalidData,
}

impl LeaveReason {
    /// How the calling thread leaves: in order, or by a panic.
    pub(crate) fn of_this_thread() -> LeaveReason {
        if std::thread::panicking() { LeaveReason::Panicked } else { LeaveReason::Orderly }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            LeaveReason::Orderly => "it left the group",
            LeaveReason::Panicked => "its thread panicked",
            LeaveReason::Closed => "its connection closed",
            LeaveReason::Vanished => "it does not answer any more",
            LeaveReason::InvalidData => "it sent data that this version does not send",
        }
    }
}

impl<A, B> BoardState<A, B> {
    /// The rank that has been silent longest, for at least [`SILENT`], among the ranks for which
    /// `is_included` returns true. A rank without heartbeats counts as silent since the first
    /// heartbeat of any rank.
    fn silent(&self, is_included: impl Fn(usize) -> bool) -> Option<usize> {
        let (now, first) = (Instant::now(), self.watched?);
        let since = |rank: usize| match &self.heartbeats[rank] {
            Some(sign) => sign.continues.then_some((sign.at, rank)),
            None => Some((first, rank)),
        };
        let ranks = (0..self.heartbeats.len()).filter(|rank| is_included(*rank)).filter_map(since);
        ranks.filter(|(at, _)| now - *at >= SILENT).min().map(|(_, rank)| rank)
    }

    /// Whether the last heartbeat of some rank reports an overdue or stuck exchange.
    fn is_overdue(&self) -> bool {
        use ExchangeProblem::{Overdue, Stuck};
        let mut heartbeats = self.heartbeats.iter().flatten();
        heartbeats.any(|sign| matches!(sign.heartbeat.problem, Some(Overdue | Stuck)))
    }

    /// Progress of a rank's device: number of its group of devices, and of exchanges begun in it.
    fn position(&self, rank: usize) -> (u64, u64) {
        let sign = self.heartbeats[rank].as_ref();
        sign.map_or((0, 0), |LastHeartbeat { heartbeat, .. }| {
            (heartbeat.membership, heartbeat.reached)
        })
    }

    /// The lowest of the ranks with least progress, among the ranks for which `is_included` returns
    /// true.
    fn least_progress(&self, is_included: impl Fn(usize) -> bool) -> Option<usize> {
        let ranks = (0..self.heartbeats.len()).filter(|rank| is_included(*rank));
        ranks.min_by_key(|rank| self.position(*rank))
    }

    /// Whether all devices have ended at least the exchanges in `heartbeat`.
    fn have_ended(&self, heartbeat: &Heartbeat) -> bool {
        let mut heartbeats = self.heartbeats.iter();
        heartbeats
            .all(|sign| sign.as_ref().is_some_and(|sign| sign.heartbeat.ends() >= heartbeat.ends()))
    }
}

impl<A, B> RankBoard<A, B> {
    pub(crate) fn new(size: usize, deadline: Duration) -> Self {
        let state = BoardState {
            meeting: 0,
            arrived: 0,
            brought: (0..size).map(|_| None).collect(),
            here: vec![false; size],
            answers: (0..size).map(|_| None).collect(),
            heartbeats: (0..size).map(|_| None).collect(),
            watched: None,
            overdue_since: None,
            failure: None,
            loss: None,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        RankBoard { size, deadline, state, changed, signal: AtomicU64::new(0) }
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Contributes a value and waits for the other ranks. The last rank to arrive runs `complete`,
    /// which gets all contributions and writes every rank's answer.
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
        let meeting = state.meeting;
        let mut state = if state.arrived == self.size {
            self.complete(state, complete)
        } else {
            self.wait(state, meeting)
        };
        // A completed meeting is valid for this rank even if another rank has left since.
        match (state.answers.get_mut(rank).and_then(Option::take), &state.failure) {
            (Some(answer), _) => Ok(answer),
            (None, Some(failure)) => Err(self.error(operation, failure)),
            (None, None) => {
                unreachable!("a meeting ends with an answer for each rank or a failure")
            }
        }
    }

    /// Ends the meeting. Contributions are read and dropped without the lock: this may wait for a
    /// full stream, and a rank that leaves meanwhile needs the lock to report its departure.
    fn complete<'a>(
        &'a self,
        mut state: MutexGuard<'a, BoardState<A, B>>,
        complete: impl FnOnce(&[Option<A>], &mut [Option<B>]) -> Result<()>,
    ) -> MutexGuard<'a, BoardState<A, B>> {
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
        state.meeting += 1;
        match outcome {
            Ok(()) => self.notify(),
            Err(error) => self.fail(&mut state, BoardFailure::Other(error)),
        }
        state
    }

    /// Waits for the end of the meeting, a failure, or the deadline.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, BoardState<A, B>>,
        meeting: u64,
    ) -> MutexGuard<'a, BoardState<A, B>> {
        let end = Instant::now() + self.deadline;
        let signal = self.signal.load(Ordering::Acquire);
        drop(state);
        spin_until(|| self.signal.load(Ordering::Acquire) != signal);
        let mut state = lock(&self.state);
        while state.meeting == meeting && state.failure.is_none() {
            if Instant::now() >= end && state.arrived < self.size {
                let missing = |rank: usize| !state.here[rank];
                let rank = state.silent(missing).or_else(|| state.least_progress(missing));
                let rank = rank.unwrap_or_default();
                self.fail(&mut state, BoardFailure::Late { rank });
                break;
            }
            // All ranks have arrived and the meeting is being completed, which may wait for the
            // device.
            let completing = state.arrived == self.size;
            let end = if completing { Instant::now() + self.deadline } else { end };
            state = wait_until(&self.changed, state, end);
        }
        state
    }

    /// Records that a rank has left and will not arrive any more.
    pub(crate) fn leave(&self, rank: usize, reason: LeaveReason) {
        self.fail(&mut lock(&self.state), BoardFailure::Gone { rank, reason });
    }

    /// Records that a rank failed alone.
    pub(crate) fn abort(&self, rank: usize, reason: &str) {
        let error = Error::RankFailed { rank, reason: reason.to_owned() };
        self.fail(&mut lock(&self.state), BoardFailure::Other(error));
    }

    /// Records that a rank sends no more heartbeats, because its device starts no more exchanges.
    pub(crate) fn unwatch(&self, rank: usize) {
        if let Some(sign) = &mut lock(&self.state).heartbeats[rank] {
            sign.continues = false;
        }
    }

    /// Records the state of a rank's device and returns the state of the group. Does not wait.
    pub(crate) fn heartbeat(&self, rank: usize, heartbeat: &Heartbeat) -> GroupStatus {
        let mut state = lock(&self.state);
        let at = Instant::now();
        state.watched.get_or_insert(at);
        state.heartbeats[rank] =
            Some(LastHeartbeat { at, heartbeat: heartbeat.clone(), continues: true });
        match &heartbeat.problem {
            None if !state.is_overdue() => state.overdue_since = None,
            None => {}
            Some(problem @ (ExchangeProblem::Overdue | ExchangeProblem::Stuck)) => {
                let own = state.position(rank);
                let late = state.silent(|other| other != rank).or_else(|| {
                    state.least_progress(|other| other != rank && state.position(other) < own)
                });
                let late = late.or((*problem == ExchangeProblem::Stuck).then_some(rank));
                let since = *state.overdue_since.get_or_insert_with(Instant::now);
                if let Some(rank) = late {
                    self.fail(&mut state, BoardFailure::Late { rank });
                } else if since.elapsed() >= UNEXPLAINED_MAX {
                    self.fail(&mut state, BoardFailure::Other(endless(self.deadline)));
                }
            }
            Some(ExchangeProblem::Lost) => {
                if let Some(rank) = state.silent(|other| other != rank) {
                    self.fail(
                        &mut state,
                        BoardFailure::Gone { rank, reason: LeaveReason::Vanished },
                    );
                }
            }
            Some(ExchangeProblem::Failed(reason)) => {
                let error = Error::RankFailed { rank, reason: reason.clone() };
                self.fail(&mut state, BoardFailure::Other(error));
            }
        }
        match &state.loss {
            Some(loss) => GroupStatus::Lost(self.error("exchange", loss)),
            None if state.have_ended(heartbeat) => GroupStatus::Ended,
            None => GroupStatus::Sound,
        }
    }

    /// Stores a failure, unless there is one already.
    fn fail(&self, state: &mut BoardState<A, B>, failure: BoardFailure) {
        let parted = matches!(failure, BoardFailure::Gone { reason: LeaveReason::Orderly, .. });
        if !parted && state.loss.is_none() {
            state.loss = Some(failure.clone());
        }
        if state.failure.is_none() {
            state.failure = Some(failure);
        }
        self.notify();
    }

    /// Wakes the waiting ranks.
    fn notify(&self) {
        self.signal.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    fn error(&self, operation: &'static str, failure: &BoardFailure) -> Error {
        match *failure {
            BoardFailure::Gone { rank, reason } => {
                Error::RankGone { operation, rank, reason: reason.text() }
            }
            BoardFailure::Late { rank } => {
                Error::RankLate { operation, rank, seconds: self.deadline.as_secs_f64() }
            }
            BoardFailure::Other(ref error) => error.clone(),
        }
    }
}

/// The board on thousands of random schedules: `cargo test -p meristem-comm --features shuttle
/// --lib model`. A lost wake-up is a deadlock, because no rank reaches its deadline.
#[cfg(all(test, feature = "shuttle"))]
mod model {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use shuttle::{Config, Runner, thread};

    use super::*;
    use crate::sync::Arc;

    type SumBoard = RankBoard<u32, u32>;

    /// Runs `rank` on three threads.
    fn check(rank: impl Fn(usize, &SumBoard) + Send + Sync + Copy + 'static) {
        let program = move || {
            let board = Arc::new(SumBoard::new(3, Duration::from_secs(1 << 20)));
            let ranks: Vec<_> = (0..3)
                .map(|number| {
                    let board = board.clone();
                    thread::spawn(move || rank(number, &board))
                })
                .collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        };
        Runner::new(RandomScheduler::new_from_seed(1, 3000), Config::new()).run(program);
        Runner::new(PctScheduler::new_from_seed(2, 4, 3000), Config::new()).run(program);
    }

    /// Gives each rank the sum of all contributions.
    fn sum(board: &SumBoard, rank: usize, number: u32) -> Result<u32> {
        board.meet("sum", rank, number, |brought, answers| {
            let sum = brought.iter().flatten().sum();
            answers.iter_mut().for_each(|answer| *answer = Some(sum));
            Ok(())
        })
    }

    #[test]
    fn every_round_answers_every_rank() {
        check(|rank, board| {
            for round in 0..4 {
                let number = round * 10 + rank as u32;
                assert_eq!(sum(board, rank, number).unwrap(), 30 * round + 3);
            }
            // A rank may leave afterwards: the other ranks have their answers.
            board.leave(rank, LeaveReason::Orderly);
        });
    }

    #[test]
    fn a_rank_that_leaves_is_named_and_no_rank_hangs() {
        check(|rank, board| {
            assert_eq!(sum(board, rank, 1).unwrap(), 3);
            if rank == 1 {
                return board.leave(1, LeaveReason::Orderly);
            }
            for _ in 0..2 {
                let error = sum(board, rank, 1).unwrap_err();
                assert!(matches!(error, Error::RankGone { rank: 1, .. }), "{error}");
            }
        });
    }

    #[test]
    fn a_rank_that_aborts_is_named_and_no_rank_hangs() {
        check(|rank, board| {
            assert_eq!(sum(board, rank, 1).unwrap(), 3);
            if rank == 2 {
                board.abort(2, "a reason");
                return board.leave(2, LeaveReason::Orderly);
            }
            for _ in 0..2 {
                let error = sum(board, rank, 1).unwrap_err();
                assert!(matches!(error, Error::RankFailed { rank: 2, .. }), "{error}");
            }
        });
    }

    #[test]
    fn a_failed_round_fails_for_every_rank() {
        check(|rank, board| {
            assert_eq!(sum(board, rank, 1).unwrap(), 3);
            let fail = |operation| Error::RankGone { operation, rank: 7, reason: "refused" };
            let result = board.meet("fail", rank, 0, |_, _| Err(fail("fail")));
            assert!(matches!(result, Err(Error::RankGone { rank: 7, .. })));
            let after = sum(board, rank, 1);
            assert!(matches!(after, Err(Error::RankGone { rank: 7, reason: "refused", .. })));
        });
    }
}

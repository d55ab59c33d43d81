//! Model check of the protocol of a meeting, over thousands of schedules. For every failure of a
//! rank and every order of arrival, no rank hangs, and each gets the right error. A hang shows as a
//! deadlock, because the model has no clock.

use std::sync::Arc;

use meristem_comm::Error as CommError;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::{Condvar, Mutex};
use shuttle::{Config, Runner, thread};

use super::meeting::{Meetings, Receivers, Wire};
use crate::error::{Error, Result};

const RANKS: usize = 3;
const SCHEDULES: usize = 400;

/// End of all meetings, by an error of the transport.
#[derive(Clone, Copy, Debug)]
enum ModelEnd {
    Gone(usize),
    Late(usize),
    Disagreed,
}

impl ModelEnd {
    fn error(self) -> Error {
        let operation = "model";
        match self {
            Self::Gone(rank) => CommError::RankGone { operation, rank, reason: "it died" },
            Self::Late(rank) => CommError::RankLate { operation, rank, seconds: 1.0 },
            Self::Disagreed => {
                let (rank, what) = (0, "a call of");
                let (expected, got) = ("one".to_string(), "another".to_string());
                CommError::Disagreement { operation, rank, what, expected, got }
            }
        }
        .into()
    }
}

/// A call of a rank, which must be equal on all ranks.
type ModelCall = (Vec<usize>, Receivers);

#[derive(Default)]
struct ModelBoard {
    /// Calls of the round in progress, with their messages.
    calls: Vec<Option<(ModelCall, Vec<u8>)>>,
    /// Messages of the round before.
    sent: Vec<Vec<u8>>,
    rounds: usize,
    end: Option<ModelEnd>,
}

/// Model of a transport of `meristem-comm`: it compares the calls of all ranks before anything
/// moves, a round is complete for all or for none, and nothing follows an error.
struct ModelHub {
    board: Mutex<ModelBoard>,
    changed: Condvar,
}

impl ModelHub {
    fn new() -> Self {
        let board = ModelBoard { calls: vec![None; RANKS], ..ModelBoard::default() };
        Self { board: Mutex::new(board), changed: Condvar::new() }
    }

    fn meet(&self, rank: usize, call: ModelCall, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut board = self.board.lock().unwrap();
        if let Some(end) = board.end {
            return Err(end.error());
        }
        board.calls[rank] = Some((call, own.to_vec()));
        let round = board.rounds;
        if board.calls.iter().all(Option::is_some) {
            let all: Vec<_> = board.calls.iter_mut().filter_map(Option::take).collect();
            if all.iter().all(|(call, _)| *call == all[0].0) {
                board.sent = all.into_iter().map(|(_, sent)| sent).collect();
            } else {
                board.end = Some(ModelEnd::Disagreed);
            }
            board.rounds += 1;
            self.changed.notify_all();
        }
        while board.rounds == round && board.end.is_none() {
            board = self.changed.wait(board).unwrap();
        }
        match board.end {
            // A complete round is complete for ranks that wake up later, too.
            Some(end) if board.rounds == round || matches!(end, ModelEnd::Disagreed) => {
                Err(end.error())
            }
            _ => Ok(board.sent.clone()),
        }
    }

    fn end(&self, end: ModelEnd) {
        self.board.lock().unwrap().end.get_or_insert(end);
        self.changed.notify_all();
    }

    /// Is late: arrives only after all others have timed out.
    fn come_late(&self, rank: usize) {
        let waits = |board: &ModelBoard| board.calls.iter().flatten().count() == RANKS - 1;
        while !waits(&self.board.lock().unwrap()) && self.board.lock().unwrap().end.is_none() {
            thread::yield_now();
        }
        self.end(ModelEnd::Late(rank));
    }
}

struct ModelWire {
    hub: Arc<ModelHub>,
    rank: usize,
}

impl Wire for ModelWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        RANKS
    }

    fn exchange(
        &mut self,
        own: &[u8],
        bytes: &[usize],
        receivers: Receivers,
    ) -> Result<Vec<Vec<u8>>> {
        let all = self.hub.meet(self.rank, (bytes.to_vec(), receivers), own)?;
        let heard = |(sent, bytes): (&Vec<u8>, &usize)| sent[..*bytes].to_vec();
        let heard = all.iter().zip(bytes).map(heard);
        Ok(if receivers.contains(self.rank) { heard.collect() } else { vec![] })
    }

    fn barrier(&mut self) -> Result<()> {
        self.hub.meet(self.rank, (vec![], Receivers::All), &[]).map(drop)
    }
}

impl Drop for ModelWire {
    /// A process that ended is gone for the others.
    fn drop(&mut self) {
        self.hub.end(ModelEnd::Gone(self.rank));
    }
}

/// Event that happens to a rank before one of its meetings.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RankFate {
    Fails,
    Dies,
    IsLate,
    /// Makes another call than the other ranks do.
    Disagrees,
    /// Has timed out elsewhere, in an exchange of gradients, waiting for rank 2.
    HasWaited,
}

/// A fate of one rank, before one of its meetings.
#[derive(Clone, Copy, Debug)]
struct Doom {
    rank: usize,
    meeting: usize,
    fate: RankFate,
}

const MEETINGS: usize = 3;

fn own_error(rank: usize) -> Error {
    Error::value("seed", rank, "another")
}

/// Runs a rank: meetings of all kinds, then it leaves. `None` if it died.
fn run(hub: &Arc<ModelHub>, rank: usize, dooms: &[Doom]) -> Option<Result<usize>> {
    let mut meetings = Meetings::over(ModelWire { hub: Arc::clone(hub), rank });
    let own = |rank: usize| vec![rank as u8; rank + 1];
    let mut meet = |meeting: usize| -> Option<Result<()>> {
        let doom = dooms.iter().find(|doom| (doom.rank, doom.meeting) == (rank, meeting));
        let mut receivers = [Receivers::All, Receivers::Root, Receivers::All][meeting];
        match doom.map(|doom| doom.fate) {
            Some(RankFate::Fails) => return Some(Err(own_error(rank))),
            Some(RankFate::HasWaited) => return Some(Err(ModelEnd::Late(2).error())),
            Some(RankFate::Dies) => return None,
            Some(RankFate::IsLate) => hub.come_late(rank),
            Some(RankFate::Disagrees) => receivers = Receivers::Root,
            None => {}
        }
        let met = meetings.meet(Ok(own(rank)), receivers);
        Some(met.map(|heard| {
            let all: Vec<Vec<u8>> = (0..RANKS).map(own).collect();
            assert_eq!(heard, if receivers.contains(rank) { all } else { vec![] });
        }))
    };
    let mut result = Ok(rank);
    for meeting in 0..MEETINGS {
        if let Err(error) = meet(meeting)? {
            result = Err(error);
            break;
        }
    }
    let agreed = meetings.agree(result);
    Some(meetings.leave(agreed))
}

/// Runs all ranks on many schedules and passes their results to `judge`.
fn check(dooms: &'static [Doom], judge: fn(&[Option<Result<usize>>])) {
    let program = move || {
        let hub = Arc::new(ModelHub::new());
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let hub = Arc::clone(&hub);
                thread::spawn(move || run(&hub, rank, dooms))
            })
            .collect();
        let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        judge(&results);
    };
    Runner::new(RandomScheduler::new_from_seed(1, SCHEDULES), Config::new()).run(program);
    Runner::new(PctScheduler::new_from_seed(2, 4, SCHEDULES), Config::new()).run(program);
}

/// The error of each rank, as text; empty if it has none or has died.
fn texts(results: &[Option<Result<usize>>]) -> Vec<String> {
    let text = |result: &Option<Result<usize>>| match result {
        Some(Err(error)) => error.to_string(),
        _ => String::new(),
    };
    results.iter().map(text).collect()
}

/// One fate of a rank, before each meeting in turn.
const fn alone(rank: usize, fate: RankFate) -> [[Doom; 1]; MEETINGS] {
    [
        [Doom { rank, meeting: 0, fate }],
        [Doom { rank, meeting: 1, fate }],
        [Doom { rank, meeting: 2, fate }],
    ]
}

#[test]
fn all_are_well_and_leave_with_their_results() {
    check(&[], |results| {
        for (rank, result) in results.iter().enumerate() {
            assert_eq!(*result.as_ref().unwrap().as_ref().unwrap(), rank);
        }
    });
}

#[test]
fn a_rank_that_fails_is_heard_of_by_all() {
    static DOOMS: [[Doom; 1]; MEETINGS] = alone(1, RankFate::Fails);
    for dooms in &DOOMS {
        check(dooms, |results| {
            let (own, reported) = (own_error(1).to_string(), format!("rank 1: {}", own_error(1)));
            assert_eq!(texts(results), [reported.clone(), own, reported]);
        });
    }
}

#[test]
fn of_several_that_fail_each_has_its_own_error_and_the_others_the_first_ones() {
    static DOOMS: [Doom; 2] = [
        Doom { rank: 2, meeting: 1, fate: RankFate::Fails },
        Doom { rank: 1, meeting: 1, fate: RankFate::Fails },
    ];
    check(&DOOMS, |results| {
        let reported = format!("rank 1: {}", own_error(1));
        assert_eq!(texts(results), [reported, own_error(1).to_string(), own_error(2).to_string()]);
    });
}

#[test]
fn a_rank_that_dies_is_named_by_all_others() {
    static DOOMS: [[Doom; 1]; MEETINGS] = alone(0, RankFate::Dies);
    for dooms in &DOOMS {
        check(dooms, |results| {
            assert!(results[0].is_none());
            let gone = ModelEnd::Gone(0).error().to_string();
            assert_eq!(texts(results), [String::new(), gone.clone(), gone]);
        });
    }
}

#[test]
fn a_rank_that_is_late_is_named_by_all_and_nobody_waits_for_it_again() {
    static DOOMS: [[Doom; 1]; MEETINGS] = alone(2, RankFate::IsLate);
    for dooms in &DOOMS {
        check(dooms, |results| {
            let late = ModelEnd::Late(2).error().to_string();
            assert_eq!(texts(results), [late.clone(), late.clone(), late]);
        });
    }
}

#[test]
fn ranks_that_make_other_calls_all_hear_of_it() {
    static DOOMS: [Doom; 1] = [Doom { rank: 1, meeting: 0, fate: RankFate::Disagrees }];
    check(&DOOMS, |results| {
        let disagreed = ModelEnd::Disagreed.error().to_string();
        assert_eq!(texts(results), [disagreed.clone(), disagreed.clone(), disagreed]);
    });
}

/// The others may hear of the failure before or after the death. No rank is left without an error,
/// and the failed rank keeps its own.
#[test]
fn a_rank_that_fails_while_another_dies_keeps_its_error() {
    static DOOMS: [Doom; 2] = [
        Doom { rank: 1, meeting: 1, fate: RankFate::Fails },
        Doom { rank: 2, meeting: 1, fate: RankFate::Dies },
    ];
    check(&DOOMS, |results| {
        let gone = ModelEnd::Gone(2).error().to_string();
        assert_eq!(texts(results), [gone, own_error(1).to_string(), String::new()]);
    });
}

/// A rank that has timed out does not wait again: the late rank finds that the others are gone.
#[test]
fn a_rank_that_was_late_elsewhere_is_not_waited_for() {
    static DOOMS: [Doom; 2] = [
        Doom { rank: 0, meeting: 1, fate: RankFate::HasWaited },
        Doom { rank: 1, meeting: 1, fate: RankFate::HasWaited },
    ];
    check(&DOOMS, |results| {
        let (texts, late) = (texts(results), ModelEnd::Late(2).error().to_string());
        assert_eq!(texts[..2], [late.clone(), late]);
        assert!(texts[2].contains("is gone"), "{texts:?}");
    });
}

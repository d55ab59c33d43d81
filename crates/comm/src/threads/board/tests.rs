//! Heartbeats of ranks' devices, and the board's conclusions.
#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap")]

use std::time::Duration;

use super::*;

const DEADLINE: Duration = Duration::from_secs(60);

/// A group of four in which each rank has sent a heartbeat: its age in seconds, and the exchange
/// reached.
fn watched(heartbeats: [(u64, u64); 4]) -> RankBoard<(), ()> {
    let board = RankBoard::new(4, DEADLINE);
    for (rank, (ago, reached)) in heartbeats.into_iter().enumerate() {
        assert!(!matches!(board.heartbeat(rank, &beat(reached, None)), GroupStatus::Lost(_)));
        let state = &mut *lock(&board.state);
        let sign = state.heartbeats[rank].as_mut().expect("just sent");
        sign.at -= Duration::from_secs(ago);
    }
    board
}

fn beat(reached: u64, problem: Option<ExchangeProblem>) -> Heartbeat {
    Heartbeat { membership: 1, reached, ended: reached, closing: false, problem }
}

/// The error after a problem of rank 0, which has reached exchange 5.
fn error(board: &RankBoard<(), ()>, problem: ExchangeProblem) -> Option<Error> {
    match board.heartbeat(0, &beat(5, Some(problem))) {
        GroupStatus::Lost(error) => Some(error),
        _ => None,
    }
}

#[test]
fn the_longest_silent_rank_is_late_and_no_rank_is_guessed() {
    let late = |heartbeats| error(&watched(heartbeats), ExchangeProblem::Overdue).unwrap();
    // Rank 1 has least progress; rank 3 has been silent longer than rank 2.
    let silent = late([(0, 5), (0, 4), (20, 5), (30, 5)]);
    assert!(matches!(silent, Error::RankLate { rank: 3, .. }), "{silent}");
    let behind = late([(0, 5), (0, 5), (1, 4), (2, 5)]);
    assert!(matches!(behind, Error::RankLate { rank: 2, .. }), "{behind}");
    let board = watched([(0, 5), (1, 5), (2, 6), (1, 5)]);
    // Another rank may still explain it.
    assert!(error(&board, ExchangeProblem::Overdue).is_none());
    lock(&board.state).overdue_since = Instant::now().checked_sub(UNEXPLAINED_MAX);
    let nobody = error(&board, ExchangeProblem::Overdue).unwrap();
    assert!(matches!(nobody, Error::Endless { seconds: 60.0, .. }), "{nobody}");
    assert!(nobody.to_string().contains("the responsible rank is unknown"));
    let stuck = error(&watched([(0, 5), (1, 6), (1, 6), (1, 6)]), ExchangeProblem::Stuck).unwrap();
    assert!(matches!(stuck, Error::RankLate { rank: 0, .. }), "{stuck}");
    // A rank without any heartbeat.
    let board = watched([(0, 5), (1, 5), (0, 5), (0, 5)]);
    lock(&board.state).heartbeats[2] = None;
    let never = error(&board, ExchangeProblem::Overdue).unwrap();
    assert!(matches!(never, Error::RankLate { rank: 2, .. }), "{never}");
}

#[test]
fn an_exchange_that_completes_late_does_not_shorten_the_next_wait() {
    let board = watched([(0, 5); 4]);
    assert!(error(&board, ExchangeProblem::Overdue).is_none());
    lock(&board.state).overdue_since = Instant::now().checked_sub(UNEXPLAINED_MAX);
    // Another rank without a problem says nothing about the exchange of rank 0.
    board.heartbeat(1, &beat(5, None));
    assert!(lock(&board.state).overdue_since.is_some());
    board.heartbeat(0, &beat(5, None));
    assert!(error(&board, ExchangeProblem::Overdue).is_none());
}

#[test]
fn a_lost_rank_is_a_silent_rank() {
    let board = watched([(0, 5), (0, 4), (0, 5), (4, 5)]);
    assert!(error(&board, ExchangeProblem::Lost).is_none());
    let lost = error(&watched([(0, 5), (0, 4), (0, 5), (6, 5)]), ExchangeProblem::Lost).unwrap();
    assert!(matches!(lost, Error::RankGone { rank: 3, .. }), "{lost}");
    assert!(lost.to_string().contains("it does not answer any more"), "{lost}");
    // Neither a rank that has left its group of devices, nor one before its first heartbeat.
    let board = watched([(0, 5), (0, 5), (20, 5), (0, 5)]);
    board.unwatch(2);
    lock(&board.state).heartbeats[3] = None;
    assert!(error(&board, ExchangeProblem::Lost).is_none());
    lock(&board.state).watched = Instant::now().checked_sub(SILENT);
    let lost = error(&board, ExchangeProblem::Lost).unwrap();
    assert!(matches!(lost, Error::RankGone { rank: 3, .. }), "{lost}");
}

#[test]
fn a_heartbeat_reports_when_all_devices_have_ended_its_exchanges() {
    let board = RankBoard::<(), ()>::new(3, DEADLINE);
    let end = |rank, membership, ended| {
        board.heartbeat(rank, &Heartbeat { membership, ended, ..Heartbeat::default() })
    };
    assert!(matches!(end(0, 1, 4), GroupStatus::Sound));
    assert!(matches!(end(1, 1, 3), GroupStatus::Sound));
    // Rank 2 has ended fewer exchanges than the others; it need not wait for more.
    assert!(matches!(end(2, 1, 3), GroupStatus::Ended));
    assert!(matches!(end(1, 1, 4), GroupStatus::Sound));
    // A rank in the next group of devices has ended this one.
    assert!(matches!(end(2, 2, 0), GroupStatus::Sound));
    board.unwatch(2);
    assert!(matches!(end(0, 1, 4), GroupStatus::Ended));
    assert!(matches!(end(1, 1, 5), GroupStatus::Sound));
}

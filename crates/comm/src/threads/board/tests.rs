//! Heartbeats of ranks' devices, and the board's conclusions.
#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap")]

use std::time::Duration;

use super::*;

const DEADLINE: Duration = Duration::from_secs(60);

/// A group of four in which each rank has sent a heartbeat: its age in seconds, and the exchange
/// reached.
fn watched(pulses: [(u64, u64); 4]) -> RankBoard<(), ()> {
    let board = RankBoard::new(4, DEADLINE);
    for (rank, (ago, reached)) in pulses.into_iter().enumerate() {
        assert!(!matches!(board.pulse(rank, &beat(reached, None)), News::Lost(_)));
        let state = &mut *lock(&board.state);
        let sign = state.signs[rank].as_mut().expect("just sent");
        sign.at -= Duration::from_secs(ago);
    }
    board
}

fn beat(reached: u64, trouble: Option<Trouble>) -> Pulse {
    Pulse { membership: 1, reached, ended: reached, closing: false, trouble }
}

/// The error after a problem of rank 0, which has reached exchange 5.
fn error(board: &RankBoard<(), ()>, trouble: Trouble) -> Option<Error> {
    match board.pulse(0, &beat(5, Some(trouble))) {
        News::Lost(error) => Some(error),
        _ => None,
    }
}

#[test]
fn who_was_silent_longest_is_late_and_nobody_is_guessed() {
    let late = |pulses| error(&watched(pulses), Trouble::Overdue).unwrap();
    // Rank 1 has least progress; rank 3 has been silent longer than rank 2.
    let silent = late([(0, 5), (0, 4), (20, 5), (30, 5)]);
    assert!(matches!(silent, Error::RankLate { rank: 3, .. }), "{silent}");
    let behind = late([(0, 5), (0, 5), (1, 4), (2, 5)]);
    assert!(matches!(behind, Error::RankLate { rank: 2, .. }), "{behind}");
    let board = watched([(0, 5), (1, 5), (2, 6), (1, 5)]);
    // Another rank may still explain it.
    assert!(error(&board, Trouble::Overdue).is_none());
    lock(&board.state).unnamed = Instant::now().checked_sub(UNNAMED);
    let nobody = error(&board, Trouble::Overdue).unwrap();
    assert!(matches!(nobody, Error::Endless { seconds: 60.0, .. }), "{nobody}");
    assert!(nobody.to_string().contains("it is not known which rank is the reason"));
    let stuck = error(&watched([(0, 5), (1, 6), (1, 6), (1, 6)]), Trouble::Stuck).unwrap();
    assert!(matches!(stuck, Error::RankLate { rank: 0, .. }), "{stuck}");
    // A rank without any heartbeat.
    let board = watched([(0, 5), (1, 5), (0, 5), (0, 5)]);
    lock(&board.state).signs[2] = None;
    let never = error(&board, Trouble::Overdue).unwrap();
    assert!(matches!(never, Error::RankLate { rank: 2, .. }), "{never}");
}

#[test]
fn a_loss_is_that_of_a_silent_rank() {
    let board = watched([(0, 5), (0, 4), (0, 5), (4, 5)]);
    assert!(error(&board, Trouble::Lost).is_none());
    let lost = error(&watched([(0, 5), (0, 4), (0, 5), (6, 5)]), Trouble::Lost).unwrap();
    assert!(matches!(lost, Error::RankGone { rank: 3, .. }), "{lost}");
    assert!(lost.to_string().contains("it does not answer any more"), "{lost}");
    // Neither a rank that has left its group of devices, nor one before its first heartbeat.
    let board = watched([(0, 5), (0, 5), (20, 5), (0, 5)]);
    board.unwatch(2);
    lock(&board.state).signs[3] = None;
    assert!(error(&board, Trouble::Lost).is_none());
    lock(&board.state).watched = Instant::now().checked_sub(SILENT);
    let lost = error(&board, Trouble::Lost).unwrap();
    assert!(matches!(lost, Error::RankGone { rank: 3, .. }), "{lost}");
}

#[test]
fn a_rank_learns_when_all_devices_have_ended_as_many_exchanges_as_its_own() {
    let board = RankBoard::<(), ()>::new(3, DEADLINE);
    let end = |rank, membership, ended| {
        board.pulse(rank, &Pulse { membership, ended, ..Pulse::default() })
    };
    assert!(matches!(end(0, 1, 4), News::Sound));
    assert!(matches!(end(1, 1, 3), News::Sound));
    // Rank 2 has ended fewer exchanges than the others; it need not wait for more.
    assert!(matches!(end(2, 1, 3), News::Ended));
    assert!(matches!(end(1, 1, 4), News::Sound));
    // A rank in the next group of devices has ended this one.
    assert!(matches!(end(2, 2, 0), News::Sound));
    board.unwatch(2);
    assert!(matches!(end(0, 1, 4), News::Ended));
    assert!(matches!(end(1, 1, 5), News::Sound));
}

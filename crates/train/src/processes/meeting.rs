//! Protocol of a meeting between the processes of a run.
//!
//! All processes do the same steps and meet where one needs the others. A meeting has two
//! exchanges. In the first, every process sends a header: its state (well or failed) and the length
//! of its message. In the second, messages go to the receivers. A failure therefore reaches the
//! others in their next meeting, of whatever kind, and no process waits for one that has failed:
//! - All processes are well: the receivers get all messages.
//! - Some have failed: every process returns an error. A process that failed by itself returns its
//!   own error. The others return the error of the first rank that failed by itself. If there is
//!   none, a process that failed because of another rank returns its own error, and the others
//!   return that of the first such rank.
//! - One is gone or late: the others return the transport's error, which names it, or their own if
//!   they have failed, and meet no more.
//!
//! Messages are bytes, carried by a [`Wire`].

use crate::error::{Error, Result};

use super::message::{RankFailure, garbled, pack, unpack};

/// Transport of bytes between the processes. All processes make the same calls in the same order.
pub(super) trait Wire {
    /// Rank of this process.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn size(&self) -> usize;

    /// Sends `own` to the receivers. Returns all messages by rank, or nothing if this process is
    /// not a receiver. `bytes` has the lengths of all messages, by rank.
    ///
    /// # Errors
    /// A process is gone, is late, or makes another call.
    fn exchange(
        &mut self,
        own: &[u8],
        bytes: &[usize],
        receivers: Receivers,
    ) -> Result<Vec<Vec<u8>>>;

    /// Waits until all processes have called it.
    ///
    /// # Errors
    /// As [`Wire::exchange`].
    fn barrier(&mut self) -> Result<()>;
}

/// Receivers of the messages of a meeting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Receivers {
    /// All processes.
    All,
    /// Rank 0 only.
    Root,
}

impl Receivers {
    /// Whether `rank` is a receiver.
    pub(super) fn contains(self, rank: usize) -> bool {
        self == Self::All || rank == 0
    }
}

/// State of a process in a meeting, and the length of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MeetingHeader {
    state: u64,
    bytes: u64,
}

/// State of a process without a failure.
const WELL: u64 = 0;
/// State of a process that failed by itself.
const FAILED: u64 = 1;
/// State of a process that failed because of another rank.
const FAILED_BY_OTHER: u64 = 2;

/// Meetings of one process with the others.
pub(super) struct Meetings<W> {
    wire: W,
    /// Whether no meeting may follow: a failure has reached all processes, or a process is gone or
    /// late.
    failed: bool,
}

impl<W: Wire> Meetings<W> {
    /// Meetings over a wire.
    pub(super) fn over(wire: W) -> Self {
        Self { wire, failed: false }
    }

    /// Rank of this process.
    pub(super) fn rank(&self) -> usize {
        self.wire.rank()
    }

    /// Number of processes.
    pub(super) fn size(&self) -> usize {
        self.wire.size()
    }

    /// Returns `own` if all processes are well, and an error on every process otherwise. If no
    /// meeting may follow any more, an error in `own` is returned without a meeting.
    ///
    /// # Errors
    /// This process's error, or else the error of another rank.
    pub(super) fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        match own {
            Ok(value) => self.meet(Ok(vec![]), Receivers::All).map(|_| value),
            Err(error) if self.failed => Err(error),
            Err(error) => {
                // A meeting with a failed process always returns an error.
                self.meet(Err(error), Receivers::All).and_then(|_| Err(garbled(0, &"nothing")))
            }
        }
    }

    /// Leaves the meetings: sends an error to the others, unless they have it, and waits for the
    /// others, some of which may be gone. If the error is that a rank is late, it does not wait. A
    /// success needs no meeting, because all processes have agreed on it before.
    ///
    /// # Errors
    /// As [`Meetings::agree`].
    pub(super) fn leave<T>(mut self, result: Result<T>) -> Result<T> {
        let result = match result {
            Err(error) => self.agree(Err(error)),
            fine => fine,
        };
        if !result.as_ref().is_err_and(Error::is_of_a_late_rank) {
            // A process that is gone by now is not a failure.
            let _ = self.wire.barrier();
        }
        result
    }

    /// Holds a meeting: each process sends `own`; receivers get all messages by rank, other
    /// processes nothing.
    ///
    /// # Errors
    /// The error in `own`, another rank's error, or the transport's error.
    pub(super) fn meet(
        &mut self,
        own: Result<Vec<u8>>,
        receivers: Receivers,
    ) -> Result<Vec<Vec<u8>>> {
        let (message, error) = match own {
            Ok(message) => (message, None),
            // Another meeting would wait for the late rank a second time.
            Err(error) if error.is_of_a_late_rank() => {
                self.failed = true;
                return Err(error);
            }
            Err(error) => (pack(&RankFailure::from_error(&error))?, Some(error)),
        };
        let state = match &error {
            None => WELL,
            Some(error) if error.is_of_another_rank() => FAILED_BY_OTHER,
            Some(_) => FAILED,
        };
        let met = self.headers(MeetingHeader { state, bytes: message.len() as u64 }).and_then(
            |headers| {
                let well = headers.iter().all(|header| header.state == WELL);
                // After a failure only the failed processes send, and all receive.
                let receivers = if well { receivers } else { Receivers::All };
                let speaks = |header: &MeetingHeader| well || header.state != WELL;
                let bytes = |header| if speaks(header) { header.bytes as usize } else { 0 };
                let bytes: Vec<usize> = headers.iter().map(bytes).collect();
                Ok((headers, self.wire.exchange(&message, &bytes, receivers)?))
            },
        );
        let (headers, all) = match met {
            Ok(met) => met,
            Err(gone) => {
                self.failed = true;
                return Err(error.unwrap_or(gone));
            }
        };
        let rank_of = |state| headers.iter().position(|header| header.state == state);
        // The original failure is more informative than later ones.
        let Some(rank) = rank_of(FAILED).or(rank_of(FAILED_BY_OTHER)) else { return Ok(all) };
        self.failed = true;
        match error {
            Some(error) if state == FAILED || state == headers[rank].state => Err(error),
            _ => Err(unpack::<RankFailure>(rank, &all[rank])?.at(rank)),
        }
    }

    /// The headers of all processes, by rank.
    fn headers(&mut self, own: MeetingHeader) -> Result<Vec<MeetingHeader>> {
        let own = [own.state.to_le_bytes(), own.bytes.to_le_bytes()].concat();
        let all = self.wire.exchange(&own, &vec![own.len(); self.size()], Receivers::All)?;
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let header = |bytes: &Vec<u8>| {
            let (state, bytes) = bytes.split_at(8);
            MeetingHeader { state: number(state), bytes: number(bytes) }
        };
        Ok(all.iter().map(header).collect())
    }
}

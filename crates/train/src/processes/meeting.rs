//! The protocol by which the processes of a run meet.
//!
//! All do the same steps, and meet where one needs the others. A meeting is two exchanges. In the
//! first each says how it comes, well or failed, and how much it has to say; in the second those
//! speak who are heard. So a failure is heard of wherever the others are, and nobody waits for one
//! that has failed:
//! - if all are well, each hears what it is to hear;
//! - if one has failed, all return an error: its own where it failed, elsewhere that of the first
//!   rank that failed by itself, or else of the first that failed for what became of another;
//! - if one is gone or late, the others return the transport's error, which names it. After that
//!   nobody meets.
//!
//! Messages are bytes; a [`Wire`] carries them.

use crate::error::{Error, Result};

use super::message::{Failure, garbled, pack, unpack};

/// Carries bytes between the processes. All make the same calls in the same order.
pub(super) trait Wire {
    /// Number of this process.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn size(&self) -> usize;

    /// Sends `own` to the receivers; returns what each sent by rank, or nothing where it is no
    /// receiver. `bytes` are the lengths of all, by rank.
    ///
    /// # Errors
    /// A process is gone, late, or makes another call.
    fn exchange(
        &mut self,
        own: &[u8],
        bytes: &[usize],
        receivers: Receivers,
    ) -> Result<Vec<Vec<u8>>>;

    /// Waits until all have come here.
    ///
    /// # Errors
    /// As [`Wire::exchange`].
    fn barrier(&mut self) -> Result<()>;
}

/// The processes that receive what is said in a meeting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Receivers {
    /// All of them.
    All,
    /// Rank 0 alone.
    Root,
}

impl Receivers {
    /// Whether a rank is one of them.
    pub(super) fn contains(self, rank: usize) -> bool {
        self == Self::All || rank == 0
    }
}

/// The state in which a process comes to a meeting, and the length of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    state: u64,
    bytes: u64,
}

/// It is well.
const WELL: u64 = 0;
/// It has failed.
const FAILED: u64 = 1;
/// It has failed for what became of another.
const LEFT_ALONE: u64 = 2;

/// The meetings of one process with the others.
pub(super) struct Meetings<W> {
    wire: W,
    /// All know that one of them has failed.
    failed: bool,
}

impl<W: Wire> Meetings<W> {
    /// Meetings over a wire.
    pub(super) fn over(wire: W) -> Self {
        Self { wire, failed: false }
    }

    /// Number of this process.
    pub(super) fn rank(&self) -> usize {
        self.wire.rank()
    }

    /// Number of processes.
    pub(super) fn size(&self) -> usize {
        self.wire.size()
    }

    /// This process' result, if all have one. If one has failed, all have; where all know of it,
    /// they do not meet.
    ///
    /// # Errors
    /// This process', or one that another has failed with.
    pub(super) fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        match own {
            Ok(value) => self.meet(Ok(vec![]), Receivers::All).map(|_| value),
            Err(error) if self.failed => Err(error),
            Err(error) => {
                // A meeting to which one comes that has failed is never well.
                self.meet(Err(error), Receivers::All).and_then(|_| Err(garbled(0, &"nothing")))
            }
        }
    }

    /// The last meeting: agrees on the result, and waits for the others, who may not be there any
    /// more.
    ///
    /// # Errors
    /// As [`Meetings::agree`].
    pub(super) fn leave<T>(mut self, result: Result<T>) -> Result<T> {
        let result = match result {
            Err(error) => self.agree(Err(error)),
            fine => fine,
        };
        if !result.as_ref().is_err_and(Error::is_of_a_late_rank) {
            // Whoever is gone by now is no reason to fail.
            let _ = self.wire.barrier();
        }
        result
    }

    /// A meeting: each sends `own`; receivers get what all sent, by rank, and the others nothing.
    ///
    /// # Errors
    /// The one in `own`; another rank's; the transport's.
    pub(super) fn meet(
        &mut self,
        own: Result<Vec<u8>>,
        receivers: Receivers,
    ) -> Result<Vec<Vec<u8>>> {
        let (said, error) = match own {
            Ok(said) => (said, None),
            // All have waited for it. They would again.
            Err(error) if error.is_of_a_late_rank() => {
                self.failed = true;
                return Err(error);
            }
            Err(error) => (pack(&Failure::of(&error))?, Some(error)),
        };
        let state = match &error {
            None => WELL,
            Some(error) if error.is_of_another_rank() => LEFT_ALONE,
            Some(_) => FAILED,
        };
        let met = self.headers(Header { state, bytes: said.len() as u64 }).and_then(|headers| {
            let well = headers.iter().all(|header| header.state == WELL);
            let receivers = if well { receivers } else { Receivers::All };
            let speaks = |header: &Header| well || header.state != WELL;
            let bytes = |header| if speaks(header) { header.bytes as usize } else { 0 };
            let bytes: Vec<usize> = headers.iter().map(bytes).collect();
            Ok((headers, self.wire.exchange(&said, &bytes, receivers)?))
        });
        let (headers, all) = match met {
            Ok(met) => met,
            Err(gone) => {
                self.failed = true;
                return Err(error.unwrap_or(gone));
            }
        };
        let rank_of = |state| headers.iter().position(|header| header.state == state);
        // Who failed says more than those that it left.
        let Some(rank) = rank_of(FAILED).or(rank_of(LEFT_ALONE)) else { return Ok(all) };
        self.failed = true;
        match error {
            Some(error) if state == FAILED || state == headers[rank].state => Err(error),
            _ => Err(unpack::<Failure>(rank, &all[rank])?.at(rank)),
        }
    }

    /// The headers of all, by rank.
    fn headers(&mut self, own: Header) -> Result<Vec<Header>> {
        let own = [own.state.to_le_bytes(), own.bytes.to_le_bytes()].concat();
        let all = self.wire.exchange(&own, &vec![own.len(); self.size()], Receivers::All)?;
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let header = |bytes: &Vec<u8>| {
            let (state, bytes) = bytes.split_at(8);
            Header { state: number(state), bytes: number(bytes) }
        };
        Ok(all.iter().map(header).collect())
    }
}

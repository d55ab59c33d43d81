//! Temporary memory of kernels on a CPU device: pieces of memory that the kernels of all streams
//! use in turn.
//!
//! A worker prefers the piece that it used last, which its caches may still hold. With separate
//! memory for each kernel, other streams would displace it from the caches before the next run.
//!
//! Invariants
//! - A piece is in one place: among the free ones, or with the one kernel that borrowed it.
//! - There are at least as many pieces of the current size as kernels that can borrow one at the
//!   same time: the number of streams with a reservation, but at most the number of workers. A
//!   larger size replaces all of them; a kernel that holds a smaller piece gives it back to the
//!   pool.
//! - A kernel in flight holds its reservation, so that a piece exists when it runs. When the last
//!   reservation is dropped, all pieces are given back.
//! - A host thread that finds no memory waits for pieces that kernels in flight will give back, so
//!   that the success of a request does not depend on timing.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::thread::ThreadId;

use super::block::MemoryBlock;
use super::host_block::HostBlock;
use crate::ground::Result;
use crate::ground::sync::{Arc, Condvar, Mutex, MutexGuard, lock, wait_on};

/// Memory that one kernel at a time uses.
pub(crate) struct ScratchPiece {
    block: Arc<MemoryBlock>,
    /// The block's entry in its pool; dropping it gives the block back.
    _place: Box<dyn Any + Send>,
    /// Requested bytes.
    bytes: usize,
    /// The worker that had it last.
    last: Option<ThreadId>,
}

impl ScratchPiece {
    /// A piece of `bytes` bytes in a block. Dropping `place` gives the block back.
    pub(crate) fn new(block: Arc<MemoryBlock>, bytes: usize, place: Box<dyn Any + Send>) -> Self {
        ScratchPiece { block, _place: place, bytes, last: None }
    }

    pub(super) fn host(&self) -> &HostBlock {
        self.block.host().unwrap_or_else(|| unreachable!("only a CPU device has such pieces"))
    }
}

/// The pieces of a device.
pub(crate) struct ScratchPieces {
    workers: usize,
    state: Mutex<ScratchState>,
    /// Notified when pieces were given back to the pool.
    returned: Condvar,
    /// Held while pieces are allocated, which may wait for kernels that hold pieces.
    making: Mutex<()>,
}

#[derive(Default)]
struct ScratchState {
    /// Bytes of each piece.
    bytes: usize,
    /// Number of pieces of this size, free or borrowed.
    made: usize,
    free: Vec<ScratchPiece>,
    /// Reservations of each stream.
    reservations: BTreeMap<u64, usize>,
    /// Number of reservations that the host holds.
    held: usize,
    /// Number of kernels that hold a piece of an earlier, smaller size.
    outgrown: usize,
    /// Number of threads that are giving pieces back.
    returning: usize,
    /// Number of times that pieces were given back.
    returns: u64,
}

impl ScratchState {
    /// Whether pieces will be given back without further calls of the host.
    fn will_return(&self) -> bool {
        let orphaned = self.held == 0 && !self.reservations.is_empty();
        orphaned || self.outgrown > 0 || self.returning > 0
    }
}

impl ScratchPieces {
    pub(crate) fn new(workers: usize) -> Self {
        let (state, making) = (Mutex::default(), Mutex::default());
        ScratchPieces { workers, state, returned: Condvar::new(), making }
    }

    /// Makes sure that kernels of `stream` can borrow `bytes` bytes. `make` allocates a piece of a
    /// given size, and is called for each missing piece. Waits for other calls of this function.
    ///
    /// # Errors
    /// The errors of `make`; the pieces are then unchanged.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        stream: u64,
        bytes: usize,
        mut make: impl FnMut(usize) -> Result<ScratchPiece>,
    ) -> Result<Reservation> {
        let _making = lock(&self.making);
        let (size, missing) = {
            let mut state = lock(&self.state);
            *state.reservations.entry(stream).or_default() += 1; // the pieces stay from now on
            state.held += 1;
            let size = bytes.max(state.bytes).max(1);
            let made = if size == state.bytes { state.made } else { 0 };
            (size, self.workers.min(state.reservations.len()).saturating_sub(made))
        };
        let held = Arc::new(InFlight { pieces: Arc::clone(self), stream, bytes });
        let reservation = Reservation { in_flight: held };
        let fresh = (0..missing).map(|_| make(size)).collect::<Result<Vec<_>>>()?;
        let mut state = lock(&self.state);
        let mut old = Vec::new();
        if size > state.bytes {
            old = std::mem::take(&mut state.free);
            state.outgrown += state.made - old.len();
            (state.bytes, state.made) = (size, 0);
        }
        state.made += fresh.len();
        state.free.extend(fresh);
        self.give_back(state, old);
        Ok(reservation)
    }

    /// Gives pieces back to the pool, after releasing the lock: the pool takes its own.
    fn give_back(&self, mut state: MutexGuard<'_, ScratchState>, pieces: Vec<ScratchPiece>) {
        state.returning += 1;
        drop(state);
        drop(pieces);
        let mut state = lock(&self.state);
        state.returning -= 1;
        state.returns += 1;
        drop(state);
        self.returned.notify_all();
    }

    /// Number of times that pieces were given back so far; `None` if none will be without further
    /// calls of the host.
    pub(crate) fn returns(&self) -> Option<u64> {
        let state = lock(&self.state);
        state.will_return().then_some(state.returns)
    }

    /// Waits until pieces were given back more than `returns` times, or until no piece will be
    /// given back.
    pub(crate) fn wait_beyond(&self, returns: u64) {
        let mut state = lock(&self.state);
        while state.returns == returns && state.will_return() {
            state = wait_on(&self.returned, state);
        }
    }

    /// A piece for the kernel that this thread runs.
    fn lend(&self) -> ScratchPiece {
        let worker = std::thread::current().id();
        let mut state = lock(&self.state);
        let own = state.free.iter().position(|piece| piece.last == Some(worker));
        let at = own.or(state.free.len().checked_sub(1));
        let mut piece = state.free.swap_remove(at.expect("a piece for every kernel that runs"));
        piece.last = Some(worker);
        piece
    }

    fn take_back(&self, piece: ScratchPiece) {
        let mut state = lock(&self.state);
        if piece.bytes == state.bytes {
            state.free.push(piece);
        } else {
            state.outgrown -= 1;
            self.give_back(state, vec![piece]);
        }
    }
}

/// A stream's claim to a piece for the kernel that it runs, held by the host.
pub(crate) struct Reservation {
    in_flight: Arc<InFlight>,
}

impl Reservation {
    pub(crate) fn bytes(&self) -> usize {
        self.in_flight.bytes
    }

    /// The temporary memory of a kernel, which borrows its piece on first use.
    pub(crate) fn borrowed(&self, poisoned: bool) -> BorrowedScratch {
        BorrowedScratch { reservation: Arc::clone(&self.in_flight), piece: None, poisoned }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let pieces = &self.in_flight.pieces;
        lock(&pieces.state).held -= 1;
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({} bytes)", self.bytes())
    }
}

/// A reservation, held by the host or by kernels in flight.
struct InFlight {
    pieces: Arc<ScratchPieces>,
    stream: u64,
    bytes: usize,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = lock(&self.pieces.state);
        if let Some(count) = state.reservations.get_mut(&self.stream) {
            *count -= 1;
            if *count == 0 {
                state.reservations.remove(&self.stream);
            }
        }
        if state.reservations.is_empty() {
            (state.bytes, state.made) = (0, 0);
            let all = std::mem::take(&mut state.free);
            self.pieces.give_back(state, all);
        }
    }
}

/// The temporary memory of one kernel: borrowed when the kernel asks for it, given back after it.
pub(crate) struct BorrowedScratch {
    reservation: Arc<InFlight>,
    piece: Option<ScratchPiece>,
    /// Whether the memory begins as [`POISON`](crate::POISON).
    pub(super) poisoned: bool,
}

impl BorrowedScratch {
    /// Bytes that the kernel gets.
    pub(super) fn bytes(&self) -> usize {
        self.reservation.bytes
    }

    /// The kernel's piece; `None` if it was taken before.
    pub(super) fn take(&mut self) -> Option<&ScratchPiece> {
        match self.piece {
            Some(_) => None,
            None => Some(self.piece.insert(self.reservation.pieces.lend())),
        }
    }
}

impl Drop for BorrowedScratch {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            self.reservation.pieces.take_back(piece);
        }
    }
}

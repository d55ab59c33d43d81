//! The memory of tensors: a block, who owns it, and who used it last.

use crate::block::Block;
use crate::error::Result;
use crate::hazard::Hazards;
use crate::memory::Owner;
use crate::pool::{Allocation, Request, Returned};
use crate::sanitize::Shadow;
use crate::stream::Stream;
use crate::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock};
use std::cell::Cell;
use std::panic::Location;

/// Numbers given to threads so far in this process: a storage's id is never used again, unlike its
/// address.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Numbers that a thread takes at once: so that threads seldom meet here.
const IDS: u64 = 1024;

/// A number that no other storage of this process has or had.
fn next_id() -> u64 {
    thread_local! {
        /// The thread's next number, and how many it has.
        static MINE: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    }
    let (next, left) = match MINE.get() {
        (_, 0) => (NEXT_ID.fetch_add(IDS, Ordering::Relaxed), IDS),
        mine => mine,
    };
    MINE.set((next + 1, left - 1));
    next
}

/// Memory that tensors share. When the last of them goes, the block goes back in stream order.
pub(crate) struct Storage {
    /// `None` for no bytes.
    block: Option<Arc<Block>>,
    bytes: usize,
    owner: Owner,
    id: u64,
    /// The stream that made it, to which the block returns.
    home: Stream,
    /// Changed under the device's submission lock only, or by the sole owner.
    hazards: Mutex<Hazards>,
    /// Where it was made.
    origin: &'static Location<'static>,
}

/// What a new storage is for.
pub(crate) struct Purpose {
    pub(crate) bytes: usize,
    pub(crate) owner: Owner,
    pub(crate) operation: &'static str,
    pub(crate) origin: &'static Location<'static>,
}

impl Storage {
    /// Memory from the stream's pool; also whether it is known to be zeros.
    pub(crate) fn new(home: &Stream, purpose: &Purpose) -> Result<(Arc<Storage>, bool)> {
        let &Purpose { bytes, owner, operation, origin } = purpose;
        let mut allocation = Allocation::default();
        if bytes > 0 {
            let state = home.state();
            let request =
                Request { stream: state, slot: home.slot(), bytes, owner, operation, site: origin };
            allocation = state.shared.pool.allocate(&state.shared, &request)?;
        }
        let Allocation { block, inherited, zeroed } = allocation;
        // Built in its place: moving it would cost more than making it.
        let storage = Arc::new(Storage {
            block,
            bytes,
            owner,
            id: next_id(),
            home: home.clone(),
            hazards: Mutex::new(Hazards::new(inherited)),
            origin,
        });
        Ok((storage, zeroed))
    }

    /// Writes a new storage from the host, if nothing else uses it or its block; whether it did.
    pub(crate) fn fill_if_idle(storage: &mut Arc<Storage>, bytes: &[u8]) -> bool {
        let Some(storage) = Arc::get_mut(storage) else { return false };
        let idle = storage.hazards.get_mut().is_ok_and(|hazards| hazards.is_idle());
        match &storage.block {
            Some(block) if idle => {
                assert!(bytes.len() <= storage.bytes);
                // SAFETY: this is the only handle, so no work of this storage can be submitted
                // meanwhile. What was submitted, for it or for earlier storages of the block, is
                // done, as `is_idle` says.
                unsafe { block.fill(bytes) };
                true
            }
            Some(_) => false,
            None => true,
        }
    }

    /// Fills a new storage, whose block comes from the system, with a pattern from the host; whether
    /// it did.
    pub(crate) fn fill_fresh(storage: &mut Arc<Storage>, pattern: u32) -> bool {
        let Some(storage) = Arc::get_mut(storage) else { return false };
        if let Some(block) = &storage.block {
            // SAFETY: this is the only handle, and nothing was ever submitted for this block.
            unsafe { block.fill_with(pattern) };
        }
        true
    }

    pub(crate) fn home(&self) -> &Stream {
        &self.home
    }

    pub(crate) fn origin(&self) -> &'static Location<'static> {
        self.origin
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Who used its block, for the race sanitizer; `None` for no bytes.
    pub(crate) fn shadow(&self) -> Option<MutexGuard<'_, Shadow>> {
        self.block.as_ref().map(|block| lock(block.shadow()))
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Address of the first byte, 0 for no bytes.
    pub(crate) fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.data().as_ptr().addr() as u64)
    }

    pub(crate) fn block(&self) -> Option<&Arc<Block>> {
        self.block.as_ref()
    }

    /// The accesses; only under the device's submission lock.
    pub(crate) fn hazards(&self) -> MutexGuard<'_, Hazards> {
        lock(&self.hazards)
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let sanitizer = self.home.state().shared.sanitizer();
        if let Some(sanitizer) = sanitizer {
            sanitizer.freed(self);
        }
        let keep_done = sanitizer.is_some();
        let Some(block) = self.block.take() else { return };
        let after = match self.hazards.get_mut() {
            Ok(hazards) => hazards.take_inherited(keep_done),
            Err(poisoned) => poisoned.into_inner().take_inherited(keep_done),
        };
        let returned = Returned { block, after, owner: self.owner, bytes: self.bytes };
        self.home.state().shared.pool.free(self.home.slot(), returned);
    }
}

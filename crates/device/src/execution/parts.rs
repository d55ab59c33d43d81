//! Kernels in parts: idle workers take over parts of a kernel that another worker runs.
//!
//! Each worker has a board, on which its running kernel posts its parts. The poster takes parts
//! from the front and helpers take parts from the back. So in consecutive kernels a part tends to
//! run on the worker whose caches hold the data of the same part of the kernel before.
//!
//! Invariants
//! - A board has one job at a time, posted by its worker. The worker posts the next job, or
//!   returns, only when all parts of the current job have ended.
//! - A part is run by the thread that claimed it, by a compare-and-exchange of the whole word of
//!   claims. That thread may use the job until it counts the part as ended.
//! - No thread waits for a helper to come: the poster runs all parts that no helper has claimed.
//!
//! The models in `model` check these.

use std::any::Any;
use std::cell::{RefCell, UnsafeCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::ground::sync::{
    Arc, AtomicSeq, AtomicUsize, Condvar, Mutex, Ordering, RaceCell, lock, spin_until, thread,
    thread_local, wait_for,
};

thread_local! {
    /// The boards of the device that this worker belongs to, and the index of its own board; `None`
    /// on other threads, and while a part runs.
    #[allow(clippy::missing_const_for_thread_local, reason = "model checkers have no such form")]
    static HERE: RefCell<Option<(Arc<PartBoards>, usize)>> = RefCell::new(None);
}

/// Runs `part` once for each number below `count`, within a kernel: on the calling worker, and on
/// idle workers of its device. Returns when all parts have ended.
///
/// The result must not depend on the worker that runs a part, or on the order: parts write disjoint
/// memory, and each part adds into its own partial sum. Then the result is the same with any number
/// of workers. A call within a part runs its parts in order on the calling thread, and so does a
/// call from a thread that is no worker.
///
/// # Panics
/// If a part panicked, with the payload of the lowest such part. All other parts have ended by
/// then; if parts run in order on one thread, the parts after it are not run.
pub fn in_parts(count: u16, part: impl Fn(usize) + Sync) {
    let here = if count < 2 { None } else { HERE.with(|here| here.borrow_mut().take()) };
    let Some((boards, own)) = here else { return (0..count).for_each(|k| part(k.into())) };
    let result = boards.boards[own].run(count, &part, || boards.call(count));
    HERE.with(|here| *here.borrow_mut() = Some((boards, own)));
    if let Err(payload) = result {
        resume_unwind(payload);
    }
}

/// The boards of a device's workers.
pub(crate) struct PartBoards {
    boards: Box<[PartBoard]>,
    /// Number of workers that help.
    helping: AtomicUsize,
    /// Number of workers that sleep on `wake`; may be outdated.
    pub(super) sleeping: AtomicUsize,
    /// Notified for a task or a part that no worker is about to take, and at the end.
    pub(super) wake: Condvar,
}

impl PartBoards {
    pub(super) fn new(workers: usize) -> Self {
        let boards = (0..workers).map(|_| PartBoard::new()).collect();
        let [helping, sleeping] = [(); 2].map(|()| AtomicUsize::new(0));
        PartBoards { boards, helping, sleeping, wake: Condvar::new() }
    }

    /// Makes the calling thread the worker with this number.
    pub(super) fn enter(self: &Arc<Self>, worker: usize) {
        HERE.with(|here| *here.borrow_mut() = Some((self.clone(), worker)));
    }

    /// Wakes a worker to help with `parts` parts, if a worker sleeps and fewer workers help than
    /// could. A worker that is about to sleep may miss the call; then the poster runs this job
    /// alone.
    fn call(&self, parts: u16) {
        let [helping, sleeping] =
            [&self.helping, &self.sleeping].map(|n| n.load(Ordering::Relaxed));
        if helping + 1 < parts.into() && sleeping > 0 {
            self.wake.notify_one();
        }
    }

    /// Whether there are parts to take; may be outdated.
    pub(super) fn any(&self) -> bool {
        self.boards.iter().any(PartBoard::is_open)
    }

    /// Runs parts, and waits briefly for more, until there are none for a while or the worker is
    /// `needed` elsewhere.
    pub(super) fn help(&self, needed: impl Fn() -> bool) {
        let here = HERE.with(|here| here.borrow_mut().take());
        self.helping.fetch_add(1, Ordering::Relaxed);
        // Each helper begins with the board after its own, so that helpers spread over the posters.
        let first = here.as_ref().map_or(0, |(_, own)| own + 1);
        let (before, after) = self.boards.split_at(first);
        loop {
            let mut taken = false;
            for board in after.iter().chain(before) {
                while !needed() && board.take(Claims::back) {
                    taken = true;
                }
            }
            if !taken || needed() || !wait_for(|| needed() || self.any()) {
                break;
            }
        }
        self.helping.fetch_sub(1, Ordering::Relaxed);
        HERE.with(|own| *own.borrow_mut() = here);
    }
}

type Payload = Box<dyn Any + Send>;
type PartFn<'a> = &'a (dyn Fn(usize) + Sync);

/// The job of one worker. Aligned, so that boards share no cache line.
#[repr(align(128))]
struct PartBoard {
    claims: AtomicSeq,
    ended: AtomicUsize,
    /// The poster's closure, which lives until [`PartBoard::run`] returns.
    job: UnsafeCell<Option<PartFn<'static>>>,
    job_seen: RaceCell,
    /// The panic of the lowest part that panicked.
    panic: Mutex<Option<(usize, Payload)>>,
}

// SAFETY: all fields but `job` are `Sync`. The poster writes `job` before it opens the claims and
// after all parts of the previous job have ended; helpers read it between their claim of a part and
// the end of that part. The closure is `Sync`.
unsafe impl Sync for PartBoard {}

/// The unclaimed parts of a job: `front..back`. The number of the job distinguishes claims of
/// different jobs.
#[derive(Clone, Copy)]
struct Claims {
    job: u32,
    front: u16,
    back: u16,
}

impl Claims {
    fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        let [front, back] = [[a, b], [c, d]].map(u16::from_le_bytes);
        Claims { job: u32::from_le_bytes([e, f, g, h]), front, back }
    }

    fn word(self) -> u64 {
        u64::from(self.job) << 32 | u64::from(self.back) << 16 | u64::from(self.front)
    }

    /// Claims the first part.
    fn front(self) -> (usize, Self) {
        (self.front.into(), Claims { front: self.front + 1, ..self })
    }

    /// Claims the last part.
    fn back(self) -> (usize, Self) {
        let back = self.back - 1;
        (back.into(), Claims { back, ..self })
    }

    fn is_open(self) -> bool {
        self.front < self.back
    }
}

impl PartBoard {
    fn new() -> Self {
        PartBoard {
            claims: AtomicSeq::new(0),
            ended: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            job_seen: RaceCell::new(),
            panic: Mutex::new(None),
        }
    }

    fn is_open(&self) -> bool {
        Claims::from_word(self.claims.load(Ordering::Relaxed)).is_open()
    }

    /// Posts a job, runs parts of it, and waits for its end. Called by the board's own worker only.
    fn run(&self, count: u16, part: PartFn<'_>, call: impl FnOnce()) -> Result<(), Payload> {
        let all = usize::from(count);
        let claims = Claims::from_word(self.claims.load(Ordering::Relaxed));
        self.ended.store(0, Ordering::Relaxed);
        self.job_seen.write();
        // SAFETY: no part of an earlier job is running, and no claim is open, so no other thread
        // reads `job` now. No thread reads it after this function, which returns only when all
        // parts have ended. So the closure outlives its use.
        unsafe { *self.job.get() = Some(std::mem::transmute::<PartFn<'_>, PartFn<'static>>(part)) };
        let open = Claims { job: claims.job.wrapping_add(1), front: 0, back: count };
        self.claims.store(open.word(), Ordering::Release);
        call();
        while self.take(Claims::front) {}
        while !spin_until(|| self.ended.load(Ordering::Acquire) == all) {
            thread::yield_now();
        }
        match lock(&self.panic).take() {
            Some((_, payload)) => Err(payload),
            None => Ok(()),
        }
    }

    /// Claims a part and runs it; returns whether there was one.
    fn take(&self, which: fn(Claims) -> (usize, Claims)) -> bool {
        let mut word = self.claims.load(Ordering::Acquire);
        let part = loop {
            let claims = Claims::from_word(word);
            if !claims.is_open() {
                return false;
            }
            let (part, left) = which(claims);
            // A success reads the value that the poster stored, or a claim in its release sequence,
            // so the job is visible.
            let (success, failure) = (Ordering::Acquire, Ordering::Acquire);
            match self.claims.compare_exchange(word, left.word(), success, failure) {
                Ok(_) => break part,
                Err(now) => word = now,
            }
        };
        self.job_seen.read();
        // SAFETY: this thread has claimed a part, which has not ended: the poster neither writes
        // `job` nor returns, and the closure lives.
        let job = unsafe { *self.job.get() }.expect("a claimed part has a job");
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(part))) {
            self.keep(part, payload);
        }
        self.ended.fetch_add(1, Ordering::Release);
        true
    }

    /// Stores the panic of a part if it is the lowest part so far. Never panics.
    fn keep(&self, part: usize, payload: Payload) {
        let other = {
            let mut panic = lock(&self.panic);
            match &*panic {
                Some((lowest, _)) if *lowest < part => Some(payload),
                _ => panic.replace((part, payload)).map(|(_, payload)| payload),
            }
        };
        other.into_iter().for_each(discard);
    }
}

/// Drops the payload of a panic. Its destructor is user code and may panic in turn; then the new
/// payload is leaked.
pub(crate) fn discard(payload: Payload) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again);
    }
}

impl fmt::Debug for PartBoards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PartBoards({})", self.boards.len())
    }
}

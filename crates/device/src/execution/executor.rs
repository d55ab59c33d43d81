//! The executor: a fixed pool of workers that run ready tasks, the streams of a device.
//!
//! A stream is in the ready list only while it has commands. A worker takes the first ready stream
//! and runs its commands until the stream is empty, has to wait for another stream, or has had its
//! turn while other streams are ready:
//!
//! ```text
//! worker:  loop {
//!     a ready task?              run it: Idle → done; Parked → its producer resumes it;
//!                                TurnOver → append it to the list
//!     closed and none active?    end
//!     parts of another kernel?   run some of them, until a task is ready       (`parts`)
//!     no other worker spins?     spin 20 µs for a task
//!     otherwise                  sleep until woken
//! }
//!
//! stream a   ▓▓▓▓▓▓  turn over           ▓▓▓▓▓▓        two workers, three streams:
//! stream b   ▓▓▓ parked (waits for c) ░░░░░░ ▓▓▓       a turn is 10 ms, some training steps
//! stream c         ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//! ```
//!
//! # Why it is fast
//! A stream stays with its worker for a whole turn, so the network of an env is in the caches of
//! one core for all steps of the turn but the first. Spinning for about the cost of a wake-up makes
//! short gaps cheap; only one worker spins for tasks, so idle workers cost no cores. Idle workers
//! make a kernel with parts faster instead.
//!
//! # Assumptions
//! A task does not block its worker: kernels do not wait for the device, and a stream that must
//! wait is parked. The exception is a wait for an event of a CUDA device, which wakes no stream: it
//! blocks the worker. All tasks have the same priority, and are served in the order in which they
//! became ready.
//!
//! Invariants
//! - A task is in the ready list at most once, and only while it has work (a stream's state is
//!   `Ready`, see `order::queue`).
//! - `active` is the number of tasks that are not idle. Workers end when it is zero and the device
//!   is closed, so all submitted work runs.
//! - At most one worker spins for tasks. A thread that adds a task wakes a sleeping worker only if
//!   no worker spins; a worker that takes a task and sees more wakes the next. All of this is under
//!   one lock, so no wake-up is lost.
//! - A worker without a task helps with parts of other workers' kernels (`parts`). When a task is
//!   ready, it finishes its current part and takes the task.
//!
//! The models in `model` check these.

use std::cell::Cell;
use std::collections::VecDeque;

use super::parts::PartBoards;
use crate::ground::sync::{
    Arc, AtomicUsize, Mutex, MutexGuard, ON_WORKER, Ordering, lock, spin_until, wait_on,
};
use crate::ground::{Error, Result};

/// Whether the calling thread is a worker of some device.
pub(crate) fn on_worker() -> bool {
    ON_WORKER.with(Cell::get)
}

/// Returns an error if the calling thread is a worker: a worker never waits for the device.
pub(crate) fn check_may_wait(operation: &'static str) -> Result<()> {
    if on_worker() { Err(Error::InsideKernel { operation }) } else { Ok(()) }
}

/// Reason why a worker left a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskEnd {
    /// It has no work.
    Idle,
    /// It waits for another task, which resumes it.
    Parked,
    /// Its turn is over; it has more work.
    TurnOver,
}

/// A task of the workers: a stream.
pub(crate) trait Task {
    /// Runs the task until it has no work left, has to wait, or its turn is over. Called by the one
    /// worker that took the task.
    fn run(self: &Arc<Self>) -> TaskEnd;
}

/// Tasks that are ready to run, and the state of the workers.
struct Ready<T> {
    tasks: VecDeque<Arc<T>>,
    active: usize,
    spinning: bool,
    sleeping: usize,
    closed: bool,
}

/// The ready list shared by the workers.
pub(crate) struct Executor<T> {
    ready: Mutex<Ready<T>>,
    /// Length of the ready list, readable without the lock.
    length: AtomicUsize,
    boards: Arc<PartBoards>,
}

impl<T> Executor<T> {
    /// An executor for `workers` workers, each of which calls [`work`](Executor::work).
    pub(crate) fn new(workers: usize) -> Self {
        let ready = Ready {
            tasks: VecDeque::new(),
            active: 0,
            spinning: false,
            sleeping: 0,
            closed: false,
        };
        Executor {
            ready: Mutex::new(ready),
            length: AtomicUsize::new(0),
            boards: Arc::new(PartBoards::new(workers)),
        }
    }
}

impl<T> Ready<T> {
    /// Whether a sleeping worker has to be woken for a task in the list.
    fn wakes(&self) -> bool {
        !self.spinning && self.sleeping > 0
    }
}

impl<T: Task> Executor<T> {
    /// Adds a task that was idle.
    pub(crate) fn start(&self, task: Arc<T>) {
        self.add(task, 1);
    }

    /// Adds a task after it was parked, or at the end of its turn.
    pub(crate) fn resume(&self, task: Arc<T>) {
        self.add(task, 0);
    }

    fn add(&self, task: Arc<T>, newly_active: usize) {
        let mut ready = lock(&self.ready);
        ready.active += newly_active;
        ready.tasks.push_back(task);
        self.length.store(ready.tasks.len(), Ordering::Release);
        let wake = ready.wakes();
        drop(ready);
        if wake {
            self.boards.wake.notify_one();
        }
    }

    /// Whether some task waits for a worker; may be outdated.
    pub(crate) fn has_ready(&self) -> bool {
        self.length.load(Ordering::Relaxed) > 0
    }

    /// Lets the workers end once all submitted work is done.
    pub(crate) fn close(&self) {
        lock(&self.ready).closed = true;
        self.boards.wake.notify_all();
    }

    /// Body of the worker with this number: runs tasks until the device is closed and has no work
    /// left.
    pub(crate) fn work(&self, worker: usize) {
        ON_WORKER.with(|on_worker| on_worker.set(true));
        self.boards.enter(worker);
        while let Some(task) = self.next() {
            match task.run() {
                TaskEnd::Parked => {}
                TaskEnd::TurnOver => self.resume(task),
                TaskEnd::Idle => {
                    let mut ready = lock(&self.ready);
                    ready.active -= 1;
                    if ready.active == 0 && ready.closed {
                        self.boards.wake.notify_all();
                    }
                }
            }
        }
    }

    /// The next task to run; `None` when the worker should end.
    fn next(&self) -> Option<Arc<T>> {
        let mut ready = lock(&self.ready);
        let mut may_spin = true;
        loop {
            if let Some(task) = ready.tasks.pop_front() {
                self.length.store(ready.tasks.len(), Ordering::Release);
                let more = !ready.tasks.is_empty() && ready.wakes();
                drop(ready);
                if more {
                    self.boards.wake.notify_one();
                }
                return Some(task);
            }
            if ready.closed && ready.active == 0 {
                return None;
            }
            if self.boards.any() {
                drop(ready);
                self.boards.help(|| self.has_ready());
                ready = lock(&self.ready);
            } else if may_spin && !ready.spinning && !ready.closed {
                ready.spinning = true;
                drop(ready);
                spin_until(|| self.has_ready() || self.boards.any());
                ready = lock(&self.ready);
                ready.spinning = false;
                may_spin = false;
            } else {
                ready = self.sleep(ready);
                may_spin = true;
            }
        }
    }

    fn sleep<'a>(&'a self, mut ready: MutexGuard<'a, Ready<T>>) -> MutexGuard<'a, Ready<T>> {
        ready.sleeping += 1;
        self.boards.sleeping.store(ready.sleeping, Ordering::Relaxed);
        ready = wait_on(&self.boards.wake, ready);
        ready.sleeping -= 1;
        self.boards.sleeping.store(ready.sleeping, Ordering::Relaxed);
        ready
    }
}

//! The queue of a stream: its submitted and completed commands, and the threads and streams that
//! wait.
//!
//! Invariants
//! - A stream is in one state: `Idle` (queue empty, in no list), `Ready` (in the executor's list or
//!   held by one worker), or `Parked` (its first command waits for another stream, which holds it
//!   as a waiter). So at most one worker runs a stream, and its commands run in order.
//! - The n-th command submitted has sequence number n, from 1; `completed` is the number of the
//!   last one done. It is stored with release order after the command's effects and after its
//!   memory was released; a thread that reads it with acquire order sees both.
//! - A waiter registers under the lock that the worker takes after it stored `completed`: a host
//!   thread in `host_wake_at` (the lowest number that any sleeps for), a stream in `waiters`. Each
//!   checks `completed` again under that lock, so no wake-up is lost.
//! - A host thread that found the queue full is woken when it is half empty.
//! - No two queue locks are held at once.
//!
//! The models in `model` check these; each names the module of its invariant.

use super::shared::Shared;
use crate::execution::{Executor, Left, Task, Work};
use crate::ground::sync::{
    Arc, AtomicSeq, Condvar, Mutex, MutexGuard, OnceLock, Ordering, TURN, lock, spin_until, wait_on,
};
use crate::ground::{Error, Result};
use crate::hooks::{Observed, Observers, Position, Ran};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::time::Instant;

/// Number of commands at which a host thread has to wait before it may enqueue more.
pub(crate) const CAPACITY: usize = 256;
/// Number of commands at which it may continue: low enough that it does not wake for every command.
const RESUME_AT: usize = CAPACITY / 2;

/// A position in a stream: done when the stream has completed that many commands.
#[derive(Clone)]
pub(crate) struct Access {
    pub(crate) stream: Arc<StreamState>,
    pub(crate) seq: u64,
}

impl Access {
    pub(crate) fn is_done(&self) -> bool {
        self.stream.is_done(self.seq)
    }

    pub(crate) fn is_on(&self, stream: &Arc<StreamState>) -> bool {
        Arc::ptr_eq(&self.stream, stream)
    }

    /// The command, as observers know it.
    pub(crate) fn position(&self) -> Position<'_> {
        self.stream.position(self.seq)
    }

    /// Whether work on `stream` needs no wait for this access.
    pub(crate) fn is_ordered_before(&self, stream: &Arc<StreamState>) -> bool {
        self.is_on(stream) || self.is_done()
    }
}

/// A wait of a stream for another.
pub(crate) struct Edge {
    pub(crate) access: Access,
    /// Whether a kernel's panic on that stream also fails this one (its result is used), or not
    /// (only its completion matters).
    pub(crate) propagates: bool,
}

/// An entry of a queue.
pub(crate) enum Command {
    Work(Work),
    Wait(Edge),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Idle,
    Ready,
    Parked,
}

/// A kernel's panic.
#[derive(Debug, Clone)]
struct Panic {
    operation: &'static str,
    stream: Arc<str>,
    site: &'static Location<'static>,
    message: Arc<str>,
}

/// Failure of a stream.
#[derive(Debug)]
struct Failure {
    /// First command without a result.
    seq: u64,
    panic: Panic,
}

/// The queue itself, under its lock.
pub(crate) struct Queue {
    commands: VecDeque<Command>,
    submitted: u64,
    place: Place,
    /// Streams parked until this one has completed a given sequence number.
    waiters: Vec<(u64, Arc<StreamState>)>,
    /// The lowest sequence number for which a host thread sleeps.
    host_wake_at: u64,
    /// Host threads that wait for space.
    blocked: usize,
}

/// State of a stream. The user's handles are in `stream`.
pub(crate) struct StreamState {
    pub(crate) id: u64,
    pub(crate) shared: Arc<Shared>,
    /// Workers that run it.
    executor: Arc<Executor<StreamState>>,
    observers: Observers,
    /// Its name, and what observers keep with it.
    pub(crate) observed: Observed,
    completed: AtomicSeq,
    failure: OnceLock<Failure>,
    queue: Mutex<Queue>,
    space: Condvar,
    done: Condvar,
}

impl Queue {
    /// Whether a host thread must wait before it adds to the queue.
    pub(crate) fn is_full(&self) -> bool {
        self.commands.len() >= CAPACITY
    }

    /// Number of the last command submitted.
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted
    }

    fn push(&mut self, command: Command) {
        self.submitted += 1;
        self.commands.push_back(command);
    }
}

impl StreamState {
    pub(crate) fn new(
        shared: Arc<Shared>,
        executor: Arc<Executor<StreamState>>,
        id: u64,
        name: &str,
    ) -> Self {
        let observers = shared.observers.clone();
        StreamState {
            id,
            observed: observers.open_stream(name),
            observers,
            shared,
            executor,
            completed: AtomicSeq::new(0),
            failure: OnceLock::new(),
            queue: Mutex::new(Queue {
                commands: VecDeque::with_capacity(CAPACITY + 32),
                submitted: 0,
                place: Place::Idle,
                waiters: Vec::new(),
                host_wake_at: u64::MAX,
                blocked: 0,
            }),
            space: Condvar::new(),
            done: Condvar::new(),
        }
    }

    /// Whether the command with this number, and all before it, are done.
    pub(crate) fn is_done(&self, seq: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= seq
    }

    /// The queue's lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Sleeps until the queue has room; `queue` is its locked guard.
    pub(crate) fn wait_for_space(&self, mut queue: MutexGuard<'_, Queue>) {
        while queue.is_full() {
            queue.blocked += 1;
            queue = wait_on(&self.space, queue);
            queue.blocked -= 1;
        }
    }

    /// Adds waits and optionally work; returns the number of the last command. `queue` is this
    /// stream's locked queue.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        mut queue: MutexGuard<'_, Queue>,
        edges: impl IntoIterator<Item = Edge>,
        work: Option<Work>,
    ) -> u64 {
        for edge in edges {
            queue.push(Command::Wait(edge));
        }
        if let Some(work) = work {
            queue.push(Command::Work(work));
        }
        let seq = queue.submitted;
        let starts = queue.place == Place::Idle && !queue.commands.is_empty();
        if starts {
            queue.place = Place::Ready;
        }
        drop(queue);
        if starts {
            self.executor.start(self.clone());
        }
        seq
    }

    /// Blocks the calling host thread until the command with this number is done.
    pub(crate) fn wait_host(&self, seq: u64) {
        if !spin_until(|| self.is_done(seq)) {
            let mut queue = self.lock();
            while !self.is_done(seq) {
                queue.host_wake_at = queue.host_wake_at.min(seq);
                queue = wait_on(&self.done, queue);
            }
        }
        self.host_saw(seq);
    }

    /// Tells observers that a host thread has seen the end of the command with this number.
    pub(crate) fn host_saw(&self, seq: u64) {
        self.observers.tell(|observer| observer.host_saw(self.position(seq)));
    }

    /// Returns an error if the result of the command with this number was lost to a panic. Reliable
    /// for completed commands; for others the error may come later.
    pub(crate) fn check_result(&self, seq: u64) -> Result<()> {
        match self.failure.get() {
            Some(failure) if failure.seq <= seq => {
                let Panic { operation, stream, site, message } = failure.panic.clone();
                Err(Error::KernelPanicked { operation, stream, site, message })
            }
            _ => Ok(()),
        }
    }

    /// Returns an error if a kernel of this stream panicked.
    pub(crate) fn check_alive(&self) -> Result<()> {
        self.check_result(u64::MAX)
    }

    /// Its name.
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.observed.name
    }

    /// The command with this number, as observers know it.
    pub(crate) fn position(&self, seq: u64) -> Position<'_> {
        Position { stream: &self.observed, seq }
    }

    /// Number of the command that is running; for its worker.
    fn next_seq(&self) -> u64 {
        self.completed.load(Ordering::Relaxed) + 1
    }

    /// Runs work, and tells the observers before any other thread can know.
    fn run_observed(&self, mut work: Work) {
        let Some(asked) = work.take_asked() else { return self.run_work(work) };
        let (operation, site) = (work.operation(), work.site());
        let at = self.position(self.next_seq());
        let (asked, dropped) = (&asked, self.failure.get().is_some());
        let start = Instant::now();
        self.run_work(work);
        let ran = Ran { at, operation, site, asked, start, dropped };
        self.observers.tell(|observer| observer.launch_ran(&ran));
    }

    /// Runs work, or drops it if an earlier kernel of the stream panicked.
    fn run_work(&self, work: Work) {
        let (operation, site) = (work.operation(), work.site());
        let alive = self.failure.get().is_none();
        let run = AssertUnwindSafe(|| if alive { work.run() } else { drop(work) });
        if let Err(payload) = catch_unwind(run) {
            let message = match payload.downcast::<String>() {
                Ok(message) => message.as_str().into(),
                Err(payload) => match payload.downcast::<&'static str>() {
                    Ok(message) => Arc::from(*message),
                    Err(payload) => {
                        // The payload's destructor is user code too, and may panic in turn.
                        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
                        Arc::from("(no message)")
                    }
                },
            };
            self.fail(Panic { operation, stream: self.name().clone(), site, message });
        }
    }

    /// Marks the current command and everything after it as failed.
    fn fail(&self, panic: Panic) {
        let seq = self.next_seq();
        // Only the first failure counts; later work is not run.
        let _ = self.failure.set(Failure { seq, panic });
    }

    /// Parks this stream if the wait is not over; returns whether it did. If so another worker may
    /// already have it: the caller must not touch it any more.
    fn park_for(self: &Arc<Self>, edge: &Edge) -> bool {
        let producer = &edge.access.stream;
        if !edge.access.is_done() {
            // Parked first: as soon as the producer knows of this stream it may wake it. The wait
            // is put back so that it is checked again then.
            {
                let mut queue = self.lock();
                let access = edge.access.clone();
                let again = Edge { access, propagates: edge.propagates };
                queue.commands.push_front(Command::Wait(again));
                queue.place = Place::Parked;
            }
            if producer.add_waiter(edge.access.seq, self) {
                return true;
            }
            let mut queue = self.lock();
            queue.place = Place::Ready;
            queue.commands.pop_front();
        }
        if edge.propagates
            && let Some(failure) = producer.failure.get()
            && failure.seq <= edge.access.seq
        {
            self.fail(failure.panic.clone());
        }
        false
    }

    /// Registers a parked stream; false if the command it waits for is done by now.
    fn add_waiter(&self, seq: u64, waiter: &Arc<StreamState>) -> bool {
        let mut queue = self.lock();
        // The worker stores `completed` before it takes this lock to look for waiters.
        let waits = !self.is_done(seq);
        if waits {
            queue.waiters.push((seq, waiter.clone()));
        }
        waits
    }

    /// Wakes the host threads and streams whose wait is over.
    fn wake_waiters<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        if queue.host_wake_at != u64::MAX && self.is_done(queue.host_wake_at) {
            queue.host_wake_at = u64::MAX;
            self.done.notify_all();
        }
        if queue.waiters.is_empty() {
            return queue;
        }
        let mut woken: SmallVec<[Arc<StreamState>; 4]> = SmallVec::new();
        queue.waiters.retain(|(seq, waiter)| {
            let done = self.is_done(*seq);
            if done {
                woken.push(waiter.clone());
            }
            !done
        });
        drop(queue); // no two queue locks at once
        for waiter in woken {
            waiter.lock().place = Place::Ready;
            waiter.executor.clone().resume(waiter);
        }
        self.lock()
    }
}

impl Task for StreamState {
    /// Runs commands until there are none, one has to wait, or other streams wait for their turn.
    fn run(self: &Arc<Self>) -> Left {
        let mut turn_start = None;
        let mut queue = self.lock();
        loop {
            let Some(command) = queue.commands.pop_front() else {
                queue.place = Place::Idle;
                return Left::Idle;
            };
            if queue.blocked > 0 && queue.commands.len() <= RESUME_AT {
                self.space.notify_all();
            }
            drop(queue);
            match command {
                Command::Work(work) => match self.observers.is_empty() {
                    true => self.run_work(work),
                    false => self.run_observed(work),
                },
                Command::Wait(edge) => {
                    self.observers.tell(|observer| observer.wait_begins(&self.observed));
                    if self.park_for(&edge) {
                        return Left::Parked;
                    }
                    self.observers.tell(|observer| {
                        let at = self.position(self.next_seq());
                        observer.wait_ended(at, edge.access.position());
                    });
                }
            }
            self.completed.store(self.next_seq(), Ordering::Release);
            queue = self.wake_waiters(self.lock());
            if self.executor.has_ready() && !queue.commands.is_empty() {
                let start = *turn_start.get_or_insert_with(Instant::now);
                if start.elapsed() >= TURN {
                    return Left::TurnOver;
                }
            }
        }
    }
}

//! The queue of a stream: its submitted and completed commands, and the threads and streams that
//! wait for them.
//!
//! Invariants
//! - A stream is in one state: `Idle` (its queue is empty, and it is in no list), `Ready` (in the
//!   executor's list or held by one worker), or `Parked` (its first command waits for another
//!   stream, which has it in its list of waiters). So at most one worker runs a stream, and its
//!   commands run in order.
//! - The n-th submitted command has sequence number n, from 1; `completed` is the number of the
//!   last completed command. It is stored with release order after the command's effects and after
//!   its memory was released; a thread that reads it with acquire order sees both.
//! - A waiter registers under the lock that the worker takes after it stored `completed`: a host
//!   thread in `host_wake_at` (the lowest number that a host thread sleeps for), a stream in
//!   `waiters`. Each waiter checks `completed` again under that lock, so no wake-up is lost.
//! - A host thread that found the queue full is woken when the queue is half empty.
//! - No two queue locks are held at once.
//!
//! - On a CUDA device no command waits in a queue: it is issued to the device at submission, under
//!   the queue's lock, and the device orders it. `completed` is not used then; the stream's
//!   `CudaQueue` tracks the device's progress.
//!
//! The models in `model` check these invariants; each model names the module of its invariant.

mod run;

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::Location;

use smallvec::SmallVec;

use super::shared::DeviceShared;
use crate::execution::cuda::{CudaQueue, OnComplete};
use crate::execution::{Executor, StreamWork};
use crate::ground::sync::{
    Arc, AtomicSeq, Condvar, Mutex, MutexGuard, OnceLock, Ordering, lock, spin_until, wait_on,
};
use crate::ground::{Error, Result};
use crate::hooks::{CommandPosition, DeviceObservers, FinishedLaunch, ObservedStream};

/// Number of commands at which a host thread has to wait before it may enqueue more.
pub(crate) const CAPACITY: usize = 256;
/// Number of commands at which the host thread continues: low enough that it does not wake for
/// every command.
const RESUME_AT: usize = CAPACITY / 2;

/// Largest number of unfinished commands of a stream on a CUDA device: more than are needed to keep
/// the device busy, and fewer than the driver accepts before it blocks the caller, which holds a
/// lock.
const IN_FLIGHT: u64 = 512;

/// A position in a stream, at which the stream has accessed a storage, or which an event marks. It
/// is done when the stream has completed `seq` commands.
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

    /// The command, as observers see it.
    pub(crate) fn position(&self) -> CommandPosition<'_> {
        self.stream.position(self.seq)
    }

    /// Whether work on `stream` needs no wait for this access.
    pub(crate) fn is_ordered_before(&self, stream: &Arc<StreamState>) -> bool {
        self.is_on(stream) || self.stream.shares_cuda_stream(stream) || self.is_done()
    }

    /// Whether the access is known to be done, without asking the device. For decisions that only
    /// save work.
    pub(crate) fn is_known_done(&self) -> bool {
        match self.stream.cuda_queue() {
            None => self.is_done(),
            Some(cuda_queue) => cuda_queue.is_known_done(self.seq),
        }
    }
}

/// A wait of a stream for another.
pub(crate) struct Edge {
    pub(crate) access: Access,
    /// Whether a kernel's panic on the awaited stream also fails this stream: true if its result is
    /// used, false if only its completion matters.
    pub(crate) propagates: bool,
}

/// A command in a queue.
pub(crate) enum StreamCommand {
    Work(StreamWork),
    Wait(Edge),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueState {
    Idle,
    Ready,
    Parked,
}

/// A kernel's panic.
#[derive(Debug, Clone)]
struct KernelPanic {
    operation: &'static str,
    stream: Arc<str>,
    site: &'static Location<'static>,
    message: Arc<str>,
}

/// The failure of a stream.
#[derive(Debug)]
struct StreamFailure {
    /// First command without a result.
    seq: u64,
    panic: KernelPanic,
}

/// The queue itself, under its lock.
pub(crate) struct StreamQueue {
    commands: VecDeque<StreamCommand>,
    submitted: u64,
    state: QueueState,
    /// Streams parked until this one has completed a given sequence number.
    waiters: Vec<(u64, Arc<StreamState>)>,
    /// The lowest sequence number for which a host thread sleeps.
    host_wake_at: u64,
    /// Host threads that wait for space.
    blocked: usize,
}

/// The device that carries out the commands of a stream.
pub(crate) enum StreamEngine {
    /// Workers of this process.
    Cpu(Arc<Executor<StreamState>>),
    /// A CUDA device.
    Cuda(CudaQueue),
}

/// Consecutive checks that find streams waiting for a worker, after which all workers count as
/// busy: about a microsecond.
const BUSY_LOOKS: u32 = 64;

/// State of a stream. The user's handle of it is [`Stream`](crate::Stream).
pub(crate) struct StreamState {
    pub(crate) id: u64,
    pub(crate) shared: Arc<DeviceShared>,
    engine: StreamEngine,
    observers: DeviceObservers,
    /// Name of the stream, and the state that observers keep with it.
    pub(crate) observed: ObservedStream,
    completed: AtomicSeq,
    failure: OnceLock<StreamFailure>,
    queue: Mutex<StreamQueue>,
    space: Condvar,
    done: Condvar,
}

impl StreamQueue {
    /// Number of the last command submitted.
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted
    }

    fn push(&mut self, command: StreamCommand) {
        self.submitted += 1;
        self.commands.push_back(command);
    }
}

impl StreamState {
    pub(crate) fn new(
        shared: Arc<DeviceShared>,
        engine: StreamEngine,
        id: u64,
        name: &str,
    ) -> Self {
        let observers = shared.observers.clone();
        StreamState {
            id,
            observed: observers.open_stream(name),
            observers,
            shared,
            engine,
            completed: AtomicSeq::new(0),
            failure: OnceLock::new(),
            queue: Mutex::new(StreamQueue {
                commands: VecDeque::with_capacity(CAPACITY + 32),
                submitted: 0,
                state: QueueState::Idle,
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
        match &self.engine {
            StreamEngine::Cpu(_) => self.completed.load(Ordering::Acquire) >= seq,
            StreamEngine::Cuda(cuda_queue) => cuda_queue.is_done(seq),
        }
    }

    /// Whether one CUDA stream carries out both streams, so that their commands run in the order of
    /// submission.
    fn shares_cuda_stream(&self, other: &StreamState) -> bool {
        let queues = self.cuda_queue().zip(other.cuda_queue());
        queues.is_some_and(|(a, b)| a.shares_cuda_stream(b))
    }

    /// Its queue on a CUDA device; `None` on a CPU device.
    pub(crate) fn cuda_queue(&self) -> Option<&CudaQueue> {
        match &self.engine {
            StreamEngine::Cpu(_) => None,
            StreamEngine::Cuda(cuda_queue) => Some(cuda_queue),
        }
    }

    /// Blocks until a CUDA device has no work, not even work of other code in the process. Does
    /// nothing on a CPU device.
    pub(crate) fn wait_for_device(&self) {
        if let Some(queue) = self.cuda_queue() {
            queue.wait_for_device();
        }
    }

    /// The queue's lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, StreamQueue> {
        lock(&self.queue)
    }

    /// Whether a host thread must wait before it adds to the queue; `queue` is its guard.
    pub(crate) fn is_full(&self, queue: &StreamQueue) -> bool {
        match &self.engine {
            StreamEngine::Cpu(_) => queue.commands.len() >= CAPACITY,
            StreamEngine::Cuda(cuda_queue) => cuda_queue.backlog(queue.submitted) >= IN_FLIGHT,
        }
    }

    /// Sleeps until the queue has room; `queue` is its locked guard.
    pub(crate) fn wait_for_space(&self, mut queue: MutexGuard<'_, StreamQueue>) {
        if let StreamEngine::Cuda(cuda_queue) = &self.engine {
            let last = queue.submitted;
            drop(queue);
            return cuda_queue.wait(last.saturating_sub(IN_FLIGHT / 2));
        }
        while self.is_full(&queue) {
            queue.blocked += 1;
            queue = wait_on(&self.space, queue);
            queue.blocked -= 1;
        }
    }

    /// Adds waits and optionally work; returns the number of the last command. `queue` is this
    /// stream's locked queue.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        mut queue: MutexGuard<'_, StreamQueue>,
        edges: impl IntoIterator<Item = Edge>,
        work: Option<StreamWork>,
    ) -> u64 {
        let executor = match &self.engine {
            StreamEngine::Cpu(executor) => executor,
            StreamEngine::Cuda(cuda_queue) => {
                let edges: SmallVec<[Edge; 4]> = edges.into_iter().collect();
                return self.issue(cuda_queue, queue, &edges, work);
            }
        };
        for edge in edges {
            queue.push(StreamCommand::Wait(edge));
        }
        if let Some(work) = work {
            queue.push(StreamCommand::Work(work));
        }
        let seq = queue.submitted;
        let starts = queue.state == QueueState::Idle && !queue.commands.is_empty();
        if starts {
            queue.state = QueueState::Ready;
        }
        drop(queue);
        if starts {
            executor.start(self.clone());
        }
        seq
    }

    /// Issues waits and optionally work to the device; returns the number of the last command.
    fn issue(
        self: &Arc<Self>,
        cuda_queue: &CudaQueue,
        mut queue: MutexGuard<'_, StreamQueue>,
        edges: &[Edge],
        mut work: Option<StreamWork>,
    ) -> u64 {
        queue.submitted += edges.len() as u64 + u64::from(work.is_some());
        let seq = queue.submitted;
        let on_complete = work.as_mut().and_then(|work| self.on_complete(seq, work));
        let waits = edges.iter().filter_map(|Edge { access, .. }| {
            // Waits for streams of CPU devices are over: see `wait_for`.
            Some((access.stream.cuda_queue()?, access.seq))
        });
        let task = work.map(|work| match work {
            StreamWork::Cuda(task) => *task,
            _ => unreachable!("a launch makes a task for a CUDA device"),
        });
        cuda_queue.issue(seq, waits, task, on_complete);
        seq
    }

    /// A callback that notifies observers when the device has run the work; `None` without
    /// observers of runs.
    fn on_complete(self: &Arc<Self>, seq: u64, work: &mut StreamWork) -> Option<OnComplete> {
        let call = work.take_call()?;
        let (stream, operation, site) = (self.clone(), work.operation(), work.site());
        Some(Box::new(move |start, end| {
            let at = stream.position(seq);
            let ran =
                FinishedLaunch { at, operation, site, call: &call, start, end, dropped: false };
            stream.observers.notify(|observer| observer.launch_ran(&ran));
        }))
    }

    /// Blocks the calling host thread until the command with this number is done.
    pub(crate) fn wait_host(&self, seq: u64) {
        match &self.engine {
            StreamEngine::Cuda(cuda_queue) => cuda_queue.wait(seq),
            StreamEngine::Cpu(executor) => {
                // If streams are ready but no worker takes them, the workers need the core of this
                // thread, so it stops spinning. A spinning worker takes a stream within fewer
                // iterations.
                let looks = Cell::new(0);
                spin_until(|| {
                    looks.set(if executor.has_ready() { looks.get() + 1 } else { 0 });
                    self.is_done(seq) || looks.get() > BUSY_LOOKS
                });
                if !self.is_done(seq) {
                    self.sleep_until(seq);
                }
            }
        }
        self.host_saw(seq);
    }

    /// Sleeps until the command with this number is done.
    fn sleep_until(&self, seq: u64) {
        let mut queue = self.lock();
        while !self.is_done(seq) {
            queue.host_wake_at = queue.host_wake_at.min(seq);
            queue = wait_on(&self.done, queue);
        }
    }

    /// Notifies observers that a host thread has seen the end of the command with this number.
    pub(crate) fn host_saw(&self, seq: u64) {
        self.observers.notify(|observer| observer.host_saw(self.position(seq)));
    }

    /// Returns an error if the result of the command with this number is lost, by a panic or a
    /// failure of the device. Reliable for completed commands; for others the error may come later.
    pub(crate) fn check_result(&self, seq: u64) -> Result<()> {
        if let StreamEngine::Cuda(cuda_queue) = &self.engine {
            return cuda_queue.check();
        }
        match self.failure.get() {
            Some(failure) if failure.seq <= seq => {
                let KernelPanic { operation, stream, site, message } = failure.panic.clone();
                Err(Error::KernelPanicked { operation, stream, site, message })
            }
            _ => Ok(()),
        }
    }

    /// Returns an error if a kernel of this stream panicked, or its device failed.
    pub(crate) fn check_alive(&self) -> Result<()> {
        self.check_result(u64::MAX)
    }

    /// Its name.
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.observed.name
    }

    /// The command with this number, as observers see it.
    pub(crate) fn position(&self, seq: u64) -> CommandPosition<'_> {
        CommandPosition { stream: &self.observed, seq }
    }
}

//! Execution of a stream's commands by a worker, and the failure of streams after a kernel's panic.

use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::time::Instant;

use smallvec::SmallVec;

use super::{
    Edge, KernelPanic, QueueState, RESUME_AT, StreamCommand, StreamEngine, StreamFailure,
    StreamQueue, StreamState,
};
use crate::execution::{StreamWork, Task, TaskEnd, discard};
use crate::ground::Error;
use crate::ground::sync::{Arc, MutexGuard, Ordering, TURN};
use crate::hooks::FinishedLaunch;

impl StreamState {
    /// Number of the command that is running; for its worker.
    fn next_seq(&self) -> u64 {
        self.completed.load(Ordering::Relaxed) + 1
    }

    /// Runs work, and notifies the observers before any other thread can see that it is done.
    fn run_observed(&self, mut work: StreamWork) {
        let Some(call) = work.take_call() else { return self.run_work(work) };
        let (operation, site) = (work.operation(), work.site());
        let at = self.position(self.next_seq());
        let (call, dropped) = (&call, self.failure.get().is_some());
        let start = Instant::now();
        self.run_work(work);
        let ran = FinishedLaunch { at, operation, site, call, start, end: Instant::now(), dropped };
        self.observers.notify(|observer| observer.launch_ran(&ran));
    }

    /// Runs work, or drops it if an earlier kernel of the stream panicked.
    fn run_work(&self, work: StreamWork) {
        let (operation, site) = (work.operation(), work.site());
        let alive = self.failure.get().is_none();
        let run = AssertUnwindSafe(|| if alive { work.run() } else { drop(work) });
        if let Err(payload) = catch_unwind(run) {
            let message = match payload.downcast::<String>() {
                Ok(message) => message.as_str().into(),
                Err(payload) => match payload.downcast::<&'static str>() {
                    Ok(message) => Arc::from(*message),
                    Err(payload) => {
                        discard(payload);
                        Arc::from("(no message)")
                    }
                },
            };
            self.fail(KernelPanic { operation, stream: self.name().clone(), site, message });
        }
    }

    /// The failure of a producer's device, in the form of a kernel's panic on its stream.
    fn lost(&self, producer: &StreamState, error: &Error) -> KernelPanic {
        let (operation, site) = match error {
            Error::DeviceFailed { operation, site, .. } => (*operation, *site),
            _ => ("wait", Location::caller()),
        };
        let (stream, message) = (producer.name().clone(), error.to_string().into());
        KernelPanic { operation, stream, site, message }
    }

    /// Marks the current command and everything after it as failed.
    fn fail(&self, panic: KernelPanic) {
        let seq = self.next_seq();
        // Only the first failure is stored; later work is not run.
        let _ = self.failure.set(StreamFailure { seq, panic });
    }

    /// Parks this stream if the wait is not over; returns whether it did. Then another worker may
    /// already run the stream, and the caller must not touch it any more. A wait for a CUDA device
    /// blocks the calling worker instead.
    fn park_for(self: &Arc<Self>, edge: &Edge) -> bool {
        let producer = &edge.access.stream;
        if let StreamEngine::Cuda(cuda_queue) = &producer.engine {
            cuda_queue.wait(edge.access.seq); // a CUDA device wakes no stream
            if edge.propagates
                && let Err(error) = cuda_queue.check()
            {
                self.fail(self.lost(producer, &error));
            }
        } else if !edge.access.is_done() {
            // Parked before it is registered, because the producer may wake it as soon as it is
            // registered. The wait is put back, to be checked again then.
            {
                let mut queue = self.lock();
                let access = edge.access.clone();
                let again = Edge { access, propagates: edge.propagates };
                queue.commands.push_front(StreamCommand::Wait(again));
                queue.state = QueueState::Parked;
            }
            if producer.add_waiter(edge.access.seq, self) {
                return true;
            }
            let mut queue = self.lock();
            queue.state = QueueState::Ready;
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

    /// Registers a parked stream; false if the awaited command is done by now.
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
    fn wake_waiters<'a>(
        &'a self,
        mut queue: MutexGuard<'a, StreamQueue>,
    ) -> MutexGuard<'a, StreamQueue> {
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
            waiter.lock().state = QueueState::Ready;
            if let StreamEngine::Cpu(executor) = &waiter.engine {
                executor.clone().resume(waiter);
            }
        }
        self.lock()
    }
}

impl Task for StreamState {
    /// Runs commands until the queue is empty, a command has to wait, or the turn is over while
    /// other streams are ready.
    fn run(self: &Arc<Self>) -> TaskEnd {
        let StreamEngine::Cpu(executor) = &self.engine else {
            unreachable!("workers get the streams of their own device")
        };
        let mut turn_start = None;
        let mut queue = self.lock();
        loop {
            let Some(command) = queue.commands.pop_front() else {
                queue.state = QueueState::Idle;
                return TaskEnd::Idle;
            };
            if queue.blocked > 0 && queue.commands.len() <= RESUME_AT {
                self.space.notify_all();
            }
            drop(queue);
            match command {
                StreamCommand::Work(work) => {
                    if self.observers.is_empty() {
                        self.run_work(work)
                    } else {
                        self.run_observed(work)
                    }
                }
                StreamCommand::Wait(edge) => {
                    self.observers.notify(|observer| observer.wait_begins(&self.observed));
                    if self.park_for(&edge) {
                        return TaskEnd::Parked;
                    }
                    self.observers.notify(|observer| {
                        let at = self.position(self.next_seq());
                        observer.wait_ended(at, edge.access.position());
                    });
                }
            }
            self.completed.store(self.next_seq(), Ordering::Release);
            queue = self.wake_waiters(self.lock());
            if executor.has_ready() && !queue.commands.is_empty() {
                let start = *turn_start.get_or_insert_with(Instant::now);
                if start.elapsed() >= TURN {
                    return TaskEnd::TurnOver;
                }
            }
        }
    }
}

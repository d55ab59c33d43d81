//! Streams: queues of commands with what each has to wait for.

use std::collections::VecDeque;

use super::graph::Run;
use super::point::Point;
use super::work::Work;

/// A command of a stream.
#[derive(Debug)]
pub(crate) struct Command {
    /// Places in other streams that come before.
    pub(crate) after: Vec<Point>,
    pub(crate) task: Task,
}

/// The task of a command.
#[derive(Debug)]
pub(crate) enum Task {
    Work(Work),
    /// A graph, node by node.
    Graph(Run),
}

/// A queue.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Number of its device.
    pub(crate) device: usize,
    /// Whether it is in order with the default stream.
    pub(crate) blocking: bool,
    /// Destroyed by the host; it goes when its commands are done.
    pub(crate) destroyed: bool,
    /// Commands that are not done; the first may be a graph of which a part is.
    pub(crate) queue: VecDeque<Command>,
    /// Commands that were ever enqueued.
    pub(crate) enqueued: u64,
    /// Commands that are done.
    pub(crate) done: u64,
}

impl Stream {
    pub(crate) fn new(device: usize, blocking: bool) -> Self {
        let queue = VecDeque::new();
        Self { device, blocking, destroyed: false, queue, enqueued: 0, done: 0 }
    }
}

/// An event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    /// Number of its device.
    pub(crate) device: usize,
    /// Whether it has a time.
    pub(crate) timed: bool,
    /// The place that it was last recorded after.
    pub(crate) recorded: Option<Point>,
}

//! Streams: queues of commands, each with the points that it waits for.

use std::collections::VecDeque;

use super::graph::GraphRun;
use super::point::StreamPoint;
use super::work::DeviceWork;

/// A command of a stream.
#[derive(Debug)]
pub(crate) struct QueuedCommand {
    /// Points in other streams that come before.
    pub(crate) after: Vec<StreamPoint>,
    /// Time at which it was enqueued, see [`SimStream::ends`].
    pub(crate) enqueued: u64,
    pub(crate) task: CommandTask,
}

/// The task of a command.
#[derive(Debug)]
pub(crate) enum CommandTask {
    Work(DeviceWork),
    /// A graph, node by node.
    Graph(GraphRun),
}

/// A stream: a queue of commands.
#[derive(Debug)]
pub(crate) struct SimStream {
    /// Number of its device.
    pub(crate) device: usize,
    /// Whether it is ordered with the default stream.
    pub(crate) blocking: bool,
    /// Whether the host has destroyed it; it is removed when its commands are done.
    pub(crate) destroyed: bool,
    /// Commands that are not done. The first may be a graph that is partly done.
    pub(crate) queue: VecDeque<QueuedCommand>,
    /// Number of commands enqueued so far.
    pub(crate) enqueued: u64,
    /// Number of commands that are done.
    pub(crate) done: u64,
    /// End of each command that is done, in microseconds. The stand-in runs one command at a time;
    /// these are the times of a device that runs the commands of all streams at once, each kernel,
    /// copy, fill or exchange for one microsecond, and no command before it is enqueued or before
    /// the end of a command that it waits for.
    pub(crate) ends: Vec<u64>,
}

impl SimStream {
    pub(crate) fn new(device: usize, blocking: bool) -> Self {
        let queue = VecDeque::new();
        Self { device, blocking, destroyed: false, queue, enqueued: 0, done: 0, ends: vec![] }
    }
}

/// An event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimEvent {
    /// Number of its device.
    pub(crate) device: usize,
    /// Whether it records a time.
    pub(crate) timed: bool,
    /// The point at which it was last recorded.
    pub(crate) recorded: Option<StreamPoint>,
}

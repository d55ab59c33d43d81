//! Work of a CUDA device, as it is handed to a lane.

use super::graph::Graph;
use super::nccl::Member;
use super::program::Bound;
use super::staging::Staging;
use crate::execution::args::Record;
use crate::execution::call::Program;
use crate::execution::transfer::{Download, Fill};
use crate::ground::sync::Arc;

/// A launch in flight.
pub(crate) struct Task {
    pub(super) record: Record,
    pub(super) act: TaskAct,
}

/// The act of a task on the arguments of its record.
pub(super) enum TaskAct {
    /// Calls of kernels.
    Calls(Program, Arc<Bound>),
    /// Calls of kernels for several launches at once.
    Graph(Arc<Graph>),
    /// Copies argument 0 into argument 1, 2 into 3, and so on.
    Copy,
    /// Fills every argument.
    Fill(Fill),
    /// Copies staging memory into argument 0.
    Upload(Staging),
    /// Sends the arguments that are read and receives those that are written, to and from these
    /// ranks.
    Exchange(Arc<Member>, Vec<usize>),
    /// Copies the arguments to the host.
    Download(Box<dyn Download>),
}

impl Task {
    /// Whether it may become a part of a graph.
    pub(crate) fn is_placed(&self) -> bool {
        matches!(&self.act, TaskAct::Calls(program, _) if program.is_placed())
    }

    pub(crate) fn record(&self) -> &Record {
        &self.record
    }

    pub(crate) fn record_mut(&mut self) -> &mut Record {
        &mut self.record
    }
}

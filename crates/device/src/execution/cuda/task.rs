//! Tasks: the commands of a CUDA device, as they are issued to a stream.

use super::graph::CudaGraph;
use super::nccl::PeerMembership;
use super::program::BoundProgram;
use super::staging::StagingBuffer;
use crate::execution::args::LaunchRecord;
use crate::execution::call::Program;
use crate::execution::fill::Fill;
use crate::execution::transfer::{Download, ForeignAddresses};
use crate::ground::sync::Arc;

/// A launch, a copy, a fill or an exchange, ready to be issued.
pub(crate) struct CudaTask {
    pub(super) record: LaunchRecord,
    pub(super) act: TaskAct,
}

/// The act of a task on the arguments of its record.
pub(super) enum TaskAct {
    /// Calls of kernels.
    Calls(Program, Arc<BoundProgram>),
    /// Calls of kernels for several launches at once.
    Graph(Arc<CudaGraph>),
    /// Copies argument 0 into argument 1, 2 into 3, and so on.
    Copy,
    /// Fills every argument.
    Fill(Fill),
    /// Copies staging memory into argument 0.
    Upload(StagingBuffer),
    /// Sends the arguments that are read to these ranks, and receives the arguments that are
    /// written from them.
    Exchange(Arc<PeerMembership>, Vec<usize>),
    /// Copies the arguments to the host.
    Download(Box<dyn Download>),
    /// Copies memory of the device that another library owns into the arguments.
    Foreign(ForeignAddresses),
}

impl CudaTask {
    /// Whether the task can become part of a graph: all its calls name their arguments
    /// ([`Program::names_pieces`]).
    pub(crate) fn names_pieces(&self) -> bool {
        matches!(&self.act, TaskAct::Calls(program, _) if program.names_pieces())
    }

    pub(crate) fn record(&self) -> &LaunchRecord {
        &self.record
    }

    pub(crate) fn record_mut(&mut self) -> &mut LaunchRecord {
        &mut self.record
    }
}

//! Queues: the streams of a CUDA device as they are mapped onto its CUDA streams.
//!
//! Many streams share one CUDA stream of the driver ([`CudaStream`]). The thread that submits a
//! command issues it at once, so nothing waits in a queue on the host. A CUDA stream numbers the
//! commands of all its streams in one sequence; a queue maps the numbers of its own stream's
//! commands to that sequence:
//!
//! ```text
//! stream a (commands)     1     2           3
//! stream b (commands)        1        2
//! CUDA stream (sequence)  1  2  3     4     5
//! ```
//!
//! Streams of one CUDA stream need no waits between them. Across CUDA streams the driver waits for
//! an event.

use std::collections::VecDeque;
use std::panic::Location;

use smallvec::SmallVec;

use super::context::CudaContext;
use super::fusion::{Fusion, branches};
use super::nccl::PeerMembership;
use super::program::BoundProgram;
use super::staging::{StagingBuffer, StagingRing};
use super::stream::{CudaStream, OnComplete};
use super::task::{CudaTask, TaskAct};
use crate::execution::args::LaunchRecord;
use crate::execution::call::{Call, Program};
use crate::execution::transfer::{HostBytes, Transfer};
use crate::ground::sync::{Arc, AtomicSeq, Mutex, Ordering, lock};
use crate::ground::{Act, Error, Result};
use crate::hooks::Counters;

/// Number of issued commands at which a queue polls the device, to forget completed commands.
const POLL_AT: usize = 256;

/// A command of this stream. From one command to the next `number` grows, and `sequence` grows or,
/// for a wait that needs no event, stays.
struct IssuedCommand {
    /// Number of the command in this stream.
    number: u64,
    /// Its number in the sequence of the CUDA stream.
    sequence: u64,
}

/// The CUDA side of one stream.
pub(crate) struct CudaQueue {
    /// The CUDA stream that carries out the commands.
    stream: Arc<CudaStream>,
    /// The latest command known to be done.
    done: AtomicSeq,
    /// Commands in the order of issue that are not known to be done.
    issued: Mutex<VecDeque<IssuedCommand>>,
    /// Devices whose results this stream has waited for. The stream fails if one of them fails.
    others: Mutex<Vec<Arc<CudaContext>>>,
}

impl CudaQueue {
    /// The queue of a new stream, carried out by this CUDA stream.
    pub(crate) fn new(stream: Arc<CudaStream>) -> CudaQueue {
        let done = AtomicSeq::new(0);
        CudaQueue { stream, done, issued: Mutex::default(), others: Mutex::default() }
    }

    /// Checks a program and binds its calls to their kernels. The first call of a source compiles
    /// and loads its kernels, which stops the device and counts as a synchronisation.
    ///
    /// # Errors
    /// [`Error::NoKernel`] without a program; the errors of the check and of the compiler;
    /// [`Error::HotScope`] if an open scope forbids the stop.
    pub(crate) fn calls(
        &self,
        program: Option<Program>,
        record: LaunchRecord,
        counters: &Counters,
    ) -> Result<CudaTask> {
        let (operation, context) = (record.operation, self.stream.context());
        let program = program.ok_or(Error::NoKernel { operation, device: self.stream.device() })?;
        self.count_loading(&program, record.site, counters)?;
        let bound = BoundProgram::for_launch(context, &program, &record)?;
        Ok(CudaTask { record, act: TaskAct::Calls(program, bound) })
    }

    /// Counts a synchronisation if kernels of a program must be loaded, which stops the device.
    fn count_loading(
        &self,
        program: &Program,
        site: &'static Location<'static>,
        counters: &Counters,
    ) -> Result<()> {
        let context = self.stream.context();
        let unloaded = |call: &Call| !context.has_module(call.kernel.source);
        if !BoundProgram::is_known(context, program) && program.0.list.iter().any(unloaded) {
            counters.count(Act::Synchronize, "load kernels", site)?;
        }
        Ok(())
    }

    /// Fuses independent tasks, all of which [name their pieces](CudaTask::names_pieces), into one;
    /// `None` for no tasks. Building the graph counts as an allocation, and its launch as a copy to
    /// the device if the addresses of the arguments are not in one of the graph's tables yet. If
    /// the driver has no memory for the graph, `reclaim` is called to free some.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::HotScope`] if an open scope forbids the allocation or the copy.
    pub(crate) fn fuse(
        &self,
        tasks: Vec<CudaTask>,
        counters: &Counters,
        reclaim: &dyn Fn(),
    ) -> Result<Option<CudaTask>> {
        let Some(Fusion { record, branches }) = Fusion::from_tasks(tasks) else { return Ok(None) };
        let build = || counters.count(Act::Allocate, "build a graph", record.site);
        let graph = self.stream.graph(branches, build, reclaim)?;
        if !graph.has_addresses(&record) {
            counters.count(Act::CopyToDevice, "addresses of a graph", record.site)?;
        }
        Ok(Some(CudaTask { record, act: TaskAct::Graph(graph) }))
    }

    /// Builds the graph of later tasks of these programs, each given with its number of arguments.
    ///
    /// # Errors
    /// The errors of [`fuse`](CudaQueue::fuse), and of binding the programs.
    pub(crate) fn prepare(
        &self,
        programs: &[(Program, usize)],
        (operation, site): (&'static str, &'static Location<'static>),
        counters: &Counters,
        reclaim: &dyn Fn(),
    ) -> Result<()> {
        let bind = |(program, args): &(Program, usize)| {
            self.count_loading(program, site, counters)?;
            let bound = BoundProgram::for_program(self.stream.context(), program, operation)?;
            Ok((program.clone(), bound, *args))
        };
        let bound = programs.iter().map(bind).collect::<Result<Vec<_>>>()?;
        let branches = branches(bound);
        if !branches.is_empty() {
            let build = || counters.count(Act::Allocate, "build a graph", site);
            self.stream.graph(branches, build, reclaim)?;
        }
        Ok(())
    }

    /// A copy or a fill. The staging memory of an upload is filled here, because `HostBytes` may
    /// call user code, which must not run under the locks of a submission.
    ///
    /// # Errors
    /// The errors of [`stage`](CudaQueue::stage).
    pub(crate) fn transfer(
        &self,
        transfer: Transfer,
        record: LaunchRecord,
        counters: &Counters,
    ) -> Result<CudaTask> {
        let act = match transfer {
            Transfer::Copy => TaskAct::Copy,
            Transfer::Fill(fill) => TaskAct::Fill(fill),
            Transfer::Upload(source) => TaskAct::Upload(self.stage(source, &record, counters)?),
            Transfer::Download(to) => TaskAct::Download(to),
            Transfer::Foreign(from) => TaskAct::Foreign(from),
        };
        Ok(CudaTask { record, act })
    }

    /// A ring of `count` page-locked buffers of `bytes` bytes, for uploads on this stream.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the system does not lock that many bytes.
    pub(crate) fn staging_ring(&self, count: usize, bytes: usize) -> Result<Arc<StagingRing>> {
        StagingRing::new(self.stream.context(), count, bytes)
    }

    /// A buffer of a ring, as [`CudaStream::take_staging`].
    ///
    /// # Errors
    /// As [`CudaStream::take_staging`].
    pub(crate) fn take_staging<G>(
        &self,
        ring: &Arc<StagingRing>,
        before_wait: impl Fn() -> Result<G>,
        before_growth: impl Fn() -> Result<()>,
    ) -> Result<StagingBuffer> {
        self.stream.take_staging(ring, before_wait, before_growth)
    }

    /// An upload of a filled buffer of a ring.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`].
    pub(crate) fn upload(&self, staging: StagingBuffer, record: LaunchRecord) -> Result<CudaTask> {
        self.check()?;
        Ok(CudaTask { record, act: TaskAct::Upload(staging) })
    }

    /// An exchange with other ranks of a group; `ranks` are the peers of the arguments.
    pub(crate) fn exchange(
        &self,
        member: &Arc<PeerMembership>,
        ranks: Vec<usize>,
        record: LaunchRecord,
    ) -> CudaTask {
        CudaTask { record, act: TaskAct::Exchange(member.clone(), ranks) }
    }

    /// The driver's handle of the stream (`CUstream`).
    pub(crate) fn handle(&self) -> u64 {
        self.stream.handle()
    }

    /// Blocks until the device has no work, not even work of other code in the process.
    pub(crate) fn wait_for_device(&self) {
        self.stream.context().synchronize();
    }

    /// Makes the device's context current on the calling thread.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn make_context_current(&self) -> Result<()> {
        let device = self.stream.device();
        self.context().bind().map_err(|source| Error::Cuda { device, source })
    }

    /// The device's context.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        self.stream.context()
    }

    /// Fills staging memory for the upload of a record. Waits for earlier copies while more than
    /// 256 MiB of it are in flight. Without page-locked memory the copy makes the host wait. Each
    /// wait counts as a synchronisation.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`], [`Error::Cuda`]; [`Error::HotScope`] if an open scope forbids the
    /// wait.
    fn stage(
        &self,
        source: HostBytes,
        record: &LaunchRecord,
        counters: &Counters,
    ) -> Result<StagingBuffer> {
        self.check()?;
        let bytes = record.args[0].bytes;
        let note_wait = || counters.count(Act::Synchronize, record.operation, record.site);
        let mut staging = self.stream.staging(bytes, note_wait)?;
        if staging.is_plain() && bytes > 0 {
            note_wait()?;
        }
        // SAFETY: no copy that uses the buffer is enqueued yet.
        let free = unsafe { staging.bytes() };
        source.write(&mut free[..bytes]);
        Ok(staging)
    }

    /// Issues command `number` after the commands of `waits`, each given by its queue and number.
    pub(crate) fn issue<'a>(
        &self,
        number: u64,
        waits: impl Iterator<Item = (&'a CudaQueue, u64)>,
        task: Option<CudaTask>,
        on_complete: Option<OnComplete>,
    ) {
        let waits = waits.filter(|(queue, _)| !self.shares_cuda_stream(queue));
        let waits = waits.inspect(|(queue, _)| self.depend_on(queue));
        let events: SmallVec<[_; 4]> = waits
            .filter_map(|(queue, number)| queue.stream.event(queue.sequence(number)?))
            .collect();
        let sequence = self.stream.issue(&events, task, on_complete);
        let mut issued = lock(&self.issued);
        issued.push_back(IssuedCommand { number, sequence });
        if issued.len() >= POLL_AT {
            self.forget_done(&mut issued);
        }
    }

    /// Whether one CUDA stream carries out both streams, and so orders their commands.
    pub(crate) fn shares_cuda_stream(&self, other: &CudaQueue) -> bool {
        Arc::ptr_eq(&self.stream, &other.stream)
    }

    /// Makes this stream fail when the device of `other` fails. Does nothing if both are on one
    /// device.
    fn depend_on(&self, other: &CudaQueue) {
        let context = other.stream.context();
        if !Arc::ptr_eq(context, self.stream.context()) {
            let mut others = lock(&self.others);
            if !others.iter().any(|known| Arc::ptr_eq(known, context)) {
                others.push(context.clone());
            }
        }
    }

    /// Whether command `number` is known to be done, without asking the device.
    pub(crate) fn is_known_done(&self, number: u64) -> bool {
        self.sequence(number).is_none_or(|sequence| self.stream.has_completed(sequence))
    }

    /// Whether command `number` is done. Polls the device if necessary.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.done.load(Ordering::Acquire) >= number || {
            let done = self.sequence(number).is_none_or(|sequence| self.stream.is_done(sequence));
            let done = done && !lock(&self.others).iter().any(|other| other.is_suspended());
            if done {
                self.done.fetch_max(number, Ordering::Release);
            }
            done
        }
    }

    /// Blocks until command `number` is done, or the device has failed.
    pub(crate) fn wait(&self, number: u64) {
        if let Some(sequence) = self.sequence(number) {
            self.stream.wait(sequence);
            let others = lock(&self.others).clone();
            others.iter().for_each(|other| other.await_reason());
        }
        self.done.fetch_max(number, Ordering::Release);
    }

    /// Number of commands up to `number` that are not known to be done.
    pub(crate) fn backlog(&self, number: u64) -> u64 {
        number.saturating_sub(self.done.load(Ordering::Acquire))
    }

    /// Returns an error if this device has failed, or a device whose results this stream has waited
    /// for.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`].
    pub(crate) fn check(&self) -> Result<()> {
        self.stream.context().check()?;
        lock(&self.others).iter().try_for_each(|other| other.check())
    }

    /// The sequence number that completes command `number`; `None` if the command is known to be
    /// done. A command that was not issued is never done: its sequence number is `u64::MAX`.
    fn sequence(&self, number: u64) -> Option<u64> {
        if self.done.load(Ordering::Acquire) >= number {
            return None;
        }
        let issued = lock(&self.issued);
        let i = issued.partition_point(|command| command.number < number);
        match issued.get(i) {
            Some(command) => Some(command.sequence),
            // Commands are forgotten after `done` was raised.
            None if self.done.load(Ordering::Acquire) >= number => None,
            None => Some(u64::MAX),
        }
    }

    /// Forgets commands that are done.
    fn forget_done(&self, issued: &mut VecDeque<IssuedCommand>) {
        while let Some(command) = issued.front() {
            if !self.stream.is_done(command.sequence) {
                break;
            }
            self.done.fetch_max(command.number, Ordering::Release);
            issued.pop_front();
        }
    }
}

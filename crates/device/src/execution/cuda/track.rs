//! Tracks: the streams of a CUDA device, by the numbers of their commands.
//!
//! A stream's commands are issued to its lane at once, in the order of their numbers. A track keeps
//! which ticket of the lane completes which number.

use super::context::CudaContext;
use super::fusion::{Fusion, branches};
use super::lane::{CudaStream, OnComplete};
use super::nccl::Membership;
use super::program::BoundProgram;
use super::staging::StagingBuffer;
use super::task::{CudaTask, TaskAct};
use crate::execution::args::LaunchRecord;
use crate::execution::call::{Call, Program};
use crate::execution::transfer::{HostBytes, Transfer};
use crate::ground::sync::{Arc, AtomicSeq, Mutex, Ordering, lock};
use crate::ground::{Act, Error, Result};
use crate::hooks::Counters;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::panic::Location;

/// Marks at which a track looks which of them are done.
const LOOK_AT: usize = 256;

/// A stream of the device.
pub(crate) struct CudaQueue {
    lane: Arc<CudaStream>,
    /// The latest number known to be done.
    done: AtomicSeq,
    /// Numbers with the tickets that complete them, both growing.
    marks: Mutex<VecDeque<(u64, u64)>>,
    /// Other devices whose results this stream has waited for: it fails with them.
    others: Mutex<Vec<Arc<CudaContext>>>,
}

impl CudaQueue {
    /// A stream that is dealt onto this lane.
    pub(crate) fn new(lane: Arc<CudaStream>) -> CudaQueue {
        let done = AtomicSeq::new(0);
        CudaQueue { lane, done, marks: Mutex::default(), others: Mutex::default() }
    }

    /// Checks a program and binds its calls to their kernels, which are compiled and loaded if this
    /// is the first call of their source; that stops the device, and counts as a synchronisation.
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
        let (operation, context) = (record.operation, self.lane.context());
        let program = program.ok_or(Error::NoKernel { operation, device: self.lane.device() })?;
        self.note_loading(&program, record.site, counters)?;
        let bound = BoundProgram::of(context, &program, &record)?;
        Ok(CudaTask { record, act: TaskAct::Calls(program, bound) })
    }

    /// Counts the stop of the device if kernels of a program must be loaded.
    fn note_loading(
        &self,
        program: &Program,
        site: &'static Location<'static>,
        counters: &Counters,
    ) -> Result<()> {
        let context = self.lane.context();
        let unloaded = |call: &Call| !context.has_module(call.kernel.source);
        if !BoundProgram::is_known(context, program) && program.0.list.iter().any(unloaded) {
            counters.note(Act::Synchronize, "load kernels", site)?;
        }
        Ok(())
    }

    /// Makes one task of several that have nothing to do with one another, each of which
    /// [is placed](CudaTask::is_placed); `None` without any. Building its graph counts as an
    /// allocation; without memory for it `reclaim` is called, which may free some.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::HotScope`] if an open scope forbids the allocation.
    pub(crate) fn fuse(
        &self,
        tasks: Vec<CudaTask>,
        counters: &Counters,
        reclaim: &dyn Fn(),
    ) -> Result<Option<CudaTask>> {
        let Some(Fusion { record, branches }) = Fusion::of(tasks) else { return Ok(None) };
        let build = || counters.note(Act::Allocate, "build a graph", record.site);
        let graph = self.lane.graph(branches, build, reclaim)?;
        Ok(Some(CudaTask { record, act: TaskAct::Graph(graph) }))
    }

    /// Builds the graph ahead that tasks of these programs will be, each with its number of
    /// arguments.
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
            self.note_loading(program, site, counters)?;
            let bound = BoundProgram::ahead(self.lane.context(), program, operation)?;
            Ok((program.clone(), bound, *args))
        };
        let bound = programs.iter().map(bind).collect::<Result<Vec<_>>>()?;
        let branches = branches(bound);
        if !branches.is_empty() {
            let build = || counters.note(Act::Allocate, "build a graph", site);
            self.lane.graph(branches, build, reclaim)?;
        }
        Ok(())
    }

    /// A copy or a fill. Fills the staging memory of an upload, so that nobody else's code runs
    /// under the locks of a submission.
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
        };
        Ok(CudaTask { record, act })
    }

    /// An exchange with other ranks of a group.
    pub(crate) fn exchange(&self, member: &Arc<Membership>, ranks: Vec<usize>, record: LaunchRecord) -> CudaTask {
        CudaTask { record, act: TaskAct::Exchange(member.clone(), ranks) }
    }

    /// The device's context.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        self.lane.context()
    }

    /// Fills staging memory for the upload of a record. Waits for earlier copies if very much of it
    /// is in flight. A copy without page-locked memory makes the host wait, and counts as that.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`]; [`Error::HotScope`] if an open scope forbids the wait.
    fn stage(&self, source: HostBytes, record: &LaunchRecord, counters: &Counters) -> Result<StagingBuffer> {
        self.check()?;
        let (device, bytes) = (self.lane.device(), record.args[0].bytes);
        let staging = self.lane.staging(bytes);
        let mut staging = staging.map_err(|source| Error::Cuda { device, source })?;
        if staging.is_plain() && bytes > 0 {
            counters.note(Act::Synchronize, record.operation, record.site)?;
        }
        // SAFETY: nothing was enqueued with it yet.
        let free = unsafe { staging.bytes() };
        source.write(&mut free[..bytes]);
        Ok(staging)
    }

    /// Issues the command of this number, after those of `waits`: tracks with the numbers of their
    /// commands.
    pub(crate) fn issue<'a>(
        &self,
        number: u64,
        waits: impl Iterator<Item = (&'a CudaQueue, u64)>,
        task: Option<CudaTask>,
        told: Option<OnComplete>,
    ) {
        let waits = waits.filter(|(track, _)| !self.shares_lane(track));
        let waits = waits.inspect(|(track, _)| self.depend_on(track));
        let events: SmallVec<[_; 4]> =
            waits.filter_map(|(track, number)| track.lane.event(track.ticket(number)?)).collect();
        let ticket = self.lane.issue(&events, task, told);
        let mut marks = lock(&self.marks);
        marks.push_back((number, ticket));
        if marks.len() >= LOOK_AT {
            self.forget_done(&mut marks);
        }
    }

    /// Whether the two streams are dealt onto one lane, which orders them.
    pub(crate) fn shares_lane(&self, other: &CudaQueue) -> bool {
        Arc::ptr_eq(&self.lane, &other.lane)
    }

    /// Fails from now on with the device of `other`, if that is another one.
    fn depend_on(&self, other: &CudaQueue) {
        let context = other.lane.context();
        if !Arc::ptr_eq(context, self.lane.context()) {
            let mut others = lock(&self.others);
            if !others.iter().any(|known| Arc::ptr_eq(known, context)) {
                others.push(context.clone());
            }
        }
    }

    /// Whether the command of this number is known to be done, without a look at the device.
    pub(crate) fn seems_done(&self, number: u64) -> bool {
        self.ticket(number).is_none_or(|ticket| self.lane.has_completed(ticket))
    }

    /// Whether the command of this number is done.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.done.load(Ordering::Acquire) >= number || {
            let done = self.ticket(number).is_none_or(|ticket| self.lane.is_done(ticket));
            let done = done && !lock(&self.others).iter().any(|other| other.is_suspended());
            if done {
                self.done.fetch_max(number, Ordering::Release);
            }
            done
        }
    }

    /// Blocks until the command of this number is done, or the device has failed.
    pub(crate) fn wait(&self, number: u64) {
        if let Some(ticket) = self.ticket(number) {
            self.lane.wait(ticket);
            let others = lock(&self.others).clone();
            others.iter().for_each(|other| other.await_reason());
        }
        self.done.fetch_max(number, Ordering::Release);
    }

    /// Commands up to this number that are not known to be done.
    pub(crate) fn behind(&self, number: u64) -> u64 {
        number.saturating_sub(self.done.load(Ordering::Acquire))
    }

    /// Returns an error if the device has failed, or another whose results the stream has waited
    /// for.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`].
    pub(crate) fn check(&self) -> Result<()> {
        self.lane.context().check()?;
        lock(&self.others).iter().try_for_each(|other| other.check())
    }

    /// The ticket that completes the command of this number; `None` if it is known to be done. A
    /// number without a mark is that of a command that was not issued, and is never done: the last
    /// ticket there is.
    fn ticket(&self, number: u64) -> Option<u64> {
        if self.done.load(Ordering::Acquire) >= number {
            return None;
        }
        let marks = lock(&self.marks);
        let i = marks.partition_point(|&(marked, _)| marked < number);
        match marks.get(i) {
            Some(&(_, ticket)) => Some(ticket),
            // Marks are dropped after `done` was raised.
            None if self.done.load(Ordering::Acquire) >= number => None,
            None => Some(u64::MAX),
        }
    }

    /// Drops the marks of commands that are done.
    fn forget_done(&self, marks: &mut VecDeque<(u64, u64)>) {
        while let Some(&(number, ticket)) = marks.front() {
            if !self.lane.is_done(ticket) {
                break;
            }
            self.done.fetch_max(number, Ordering::Release);
            marks.pop_front();
        }
    }
}

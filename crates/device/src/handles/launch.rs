//! Launches: a kernel with its tensors, checked and enqueued onto a stream.

use std::panic::Location;
use std::time::Instant;

use smallvec::SmallVec;

use super::expect::Expect;
use super::group::{GroupedLaunch, LaunchGroup};
use super::launches::Launches;
use super::operands::{check_overlap, touch};
use super::{Launch, Scratch, Stream, Tensor};
use crate::execution::{Arg, Args, LaunchRecord, Program, StreamWork, Transfer};
use crate::ground::sync::Arc;
use crate::ground::{AccessKind, Act, Result};
use crate::hooks::{Category, LaunchArgument, LaunchCall, log_placement};
use crate::order::{StreamState, submit_work};

impl<'a> Launch<'a> {
    pub(crate) fn new(
        stream: &'a Stream,
        operation: &'static str,
        act: Option<Act>,
        site: &'static Location<'static>,
    ) -> Self {
        Launch {
            stream,
            operation,
            act,
            site,
            tensors: SmallVec::new(),
            scratch: None,
            program: None,
        }
    }

    /// Adds an argument that the kernel only reads. Its index is the number of earlier arguments.
    pub fn read(mut self, tensor: &'a Tensor) -> Self {
        self.tensors.push((tensor, AccessKind::Read));
        self
    }

    /// Adds an argument that the kernel writes, and may read. Its index is the number of earlier
    /// arguments.
    pub fn write(mut self, tensor: &'a Tensor) -> Self {
        self.tensors.push((tensor, AccessKind::Write));
        self
    }

    /// Gives the kernel temporary memory, which [`Args::scratch`] returns.
    pub fn scratch(mut self, scratch: &'a Scratch) -> Self {
        self.scratch = Some(scratch);
        self
    }

    /// Sets the program of the launch on a CUDA device: one [`Call`](crate::Call) of a kernel, or
    /// several. `program` is called only there.
    pub fn gpu<P: Into<Program>>(mut self, program: impl FnOnce() -> P) -> Self {
        if self.stream.state().cuda_queue().is_some() {
            self.program = Some(program().into());
        }
        self
    }

    /// Enqueues the kernel: on a CPU device the closure, on a CUDA device the program from
    /// [`gpu`](Launch::gpu). A worker of the device, or the GPU, runs it after all earlier work of
    /// the stream, and after every earlier launch of other streams with a conflicting access. These
    /// waits happen on the device. Waits for space if the stream's queue is full. Does not wait for
    /// the device, except on a CUDA device: the first launch of a kernel loads it, which waits and
    /// counts as a synchronisation (unless
    /// [`Device::load_kernels`](crate::Device::load_kernels) has done it), and the first launch of
    /// a device with a trace waits for the earlier work of its stream.
    ///
    /// A kernel must not wait for the device, and should not block on other host threads. If it
    /// panics, its stream fails: later work is dropped, and later calls return
    /// [`crate::Error::KernelPanicked`].
    ///
    /// # Errors
    /// Nothing was enqueued if this returns an error, except with `MERISTEM_LAUNCH_BLOCKING=1`,
    /// where the kernel's own panic is returned.
    /// - [`crate::Error::Mismatch`]: an argument, or the temporary memory, belongs to another
    ///   stream.
    /// - [`crate::Error::Overlap`]: a written argument shares bytes with another.
    /// - [`crate::Error::KernelPanicked`]: an earlier kernel panicked, on this stream or on a
    ///   stream whose result is an argument.
    /// - [`crate::Error::Race`], only with the race sanitizer on.
    /// - On a CUDA device: [`crate::Error::NoKernel`] without a program, [`crate::Error::Mismatch`]
    ///   if a call does not match its kernel's declaration, [`crate::Error::Cuda`] if a kernel
    ///   cannot be compiled, [`crate::Error::HotScope`] if a kernel must be loaded and an open
    ///   scope forbids the wait, [`crate::Error::DeviceFailed`].
    pub fn run<F>(mut self, kernel: F) -> Result<()>
    where
        F: FnOnce(&mut Args<'_>) + Send + 'static,
    {
        let program = self.program.take();
        let stream = self.stream.state();
        self.submit(Category::Launch, |record| bound(stream, program, record, kernel))
    }

    /// Enqueues a copy or a fill of the arguments, like the kernel of [`run`](Launch::run).
    pub(crate) fn transfer(self, transfer: Transfer) -> Result<()> {
        let category = transfer.category();
        let stream = self.stream.state();
        self.submit(category, |record| match stream.cuda_queue() {
            None => Ok(StreamWork::Transfer(Box::new((record, transfer)))),
            Some(cuda_queue) => {
                let task = cuda_queue.transfer(transfer, record, &stream.shared.counters)?;
                Ok(StreamWork::Cuda(Box::new(task)))
            }
        })
    }

    pub(super) fn submit(
        self,
        category: Category,
        work: impl FnOnce(LaunchRecord) -> Result<StreamWork>,
    ) -> Result<()> {
        self.check_streams()?;
        check_overlap(self.operation, &self.tensors)?;
        log_placement(self.operation, || self.placements());
        let record = self.record(category);
        let touching = self.tensors.iter().filter(|(tensor, _)| tensor.bytes() > 0);
        let touches = touching.map(|&(tensor, access)| touch(tensor, access));
        let state = self.stream.state();
        if let Some(act) = self.act {
            state.shared.counters.count(act, self.operation, self.site)?;
        }
        submit_work(state, touches, work(record)?)
    }

    /// Adds this launch to a group, which enqueues it. Its arguments may be tensors of any stream
    /// of the group.
    ///
    /// # Errors
    /// [`crate::Error::Mismatch`] if the temporary memory belongs to another stream; the errors of
    /// [`run`](Launch::run) about a call on a CUDA device. Errors of the arguments are returned by
    /// [`LaunchGroup::run`].
    pub fn join<F>(mut self, group: &mut LaunchGroup<'a>, kernel: F) -> Result<()>
    where
        F: FnOnce(&mut Args<'_>) + Send + 'static,
    {
        self.check_scratch()?;
        log_placement(self.operation, || self.placements());
        let record = self.record(Category::Launch);
        let state = self.stream.state();
        let work = bound(state, self.program.take(), record, kernel)?;
        if let Some(act) = self.act {
            state.shared.counters.count(act, self.operation, self.site)?;
        }
        group.parts.push(self.member(work));
        Ok(())
    }

    /// Adds this launch to independent launches that are enqueued together.
    ///
    /// # Errors
    /// The errors of [`run`](Launch::run) about the arguments, and about a call on a CUDA device.
    pub fn add<F>(mut self, launches: &mut Launches<'a>, kernel: F) -> Result<()>
    where
        F: FnOnce(&mut Args<'_>) + Send + 'static,
    {
        self.check_streams()?;
        check_overlap(self.operation, &self.tensors)?;
        log_placement(self.operation, || self.placements());
        let record = self.record(Category::Launch);
        let work = bound(self.stream.state(), self.program.take(), record, kernel)?;
        launches.parts.push(self.member(work));
        Ok(())
    }

    fn member(self, work: StreamWork) -> GroupedLaunch<'a> {
        let Launch { stream, operation, tensors, .. } = self;
        GroupedLaunch { operation, stream: stream.state(), tensors, work }
    }

    fn record(&self, category: Category) -> LaunchRecord {
        let args = self.tensors.iter().map(|&(tensor, access)| Arg {
            block: if tensor.bytes() == 0 { None } else { tensor.storage().block().cloned() },
            offset: tensor.offset(),
            bytes: tensor.bytes(),
            dtype: tensor.dtype(),
            access,
            taken: false,
        });
        let (operation, site) = (self.operation, self.site);
        let shared = &self.stream.state().shared;
        let call = shared.observers.watch_runs().then(|| self.call(category));
        let scratch = self.scratch.map(Scratch::borrowed);
        LaunchRecord { operation, site, args: args.collect(), scratch, isa: shared.isa, call }
    }

    #[cold]
    fn call(&self, category: Category) -> Arc<LaunchCall> {
        let argument = |&(tensor, access): &(&Tensor, AccessKind)| {
            let (dtype, shape, format) = (tensor.dtype(), tensor.shape(), tensor.format());
            LaunchArgument { access, dtype, shape, format }
        };
        let arguments = self.tensors.iter().map(argument).collect();
        Arc::new(LaunchCall { category, at: Instant::now(), arguments })
    }

    /// Placements of inputs and outputs, by their positions.
    fn placements(&self) -> (String, String) {
        let of = |access: AccessKind| {
            let all = self.tensors.iter().enumerate().filter(|(_, (_, used))| *used == access);
            let words = all.map(|(i, (tensor, _))| format!("{i}: {}", tensor.placement()));
            words.collect::<Vec<_>>().join("; ")
        };
        (of(AccessKind::Read), of(AccessKind::Write))
    }

    fn check_streams(&self) -> Result<()> {
        // Before the launch is counted.
        self.stream.state().check_alive()?;
        let expect = Expect::stream(self.stream);
        for (i, (tensor, _)) in self.tensors.iter().enumerate() {
            expect.check(self.operation, format_args!("argument {i}"), tensor)?;
        }
        self.check_scratch()
    }

    fn check_scratch(&self) -> Result<()> {
        self.scratch.map_or(Ok(()), |scratch| scratch.check(self.operation, self.stream))
    }
}

/// The kernel of a launch for its stream's device.
///
/// # Errors
/// The errors of a program on a CUDA device; see [`Launch::run`].
fn bound<F>(
    stream: &StreamState,
    program: Option<Program>,
    record: LaunchRecord,
    kernel: F,
) -> Result<StreamWork>
where
    F: FnOnce(&mut Args<'_>) + Send + 'static,
{
    match stream.cuda_queue() {
        None => Ok(StreamWork::kernel(record, kernel)),
        Some(cuda_queue) => {
            let task = cuda_queue.calls(program, record, &stream.shared.counters)?;
            Ok(StreamWork::Cuda(Box::new(task)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, DeviceId, DeviceOptions, Trace};

    /// A launch's [`LaunchCall`] costs a clock read and an allocation, which only a trace needs.
    #[test]
    fn a_call_is_recorded_only_for_an_observer_of_runs() {
        let folder = tempfile::tempdir().unwrap();
        let trace = Trace::create(folder.path().join("t.json")).unwrap();
        for (sanitize, trace, recorded) in
            [(false, None, false), (true, None, false), (true, Some(trace), true)]
        {
            let options = DeviceOptions { threads: 1, sanitize, trace, ..DeviceOptions::default() };
            let stream = Device::open(DeviceId::Cpu(0), &options).unwrap().stream("s");
            let record = stream.launch("nothing").record(Category::Launch);
            assert_eq!(record.call.is_some(), recorded, "sanitize: {sanitize}");
        }
    }
}

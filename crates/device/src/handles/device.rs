//! Devices: opening one, its streams, counts and memory.

use std::fmt;
use std::panic::Location;

use super::options::{DeviceOptions, Environment, MAX_THREADS};
use super::report::MemoryReport;
use super::{Device, DeviceBackend, DeviceHandle, Stream};
use crate::execution::cuda::{CudaContext, CudaQueue, CudaStream};
use crate::execution::{
    BlockSource, Executor, KernelSource, ScratchPieces, check_may_wait, on_worker,
};
use crate::ground::sync::{Arc, AtomicU64, Mutex, Ordering, Weak, lock, thread};
use crate::ground::{Act, Counts, DeviceId, Error, Isa, Race, Result};
use crate::hooks::{Counters, DeviceObserver, DeviceObservers};
use crate::memory::Pool;
use crate::observers::{HotScope, Sanitizer, ScopePolicy, Trace};
use crate::order::{DeviceShared, StreamEngine, StreamState, Submission};

impl DeviceBackend {
    /// Workers that wait for tasks; the threads are named after the device.
    fn cpu(id: DeviceId, threads: usize) -> Result<DeviceBackend> {
        let executor = Arc::new(Executor::new(threads));
        let mut backend = DeviceBackend::Cpu { executor, workers: Vec::new() };
        for worker in 0..threads {
            let DeviceBackend::Cpu { executor, workers } = &mut backend else { break };
            let executor = executor.clone();
            let thread = thread::Builder::new()
                .name(format!("{id}-{worker}"))
                .spawn(move || executor.work(worker))
                // Dropping the backend ends the workers that started.
                .map_err(|source| Error::WorkerSpawn { worker, threads, source })?;
            workers.push(thread);
        }
        Ok(backend)
    }

    /// The driver's streams of a CUDA device; `count` of them.
    fn cuda(context: &Arc<CudaContext>, count: usize) -> Result<DeviceBackend> {
        let cuda_streams = (0..count).map(|_| CudaStream::new(context)).collect::<Result<_>>()?;
        Ok(DeviceBackend::Cuda { cuda_streams, copies: CudaStream::new(context)? })
    }

    fn threads(&self) -> usize {
        match self {
            DeviceBackend::Cpu { workers, .. } => workers.len(),
            DeviceBackend::Cuda { cuda_streams, .. } => cuda_streams.len(),
        }
    }

    /// The engine of stream `id`, which may be for copies.
    fn engine(&self, id: u64, is_for_copies: bool) -> StreamEngine {
        match self {
            DeviceBackend::Cpu { executor, .. } => StreamEngine::Cpu(executor.clone()),
            DeviceBackend::Cuda { copies, .. } if is_for_copies => {
                StreamEngine::Cuda(CudaQueue::new(copies.clone()))
            }
            DeviceBackend::Cuda { cuda_streams, .. } => StreamEngine::Cuda(CudaQueue::new(
                cuda_streams[id as usize % cuda_streams.len()].clone(),
            )),
        }
    }
}

impl Drop for DeviceBackend {
    fn drop(&mut self) {
        match self {
            DeviceBackend::Cpu { executor, workers } => {
                executor.close();
                // If a kernel's closure drops the last handle, this thread is a worker, which
                // cannot wait for itself. The workers then end without being joined.
                if !on_worker() {
                    for worker in workers.drain(..) {
                        // A worker catches the panics of kernels; a panic of the worker itself
                        // cannot be reported.
                        let _ = worker.join();
                    }
                }
            }
            // Waits for all work, because the device may still use memory that is freed next.
            DeviceBackend::Cuda { cuda_streams, copies } => {
                cuda_streams.iter().chain([&*copies]).for_each(|cuda_stream| cuda_stream.drain())
            }
        }
    }
}

impl DeviceHandle {
    /// A device with the observers that its options and environment name.
    fn new(
        id: DeviceId,
        (memory, backend): (BlockSource, DeviceBackend),
        options: &DeviceOptions,
        environment: &Environment,
    ) -> Self {
        let trace = options.trace.as_ref().map(|trace| Arc::new(trace.process(&id.to_string())));
        let sanitizer = environment.sanitize.then(Arc::<Sanitizer>::default);
        let mut observers: Vec<Arc<dyn DeviceObserver>> = Vec::new();
        if let Some(trace) = &trace {
            observers.push(trace.clone());
        }
        if let Some(sanitizer) = &sanitizer {
            observers.push(sanitizer.clone());
        }
        let observers = DeviceObservers::new(observers);
        let shared = DeviceShared {
            id,
            isa: options.isa.unwrap_or(environment.isa),
            launch_blocking: environment.launch_blocking,
            faults: environment.faults,
            counters: Counters::default(),
            checks_order: observers.check_order(),
            observers: observers.clone(),
            submission: Mutex::new(Submission),
        };
        let pieces = Arc::new(ScratchPieces::new(backend.threads()));
        let limit = options.memory_limit;
        let pool = Pool::new(memory, limit, environment.faults, observers, pieces);
        DeviceHandle {
            shared: Arc::new(shared),
            backend,
            pool: Arc::new(pool),
            trace,
            sanitizer,
            streams: Mutex::default(),
            next_stream: AtomicU64::new(0),
        }
    }
}

impl Device {
    /// Opens a device. Opening it twice gives two independent devices, each with its memory and
    /// workers. A CUDA device needs the crate's `cuda` feature, NVIDIA's driver for CUDA 13.0 or
    /// newer, and a GPU of compute capability 8.0 or higher.
    ///
    /// - `MERISTEM_LAUNCH_BLOCKING=1` makes every launch wait for its kernel (S4), to find the
    ///   launch that fails or hangs; the results are the same.
    /// - `MERISTEM_SANITIZE=1`, or [`DeviceOptions::sanitize`], checks every launch for races, and
    ///   fills new memory with [`POISON`](crate::POISON) (S3): a launch that is not ordered after a
    ///   conflicting launch returns [`Error::Race`].
    ///
    /// # Errors
    /// [`Error::NotCompiled`] for a CUDA device without the `cuda` feature, and [`Error::Cuda`] if
    /// it cannot be used; [`Error::BadOption`] for too many workers; [`Error::WorkerSpawn`] if the
    /// system refuses them; [`Error::BadEnvironment`]; [`Error::Isa`].
    pub fn open(id: DeviceId, options: &DeviceOptions) -> Result<Device> {
        Device::open_in(id, options, Environment::read()?)
    }

    pub(crate) fn open_in(
        id: DeviceId,
        options: &DeviceOptions,
        environment: Environment,
    ) -> Result<Device> {
        let sanitize = environment.sanitize || options.sanitize;
        let environment = Environment { sanitize, ..environment };
        let threads = match options.threads {
            n if n <= MAX_THREADS => n,
            n => {
                let expected = format!("0 (one for each core) to {MAX_THREADS}");
                return Err(Error::BadOption { option: "threads", expected, got: n.to_string() });
            }
        };
        let parts = match id {
            DeviceId::Cpu(_) => {
                let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
                let threads = if threads == 0 { cores().min(MAX_THREADS) } else { threads };
                (BlockSource::Host, DeviceBackend::cpu(id, threads)?)
            }
            DeviceId::Cuda(_) => {
                let context = CudaContext::open(id)?;
                let backend = DeviceBackend::cuda(&context, threads.max(1))?;
                (BlockSource::Device(Box::new(context)), backend)
            }
        };
        let handle = DeviceHandle::new(id, parts, options, &environment);
        let (threads, limit) = (handle.backend.threads(), options.memory_limit);
        tracing::debug!(device = %id, threads, ?limit, "device opened");
        Ok(Device(Arc::new(handle)))
    }

    /// Identifier of the device.
    pub fn id(&self) -> DeviceId {
        self.shared().id
    }

    /// Number of workers, or of the driver's streams on a CUDA device.
    pub fn threads(&self) -> usize {
        self.0.backend.threads()
    }

    /// Instruction set of its kernels.
    pub fn isa(&self) -> Isa {
        self.shared().isa
    }

    /// A new stream. The name is for errors and reports, and need not be unique.
    pub fn stream(&self, name: &str) -> Stream {
        self.new_stream(name, false)
    }

    /// A new stream for copies between host and device, which run beside the kernels of other
    /// streams: on a CUDA device one stream of the driver carries out all of these. On a CPU device
    /// it is a stream like others.
    pub fn copy_stream(&self, name: &str) -> Stream {
        self.new_stream(name, true)
    }

    fn new_stream(&self, name: &str, is_for_copies: bool) -> Stream {
        let DeviceHandle { shared, backend, next_stream, streams, .. } = &*self.0;
        let id = next_stream.fetch_add(1, Ordering::Relaxed);
        let engine = backend.engine(id, is_for_copies);
        let state = Arc::new(StreamState::new(shared.clone(), engine, id, name));
        let mut streams = lock(streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&state));
        Stream::new(self, state)
    }

    /// Compiles and loads kernels ahead of their first launch; to be called before a hot path. On a
    /// CUDA device this waits, and counts one synchronisation, if some kernels are not loaded yet;
    /// on a CPU device it does nothing.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a source cannot be compiled or loaded; [`Error::HotScope`] if an open
    /// scope forbids the wait.
    #[track_caller]
    pub fn load_kernels(&self, sources: &[&'static KernelSource]) -> Result<()> {
        let (counters, site) = (&self.shared().counters, Location::caller());
        match &self.0.backend {
            DeviceBackend::Cpu { .. } => Ok(()),
            DeviceBackend::Cuda { cuda_streams, .. } => {
                let wait = || counters.count(Act::Synchronize, "Device::load_kernels", site);
                cuda_streams.first().map_or(Ok(()), |cuda_stream| cuda_stream.load(sources, wait))
            }
        }
    }

    /// The trace that records this device, to add [spans](Trace::span).
    pub fn trace(&self) -> Option<&Trace> {
        self.0.trace.as_ref().map(|process| process.trace())
    }

    /// Counts of the device so far.
    pub fn counts(&self) -> Counts {
        self.shared().counters.read()
    }

    /// Memory in use, its peak, and both by owner (V3). Does not wait.
    pub fn memory(&self) -> MemoryReport {
        self.pool().with_usage(|usage| MemoryReport::from_usage(usage))
    }

    /// Whether the race sanitizer is on ([`DeviceOptions::sanitize`] or `MERISTEM_SANITIZE=1`).
    pub fn is_sanitized(&self) -> bool {
        self.0.shared.checks_order
    }

    /// The races found so far, at most the first 64; none without the sanitizer. Does not wait.
    pub fn races(&self) -> Vec<Race> {
        self.0.sanitizer.as_ref().map_or_else(Vec::new, |sanitizer| sanitizer.races())
    }

    /// Opens a hot scope on this thread. Until the guard is dropped, the thread's acts on this
    /// device are counted with their call sites, and `policy` applies to copies, waits and
    /// allocations (V2). Launches are counted and not refused, except a launch that must load its
    /// kernels, which waits (see [`load_kernels`](Device::load_kernels)), and
    /// [`Launches`](crate::Launches) that must build a graph or copy addresses. Does not wait.
    ///
    /// Scopes nest: every open scope counts, and the strictest applies.
    ///
    /// ```
    /// # use meristem_device::{DType, Device, DeviceId, DeviceOptions, Error};
    /// # use meristem_device::{Owner, ScopePolicy, Tensor};
    /// # let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    /// let loss = Tensor::zeros(&device.stream("s"), [1], DType::F32, Owner::Metrics)?;
    /// let scope = device.hot_scope("train_step", ScopePolicy::Deny);
    /// let refused = loss.to_vec::<f32>();
    /// assert!(matches!(refused, Err(Error::HotScope { scope: "train_step", .. })));
    /// assert_eq!(scope.finish().sites[0].refused, 1);
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn hot_scope(&self, name: &'static str, policy: ScopePolicy) -> HotScope {
        let (device, opened) = (self.shared().counters.device(), Location::caller());
        HotScope::open(device, name, policy, opened)
    }

    /// Gives cached memory that no kernel uses back to the system; returns its number of bytes.
    /// Does not wait on a CPU device. On a CUDA device this waits for all work, which is counted as
    /// a synchronisation; in a hot scope that forbids waits it does nothing.
    #[track_caller]
    pub fn trim(&self) -> usize {
        let (counters, site) = (&self.shared().counters, Location::caller());
        let forbidden = || counters.count(Act::Synchronize, "Device::trim", site).is_err();
        if self.pool().returning_waits() && forbidden() { 0 } else { self.pool().trim() }
    }

    /// Blocks the calling thread until all work enqueued so far on every stream is done. Counted as
    /// one synchronisation.
    ///
    /// # Errors
    /// [`Error::KernelPanicked`] if a kernel of any stream panicked (this waits for all streams
    /// anyway); [`Error::DeviceFailed`]; [`Error::HotScope`] if an open scope forbids the wait;
    /// [`Error::InsideKernel`] if called inside of a kernel.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let (operation, site) = ("Device::synchronize", Location::caller());
        check_may_wait(operation)?;
        self.shared().counters.count(Act::Synchronize, operation, site)?;
        let _wait = self.shared().observers.host_waits(operation, Some(site));
        let streams = lock(&self.0.streams).clone();
        let mut result = Ok(());
        for stream in streams.iter().filter_map(Weak::upgrade) {
            let seq = stream.lock().submitted();
            stream.wait_host(seq);
            result = result.and(stream.check_result(seq));
        }
        result
    }

    #[cfg(test)]
    pub(crate) fn sanitizer(&self) -> Option<&Sanitizer> {
        self.0.sanitizer.as_deref()
    }

    #[inline]
    pub(super) fn pool(&self) -> &Arc<Pool<Stream>> {
        &self.0.pool
    }

    /// The temporary memory of kernels that workers run; `None` on a CUDA device.
    pub(super) fn pieces(&self) -> Option<&Arc<ScratchPieces>> {
        matches!(self.0.backend, DeviceBackend::Cpu { .. }).then_some(self.pool().pieces())
    }

    pub(crate) fn shared(&self) -> &Arc<DeviceShared> {
        &self.0.shared
    }
}

impl PartialEq for Device {
    /// Whether both are handles of the same opened device.
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {} threads)", self.id(), self.threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Owner, Tensor};

    /// All memory is freed with the last handle, although free blocks, streams and the device hold
    /// references to each other.
    #[test]
    fn nothing_outlives_its_handles() {
        let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
        let watch = Arc::downgrade(device.shared());
        let (a, b) = (device.stream("a"), device.stream("b"));
        for _ in 0..300 {
            let x = Tensor::zeros(&a, [100], DType::U8, Owner::Other).unwrap().on(&b).unwrap();
            b.launch("write").write(&x).run(|args| args.write::<u8>(0).fill(1)).unwrap();
        }
        let streams = [a, b].map(|stream| Arc::downgrade(stream.state()));
        drop(device);
        assert!(watch.upgrade().is_none());
        assert!(streams.iter().all(|stream| stream.upgrade().is_none()));
    }
}

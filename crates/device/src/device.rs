//! Devices: opening one, its streams, counts and memory.

use crate::executor::{Executor, on_worker};
use crate::ground::fault::Faults;
use crate::ground::sync::thread::{self, JoinHandle};
use crate::ground::sync::{Arc, AtomicU64, Mutex, Ordering, Weak, lock};
use crate::ground::{Act, Counts, DeviceId, Error, Isa, Race, Result};
use crate::hooks::{Counters, Observer, Observers};
use crate::memory::MemoryReport;
use crate::observers::{HotScope, Policy, Process, Sanitizer, Trace};
use crate::pool::Pool;
use crate::queue::{StreamState, check_may_wait};
use crate::stream::Stream;
use crate::submit::Submission;
use std::fmt;
use std::panic::Location;

/// Largest number of workers of a device.
const MAX_THREADS: usize = 1024;

/// Options for opening a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Workers of a CPU device; 0: one for each core available to the process. No result depends on
    /// it.
    pub threads: usize,
    /// Largest number of bytes that the device takes from the system, `None` for no limit.
    pub memory_limit: Option<usize>,
    /// Instruction set of the kernels; `None`: the value of `MERISTEM_ISA`, or the best of this
    /// machine.
    pub isa: Option<Isa>,
    /// Trace to record into; `None` for none.
    pub trace: Option<Trace>,
    /// Checks every launch for races (S3), as `MERISTEM_SANITIZE=1` does for every device.
    pub sanitize: bool,
}

/// Settings from environment variables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Environment {
    /// `MERISTEM_ISA`: the instruction set of the kernels.
    pub(crate) isa: Isa,
    /// `MERISTEM_LAUNCH_BLOCKING`: every launch waits for its kernel (S4).
    pub(crate) launch_blocking: bool,
    /// `MERISTEM_SANITIZE`: every launch is checked for races (S3).
    pub(crate) sanitize: bool,
    /// Faults planted by tests only.
    pub(crate) faults: Faults,
}

impl Default for Environment {
    /// Settings with no variable set.
    fn default() -> Self {
        let faults = Faults::default();
        Environment { isa: Isa::detect(), launch_blocking: false, sanitize: false, faults }
    }
}

impl Environment {
    fn read() -> Result<Self> {
        let isa = Isa::from_env()?;
        let launch_blocking = switch("MERISTEM_LAUNCH_BLOCKING")?;
        let sanitize = switch("MERISTEM_SANITIZE")?;
        Ok(Environment { isa, launch_blocking, sanitize, faults: Faults::default() })
    }
}

/// Reads an environment variable that is on or off.
fn switch(variable: &'static str) -> Result<bool> {
    let value = std::env::var_os(variable);
    match value.as_ref().map(|value| value.to_str()) {
        None | Some(Some("" | "0")) => Ok(false),
        Some(Some("1")) => Ok(true),
        Some(_) => {
            let got = value.unwrap_or_default().to_string_lossy().into_owned();
            Err(Error::BadEnvironment { variable, expected: "0 or 1", got })
        }
    }
}

/// State shared by the workers and all handles of a device.
pub(crate) struct Shared {
    pub(crate) id: DeviceId,
    pub(crate) executor: Executor,
    pub(crate) pool: Pool,
    pub(crate) counters: Counters,
    pub(crate) submission: Mutex<Submission>,
    pub(crate) launch_blocking: bool,
    pub(crate) isa: Isa,
    pub(crate) observers: Observers,
    /// Whether an observer [checks order](Observer::checks_order).
    pub(crate) checks_order: bool,
    pub(crate) faults: Faults,
    threads: usize,
    /// Live streams, to wait for all of them.
    streams: Mutex<Vec<Weak<StreamState>>>,
    next_stream: AtomicU64,
}

/// A device: workers, memory and counts. A handle: clones are the same device, and streams and
/// tensors hold one. Dropping the last handle waits until all enqueued work is done, and ends the
/// workers.
#[derive(Clone)]
pub struct Device(Arc<DeviceHandle>);

struct DeviceHandle {
    shared: Arc<Shared>,
    trace: Option<Arc<Process>>,
    sanitizer: Option<Arc<Sanitizer>>,
    workers: Vec<JoinHandle<()>>,
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        self.shared.executor.close();
        // The last handle may be dropped inside of a kernel's closure: a worker cannot wait for
        // itself. The workers then end by themselves.
        if !on_worker() {
            for worker in self.workers.drain(..) {
                // A worker catches the panics of kernels; a panic of its own cannot be reported to
                // anyone.
                let _ = worker.join();
            }
        }
        // Free blocks refer to streams, and streams to `shared`. No storage is left to free more.
        self.shared.pool.clear();
    }
}

impl Device {
    /// Opens a device. Opening it twice gives two devices with memory and workers of their own.
    ///
    /// - `MERISTEM_LAUNCH_BLOCKING=1` makes every launch wait for its kernel (S4), to find out
    ///   which one fails or hangs; the results are the same.
    /// - `MERISTEM_SANITIZE=1`, or [`DeviceOptions::sanitize`], checks every launch for races, and
    ///   fills new memory with [`POISON`](crate::POISON) (S3): a launch that is not ordered after a
    ///   conflicting one returns [`Error::Race`].
    ///
    /// # Errors
    /// [`Error::NotCompiled`] for a CUDA device; [`Error::BadOption`] for too many workers;
    /// [`Error::WorkerSpawn`] if the system refuses them; [`Error::BadEnvironment`];
    /// [`Error::Isa`].
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
        if let DeviceId::Cuda(_) = id {
            return Err(Error::NotCompiled { device: id });
        }
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_THREADS),
            n if n <= MAX_THREADS => n,
            n => {
                let expected = format!("0 (one for each core) to {MAX_THREADS}");
                return Err(Error::BadOption { option: "threads", expected, got: n.to_string() });
            }
        };
        let trace = options.trace.as_ref().map(|trace| Arc::new(trace.process(&id.to_string())));
        let sanitizer = environment.sanitize.then(Arc::<Sanitizer>::default);
        let mut observers: Vec<Arc<dyn Observer>> = Vec::new();
        if let Some(trace) = &trace {
            observers.push(trace.clone());
        }
        if let Some(sanitizer) = &sanitizer {
            observers.push(sanitizer.clone());
        }
        let observers = Observers::new(observers);
        let checks_order = observers.check_order();
        let shared = Arc::new(Shared {
            id,
            executor: Executor::default(),
            pool: Pool::new(options.memory_limit, environment.faults, observers.clone()),
            counters: Counters::default(),
            submission: Mutex::default(),
            launch_blocking: environment.launch_blocking,
            isa: options.isa.unwrap_or(environment.isa),
            observers,
            checks_order,
            faults: environment.faults,
            threads,
            streams: Mutex::default(),
            next_stream: AtomicU64::new(0),
        });
        let mut handle =
            DeviceHandle { shared, trace, sanitizer, workers: Vec::with_capacity(threads) };
        for worker in 0..threads {
            let shared = handle.shared.clone();
            let thread = thread::Builder::new()
                .name(format!("{id}-{worker}"))
                .spawn(move || shared.executor.work())
                // Dropping the handle ends the workers that started.
                .map_err(|source| Error::WorkerSpawn { worker, threads, source })?;
            handle.workers.push(thread);
        }
        tracing::debug!(device = %id, threads, limit = ?options.memory_limit, "device opened");
        Ok(Device(Arc::new(handle)))
    }

    /// Identifier of the device.
    pub fn id(&self) -> DeviceId {
        self.shared().id
    }

    /// Number of workers.
    pub fn threads(&self) -> usize {
        self.shared().threads
    }

    /// Instruction set of its kernels.
    pub fn isa(&self) -> Isa {
        self.shared().isa
    }

    /// A new stream. The name is for errors and reports, and need not be unique.
    pub fn stream(&self, name: &str) -> Stream {
        let shared = self.shared();
        let id = shared.next_stream.fetch_add(1, Ordering::Relaxed);
        let state = Arc::new(StreamState::new(shared.clone(), id, name));
        let mut streams = lock(&shared.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&state));
        Stream::new(self, state)
    }

    /// The trace it is recorded in, to add [spans](Trace::span).
    pub fn trace(&self) -> Option<&Trace> {
        self.0.trace.as_ref().map(|process| process.trace())
    }

    /// Counts of the device so far.
    pub fn counts(&self) -> Counts {
        self.shared().counters.read()
    }

    /// Memory in use, its peak, and both by owner (V3). Does not wait.
    pub fn memory(&self) -> MemoryReport {
        self.shared().pool.report()
    }

    /// Whether the race sanitizer is on ([`DeviceOptions::sanitize`] or `MERISTEM_SANITIZE=1`).
    pub fn is_sanitized(&self) -> bool {
        self.0.sanitizer.is_some()
    }

    /// The races found so far, at most the first 64; none without the sanitizer. Does not wait.
    pub fn races(&self) -> Vec<Race> {
        self.0.sanitizer.as_ref().map_or_else(Vec::new, |sanitizer| sanitizer.races())
    }

    /// Opens a hot scope on this thread. Until the guard is dropped, the thread's acts on this
    /// device are counted with their call sites, and `policy` decides about copies, waits and
    /// allocations (V2). Launches are counted and never refused. Does not wait.
    ///
    /// Scopes nest: every open one counts, and the strictest applies.
    ///
    /// ```
    /// # use meristem_device::{DType, Device, DeviceId, DeviceOptions, Error};
    /// # use meristem_device::{Owner, Policy, Tensor};
    /// # let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    /// let loss = Tensor::zeros(&device.stream("s"), [1], DType::F32, Owner::Metrics)?;
    /// let scope = device.hot_scope("train_step", Policy::Deny);
    /// let refused = loss.to_vec::<f32>();
    /// assert!(matches!(refused, Err(Error::HotScope { scope: "train_step", .. })));
    /// assert_eq!(scope.finish().sites[0].refused, 1);
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn hot_scope(&self, name: &'static str, policy: Policy) -> HotScope {
        let (device, opened) = (self.shared().counters.device(), Location::caller());
        HotScope::open(device, name, policy, opened)
    }

    /// Returns memory that is cached for reuse, and that no kernel still uses, to the system;
    /// returns the number of bytes. Does not wait.
    pub fn trim(&self) -> usize {
        self.shared().pool.trim()
    }

    /// Blocks the calling thread until all work enqueued so far on every stream is done. Counted as
    /// one synchronisation.
    ///
    /// # Errors
    /// [`Error::KernelPanicked`] if a kernel of any stream panicked (this waits for all streams
    /// anyway); [`Error::InsideKernel`] if called inside of a kernel.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let (operation, site) = ("Device::synchronize", Location::caller());
        check_may_wait(operation)?;
        self.shared().counters.note(Act::Synchronize, operation, site)?;
        let _wait = self.shared().observers.host_waits(operation, Some(site));
        let streams = lock(&self.shared().streams).clone();
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

    pub(crate) fn shared(&self) -> &Arc<Shared> {
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

    /// All memory is freed with the last handle, although free blocks, streams and the device refer
    /// to each other.
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

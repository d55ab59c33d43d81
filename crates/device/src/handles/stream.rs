//! Streams: launches, copies and fills, and waits.

use std::fmt;
use std::panic::Location;

use super::event::Event;
use super::{Device, Launch, Stream, StreamHandle, Tensor, transfer};
use crate::execution::{Fill, check_may_wait};
use crate::ground::sync::Arc;
use crate::ground::{Act, Result};
use crate::memory::{Pool, StreamHome};
use crate::order::{Access, StreamState, wait_for};

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.device.pool().close_slot(self.slot);
    }
}

impl Stream {
    pub(super) fn new(device: &Device, state: Arc<StreamState>) -> Self {
        let slot = device.pool().open_slot();
        Stream(Arc::new(StreamHandle { state, device: device.clone(), slot }))
    }

    /// Number of this stream, unique in its device.
    pub fn id(&self) -> u64 {
        self.0.state.id
    }

    /// The name given to it.
    pub fn name(&self) -> &str {
        self.0.state.name()
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Starts a launch; see [`Launch`]. `operation` names it in errors and reports.
    #[track_caller]
    pub fn launch<'a>(&'a self, operation: &'static str) -> Launch<'a> {
        Launch::new(self, operation, Some(Act::Launch), Location::caller())
    }

    /// Copies tensors inside of the device, in stream order: each piece is a pair (`from`, `to`).
    /// One command, counted as one launch, for all pieces. `operation` names it in errors and
    /// reports. Waits only for space if the stream's queue is full.
    ///
    /// # Errors
    /// The errors of [`Launch::run`], with the tensors of all pieces in order as arguments
    /// (`pieces[1].from` is argument 2); and [`crate::Error::Mismatch`] if the two tensors of a
    /// piece differ in element type, number of elements or memory format.
    #[track_caller]
    pub fn copy(&self, operation: &'static str, pieces: &[(&Tensor, &Tensor)]) -> Result<()> {
        transfer::copy(self, operation, pieces, Location::caller())
    }

    /// Copies memory that another library owns into tensors of this stream: one command, for which
    /// the host waits, counted as one launch and one synchronisation. Each piece is an address and
    /// a tensor of this stream. The address is in memory of this device, which for a CPU device is
    /// host memory.
    ///
    /// # Safety
    /// Until this returns, each address has as many readable bytes as its tensor. Work that writes
    /// them is done, or this stream waits for it ([`Stream::cuda_handle`]).
    ///
    /// # Errors
    /// The errors of [`Launch::run`] and [`Stream::synchronize`].
    #[track_caller]
    pub unsafe fn copy_foreign(
        &self,
        operation: &'static str,
        pieces: &[(u64, &Tensor)],
    ) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { transfer::copy_foreign(self, operation, pieces, Location::caller()) }
    }

    /// The driver's handle (`CUstream`) of the CUDA stream that carries out this stream; `None` on
    /// the CPU. Other code of the process may make the CUDA stream wait for its own work. The
    /// handle lives as long as the device.
    pub fn cuda_handle(&self) -> Option<u64> {
        self.state().cuda_queue().map(|queue| queue.handle())
    }

    /// Overwrites a tensor with the bytes that `make` writes, in stream order: one command, counted
    /// as one copy to the device. `make` receives a buffer of the tensor's size, with
    /// unspecified contents.
    ///
    /// - On a CPU device the buffer is the tensor's memory, and a worker calls `make` in stream
    ///   order; if `make` panics, the stream fails.
    /// - For a CUDA device the buffer is staging memory, and this function calls `make`, unless an
    ///   open scope forbids the copy; if `make` panics, the panic reaches the caller, and nothing
    ///   is enqueued, though the copy was counted. Waits for earlier copies while more than 256 MiB
    ///   of staging memory are in use. An upload above 64 MiB goes through pageable memory, and the
    ///   host waits for it. Each wait counts as a synchronisation. For uploads that repeat,
    ///   [`host_buffers`](Stream::host_buffers) has neither limit.
    ///
    /// # Errors
    /// The errors of [`Launch::run`], the tensor being argument 0; [`crate::Error::HotScope`] if an
    /// open scope forbids the copy, or a wait that is needed because the upload is above 64 MiB,
    /// 256 MiB of staging memory are in use, or the system has no page-locked memory left.
    #[track_caller]
    pub fn upload<F>(&self, operation: &'static str, tensor: &Tensor, make: F) -> Result<()>
    where
        F: FnOnce(&mut [u8]) + Send + 'static,
    {
        transfer::upload(self, operation, tensor, (Box::new(make), Location::caller()))
    }

    /// Fills the tensors, in stream order: one command, counted as one launch, for all of them.
    /// `operation` names it in errors and reports. Waits only for space if the stream's queue is
    /// full.
    ///
    /// # Errors
    /// The errors of [`Launch::run`].
    #[track_caller]
    pub fn fill(&self, operation: &'static str, pieces: &[&Tensor], fill: Fill) -> Result<()> {
        transfer::fill(self, operation, pieces, (fill, Location::caller()))
    }

    /// Marks the current end of the stream. Costs nothing on the device; does not wait.
    pub fn record(&self) -> Event {
        let seq = self.state().lock().submitted();
        Event(Access { stream: self.state().clone(), seq })
    }

    /// Makes later work of this stream wait for the event, which may be of another device. The wait
    /// happens on the device, and the host continues. There is one exception: a wait of a CUDA
    /// device's stream for an event of a CPU device blocks the host, and counts as a
    /// synchronisation if the event is not reached yet. A wait of a CPU device's stream for an
    /// event of a CUDA device blocks a worker.
    ///
    /// # Errors
    /// - [`crate::Error::KernelPanicked`] if this stream failed, or the event's stream failed
    ///   before the event; [`crate::Error::DeviceFailed`]. If the failure is only known later, this
    ///   stream fails then.
    /// - For a wait of the host: [`crate::Error::InsideKernel`], [`crate::Error::HotScope`].
    #[track_caller]
    pub fn wait(&self, event: &Event) -> Result<()> {
        wait_for(self.state(), &event.0, Location::caller())
    }

    /// Blocks the calling thread until all work on this stream is done. Counted as one
    /// synchronisation.
    ///
    /// # Errors
    /// [`crate::Error::KernelPanicked`] if a kernel panicked, on this stream or on a stream whose
    /// result it used; [`crate::Error::DeviceFailed`]; [`crate::Error::HotScope`] if an open scope
    /// forbids the wait; [`crate::Error::InsideKernel`] if called inside of a kernel.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let (operation, site) = ("Stream::synchronize", Location::caller());
        self.count_wait(operation, site)?;
        self.wait_counted(operation, site)
    }

    /// Counts a wait of the host as one synchronisation. Called before work is enqueued that must
    /// not go on when its caller returns.
    ///
    /// # Errors
    /// [`crate::Error::HotScope`] if an open scope forbids the wait;
    /// [`crate::Error::InsideKernel`].
    pub(crate) fn count_wait(
        &self,
        operation: &'static str,
        site: &'static Location<'static>,
    ) -> Result<()> {
        check_may_wait(operation)?;
        self.state().shared.counters.count(Act::Synchronize, operation, site)
    }

    /// Waits as [`Stream::synchronize`] does, after [`Stream::count_wait`].
    ///
    /// # Errors
    /// [`crate::Error::KernelPanicked`], [`crate::Error::DeviceFailed`].
    pub(crate) fn wait_counted(
        &self,
        operation: &'static str,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let _wait = self.state().shared.observers.host_waits(operation, Some(site));
        let seq = self.state().lock().submitted();
        self.state().wait_host(seq);
        self.state().check_result(seq)
    }

    pub(crate) fn state(&self) -> &Arc<StreamState> {
        &self.0.state
    }
}

impl StreamHome for Stream {
    #[inline]
    fn state(&self) -> &Arc<StreamState> {
        &self.0.state
    }

    #[inline]
    fn pool(&self) -> &Pool<Stream> {
        self.0.device.pool()
    }

    #[inline]
    fn slot(&self) -> usize {
        self.0.slot
    }
}

impl PartialEq for Stream {
    /// Whether both are the same stream.
    fn eq(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} `{}` on {})", self.id(), self.name(), self.device().id())
    }
}

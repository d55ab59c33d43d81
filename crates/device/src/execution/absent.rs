//! CUDA in a build without it: types without values, so that all other modules compile in the same
//! way. Only this module sees that the types have no values: elsewhere the compiler would warn of
//! unreachable code.

use std::error::Error as StdError;
use std::panic::Location;
use std::time::Instant;

use super::args::LaunchRecord;
use super::block::{Allocator, DeviceMemory};
use super::call::{KernelSource, Program};
use super::transfer::Transfer;
use crate::ground::sync::Arc;
use crate::ground::{DeviceId, Error, ID_BYTES, PeerPlace, PeerProgress, Result};
use crate::hooks::Counters;

/// A callback for the completion of a task, with the times at which it began and ended.
pub(crate) type OnComplete = Box<dyn FnOnce(Instant, Instant) + Send>;

/// Whether the MPI library of this process takes addresses of CUDA memory: unknown in this build.
pub fn mpi_takes_cuda_memory() -> Option<bool> {
    None
}

/// No value.
#[derive(Debug)]
enum Never {}

/// An opened device.
#[derive(Debug)]
pub(crate) struct CudaContext(Never);

impl CudaContext {
    /// # Errors
    /// [`Error::NotCompiled`].
    pub(crate) fn open(device: DeviceId) -> Result<Arc<CudaContext>> {
        Err(Error::NotCompiled { device })
    }
}

impl Allocator for Arc<CudaContext> {
    fn allocate(&self, _size: usize) -> Option<Box<dyn DeviceMemory>> {
        match self.0 {}
    }
}

/// A stream of the driver.
#[derive(Debug)]
pub(crate) struct CudaStream(Never);

impl CudaStream {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
        match context.0 {}
    }

    pub(crate) fn drain(&self) {
        match self.0 {}
    }

    pub(crate) fn load(
        &self,
        _sources: &[&'static KernelSource],
        _before: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        match self.0 {}
    }
}

/// Host memory of one copy.
#[derive(Debug)]
pub(crate) struct StagingBuffer(Never);

impl StagingBuffer {
    /// # Safety
    /// None is needed: there is no buffer.
    pub(crate) unsafe fn bytes(&mut self) -> &mut [u8] {
        match self.0 {}
    }

    pub(crate) fn give_back(self) {
        match self.0 {}
    }
}

/// Page-locked buffers of one size.
#[derive(Debug)]
pub(crate) struct StagingRing(Never);

/// Membership in a group of devices.
#[derive(Debug)]
pub(crate) struct PeerMembership(Never);

impl PeerMembership {
    /// # Errors
    /// [`Error::NotCompiled`].
    pub(crate) fn library() -> Result<String> {
        Err(Error::NotCompiled { device: DeviceId::Cuda(0) })
    }

    pub(crate) fn new_id(context: &Arc<CudaContext>) -> Result<[u8; ID_BYTES]> {
        match context.0 {}
    }

    pub(crate) fn begin(
        context: &Arc<CudaContext>,
        _place: &PeerPlace,
    ) -> Result<Arc<PeerMembership>> {
        match context.0 {}
    }

    pub(crate) fn connect(&self) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn poll(&self) {
        match self.0 {}
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        match self.0 {}
    }

    pub(crate) fn progress(&self) -> PeerProgress {
        match self.0 {}
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn abort(&self, _cause: Arc<dyn StdError + Send + Sync>) {
        match self.0 {}
    }

    pub(crate) fn close(&self, _proceed: &mut dyn FnMut() -> bool) {
        match self.0 {}
    }
}

/// A launch, a copy, a fill or an exchange, ready to be issued.
pub(crate) struct CudaTask(Never);

impl CudaTask {
    pub(crate) fn record(&self) -> &LaunchRecord {
        match self.0 {}
    }

    pub(crate) fn record_mut(&mut self) -> &mut LaunchRecord {
        match self.0 {}
    }

    pub(crate) fn names_pieces(&self) -> bool {
        match self.0 {}
    }
}

/// The CUDA side of one stream.
pub(crate) struct CudaQueue(Never);

impl CudaQueue {
    pub(crate) fn new(cuda_stream: Arc<CudaStream>) -> CudaQueue {
        match cuda_stream.0 {}
    }

    pub(crate) fn handle(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn wait_for_device(&self) {
        match self.0 {}
    }

    pub(crate) fn make_context_current(&self) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn calls(
        &self,
        _program: Option<Program>,
        _record: LaunchRecord,
        _counters: &Counters,
    ) -> Result<CudaTask> {
        match self.0 {}
    }

    pub(crate) fn transfer(
        &self,
        _transfer: Transfer,
        _record: LaunchRecord,
        _counters: &Counters,
    ) -> Result<CudaTask> {
        match self.0 {}
    }

    pub(crate) fn staging_ring(&self, _count: usize, _bytes: usize) -> Result<Arc<StagingRing>> {
        match self.0 {}
    }

    pub(crate) fn take_staging<G>(
        &self,
        _ring: &Arc<StagingRing>,
        _before_wait: impl Fn() -> Result<G>,
        _before_growth: impl Fn() -> Result<()>,
    ) -> Result<StagingBuffer> {
        match self.0 {}
    }

    pub(crate) fn upload(
        &self,
        _staging: StagingBuffer,
        _record: LaunchRecord,
    ) -> Result<CudaTask> {
        match self.0 {}
    }

    pub(crate) fn fuse(
        &self,
        _tasks: Vec<CudaTask>,
        _counters: &Counters,
        _reclaim: &dyn Fn(),
    ) -> Result<Option<CudaTask>> {
        match self.0 {}
    }

    pub(crate) fn prepare(
        &self,
        _programs: &[(Program, usize)],
        _launch: (&'static str, &'static Location<'static>),
        _counters: &Counters,
        _reclaim: &dyn Fn(),
    ) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn exchange(
        &self,
        _member: &Arc<PeerMembership>,
        _ranks: Vec<usize>,
        _record: LaunchRecord,
    ) -> CudaTask {
        match self.0 {}
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        match self.0 {}
    }

    pub(crate) fn shares_cuda_stream(&self, _other: &CudaQueue) -> bool {
        match self.0 {}
    }

    pub(crate) fn is_known_done(&self, _number: u64) -> bool {
        match self.0 {}
    }

    pub(crate) fn backlog(&self, _number: u64) -> u64 {
        match self.0 {}
    }

    pub(crate) fn issue<'a>(
        &self,
        _number: u64,
        _waits: impl Iterator<Item = (&'a CudaQueue, u64)>,
        _task: Option<CudaTask>,
        _told: Option<OnComplete>,
    ) {
        match self.0 {}
    }

    pub(crate) fn is_done(&self, _number: u64) -> bool {
        match self.0 {}
    }

    pub(crate) fn wait(&self, _number: u64) {
        match self.0 {}
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.0 {}
    }
}

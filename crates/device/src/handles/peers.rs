//! Groups of CUDA devices, usually one per process, that exchange tensors over NCCL.

use std::error::Error as StdError;
use std::fmt;

use super::{Launch, Stream};
use crate::execution::{PeerMembership, StreamWork};
use crate::ground::sync::Arc;
use crate::ground::{Error, ID_BYTES, PeerPlace, PeerProgress, Property, Result};
use crate::hooks::Category;

/// Membership of a device in a group of devices, over NCCL. Usually every process has one device of
/// the group. Dropping the last handle without [`close`](Peers::close) ends the membership once its
/// exchanges have run; data sent to other machines may then be lost.
#[derive(Clone)]
pub struct Peers(Arc<PeerMembership>);

impl Peers {
    /// Bytes of the id of a group.
    pub const ID_BYTES: usize = ID_BYTES;

    /// The version of the NCCL that is installed, such as `2.27.3`. Does not wait.
    ///
    /// # Errors
    /// [`Error::NotCompiled`] in a build without CUDA; [`Error::Cuda`] if the library was not found
    /// or is too old.
    pub fn library() -> Result<String> {
        PeerMembership::library()
    }

    /// The id of a new group, to be sent to all its members.
    ///
    /// # Errors
    /// The errors of [`library`](Peers::library); [`Error::NoKernel`] for a stream of a CPU device.
    pub fn new_id(stream: &Stream) -> Result<[u8; ID_BYTES]> {
        PeerMembership::new_id(cuda_queue(stream)?.context())
    }

    /// Begins to join a group with a stream's device; [`connect`](Peers::connect) completes it.
    /// Does not wait.
    ///
    /// # Errors
    /// The errors of [`new_id`](Peers::new_id).
    pub fn begin(stream: &Stream, place: &PeerPlace) -> Result<Peers> {
        PeerMembership::begin(cuda_queue(stream)?.context(), place).map(Peers)
    }

    /// Connects to all other members, once. Waits until all have joined, or another thread
    /// [aborts](Peers::abort) the membership; after an error of NCCL, at most
    /// [`PeerPlace::patience`] for such an abort, which gives the reason.
    ///
    /// # Errors
    /// [`Error::Cuda`], after an abort with
    /// [`CudaError::ExchangeAborted`](crate::CudaError::ExchangeAborted); [`Error::DeviceFailed`].
    pub fn connect(&self) -> Result<()> {
        self.0.connect()
    }

    /// Polls the device's progress with the exchanges of this membership. A driver may answer only
    /// when a kernel has ended, so this may wait for the device.
    pub fn poll(&self) {
        self.0.poll();
    }

    /// The device's progress at the last [poll](Peers::poll). All exchanges count as ended once the
    /// device has failed. Does not wait.
    pub fn progress(&self) -> PeerProgress {
        self.0.progress()
    }

    /// Returns an error if the device has failed, or NCCL has noticed that the group is broken.
    /// NCCL need not notice that a process is gone. Waits for calls of NCCL in other threads.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`], [`Error::Cuda`].
    pub fn check_group(&self) -> Result<()> {
        self.0.check()
    }

    /// Ends all exchanges, from any thread. Their results are lost, so the device fails with
    /// [`CudaError::ExchangeAborted`](crate::CudaError::ExchangeAborted) and this cause. Before
    /// [`connect`](Peers::connect) has returned, only `connect` fails. Waits until the device's
    /// current exchange has ended.
    pub fn abort(&self, cause: Arc<dyn StdError + Send + Sync>) {
        self.0.abort(cause);
    }

    /// Leaves the group. Waits until all exchanges have ended and all sent data is on its way, for
    /// as long as `proceed` returns true; then ends the exchanges that remain.
    pub fn close(&self, proceed: &mut dyn FnMut() -> bool) {
        self.0.close(proceed);
    }
}

fn cuda_queue(stream: &Stream) -> Result<&crate::execution::cuda::CudaQueue> {
    let device = stream.device().id();
    stream.state().cuda_queue().ok_or(Error::NoKernel { operation: "exchange over NCCL", device })
}

impl Launch<'_> {
    /// Enqueues an exchange with other devices instead of a kernel. Argument `i` is sent to rank
    /// `ranks[i]` if it is read, and received from that rank if it is written; all messages are
    /// exchanged at once. Messages from one rank to another are matched in order, and must have the
    /// same sizes on both ranks. Waits until NCCL has enqueued the exchange, but neither for the
    /// device nor for other ranks.
    ///
    /// If NCCL refuses the exchange, the device completes no further work. It fails when
    /// [`abort`](Peers::abort) gives the reason, or when [`PeerPlace::patience`] has elapsed.
    ///
    /// # Errors
    /// The errors of [`run`](Launch::run); [`Error::Mismatch`] if the number of ranks is not the
    /// number of arguments, or if `peers` belong to another device; [`Error::NoKernel`] for a
    /// stream of a CPU device.
    pub fn exchange(self, peers: &Peers, ranks: Vec<usize>) -> Result<()> {
        let stream = self.stream.state();
        let operation = self.operation;
        let mismatch = |argument: &str, property, expected: String, got: String| {
            let argument = argument.to_owned();
            Err(Error::Mismatch { operation, argument, property, expected, got })
        };
        if ranks.len() != self.tensors.len() {
            let (expected, got) = (self.tensors.len().to_string(), ranks.len().to_string());
            return mismatch("ranks", Property::Shape, expected, got);
        }
        let cuda_queue = cuda_queue(self.stream)?;
        if !Arc::ptr_eq(cuda_queue.context(), peers.0.context()) {
            let id = stream.shared.id.to_string();
            let expected = format!("of this opening of {id}");
            return mismatch("peers", Property::Device, expected, "those of another".to_owned());
        }
        self.submit(Category::Launch, |record| {
            Ok(StreamWork::Cuda(Box::new(cuda_queue.exchange(&peers.0, ranks, record))))
        })
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

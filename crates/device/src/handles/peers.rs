//! Groups of CUDA devices, of one process each, that exchange tensors over NCCL.

use super::{Launch, Stream};
use crate::execution::{Membership, Work};
use crate::ground::sync::Arc;
use crate::ground::{Error, ID_BYTES, PeerPlace, PeerProgress, Property, Result};
use crate::hooks::Category;
use std::error::Error as StdError;
use std::fmt;

/// Membership of a device in a group of devices, over NCCL. Every process has one device of the
/// group. Dropping the last handle without [`close`](Peers::close) ends it, once its exchanges have
/// run; what was sent to other machines may then be lost.
#[derive(Clone)]
pub struct Peers(Arc<Membership>);

impl Peers {
    /// Bytes of the name of a group.
    pub const ID_BYTES: usize = ID_BYTES;

    /// Returns an error unless this build has CUDA, and NCCL is there. Does not wait.
    ///
    /// # Errors
    /// [`Error::NotCompiled`]; [`Error::Cuda`] without a library, or if it is too old.
    pub fn check() -> Result<()> {
        Membership::check_library()
    }

    /// A name for a new group, to be told to all its members.
    ///
    /// # Errors
    /// The errors of [`check`](Peers::check); [`Error::NoKernel`] for a stream of a processor.
    pub fn new_id(stream: &Stream) -> Result<[u8; ID_BYTES]> {
        Membership::new_id(track(stream)?.context())
    }

    /// Begins to join a group with a stream's device: [`connect`](Peers::connect) ends that. Does
    /// not wait.
    ///
    /// # Errors
    /// The errors of [`new_id`](Peers::new_id).
    pub fn begin(stream: &Stream, place: &PeerPlace) -> Result<Peers> {
        Membership::begin(track(stream)?.context(), place).map(Peers)
    }

    /// Connects to all others, once. Waits until all have joined, or another thread
    /// [aborts](Peers::abort) that.
    ///
    /// # Errors
    /// [`Error::Cuda`], after an abort with
    /// [`CudaError::ExchangeAborted`](crate::CudaError::ExchangeAborted); [`Error::DeviceFailed`].
    pub fn connect(&self) -> Result<()> {
        self.0.connect()
    }

    /// Asks the device how far it is with the exchanges of this membership. A driver may answer
    /// only when a kernel has ended, so this may wait for the device.
    pub fn look(&self) {
        self.0.look();
    }

    /// How far the device was when it was last asked; all exchanges count as ended once it has
    /// failed. Does not wait.
    pub fn progress(&self) -> PeerProgress {
        self.0.progress()
    }

    /// Returns an error if the device has failed, or NCCL has noticed that the group is broken. It
    /// need not notice that a process is gone. Waits for calls of NCCL in other threads.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`], [`Error::Cuda`].
    pub fn check_group(&self) -> Result<()> {
        self.0.check()
    }

    /// Ends all exchanges, from any thread. Their results are lost, so the device fails, with
    /// [`CudaError::ExchangeAborted`](crate::CudaError::ExchangeAborted) and this cause; before
    /// [`connect`](Peers::connect) has ended only that does. Waits for the exchange that the device
    /// is in, which ends.
    pub fn abort(&self, cause: Arc<dyn StdError + Send + Sync>) {
        self.0.abort(cause);
    }

    /// Leaves the group once all exchanges have ended. Waits until everything that was sent is on
    /// its way, for as long as `proceed` returns true.
    pub fn close(&self, proceed: &mut dyn FnMut() -> bool) {
        self.0.close(proceed);
    }
}

fn track(stream: &Stream) -> Result<&crate::execution::cuda::CudaQueue> {
    let device = stream.device().id();
    stream.state().track().ok_or(Error::NoKernel { operation: "exchange over NCCL", device })
}

impl Launch<'_> {
    /// Enqueues an exchange with other devices in the place of a kernel: sends every argument that
    /// is read to the rank of `ranks` at its position, and receives every argument that is written
    /// from it, all at once. Messages from one rank to another are matched in order; the other rank
    /// makes the exchange with arguments of the same sizes. Does not wait for the device, nor for
    /// other ranks. If NCCL refuses it, nothing of the device ends from then on until
    /// [`abort`](Peers::abort) gives the reason, or for the patience of the membership: then the
    /// device fails.
    ///
    /// # Errors
    /// The errors of [`run`](Launch::run); [`Error::Mismatch`] for another number of ranks, or
    /// peers of another device.
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
        let track = track(self.stream)?;
        if !Arc::ptr_eq(track.context(), peers.0.context()) {
            let id = stream.shared.id.to_string();
            let expected = format!("of this opening of {id}");
            return mismatch("peers", Property::Device, expected, "those of another".to_owned());
        }
        self.submit(Category::Launch, |record| {
            Ok(Work::Cuda(Box::new(track.exchange(&peers.0, ranks, record))))
        })
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

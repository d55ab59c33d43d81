//! Groups of CUDA devices, of one process each, that exchange tensors over NCCL.

use super::{Launch, Stream};
use crate::execution::{ID_BYTES, Member, Work};
use crate::ground::sync::Arc;
use crate::ground::{Error, Property, Result};
use crate::hooks::Category;
use std::fmt;

/// Membership of a device in a group of devices, over NCCL. Every process has one device of the
/// group. Dropping it gives it up, once its exchanges have run.
#[derive(Clone)]
pub struct Peers(Arc<Member>);

impl Peers {
    /// Bytes of the name of a group.
    pub const ID_BYTES: usize = ID_BYTES;

    /// Returns an error unless this build has CUDA, and NCCL is there. Does not wait.
    ///
    /// # Errors
    /// [`Error::NotCompiled`]; [`Error::Cuda`] without a library, or if it is too old.
    pub fn check() -> Result<()> {
        Member::check_library()
    }

    /// A name for a new group, to be told to all its members.
    ///
    /// # Errors
    /// The errors of [`check`](Peers::check); [`Error::NoKernel`] for a stream of a processor.
    pub fn new_id(stream: &Stream) -> Result<[u8; ID_BYTES]> {
        Member::new_id(track(stream)?.context())
    }

    /// Joins a group as `rank` of `size`, with a stream's device. Waits until all have joined;
    /// NCCL has no deadline for that, so ranks make sure before that all will.
    ///
    /// # Errors
    /// The errors of [`new_id`](Peers::new_id).
    pub fn join(stream: &Stream, id: &[u8; ID_BYTES], rank: usize, size: usize) -> Result<Peers> {
        Ok(Peers(Member::join(track(stream)?.context(), id, rank, size)?))
    }
}

fn track(stream: &Stream) -> Result<&crate::execution::cuda::Track> {
    let device = stream.device().id();
    stream.state().track().ok_or(Error::NoKernel { operation: "exchange over NCCL", device })
}

impl Launch<'_> {
    /// Enqueues an exchange with other devices in the place of a kernel: sends every argument that
    /// is read to the rank of `ranks` at its position, and receives every argument that is written
    /// from it, all at once. Messages from one rank to another are matched in order; the other rank
    /// makes the exchange with arguments of the same sizes. Does not wait for the device, but may
    /// wait for the other ranks when two of them exchange for the first time.
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

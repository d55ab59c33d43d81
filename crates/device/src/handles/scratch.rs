//! Temporary memory of the kernels of a stream.

use std::fmt;
use std::panic::Location;

use super::Stream;
use crate::execution::{BorrowedScratch, Reservation, ScratchPiece, check_may_wait};
use crate::ground::sync::Arc;
use crate::ground::{Error, Owner, Property, Result};
use crate::memory::{MemoryRequest, PooledBlock, StreamHome};

/// Temporary memory on a CPU device for the kernels of a stream. A kernel has the memory while it
/// runs; the contents are lost afterwards. Streams share the memory: a device has one piece for
/// each kernel that can run at once, at most one for each worker, however many streams there are. A
/// worker uses its piece for one kernel after the other, so that the piece stays in its caches. A
/// handle: clones are the same memory. The memory is given back when no stream of the device has a
/// handle any more.
///
/// ```
/// # use meristem_device::*;
/// # fn main() -> Result<()> {
/// let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
/// let stream = device.stream("s");
/// let sum = Tensor::zeros(&stream, [1], DType::U8, Owner::Other)?;
/// let scratch = Scratch::new(&stream, 1000, Owner::Activations)?;
/// stream.launch("sum").write(&sum).scratch(&scratch).run(|args| {
///     let scratch = args.scratch();
///     scratch.fill(0);
///     scratch[..3].fill(2);
///     args.write::<u8>(0)[0] = scratch.iter().sum();
/// })?;
/// assert_eq!(sum.to_vec::<u8>()?, [6]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Scratch {
    stream: Stream,
    reservation: Arc<Reservation>,
}

impl Scratch {
    /// Temporary memory of `bytes` bytes, aligned to 64. If another stream of the device has
    /// reserved at least `bytes` bytes, this allocates at most one piece, and none if each worker
    /// already has a piece. Otherwise it replaces all pieces by larger ones. Does not wait for the
    /// device, unless the memory limit is reached or the system has no memory left.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Mismatch`] for a stream of a CUDA device, which has no
    /// workers; [`Error::HotScope`] if an open scope forbids to allocate or to wait;
    /// [`Error::InsideKernel`] if called inside of a kernel.
    #[track_caller]
    pub fn new(stream: &Stream, bytes: usize, owner: Owner) -> Result<Scratch> {
        let (operation, site, device) = ("Scratch::new", Location::caller(), stream.device());
        check_may_wait(operation)?;
        let Some(pieces) = device.pieces() else {
            return Err(Error::Mismatch {
                operation,
                argument: "stream".to_owned(),
                property: Property::Device,
                expected: "a cpu device, whose workers run kernels".into(),
                got: device.id().to_string(),
            });
        };
        let make = |bytes| {
            // A block that is ready for a stream without work is ready for every stream.
            let idle = device.stream("scratch");
            let (stream, slot) = (idle.state(), idle.slot());
            let request = MemoryRequest { stream, slot, bytes, owner, operation, site };
            let pooled = PooledBlock::new(device.pool(), &request)?;
            let block = pooled.block().cloned();
            let block = block.unwrap_or_else(|| unreachable!("it has at least one byte"));
            Ok(ScratchPiece::new(block, bytes, Box::new(pooled)))
        };
        let reservation = Arc::new(pieces.reserve(stream.id(), bytes, make)?);
        Ok(Scratch { stream: stream.clone(), reservation })
    }

    /// Number of bytes that a kernel gets.
    pub fn bytes(&self) -> usize {
        self.reservation.bytes()
    }

    /// Checks that the memory is for launches of this stream.
    pub(super) fn check(&self, operation: &'static str, stream: &Stream) -> Result<()> {
        if *stream == self.stream {
            return Ok(());
        }
        Err(Error::Mismatch {
            operation,
            argument: "scratch".to_owned(),
            property: Property::Stream,
            expected: format!("of stream `{}`", stream.name()),
            got: format!("one of stream `{}`", self.stream.name()),
        })
    }

    /// The memory that a kernel of a launch will borrow.
    pub(super) fn borrowed(&self) -> BorrowedScratch {
        self.reservation.borrowed(self.stream.state().shared.checks_order)
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({} bytes, {:?})", self.bytes(), self.stream)
    }
}

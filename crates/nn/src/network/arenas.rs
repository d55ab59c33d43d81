//! The arenas of a network: one for launches that leave nothing there, one that keeps a gradient,
//! and one that keeps activations.

use meristem_device::{DType, DeviceId, Owner, Scratch, Stream, Tensor};

use super::run::Arena;
use crate::error::Result;

/// On a processor almost every launch has its arena in temporary memory, which all networks of the
/// device share: the next network overwrites it while it is still in the caches. Only a gradient or
/// activations that a later launch uses are kept. On a CUDA device, where networks run at once,
/// each network has an arena for all its launches except those that use kept activations.
#[derive(Clone, Debug)]
pub(super) struct Arenas {
    /// On a processor; `None` until [`Arenas::make_room`] is first called.
    temporary: Option<Scratch>,
    /// The arena that keeps a gradient, and on a CUDA device that of all other launches without
    /// kept activations. It has the largest size that such a launch has needed so far.
    pub(super) kept: Tensor,
    /// The arena of a forward pass whose activations a later launch uses, and of that launch: no
    /// other launch writes there.
    pub(super) activations: Tensor,
}

impl Arenas {
    /// Without any memory.
    pub(super) fn new(stream: &Stream) -> Result<Self> {
        Ok(Self { temporary: None, kept: tensor(stream, 0)?, activations: tensor(stream, 0)? })
    }

    /// Makes room for `len` f32 of a launch that keeps no contents.
    pub(super) fn make_room(&mut self, stream: &Stream, len: usize) -> Result<()> {
        if let DeviceId::Cuda(_) = stream.device().id() {
            return self.make_kept_room(stream, len);
        }
        let bytes = len * size_of::<f32>();
        if self.temporary.as_ref().is_none_or(|scratch| scratch.bytes() < bytes) {
            self.temporary = Some(Scratch::new(stream, bytes, Owner::Activations)?);
        }
        Ok(())
    }

    /// Makes room for `len` f32 that a later launch uses.
    pub(super) fn make_kept_room(&mut self, stream: &Stream, len: usize) -> Result<()> {
        if len > self.kept.numel() {
            self.kept = tensor(stream, len)?;
        }
        Ok(())
    }

    /// Makes room for `len` f32 of a forward pass whose activations are kept. The contents are lost
    /// if the arena grows.
    pub(super) fn make_activations_room(&mut self, stream: &Stream, len: usize) -> Result<()> {
        if len > self.activations.numel() {
            self.activations = tensor(stream, len)?;
        }
        Ok(())
    }

    /// The arena of a launch that leaves nothing there.
    pub(super) fn of_a_launch(&self) -> Arena<'_> {
        self.temporary.as_ref().map_or(Arena::Kept(&self.kept), Arena::Scratch)
    }
}

fn tensor(stream: &Stream, len: usize) -> Result<Tensor> {
    Ok(Tensor::empty(stream, [len], DType::F32, Owner::Activations)?)
}

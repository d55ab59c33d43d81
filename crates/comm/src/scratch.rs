//! Temporary memory of collectives, allocated once and reused.

use meristem_device::{DType, Owner, Stream, Tensor};

use crate::error::Result;

/// Scratch memory, one tensor per stream and element type.
#[derive(Default)]
pub(crate) struct CollectiveScratch(Vec<Tensor>);

impl CollectiveScratch {
    /// Returns `len` elements with unspecified values, in the memory of the last call if large
    /// enough.
    pub(crate) fn get(&mut self, stream: &Stream, dtype: DType, len: usize) -> Result<Tensor> {
        let fits = |kept: &&Tensor| kept.dtype() == dtype && kept.stream() == stream;
        if let Some(kept) = self.0.iter().find(fits).filter(|kept| kept.numel() >= len) {
            return Ok(kept.view(0, [len])?);
        }
        self.0.retain(|kept| !fits(&kept));
        let tensor = Tensor::empty(stream, [len], dtype, Owner::Collectives)?;
        self.0.push(tensor.clone());
        Ok(tensor)
    }
}

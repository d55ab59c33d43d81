//! Staging of a streamed dataset's batches, one batch ahead of their use (D7).

use std::ops::Range;
use std::sync::Arc;

use meristem_device::MappedFile;
use meristem_device::{DType, Owner, Stream, Tensor};

use super::permutation::Indices;
use crate::error::Result;

/// Two buffers of one env: a loader fills one while the env's stream reads the other. Every wait
/// between the two streams is on the device.
pub(super) struct BatchStage {
    loader: Stream,
    file: Arc<MappedFile>,
    /// Bytes of one image.
    image: usize,
    /// u8 [capacity · image] of the loader, and the same memory for the env.
    slots: [(Tensor, Tensor); 2],
    turn: usize,
}

impl BatchStage {
    /// Buffers for `capacity` images of `image` bytes.
    pub(super) fn new(
        env: &Stream,
        file: &Arc<MappedFile>,
        image: usize,
        capacity: usize,
    ) -> Result<Self> {
        let loader = env.device().stream(&format!("{} loader", env.name()));
        let slot = || -> Result<(Tensor, Tensor)> {
            let buffer = Tensor::empty(&loader, [capacity * image], DType::U8, Owner::Batches)?;
            let read = buffer.on(env)?;
            Ok((buffer, read))
        };
        let slots = [slot()?, slot()?];
        Ok(Self { loader, file: file.clone(), image, slots, turn: 0 })
    }

    /// Begins to copy the images at places `part` of the permutations into the other buffer. Does
    /// not wait; the loader waits on the device for the gather that last read the buffer.
    ///
    /// # Errors
    /// The errors of the upload. Then the buffer of the previous fill remains the last.
    pub(super) fn fill(&mut self, permutation: &Arc<Indices>, part: Range<usize>) -> Result<()> {
        let turn = self.turn ^ 1;
        let (file, permutation, size) = (self.file.clone(), permutation.clone(), self.image);
        self.loader.upload("stage", &self.slots[turn].0, move |buffer| {
            let images = file.as_bytes();
            let samples = &permutation.as_slice()[part];
            for (sample, staged) in samples.iter().zip(buffer.chunks_exact_mut(size)) {
                let start = *sample as usize * size;
                staged.copy_from_slice(&images[start..start + size]);
            }
        })?;
        self.turn = turn;
        Ok(())
    }

    /// The buffer of the last [`Self::fill`], on the env's stream.
    pub(super) fn filled(&self) -> &Tensor {
        &self.slots[self.turn].1
    }
}

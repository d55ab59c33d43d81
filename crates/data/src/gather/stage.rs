//! Staging of a streamed dataset's batches, one batch ahead of their use (D7).

use std::ops::Range;
use std::sync::Arc;

use meristem_device::MappedFile;
use meristem_device::{DType, Owner, Stream, Tensor};

use super::permutation::Indices;
use crate::error::Result;

/// Two buffers of one env: the stream `loader` fills one while the env's stream reads the other.
/// Each of these streams waits for the other on the device; the host does not wait.
pub(super) struct BatchStage {
    loader: Stream,
    file: Arc<MappedFile>,
    /// Bytes of one image.
    image: usize,
    /// u8 [capacity · image], as handles on the loader's stream and on the env's stream.
    slots: [(Tensor, Tensor); 2],
    /// Index of the slot that was filled last.
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

    /// Begins to copy the images at places `part` of the permutations into the buffer that was not
    /// filled last. Does not wait; the loader waits on the device for the gather that last read the
    /// buffer.
    ///
    /// # Errors
    /// The errors of the upload. After an error [`Self::filled`] returns the same buffer as before.
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

    /// The buffer of the last [`Self::fill`] without an error, on the env's stream.
    pub(super) fn filled(&self) -> &Tensor {
        &self.slots[self.turn].1
    }
}

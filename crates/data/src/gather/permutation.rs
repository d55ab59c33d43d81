//! The permutations of an epoch on a device: copied once per epoch, not once per batch.

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{DType, Device, Owner, Stream, Tensor};

use crate::error::Result;
use crate::order::EpochOrder;

/// 32-bit words of an epoch's number.
const EPOCH_WORDS: usize = 2;

/// Permutations, which are indices of samples, and the numbers of their epochs, on the host, laid
/// out as in [`Permutations::tensors`]. On a CPU device the copy to the device reads them without a
/// staging buffer.
#[derive(Default)]
pub(super) struct Indices(pub(super) Vec<u32>);

impl Indices {
    pub(super) fn as_slice(&self) -> &[u32] {
        &self.0
    }
}

impl AsRef<[u8]> for Indices {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// A permutation that is drawn for each epoch, and the samples that it permutes.
#[derive(Clone)]
pub(super) struct Permutation {
    /// Its number in the [`EpochOrder`].
    pub(super) number: usize,
    /// Maps an entry of the permutation to an index of the dataset; `None`: the entry is the index.
    pub(super) subset: Option<Arc<[u32]>>,
}

/// The permutations from which the envs of one device take their samples, in one tensor. There are
/// two sets, used in turn, so that an env that begins an epoch does not wait for an env that is
/// still finishing the previous epoch.
pub(super) struct Permutations {
    stream: Stream,
    /// Each permutation, with its range in the tensors.
    permutations: Vec<(Permutation, Range<usize>)>,
    /// Whether each permutation is drawn.
    selected: Vec<bool>,
    /// Entries of all permutations.
    len: usize,
    /// u32 [len + 2 · permutations] each: the permutations, then the epoch of each, low word first.
    tensors: [Tensor; 2],
    /// The contents of `tensors`.
    indices: [Arc<Indices>; 2],
    /// Index of the set of the current epoch in `tensors` and `indices`.
    turn: usize,
}

impl Permutations {
    pub(super) fn new(
        device: &Device,
        permutations: Vec<Permutation>,
        order: &EpochOrder,
    ) -> Result<Self> {
        let selected = vec![true; permutations.len()];
        Self::on_stream(device.stream("order"), permutations, selected, order)
    }

    fn on_stream(
        stream: Stream,
        permutations: Vec<Permutation>,
        selected: Vec<bool>,
        order: &EpochOrder,
    ) -> Result<Self> {
        let mut len = 0;
        let place = |permutation: Permutation| {
            let start = len;
            len += order.permutation_len(permutation.number);
            (permutation, start..len)
        };
        let permutations: Vec<_> = permutations.into_iter().map(place).collect();
        let words = len + EPOCH_WORDS * permutations.len();
        let tensor = || Tensor::empty(&stream, [words], DType::U32, Owner::Batches);
        let tensors = [tensor()?, tensor()?];
        let (indices, turn) = (Default::default(), 0);
        Ok(Self { stream, permutations, selected, len, tensors, indices, turn })
    }

    /// Gives other samples to the permutation with this number in the [`EpochOrder`], and allocates
    /// all tensors again.
    ///
    /// # Errors
    /// Out of memory; nothing is changed then.
    pub(super) fn set(
        &mut self,
        number: usize,
        samples: &Arc<[u32]>,
        order: &EpochOrder,
    ) -> Result<()> {
        let place = self.place_of(number);
        let mut permutations: Vec<Permutation> =
            self.permutations.iter().map(|(permutation, _)| permutation.clone()).collect();
        permutations[place].subset = Some(samples.clone());
        let selected = self.selected.clone();
        *self = Self::on_stream(self.stream.clone(), permutations, selected, order)?;
        Ok(())
    }

    /// Draws only some permutations from the next epoch on, selected by their number in the
    /// [`EpochOrder`].
    pub(super) fn select(&mut self, is_selected: &[bool]) {
        let numbers = self.permutations.iter().map(|(permutation, _)| permutation.number);
        self.selected = numbers.map(|number| is_selected[number]).collect();
    }

    /// Offset in the tensors of the permutation with this number in the [`EpochOrder`].
    pub(super) fn start_of(&self, number: usize) -> usize {
        self.permutations[self.place_of(number)].1.start
    }

    /// Index in `permutations` of the permutation with this number in the [`EpochOrder`].
    fn place_of(&self, number: usize) -> usize {
        let found = self.permutations.iter().position(|(other, _)| other.number == number);
        found.unwrap_or(0)
    }

    /// Handles to both tensors on `stream`.
    pub(super) fn on(&self, stream: &Stream) -> Result<[Tensor; 2]> {
        Ok([self.tensors[0].on(stream)?, self.tensors[1].on(stream)?])
    }

    /// Views of the words of a permutation's epoch in `tensors`, a result of [`Self::on`].
    pub(super) fn epochs_of(&self, number: usize, tensors: &[Tensor; 2]) -> Result<[Tensor; 2]> {
        let start = self.len + EPOCH_WORDS * self.place_of(number);
        let view = |tensor: &Tensor| tensor.view(start, [EPOCH_WORDS]);
        Ok([view(&tensors[0])?, view(&tensors[1])?])
    }

    /// Draws each selected permutation for its epoch, `epochs[number]`, maps it through its subset,
    /// and begins to copy all permutations to the device.
    pub(super) fn start(&mut self, order: &EpochOrder, epochs: &[u64]) -> Result<()> {
        self.turn ^= 1;
        let indices = &mut self.indices[self.turn];
        if Arc::get_mut(indices).is_none() {
            // A copy still reads the old set, because epochs are started faster than they are used.
            *indices = Arc::default();
        }
        if let Some(Indices(indices)) = Arc::get_mut(indices) {
            indices.resize(self.len + EPOCH_WORDS * self.permutations.len(), 0);
            let (places, words) = indices.split_at_mut(self.len);
            let words = words.chunks_exact_mut(EPOCH_WORDS);
            let all = self.permutations.iter().zip(words).zip(&self.selected);
            for (((Permutation { number, subset }, range), words), drawn) in all {
                if !drawn {
                    continue;
                }
                let (permutation, epoch) = (&mut places[range.clone()], epochs[*number]);
                order.permutation_into(*number, epoch, permutation);
                if let Some(subset) = subset {
                    permutation.iter_mut().for_each(|i| *i = subset[*i as usize]);
                }
                words.copy_from_slice(&[epoch as u32, (epoch >> 32) as u32]);
            }
        }
        self.tensors[self.turn].copy_from_shared(indices.clone(), 0)?;
        tracing::trace!(stream = self.stream.name(), "permutations drawn");
        Ok(())
    }

    /// Index of the current tensor.
    pub(super) fn turn(&self) -> usize {
        self.turn
    }

    /// The current permutations, on the host.
    pub(super) fn indices(&self) -> &Arc<Indices> {
        &self.indices[self.turn]
    }
}

//! The gather on a CPU device: select, augment and normalise in one pass (D2, D8).

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Zeroable;
use half::f16;
use meristem_device::simd::{Vectorized, fetch, vectorize};
use meristem_device::{Args, Element};

use crate::augment::{Augment, AugmentDraw};
use crate::shape::{SampleShape, StoredValue};
use crate::targets::{TargetForm, TargetKind};

/// Values that are normalised as one block: a multiple of every number of channels from 1 to 4 and
/// of the widest vector, so that all blocks have the same constants.
const BLOCK: usize = 48;
/// Block size for the values after the last whole block; the remainder is normalised one by one.
const PART: usize = 16;

/// Constants of the normalisation v · scale + shift: entry i is for the channel of value i in a
/// block of [`BLOCK`] values that begins with channel 0.
struct MultiplyAdd {
    scale: [f32; BLOCK],
    shift: [f32; BLOCK],
}

impl MultiplyAdd {
    fn new(constants: &[(f32, f32)]) -> Self {
        let constant = |i: usize| constants[i % constants.len()];
        Self {
            scale: std::array::from_fn(|i| constant(i).0),
            shift: std::array::from_fn(|i| constant(i).1),
        }
    }

    /// Normalises whole pixels, and prefetches `next`, which has the same length.
    #[inline(always)]
    fn apply(&self, bytes: &[u8], values: &mut [f32], next: &[u8]) {
        let (byte_blocks, bytes) = bytes.as_chunks::<BLOCK>();
        let (value_blocks, values) = values.as_chunks_mut::<BLOCK>();
        let next_blocks = next.as_chunks::<BLOCK>().0;
        for ((bytes, values), next) in byte_blocks.iter().zip(value_blocks).zip(next_blocks) {
            fetch(next);
            for i in 0..BLOCK {
                values[i] = f32::from(bytes[i]) * self.scale[i] + self.shift[i];
            }
        }
        let (scales, shifts) = (self.scale.chunks_exact(PART), self.shift.chunks_exact(PART));
        let parts = bytes.chunks(PART).zip(values.chunks_mut(PART)).zip(scales.zip(shifts));
        for ((bytes, values), (scales, shifts)) in parts {
            for (((value, byte), scale), shift) in
                values.iter_mut().zip(bytes).zip(scales).zip(shifts)
            {
                *value = f32::from(*byte) * scale + shift;
            }
        }
    }
}

/// Constants for any number of channels and any stored type: the scales and shifts of all channels,
/// repeated to at least [`BLOCK`] values.
struct Table {
    scale: Vec<f32>,
    shift: Vec<f32>,
}

impl Table {
    fn new(constants: &[(f32, f32)]) -> Self {
        let len = BLOCK.div_ceil(constants.len()) * constants.len();
        let (scale, shift) = constants.iter().copied().cycle().take(len).unzip();
        Self { scale, shift }
    }
}

/// Conversion of stored values to inputs.
trait Conversion {
    type Stored: Element;

    /// Writes black pixels to `stored`, which begins with channel 0.
    fn blacken(&self, stored: &mut [Self::Stored]);

    /// Normalises whole pixels, and may prefetch `next`, the same pixels of the next image.
    fn normalize(&self, stored: &[Self::Stored], values: &mut [f32], next: &[Self::Stored]);
}

/// Bytes of at most 4 channels.
impl Conversion for MultiplyAdd {
    type Stored = u8;

    #[inline(always)]
    fn blacken(&self, stored: &mut [u8]) {
        stored.fill(0);
    }

    #[inline(always)]
    fn normalize(&self, stored: &[u8], values: &mut [f32], next: &[u8]) {
        self.apply(stored, values, next);
    }
}

/// Values that were normalised when they were stored.
struct Normalized<'a>(&'a MultiplyAdd);

impl Conversion for Normalized<'_> {
    type Stored = f32;

    #[inline(always)]
    fn blacken(&self, stored: &mut [f32]) {
        for block in stored.chunks_mut(BLOCK) {
            block.copy_from_slice(&self.0.shift[..block.len()]);
        }
    }

    #[inline(always)]
    fn normalize(&self, stored: &[f32], values: &mut [f32], _: &[f32]) {
        values.copy_from_slice(stored);
    }
}

/// Values of any type and number of channels.
struct ByTable<'a, V> {
    table: &'a Table,
    stored: PhantomData<V>,
}

impl<'a, V> ByTable<'a, V> {
    fn new(table: &'a Table) -> Self {
        Self { table, stored: PhantomData }
    }
}

impl<V: StoredValue> Conversion for ByTable<'_, V> {
    type Stored = V;

    #[inline(always)]
    fn blacken(&self, stored: &mut [V]) {
        stored.fill(V::zeroed());
    }

    #[inline(always)]
    fn normalize(&self, stored: &[V], values: &mut [f32], _: &[V]) {
        let Table { scale, shift } = self.table;
        let blocks = stored.chunks(scale.len()).zip(values.chunks_mut(scale.len()));
        for (stored, values) in blocks {
            let constants = scale.iter().zip(shift);
            let pairs = values.iter_mut().zip(stored);
            for ((value, stored), (scale, shift)) in pairs.zip(constants) {
                *value = stored.value() * scale + shift;
            }
        }
    }
}

/// Stored values that the kernel reads: their type, and whether their constants are in blocks or in
/// a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum StoredValues {
    /// u8, of at most 4 channels.
    Bytes,
    /// u8, of more channels.
    ManyBytes,
    /// i16.
    Integers,
    /// f16.
    Halves,
    /// f32.
    Floats,
    /// f32, normalised.
    Normalized,
}

/// Storage of the samples that the kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SampleStorage {
    pub(super) values: StoredValues,
    /// Whether only the samples of this batch are stored, in its order; else the whole dataset.
    pub(super) staged: bool,
}

/// Augmentation of an env's images in an epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct EpochAugment {
    pub(super) augment: Augment,
    pub(super) seed: u64,
    pub(super) epoch: u64,
}

/// Parameters that all gathers of a [`super::GatherBatches`] share.
pub(super) struct GatherKernel {
    shape: SampleShape,
    blocks: MultiplyAdd,
    table: Table,
    pub(super) targets: TargetForm,
}

impl GatherKernel {
    pub(super) fn new(
        (shape, targets): (SampleShape, TargetForm),
        constants: &[(f32, f32)],
    ) -> Self {
        let (blocks, table) = (MultiplyAdd::new(constants), Table::new(constants));
        Self { shape, blocks, table, targets }
    }

    /// Runs one gather. Arguments: stored samples, targets u32 [N] or f32 [N, K], indices of
    /// samples u32 [n]; outputs: inputs f32 [n, H, W, C], targets u32 [n] or f32 [n, K]. The words
    /// of the epoch, and the table of constants, are for the GPU's kernel; here they are
    /// parameters.
    pub(super) fn run(
        &self,
        args: &mut Args<'_>,
        storage: SampleStorage,
        epoch_augment: EpochAugment,
    ) {
        let samples = args.read::<u32>(2);
        let inputs = args.write::<f32>(3);
        match self.targets {
            TargetForm { kind: TargetKind::Classes, .. } => {
                let classes = args.read::<u32>(1);
                for (target, sample) in args.write::<u32>(4).iter_mut().zip(samples) {
                    *target = classes[*sample as usize];
                }
            }
            TargetForm { kind: TargetKind::Labels | TargetKind::Numbers, width } => {
                let all_targets = args.read::<f32>(1);
                let targets = args.write::<f32>(4).chunks_exact_mut(width);
                for (target, sample) in targets.zip(samples) {
                    target.copy_from_slice(&all_targets[*sample as usize * width..][..width]);
                }
            }
        }
        let isa = args.isa();
        let pick = PickedSamples { kernel: self, samples, epoch_augment, staged: storage.staged };
        match storage.values {
            StoredValues::Bytes => vectorize(
                isa,
                VectorizedGather {
                    pick,
                    conversion: &self.blocks,
                    stored: args.read::<u8>(0),
                    inputs,
                },
            ),
            StoredValues::ManyBytes => self.run_by_table::<u8>(args, pick, inputs),
            StoredValues::Integers => self.run_by_table::<i16>(args, pick, inputs),
            StoredValues::Halves => self.run_by_table::<f16>(args, pick, inputs),
            StoredValues::Floats => self.run_by_table::<f32>(args, pick, inputs),
            StoredValues::Normalized => {
                let conversion = &Normalized(&self.blocks);
                vectorize(
                    isa,
                    VectorizedGather { pick, conversion, stored: args.read::<f32>(0), inputs },
                )
            }
        }
    }

    fn run_by_table<V: StoredValue>(
        &self,
        args: &Args<'_>,
        pick: PickedSamples<'_>,
        inputs: &mut [f32],
    ) {
        let conversion = &ByTable::<V>::new(&self.table);
        vectorize(
            args.isa(),
            VectorizedGather { pick, conversion, stored: args.read::<V>(0), inputs },
        )
    }
}

/// Writer of augmented images.
struct Augmenter<'a, C: Conversion> {
    shape: SampleShape,
    conversion: &'a C,
    /// Scratch memory for one row.
    line: Vec<C::Stored>,
}

impl<'a, C: Conversion> Augmenter<'a, C> {
    fn new(shape: SampleShape, conversion: &'a C) -> Self {
        Self { shape, conversion, line: vec![C::Stored::zeroed(); shape.width * shape.channels] }
    }

    /// Writes one augmented image to `values`, row by row. `next` is the image of the next sample,
    /// to prefetch.
    #[inline(always)]
    fn write(&mut self, draw: &AugmentDraw, [image, next]: [&[C::Stored]; 2], values: &mut [f32]) {
        let Self { shape: SampleShape { channels, height, width }, conversion, ref mut line } =
            *self;
        let row = width * channels;
        let columns = columns_inside(draw.left, width);
        let first = (columns.start as isize + draw.left) as usize * channels;
        let (start, end) = (columns.start * channels, columns.end * channels);
        let rows = values.chunks_exact_mut(row).zip(next.chunks_exact(row));
        for (y, (values, next)) in rows.enumerate() {
            let source = y as isize + draw.top;
            if (0..height as isize).contains(&source) {
                let place = source as usize * row + first;
                conversion.blacken(&mut line[..start]);
                line[start..end].copy_from_slice(&image[place..place + end - start]);
                conversion.blacken(&mut line[end..]);
                if draw.flip {
                    reverse_pixels(line, channels);
                }
            } else {
                conversion.blacken(line);
            }
            conversion.normalize(line, values, next);
            if draw.cut_rows.contains(&y) {
                let cut = &draw.cut_columns;
                values[cut.start * channels..cut.end * channels].fill(0.0);
            }
        }
    }
}

/// The columns x of 0..width whose source column x + left is also in 0..width; |left| is at most
/// width.
fn columns_inside(left: isize, width: usize) -> Range<usize> {
    let start = (-left).max(0) as usize;
    let end = (width as isize - left.max(0)) as usize;
    start..end
}

#[inline(always)]
fn reverse_pixels<T>(row: &mut [T], channels: usize) {
    match channels {
        1 => row.reverse(),
        2 => row.as_chunks_mut::<2>().0.reverse(),
        3 => row.as_chunks_mut::<3>().0.reverse(),
        4 => row.as_chunks_mut::<4>().0.reverse(),
        _ => {
            // Reversing each pixel again restores the order of its channels.
            row.reverse();
            row.chunks_exact_mut(channels).for_each(<[T]>::reverse);
        }
    }
}

/// Samples of one batch of one env, with the parameters of their gather.
struct PickedSamples<'a> {
    kernel: &'a GatherKernel,
    samples: &'a [u32],
    epoch_augment: EpochAugment,
    /// Whether only `samples` are stored, in this order.
    staged: bool,
}

impl PickedSamples<'_> {
    /// Gathers the samples from `stored` to `inputs`.
    #[inline(always)]
    fn gather<C: Conversion>(&self, conversion: &C, stored: &[C::Stored], inputs: &mut [f32]) {
        let (shape, EpochAugment { augment, seed, epoch }) =
            (&self.kernel.shape, self.epoch_augment);
        let size = shape.numel();
        let mut augmenter = Augmenter::new(*shape, conversion);
        let sample_at = |i: usize| {
            let place = if self.staged { i } else { self.samples[i] as usize };
            &stored[place * size..(place + 1) * size]
        };
        let last = self.samples.len().saturating_sub(1);
        for (i, (sample, values)) in
            self.samples.iter().zip(inputs.chunks_exact_mut(size)).enumerate()
        {
            // Samples are drawn at random: without prefetching, each one begins with a cache miss.
            let [own, next] = [sample_at(i), sample_at(last.min(i + 1))];
            if augment == Augment::NONE {
                conversion.normalize(own, values, next);
            } else {
                let draw = augment.draw(*shape, seed, epoch, *sample);
                augmenter.write(&draw, [own, next], values);
            }
        }
    }
}

/// A call of [`PickedSamples::gather`], compiled for the device's instruction set.
struct VectorizedGather<'a, C: Conversion> {
    pick: PickedSamples<'a>,
    conversion: &'a C,
    stored: &'a [C::Stored],
    inputs: &'a mut [f32],
}

impl<C: Conversion> Vectorized for VectorizedGather<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.pick.gather(self.conversion, self.stored, self.inputs);
    }
}

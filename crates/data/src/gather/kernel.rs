//! The gather on the processor: select, augment and normalise in one pass (D2, D8).

use std::ops::Range;

use meristem_device::simd::{Vectorized, fetch, vectorize};
use meristem_device::{Args, Element};

use crate::augment::{Augment, AugmentDraw};
use crate::dataset::ImageShape;
use crate::normalization::Normalization;

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
    fn new(normalization: &Normalization) -> Self {
        let constants = normalization.multiply_add();
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

/// Conversion of stored values to inputs.
trait Stored: Element {
    /// Writes black pixels to `stored`, which begins with channel 0.
    fn blacken(constants: &MultiplyAdd, stored: &mut [Self]);

    /// Normalises whole pixels, and may prefetch `next`, the same pixels of the next image.
    fn normalize(constants: &MultiplyAdd, stored: &[Self], values: &mut [f32], next: &[Self]);
}

impl Stored for u8 {
    #[inline(always)]
    fn blacken(_: &MultiplyAdd, stored: &mut [Self]) {
        stored.fill(0);
    }

    #[inline(always)]
    fn normalize(constants: &MultiplyAdd, stored: &[Self], values: &mut [f32], next: &[Self]) {
        constants.apply(stored, values, next);
    }
}

/// Values stored normalised.
impl Stored for f32 {
    #[inline(always)]
    fn blacken(constants: &MultiplyAdd, stored: &mut [Self]) {
        for block in stored.chunks_mut(BLOCK) {
            block.copy_from_slice(&constants.shift[..block.len()]);
        }
    }

    #[inline(always)]
    fn normalize(_: &MultiplyAdd, stored: &[Self], values: &mut [f32], _: &[Self]) {
        values.copy_from_slice(stored);
    }
}

/// Storage of the images that the kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageStorage {
    /// The whole dataset, u8.
    Bytes,
    /// The whole dataset, f32.
    Normalized,
    /// u8, only the images of this batch and in its order.
    Staged,
}

/// Parameters that all gathers of a [`super::GatherBatches`] share.
pub(super) struct GatherKernel {
    shape: ImageShape,
    constants: MultiplyAdd,
    augment: Augment,
    seed: u64,
}

impl GatherKernel {
    pub(super) fn new(
        shape: ImageShape,
        normalization: &Normalization,
        augment: Augment,
        seed: u64,
    ) -> Self {
        Self { shape, constants: MultiplyAdd::new(normalization), augment, seed }
    }

    /// Runs one gather. Arguments: images, labels u32 [N], samples u32 [n]; outputs: inputs f32
    /// [n, H, W, C], targets u32 [n]. The last argument, the words of the epoch, is for the GPU's
    /// kernel; here the epoch is a parameter.
    pub(super) fn run(&self, args: &mut Args<'_>, storage: ImageStorage, epoch: u64) {
        let labels = args.read::<u32>(1);
        let samples = args.read::<u32>(2);
        let inputs = args.write::<f32>(3);
        for (target, sample) in args.write::<u32>(4).iter_mut().zip(samples) {
            *target = labels[*sample as usize];
        }
        let pick =
            PickedImages { kernel: self, samples, epoch, staged: storage == ImageStorage::Staged };
        let isa = args.isa();
        match storage {
            ImageStorage::Bytes | ImageStorage::Staged => {
                vectorize(isa, Work { pick, images: args.read::<u8>(0), inputs })
            }
            ImageStorage::Normalized => {
                vectorize(isa, Work { pick, images: args.read::<f32>(0), inputs })
            }
        }
    }

    /// Writes one augmented image to `values`, row by row. `next` is the image of the next sample,
    /// to prefetch; `line` is scratch memory for one row.
    #[inline(always)]
    fn augmented<T: Stored>(
        &self,
        draw: &AugmentDraw,
        image: &[T],
        next: &[T],
        values: &mut [f32],
        line: &mut [T],
    ) {
        let ImageShape { channels, height, width } = self.shape;
        let row = width * channels;
        let columns = columns_inside(draw.left, width);
        let first = (columns.start as isize + draw.left) as usize * channels;
        let (start, end) = (columns.start * channels, columns.end * channels);
        let rows = values.chunks_exact_mut(row).zip(next.chunks_exact(row));
        for (y, (values, next)) in rows.enumerate() {
            let source = y as isize + draw.top;
            if (0..height as isize).contains(&source) {
                let place = source as usize * row + first;
                T::blacken(&self.constants, &mut line[..start]);
                line[start..end].copy_from_slice(&image[place..place + end - start]);
                T::blacken(&self.constants, &mut line[end..]);
                if draw.flip {
                    reverse_pixels(line, channels);
                }
            } else {
                T::blacken(&self.constants, line);
            }
            T::normalize(&self.constants, line, values, next);
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
        _ => row.as_chunks_mut::<4>().0.reverse(),
    }
}

/// Samples of one batch of one env, with the parameters of their gather.
struct PickedImages<'a> {
    kernel: &'a GatherKernel,
    samples: &'a [u32],
    epoch: u64,
    /// Whether only the images of `samples` are stored, in this order.
    staged: bool,
}

impl PickedImages<'_> {
    /// Gathers the samples from the stored `images` to `inputs`.
    #[inline(always)]
    fn gather<T: Stored>(&self, images: &[T], inputs: &mut [f32]) {
        let GatherKernel { shape, constants, augment, seed } = self.kernel;
        let size = shape.numel();
        let mut line = vec![T::zeroed(); shape.width * shape.channels];
        let image = |i: usize| {
            let place = if self.staged { i } else { self.samples[i] as usize };
            &images[place * size..(place + 1) * size]
        };
        let last = self.samples.len().saturating_sub(1);
        for (i, (sample, values)) in
            self.samples.iter().zip(inputs.chunks_exact_mut(size)).enumerate()
        {
            // Samples are drawn at random: without prefetching, each image begins with a cache
            // miss.
            let [image, next] = [image(i), image(last.min(i + 1))];
            if *augment == Augment::NONE {
                T::normalize(constants, image, values, next);
            } else {
                let draw = augment.draw(*shape, *seed, self.epoch, *sample);
                self.kernel.augmented(&draw, image, next, values, &mut line);
            }
        }
    }
}

/// Runs [`PickedImages::gather`], compiled for the instruction set of the processor.
struct Work<'a, T> {
    pick: PickedImages<'a>,
    images: &'a [T],
    inputs: &'a mut [f32],
}

impl<T: Stored> Vectorized for Work<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.pick.gather(self.images, self.inputs);
    }
}

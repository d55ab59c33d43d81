//! Declaration of the gather's kernels on a GPU, which are in `gather.cu`.

use std::sync::{Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand, Piece, Program};

use super::kernel::ImageStorage;
use crate::augment::Augment;
use crate::dataset::ImageShape;
use crate::normalization::Normalization;

pub(super) static SOURCE: KernelSource = KernelSource {
    name: "crates/data/src/gather/gather.cu",
    text: include_str!("gather.cu"),
    headers: &[],
};

/// Threads of a block. Each block writes one image.
const THREADS: u32 = 256;

const LABELS: Operand = Operand::read::<u32>();
const SAMPLES: Operand = Operand::read::<u32>();
const INPUTS: Operand = Operand::write::<f32>();
const TARGETS: Operand = Operand::write::<u32>();
const EPOCH: Operand = Operand::read::<u32>();

static BYTES: Kernel = Kernel {
    source: &SOURCE,
    entry: "gather_bytes",
    operands: &[Operand::read::<u8>(), LABELS, SAMPLES, INPUTS, TARGETS, EPOCH],
    values: size_of::<GpuValues>(),
};

static FLOATS: Kernel = Kernel {
    entry: "gather_floats",
    operands: &[Operand::read::<f32>(), LABELS, SAMPLES, INPUTS, TARGETS, EPOCH],
    ..BYTES
};

/// The struct `Values` of `gather.cu`, with the same layout.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct GpuValues {
    seed: u64,
    scale: [f32; 4],
    shift: [f32; 4],
    channels: u32,
    height: u32,
    width: u32,
    padding: u32,
    flip: u32,
    cutout: u32,
    staged: u32,
    unused: u32,
}

/// The compiled programs of a [`super::GatherBatches`]. Samples and epoch are tensor arguments, so
/// a program depends only on the storage of the images and on the lengths of the tensors.
pub(super) struct GpuGather {
    values: GpuValues,
    /// Storage of the images, lengths of the tensors as in [`Self::program`], program.
    programs: Mutex<Vec<(ImageStorage, [usize; 6], Program)>>,
}

impl GpuGather {
    pub(super) fn new(
        shape: ImageShape,
        normalization: &Normalization,
        augment: Augment,
        seed: u64,
    ) -> GpuGather {
        let ImageShape { channels, height, width } = shape;
        let mut values = GpuValues {
            seed,
            channels: channels as u32,
            height: height as u32,
            width: width as u32,
            padding: augment.crop_padding as u32,
            flip: augment.flip.into(),
            cutout: augment.cutout as u32,
            ..GpuValues::zeroed()
        };
        for (channel, (scale, shift)) in normalization.multiply_add().into_iter().enumerate() {
            values.scale[channel] = scale;
            values.shift[channel] = shift;
        }
        GpuGather { values, programs: Mutex::default() }
    }

    /// The program that gathers over tensors with `lens` elements: images, labels, samples, inputs,
    /// targets, epoch.
    pub(super) fn program(&self, storage: ImageStorage, lens: [usize; 6]) -> Program {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same =
            |known: &&(ImageStorage, [usize; 6], Program)| (known.0, known.1) == (storage, lens);
        let known = programs.iter().find(is_same);
        if let Some((_, _, program)) = known {
            return program.clone();
        }
        let kernel = match storage {
            ImageStorage::Bytes | ImageStorage::Staged => &BYTES,
            ImageStorage::Normalized => &FLOATS,
        };
        let values = GpuValues { staged: (storage == ImageStorage::Staged).into(), ..self.values };
        let pieces = lens.into_iter().enumerate();
        let pieces = pieces.map(|(argument, len)| Piece { argument, start: 0, len });
        let call = Call::new(kernel, lens[2] as u32, THREADS).values(values).with_pieces(pieces);
        let program = Program::from(call);
        programs.push((storage, lens, program.clone()));
        program
    }
}

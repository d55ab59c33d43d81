//! Declaration of the gather's kernels on a GPU, which are in `gather.cu`.

use std::sync::{Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand, Owner, Piece, Program, Stream, Tensor};

use super::kernel::{SampleStorage, Storage};
use crate::augment::Augment;
use crate::error::Result;
use crate::shape::SampleShape;

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

const CONSTANTS: Operand = Operand::read::<f32>();

static MANY_BYTES: Kernel = Kernel {
    entry: "gather_many_bytes",
    operands: &[Operand::read::<u8>(), LABELS, SAMPLES, INPUTS, TARGETS, EPOCH, CONSTANTS],
    ..BYTES
};

static RAW_FLOATS: Kernel = Kernel {
    entry: "gather_raw_floats",
    operands: &[Operand::read::<f32>(), LABELS, SAMPLES, INPUTS, TARGETS, EPOCH, CONSTANTS],
    ..BYTES
};

impl Storage {
    /// Whether the constants are a tensor, because there may be any number of channels.
    fn has_table(self) -> bool {
        matches!(self, Self::ManyBytes | Self::Floats)
    }
}

/// The tensor of constants on an env's stream, if the storage needs one: the scales of all
/// channels, then the shifts.
pub(super) fn constants(
    stream: &Stream,
    storage: SampleStorage,
    constants: &[(f32, f32)],
) -> Result<Option<Tensor>> {
    if !storage.values.has_table() {
        return Ok(None);
    }
    let (mut table, shifts): (Vec<f32>, Vec<f32>) = constants.iter().copied().unzip();
    table.extend(shifts);
    Ok(Some(Tensor::from_slice(stream, &table, [table.len()], Owner::Batches)?))
}

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
/// a program depends only on the storage of the samples and on the lengths of the tensors.
pub(super) struct GpuGather {
    values: GpuValues,
    /// Storage of the samples, lengths of the tensors as in [`Self::program`], program.
    programs: Mutex<Vec<(SampleStorage, [usize; 6], Program)>>,
}

impl GpuGather {
    pub(super) fn new(
        shape: SampleShape,
        constants: &[(f32, f32)],
        augment: Augment,
        seed: u64,
    ) -> GpuGather {
        let SampleShape { channels, height, width } = shape;
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
        // Kernels with a table of constants do not read these.
        let own = values.scale.iter_mut().zip(&mut values.shift);
        for ((scale, shift), constants) in own.zip(constants) {
            (*scale, *shift) = *constants;
        }
        GpuGather { values, programs: Mutex::default() }
    }

    /// The program that gathers over tensors with `lens` elements: stored samples, labels, indices
    /// of samples, inputs, targets, epoch.
    pub(super) fn program(&self, storage: SampleStorage, lens: [usize; 6]) -> Program {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same =
            |known: &&(SampleStorage, [usize; 6], Program)| (known.0, known.1) == (storage, lens);
        let known = programs.iter().find(is_same);
        if let Some((_, _, program)) = known {
            return program.clone();
        }
        let kernel = match storage.values {
            Storage::Bytes => &BYTES,
            Storage::ManyBytes => &MANY_BYTES,
            Storage::Floats => &RAW_FLOATS,
            Storage::Normalized => &FLOATS,
        };
        let values = GpuValues { staged: storage.staged.into(), ..self.values };
        let table = storage.values.has_table().then_some(2 * values.channels as usize);
        let pieces = lens.into_iter().chain(table).enumerate();
        let pieces = pieces.map(|(argument, len)| Piece { argument, start: 0, len });
        let call = Call::new(kernel, lens[2] as u32, THREADS).values(values).with_pieces(pieces);
        let program = Program::from(call);
        programs.push((storage, lens, program.clone()));
        program
    }
}

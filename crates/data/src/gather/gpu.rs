//! Declaration of the gather's kernels on a GPU, which are in `gather.cu`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};
use half::f16;
use meristem_device::{Call, Kernel, KernelSource, Operand, Owner, Piece, Program, Stream, Tensor};

use super::kernel::{EpochAugment, SampleStorage, StoredValues};
use crate::augment::Augment;
use crate::error::Result;
use crate::shape::SampleShape;
use crate::targets::{TargetForm, TargetKind};

pub(super) static SOURCE: KernelSource = KernelSource {
    name: "crates/data/src/gather/gather.cu",
    text: include_str!("gather.cu"),
    headers: &[],
};

/// Threads of a block. Each block writes one image.
const THREADS: u32 = 256;

const SAMPLES: Operand = Operand::read::<u32>();
const INPUTS: Operand = Operand::write::<f32>();
const EPOCH: Operand = Operand::read::<u32>();
const CONSTANTS: Operand = Operand::read::<f32>();

/// The kernels for one type of targets, each for the [`StoredValues`] of its name.
struct Kernels {
    bytes: Kernel,
    many_bytes: Kernel,
    integers: Kernel,
    halves: Kernel,
    floats: Kernel,
    normalized: Kernel,
}

/// The [`Kernels`] for a type of targets; their entries end in `$suffix`.
macro_rules! kernels {
    ($target:ty, $suffix:literal) => {{
        const fn kernel(entry: &'static str, operands: &'static [Operand]) -> Kernel {
            Kernel { source: &SOURCE, entry, operands, values: size_of::<GpuValues>() }
        }
        /// Targets of the whole dataset, and targets of the batch.
        const ALL_TARGETS: Operand = Operand::read::<$target>();
        const TARGETS: Operand = Operand::write::<$target>();
        const BYTES: Operand = Operand::read::<u8>();
        const INTEGERS: Operand = Operand::read::<i16>();
        const HALVES: Operand = Operand::read::<f16>();
        const FLOATS: Operand = Operand::read::<f32>();
        Kernels {
            bytes: kernel(
                concat!("gather_bytes", $suffix),
                &[BYTES, ALL_TARGETS, SAMPLES, INPUTS, TARGETS, EPOCH],
            ),
            many_bytes: kernel(
                concat!("gather_many_bytes", $suffix),
                &[BYTES, ALL_TARGETS, SAMPLES, INPUTS, TARGETS, EPOCH, CONSTANTS],
            ),
            integers: kernel(
                concat!("gather_integers", $suffix),
                &[INTEGERS, ALL_TARGETS, SAMPLES, INPUTS, TARGETS, EPOCH, CONSTANTS],
            ),
            halves: kernel(
                concat!("gather_halves", $suffix),
                &[HALVES, ALL_TARGETS, SAMPLES, INPUTS, TARGETS, EPOCH, CONSTANTS],
            ),
            floats: kernel(
                concat!("gather_floats", $suffix),
                &[FLOATS, ALL_TARGETS, SAMPLES, INPUTS, TARGETS, EPOCH, CONSTANTS],
            ),
            normalized: kernel(
                concat!("gather_normalized", $suffix),
                &[FLOATS, ALL_TARGETS, SAMPLES, INPUTS, TARGETS, EPOCH],
            ),
        }
    }};
}

static OF_CLASSES: Kernels = kernels!(u32, "");
static OF_VALUES: Kernels = kernels!(f32, "_to_values");

impl StoredValues {
    /// Whether the constants are a tensor, because there may be any number of channels.
    fn has_table(self) -> bool {
        matches!(self, Self::ManyBytes | Self::Integers | Self::Halves | Self::Floats)
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
    target_width: u32,
}

/// Storage of the samples, augmentation with its seed, and lengths of the tensors as in
/// [`GpuGather::program`].
type ProgramKey = (SampleStorage, (Augment, u64), [usize; 6]);

/// The programs that a [`super::GatherBatches`] has made so far. Samples and epoch are tensor
/// arguments, so a program depends only on the storage of the samples, their augmentation with its
/// seed, and the lengths of the tensors.
pub(super) struct GpuGather {
    values: GpuValues,
    kernels: &'static Kernels,
    programs: Mutex<HashMap<ProgramKey, Program>>,
}

impl GpuGather {
    pub(super) fn new(
        (shape, targets): (SampleShape, TargetForm),
        constants: &[(f32, f32)],
    ) -> GpuGather {
        let SampleShape { channels, height, width } = shape;
        let mut values = GpuValues {
            channels: channels as u32,
            height: height as u32,
            width: width as u32,
            target_width: targets.width as u32,
            ..GpuValues::zeroed()
        };
        // Kernels with a table of constants do not read these.
        let own = values.scale.iter_mut().zip(&mut values.shift);
        for ((scale, shift), constants) in own.zip(constants) {
            (*scale, *shift) = *constants;
        }
        let kernels = match targets.kind {
            TargetKind::Classes => &OF_CLASSES,
            TargetKind::Labels | TargetKind::Numbers => &OF_VALUES,
        };
        GpuGather { values, kernels, programs: Mutex::default() }
    }

    /// The program that gathers over tensors with `lens` elements: stored samples, stored targets,
    /// indices of samples, inputs, targets, epoch.
    pub(super) fn program(
        &self,
        storage: SampleStorage,
        EpochAugment { augment, seed, .. }: EpochAugment,
        lens: [usize; 6],
    ) -> Program {
        // Without augmentation nothing is drawn, and envs with different seeds share the program.
        let seed = if augment == Augment::NONE { 0 } else { seed };
        let key = (storage, (augment, seed), lens);
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = programs.get(&key) {
            return program.clone();
        }
        let kernel = match storage.values {
            StoredValues::Bytes => &self.kernels.bytes,
            StoredValues::ManyBytes => &self.kernels.many_bytes,
            StoredValues::Integers => &self.kernels.integers,
            StoredValues::Halves => &self.kernels.halves,
            StoredValues::Floats => &self.kernels.floats,
            StoredValues::Normalized => &self.kernels.normalized,
        };
        let values = GpuValues {
            seed,
            padding: augment.crop_padding as u32,
            flip: augment.flip.into(),
            cutout: augment.cutout as u32,
            staged: storage.staged.into(),
            ..self.values
        };
        let table = storage.values.has_table().then_some(2 * values.channels as usize);
        let pieces = lens.into_iter().chain(table).enumerate();
        let pieces = pieces.map(|(argument, len)| Piece { argument, start: 0, len });
        let call = Call::new(kernel, lens[2] as u32, THREADS).values(values).with_pieces(pieces);
        let program = Program::from(call);
        programs.insert(key, program.clone());
        program
    }
}

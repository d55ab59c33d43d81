//! The gather's kernel on a GPU, declared: `gather.cu`.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, Operand, Source};

use super::kernel::Form;
use crate::augment::Augment;
use crate::dataset::ImageShape;
use crate::normalization::Normalization;

pub(super) static SOURCE: Source = Source {
    name: "crates/data/src/gather/gather.cu",
    text: include_str!("gather.cu"),
    headers: &[],
};

/// Threads of a block, which makes one image.
const THREADS: u32 = 256;

const LABELS: Operand = Operand::read::<u32>();
const ORDER: Operand = Operand::read::<u32>();
const INPUTS: Operand = Operand::write::<f32>();
const TARGETS: Operand = Operand::write::<u32>();

static BYTES: Kernel = Kernel {
    source: &SOURCE,
    entry: "gather_bytes",
    operands: &[Operand::read::<u8>(), LABELS, ORDER, INPUTS, TARGETS],
    values: size_of::<GpuValues>(),
};

static FLOATS: Kernel = Kernel {
    entry: "gather_floats",
    operands: &[Operand::read::<f32>(), LABELS, ORDER, INPUTS, TARGETS],
    ..BYTES
};

/// `Values` of `gather.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct GpuValues {
    seed: u64,
    epoch: u64,
    first: u64,
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

/// Values that the gathers of a [`super::GatherBatches`] share; epoch, place and form are set for
/// each.
pub(super) struct GpuGather(GpuValues);

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
        GpuGather(values)
    }

    /// The call that gathers the `n` samples from place `first` of the permutations on.
    pub(super) fn call(&self, form: Form, epoch: u64, (first, n): (usize, usize)) -> Call {
        let kernel = match form {
            Form::Bytes | Form::Staged => &BYTES,
            Form::Normalized => &FLOATS,
        };
        let staged = (form == Form::Staged).into();
        let values = GpuValues { epoch, first: first as u64, staged, ..self.0 };
        Call::new(kernel, n as u32, THREADS).values(values)
    }
}

//! Calls of `int8.cu`.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, DType, Kernel, KernelSource, Operand, Piece};

use super::{Divide, source};

pub(super) static SOURCE: KernelSource = source!("int8.cu");

static ENCODE: Kernel = Kernel {
    source: &SOURCE,
    entry: "encode",
    operands: &[Operand::write::<f32>(), Operand::write::<u8>(), Operand::write::<f32>()],
    values: 0,
};

static DECODE: Kernel = Kernel {
    source: &SOURCE,
    entry: "decode",
    operands: &[Operand::read::<u8>(), Operand::read::<f32>(), Operand::write::<f32>()],
    values: size_of::<DecodeValues>(),
};

/// The struct `DecodeValues` of `int8.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct DecodeValues {
    divide: Divide,
    start: u64,
}

/// Writes codes and scales, and subtracts their values from `acc`. A warp for each scale.
pub(crate) fn encode(acc: Piece, codes: Piece, scales: Piece) -> Call {
    Call::new(&ENCODE, scales.len as u32, 32).with_pieces([acc, codes, scales])
}

/// Writes the values of codes with their scales, from element `start` on.
pub(crate) fn decode(
    codes: [Piece; 2],
    values: Piece,
    start: usize,
    divisor: Option<usize>,
) -> Call {
    let divide = Divide::new(DType::F32, divisor);
    let call = Call::each(&DECODE, values.len).with_pieces(codes.into_iter().chain([values]));
    call.values(DecodeValues { divide, start: start as u64 })
}

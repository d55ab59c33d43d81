//! Calls of `feedback.cu`.

use meristem_device::{Call, DType, KernelSource, Piece};

use super::{PerType, Typed, bits_of, source_per_type, typed};

pub(super) static SOURCE: PerType<KernelSource> = source_per_type!("feedback.cu");

static ADVANCE: Typed = typed!("advance", u64, [read T, write T]);
static DRAIN: Typed = typed!("drain", (), [read T, write T, write T]);
static CLEAR: Typed = typed!("clear", (), [read u32, write T]);
static FILL: Typed = typed!("fill_minus_zero", (), [write T]);

/// Updates the velocity with a gradient.
pub(crate) fn advance(dtype: DType, gradient: Piece, velocity: Piece, factor: f64) -> Call {
    let call = Call::each(ADVANCE.get(dtype), gradient.len).with_pieces([gradient, velocity]);
    call.values(bits_of(dtype, factor))
}

/// Writes residual plus `added` to `output`, which may be `added`, and clears the residual.
pub(crate) fn drain(dtype: DType, added: Piece, residual: Piece, output: Piece) -> Call {
    Call::each(DRAIN.get(dtype), output.len).with_pieces([added, residual, output])
}

/// Clears the elements of `kept` at `indices`.
pub(crate) fn clear(dtype: DType, indices: Piece, kept: Piece) -> Call {
    Call::each(CLEAR.get(dtype), indices.len).with_pieces([indices, kept])
}

/// Fills `kept` with minus zero.
pub(crate) fn fill_minus_zero(dtype: DType, kept: Piece) -> Call {
    Call::each(FILL.get(dtype), kept.len).with_pieces([kept])
}

//! Calls of `sum.cu`.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, DType, KernelSource, Piece};
use smallvec::SmallVec;

use super::{ABSENT, Divide, PerType, Typed, source_per_type, typed};

pub(super) static SOURCE: PerType<KernelSource> = source_per_type!("sum.cu");

/// Largest number of sources, and of targets, per call.
const MOST: usize = 8;
/// Elements per block: 256 threads with four elements each.
const BLOCK: usize = 1024;

static SUM: Typed = typed!("sum", SumValues, [
    read T, read T, read T, read T, read T, read T, read T, read T,
    write T, write T, write T, write T, write T, write T, write T, write T,
]);

/// The struct `SumValues` of `sum.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumValues {
    divide: Divide,
    sources: u32,
    targets: u32,
}

/// Elements of a sum over ranks, all with the same length.
pub(crate) struct RankPieces<'a> {
    /// The summands, in order.
    pub(crate) sources: &'a [Piece],
    /// Memory for the result. A target may also be a source.
    pub(crate) targets: &'a [Piece],
    /// Memory for partial sums, used if there are more than [`MOST`] sources: a target, or one of
    /// the first [`MOST`] sources.
    pub(crate) partial: Piece,
}

/// Adds all sources in order, into all targets.
pub(crate) fn sum(dtype: DType, ranks: &RankPieces<'_>, divisor: Option<usize>) -> Vec<Call> {
    let &RankPieces { sources, targets, partial } = ranks;
    let (whole, divided) = (Divide::new(dtype, None), Divide::new(dtype, divisor));
    let mut calls = Vec::new();
    let (first, rest) = sources.split_at(sources.len().min(MOST));
    let mut now: SmallVec<[Piece; MOST]> = first.into();
    for next in rest.chunks(MOST - 1) {
        calls.push(call(dtype, &now, &[partial], whole));
        now = std::iter::once(partial).chain(next.iter().copied()).collect();
    }
    let (first, rest) = targets.split_at(targets.len().min(MOST));
    calls.push(call(dtype, &now, first, divided));
    calls.extend(rest.chunks(MOST).map(|next| call(dtype, &first[..1], next, whole)));
    calls
}

fn call(dtype: DType, sources: &[Piece], targets: &[Piece], divide: Divide) -> Call {
    let filled = |pieces: &[Piece]| {
        let mut all = [ABSENT; MOST];
        all[..pieces.len()].copy_from_slice(pieces);
        all
    };
    let blocks = targets.first().map_or(0, |target| target.len.div_ceil(BLOCK)) as u32;
    let values = SumValues { divide, sources: sources.len() as u32, targets: targets.len() as u32 };
    let pieces = filled(sources).into_iter().chain(filled(targets));
    Call::new(SUM.get(dtype), blocks, 256).with_pieces(pieces).values(values)
}

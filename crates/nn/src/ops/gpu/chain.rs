//! Calls for [`ops::chain`](crate::ops::chain): those of its links, each for the whole batch. Inner
//! values lie in scratch, and behind them the scratch of the links.

use super::{At, Emission, Emitted, emit as emit_any, read, scratch as scratch_of, write};
use crate::ops::Op;
use crate::ops::chain::{Chain, Operand, Place};

/// A link, with its operands among those of the chain.
struct Linked<'a> {
    op: &'a Op,
    reads: Vec<At>,
    writes: Vec<At>,
}

/// An absent operand.
const NONE: At = write(0).part(0, 0);

/// f32 elements of scratch that an inner value takes.
fn inner_len(of: &Operand) -> usize {
    (of.len * of.dtype.size()).div_ceil(size_of::<f32>()).next_multiple_of(16)
}

/// The links, where scratch behind the inner values has so many elements.
fn links(of: &Chain, rest: usize) -> impl Iterator<Item = Linked<'_>> {
    let scratch = write(of.writes.len());
    let start = move |at: usize| of.inner[..at].iter().map(inner_len).sum::<usize>();
    let place = move |place: &Place| -> At {
        match *place {
            Place::Absent => NONE,
            Place::Read(at) => read(at),
            Place::Write(at) => write(at),
            Place::Inner(at) => scratch.part(start(at), of.inner[at].len),
        }
    };
    let rest = if rest == 0 { NONE } else { scratch.part(start(of.inner.len()), rest) };
    of.links.iter().map(move |link| Linked {
        op: &link.op,
        reads: link.reads.iter().map(place).collect(),
        writes: link.writes.iter().map(place).chain([rest]).collect(),
    })
}

pub(super) fn emit(of: &Chain) -> Emission {
    let calls = links(of, rest(of)).flat_map(|Linked { op, reads, writes }| {
        let place = move |at: At| {
            let given = if at.written { writes[at.index] } else { reads[at.index] };
            match (at.part, given.part) {
                (_, Some((_, 0))) => NONE,
                (Some((start, len)), Some((first, _))) => given.part(first + start, len),
                (Some((start, len)), None) => given.part(start, len),
                (None, _) => given,
            }
        };
        emit_any(op).into_iter().map(move |Emitted { call, operands }| Emitted {
            call,
            operands: operands.into_iter().map(&place).collect(),
        })
    });
    calls.collect()
}

/// Scratch that any link needs.
fn rest(of: &Chain) -> usize {
    of.links.iter().map(|link| scratch_of(&link.op)).max().unwrap_or(0)
}

pub(super) fn scratch(of: &Chain) -> usize {
    of.inner.iter().map(inner_len).sum::<usize>() + rest(of)
}

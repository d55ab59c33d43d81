//! Calls for [`ops::block`](crate::ops::block): those of its parts, one after the other.

use super::{At, Emission, Emitted, emit as emit_any, read, scratch as scratch_of, write};
use crate::ops::block::{Normed, Op};
use crate::ops::stage::Data;
use crate::ops::{Op as Any, conv, norm};

/// An operation that another one stands for, and its operands among those of the other.
struct Part {
    op: Any,
    reads: Vec<At>,
    writes: Vec<At>,
}

/// An absent operand.
const NONE: At = write(0).part(0, 0);

/// Scratch: raw images or their gradient, then that of the part.
fn places(of: &Normed, scratch: usize, rest: usize) -> [At; 2] {
    let raw = of.norm.shape.len();
    [write(scratch).part(0, raw), write(scratch).part(raw.next_multiple_of(16), rest)]
}

/// The parts, where scratch behind the raw images has so many elements.
fn parts(op: &Op, rest: usize) -> Vec<Part> {
    match *op {
        Op::Forward(of) => {
            let [raw, rest] = places(&of, 1, rest);
            let (convolution, norm) = (conv::Op::Forward(of.product), norm::Op::Forward(of.norm));
            let reads = [0, 1, 2].map(read).to_vec();
            let first = Part { op: convolution.into(), reads, writes: vec![raw, rest] };
            let reads = [&[raw], &[3, 4, 5, 6].map(read)[..]].concat();
            vec![first, Part { op: norm.into(), reads, writes: vec![write(0), NONE, rest] }]
        }
        Op::Gradient { of: of @ Normed { product, norm }, data } => {
            let [raw, rest] = places(&of, 4, rest);
            let gradient = norm::Op::Gradient { norm, accumulate: false };
            let reads = [2, 3, 4, 5, 6, 7, 8, 9].map(read).to_vec();
            let writes = vec![raw, write(2), write(3), rest];
            let gradient = Part { op: gradient.into(), reads, writes };
            let weight = conv::Op::WeightGradient(product).into();
            let writes = vec![write(1), NONE, rest];
            let weight = Part { op: weight, reads: vec![read(0), raw], writes };
            let accumulate = data == Data::Accumulate;
            let images = conv::Op::DataGradient { product, accumulate }.into();
            let writes = vec![write(0), rest];
            let images = Part { op: images, reads: vec![raw, read(1)], writes };
            let wanted = data != Data::Unwanted;
            [gradient, weight].into_iter().chain(wanted.then_some(images)).collect()
        }
    }
}

pub(super) fn emit(op: &Op) -> Emission {
    let of_parts = parts(op, rest(op)).into_iter().flat_map(|Part { op, reads, writes }| {
        let place = move |at: At| {
            let given = if at.written { writes[at.index] } else { reads[at.index] };
            match (at.part, given.part) {
                (Some((start, len)), Some((first, _))) => given.part(first + start, len),
                (Some((start, len)), None) => given.part(start, len),
                (None, _) => given,
            }
        };
        emit_any(&op).into_iter().map(move |Emitted { call, operands }| Emitted {
            call,
            operands: operands.into_iter().map(&place).collect(),
        })
    });
    of_parts.collect()
}

/// Scratch that any part needs.
fn rest(op: &Op) -> usize {
    parts(op, 0).iter().map(|part| scratch_of(&part.op)).max().unwrap_or(0)
}

pub(super) fn scratch(op: &Op) -> usize {
    let (Op::Forward(of) | Op::Gradient { of, .. }) = op;
    of.norm.shape.len().next_multiple_of(16) + rest(op)
}

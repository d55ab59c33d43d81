//! Calls for [`ops::chain`](crate::ops::chain): the calls of its steps, each for the whole batch.
//! Scratch holds the inner values, then the scratch of the steps.

use super::{CallOperand, Emission, Emitted, emit as emit_any, read, scratch as scratch_of, write};
use crate::ops::StepOp;
use crate::ops::chain::{Chain, ChainOperand, OperandPlace};
use crate::precision::ValueType;

/// A step, with its operands among the chain's operands.
struct PlacedStep<'a> {
    op: &'a StepOp,
    reads: Vec<CallOperand>,
    writes: Vec<CallOperand>,
}

/// An absent operand.
const NONE: CallOperand = write(0).part(0, 0);

/// f32 elements of scratch that an inner value takes.
fn inner_len(of: &ChainOperand) -> usize {
    (of.len * of.dtype.size()).div_ceil(size_of::<f32>()).next_multiple_of(16)
}

/// The steps; their scratch, after the inner values, has `rest` elements.
fn steps(of: &Chain, rest: usize) -> impl Iterator<Item = PlacedStep<'_>> {
    let scratch = write(of.writes.len());
    let start = move |at: usize| of.inner[..at].iter().map(inner_len).sum::<usize>();
    let place = move |place: &OperandPlace| -> CallOperand {
        match *place {
            OperandPlace::Absent => NONE,
            OperandPlace::Read(at) => read(at),
            OperandPlace::Write(at) => write(at),
            OperandPlace::Inner(at) => scratch.part(start(at), of.inner[at].len),
        }
    };
    let rest = if rest == 0 { NONE } else { scratch.part(start(of.inner.len()), rest) };
    of.steps.iter().map(move |step| PlacedStep {
        op: &step.op,
        reads: step.reads.iter().map(place).collect(),
        writes: step.writes.iter().map(place).chain([rest]).collect(),
    })
}

pub(super) fn emit(of: &Chain, values: ValueType) -> Emission {
    let calls = steps(of, rest(of)).flat_map(|PlacedStep { op, reads, writes }| {
        let place = move |at: CallOperand| {
            let given = if at.written { writes[at.index] } else { reads[at.index] };
            match (at.part, given.part) {
                (_, Some((_, 0))) => NONE,
                (Some((start, len)), Some((first, _))) => given.part(first + start, len),
                (Some((start, len)), None) => given.part(start, len),
                (None, _) => given,
            }
        };
        emit_any(op, values).into_iter().map(move |Emitted { call, operands }| Emitted {
            call,
            operands: operands.into_iter().map(&place).collect(),
        })
    });
    calls.collect()
}

/// Most scratch that a step needs.
fn rest(of: &Chain) -> usize {
    of.steps.iter().map(|step| scratch_of(&step.op)).max().unwrap_or(0)
}

pub(super) fn scratch(of: &Chain) -> usize {
    of.inner.iter().map(inner_len).sum::<usize>() + rest(of)
}

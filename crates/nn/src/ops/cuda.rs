//! One operation on a CUDA device, with operands of the host: for tests of its kernels.

use meristem_device::{Owner, Piece, Stream, Tensor, read_back};

use super::gpu;
use super::{Slice, StepOp, StepOperands};
use crate::error::Result;
use crate::precision::ValueType;

/// Copies the operands to the device, runs the operation there, and copies the written operands
/// back.
pub(super) fn run(
    stream: &Stream,
    op: &StepOp,
    values: ValueType,
    operands: StepOperands<'_>,
) -> Result<()> {
    let StepOperands { reads, mut writes } = operands;
    let upload = |operand: Slice<'_>| -> Result<Tensor> {
        let (dtype, len) = operand.form();
        let tensor = Tensor::empty(stream, [len], dtype, Owner::Other)?;
        let bytes = operand.bytes().to_vec();
        stream.upload("operand", &tensor, move |to| to.copy_from_slice(&bytes))?;
        Ok(tensor)
    };
    let read: Vec<Tensor> = reads.iter().map(|of| upload(*of)).collect::<Result<_>>()?;
    let written: Vec<Tensor> =
        writes.iter().map(|of| upload(of.as_slice())).collect::<Result<_>>()?;
    let lies = |is_written: bool, index: usize| {
        let (tensors, before) = if is_written { (&written, read.len()) } else { (&read, 0) };
        Piece { argument: before + index, start: 0, len: tensors[index].numel() }
    };
    let calls: Vec<_> = gpu::emit(op, values).into_iter().map(|call| call.place(lies)).collect();
    let launch = read.iter().fold(stream.launch("operation"), |launch, of| launch.read(of));
    let launch = written.iter().fold(launch, |launch, of| launch.write(of));
    launch.gpu(|| calls).run(|_| unreachable!("the device is a CUDA device"))?;
    let results = read_back(&written.iter().collect::<Vec<_>>())?;
    for (to, bytes) in writes.iter_mut().zip(results) {
        to.bytes_mut().copy_from_slice(&bytes);
    }
    Ok(())
}

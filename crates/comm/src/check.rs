//! Checks of arguments, on entry and on exit (V1). They read only handles, without launches or
//! waits.

use meristem_device::{Expect, MemoryFormat, Tensor};

use crate::error::{Error, Result};
use crate::number::is_number;

/// A rank and the number of ranks of its group.
#[derive(Clone, Copy)]
pub(crate) struct GroupRank {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

/// Checks that the element type can be summed.
pub(crate) fn summable(
    operation: &'static str,
    argument: impl Into<String>,
    tensor: &Tensor,
) -> Result<()> {
    if is_number(tensor.dtype()) {
        return Ok(());
    }
    Err(Error::argument(operation, argument, "f32, f64 or bf16", tensor.dtype()))
}

/// Requirements on a tensor with the stream, element type, shape and memory format of `tensor`.
pub(crate) fn like(tensor: &Tensor) -> Expect<'_> {
    let expect = Expect::stream(tensor.stream()).dtype(tensor.dtype());
    expect.shape(tensor.dims().iter().copied()).format(tensor.format())
}

/// Checks that `output` matches `input`, in the same or separate memory.
pub(crate) fn output(operation: &'static str, input: &Tensor, output: &Tensor) -> Result<()> {
    like(input).check(operation, "output", output)?;
    apart(operation, input, output)
}

/// Checks that the memory of `output` and `input` does not overlap partly.
fn apart(operation: &'static str, input: &Tensor, output: &Tensor) -> Result<()> {
    let bytes = |tensor: &Tensor| {
        let start = tensor.address();
        start..start + (tensor.numel() * tensor.dtype().size()) as u64
    };
    let (from, to) = (bytes(input), bytes(output));
    let partly = input.storage_id() == output.storage_id()
        && from != to
        && from.start < to.end
        && to.start < from.end;
    if !partly {
        return Ok(());
    }
    let expected = "the input itself, or separate memory";
    Err(Error::argument(operation, "output", expected, "a part of the input's memory"))
}

/// Checks that `output` has exactly the size of the inputs of all ranks, which a gather writes in
/// rank order. `input` may be the part of `output` for this rank.
pub(crate) fn gathered(
    operation: &'static str,
    input: &Tensor,
    output: &Tensor,
    group: GroupRank,
) -> Result<()> {
    let GroupRank { rank: me, size: n } = group;
    let expect = Expect::stream(input.stream()).dtype(input.dtype());
    match (format(input), input.dims()) {
        (MemoryFormat::ChannelsLast, &[images, c, h, w]) => {
            let expect = expect.shape([n * images, c, h, w]).channels_last();
            expect.check(operation, "output", output)?;
        }
        _ => expect.contiguous().check(operation, "output", output)?,
    }
    if output.numel() != n * input.numel() {
        let expected = format!("{n} x {} elements", input.numel());
        return Err(Error::argument(operation, "output", expected, output.numel()));
    }
    let own = output.view(me * input.numel(), [input.numel()])?;
    if own.address() == input.address() { Ok(()) } else { apart(operation, input, output) }
}

/// The memory format of a tensor; contiguous if both formats have the same order.
pub(crate) fn format(tensor: &Tensor) -> MemoryFormat {
    match (tensor.format(), tensor.dims()) {
        (MemoryFormat::ChannelsLast, &[_, c, h, w]) if c == 1 || h * w == 1 => {
            MemoryFormat::Contiguous
        }
        (format, _) => format,
    }
}

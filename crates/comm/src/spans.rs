//! Elements in several pieces of memory that are exchanged as one sequence, such as a model's
//! gradients.

use std::ops::Range;

use meristem_device::{DType, Expect, Stream, Tensor};
use smallvec::{SmallVec, smallvec};

use crate::error::{Error, Result};

/// Elements in place: contiguous pieces of memory in order, with one type and stream. Adjacent
/// pieces are merged.
#[derive(Debug, Clone)]
pub struct Spans {
    /// The pieces, flat. None is empty, except that `Spans` without elements have one empty piece,
    /// which has the type and the stream.
    pieces: SmallVec<[Tensor; 1]>,
    len: usize,
}

impl Spans {
    /// All elements of the tensors, each in memory order.
    ///
    /// # Errors
    /// [`Error::BadArgument`], with the name `operation`, for no tensors, or tensors with different
    /// streams or element types.
    pub fn new(operation: &'static str, tensors: &[&Tensor]) -> Result<Spans> {
        let Some((first, rest)) = tensors.split_first() else {
            return Err(Error::argument(operation, "tensors", "at least one", "none"));
        };
        let mut spans = Spans::try_from(*first)?;
        let expect = Expect::stream(first.stream()).dtype(first.dtype());
        for (i, tensor) in (1..).zip(rest) {
            expect.check(operation, format_args!("tensors[{i}]"), tensor)?;
            spans.push(tensor)?;
        }
        Ok(spans)
    }

    fn push(&mut self, tensor: &Tensor) -> Result<()> {
        if tensor.numel() == 0 {
            return Ok(());
        }
        self.len += tensor.numel();
        let last = self.pieces.pop();
        match last.as_ref().and_then(|last| last.joined(tensor)) {
            Some(both) => self.pieces.push(both),
            None => {
                self.pieces.extend(last.filter(|last| last.numel() > 0));
                self.pieces.push(tensor.view(0, [tensor.numel()])?);
            }
        }
        Ok(())
    }

    /// The pieces, each flat.
    pub fn pieces(&self) -> &[Tensor] {
        &self.pieces
    }

    /// The pieces, each flat, by value.
    pub(crate) fn into_pieces(self) -> impl Iterator<Item = Tensor> {
        self.pieces.into_iter()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.pieces[0].dtype()
    }

    /// The stream of the elements.
    pub fn stream(&self) -> &Stream {
        self.pieces[0].stream()
    }

    /// The elements in `range`.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a range outside of the elements.
    pub fn window(&self, range: Range<usize>) -> Result<Spans> {
        let mut pieces = SmallVec::new();
        let mut start = 0;
        for piece in &self.pieces {
            let end = start + piece.numel();
            let (from, to) = (range.start.max(start), range.end.min(end));
            if from < to {
                pieces.push(piece.view(from - start, [to - from])?);
            }
            start = end;
        }
        if range.end > self.len {
            let expected = format!("within the {} elements", self.len);
            return Err(Error::argument("Spans::window", "range", expected, format!("{range:?}")));
        }
        if pieces.is_empty() {
            pieces.push(self.pieces[0].view(0, [0])?);
        }
        Ok(Spans { pieces, len: range.len() })
    }

    /// Whether both have the same memory in the same order.
    pub(crate) fn is_same(&self, other: &Spans) -> bool {
        let place = |piece: &Tensor| (piece.storage_id(), piece.address(), piece.numel());
        self.pieces.iter().map(place).eq(other.pieces.iter().map(place))
    }
}

/// All elements of one tensor, in memory order.
impl TryFrom<&Tensor> for Spans {
    type Error = Error;

    fn try_from(tensor: &Tensor) -> Result<Spans> {
        let len = tensor.numel();
        Ok(Spans { pieces: smallvec![tensor.view(0, [len])?], len })
    }
}

/// Divides `range` into parts, each of which lies within a single piece of each of the `spans`.
pub(crate) fn parts<'a>(
    spans: impl Iterator<Item = &'a Spans>,
    range: &Range<usize>,
) -> SmallVec<[Range<usize>; 4]> {
    let mut ends: SmallVec<[usize; 4]> = smallvec![range.end];
    for spans in spans {
        let mut end = 0;
        let all = spans.pieces.iter().map(|piece| {
            end += piece.numel();
            end
        });
        ends.extend(all.filter(|end| range.start < *end && *end < range.end));
    }
    ends.sort_unstable();
    ends.dedup();
    let mut start = range.start;
    let parts = ends.into_iter().map(|end| std::mem::replace(&mut start, end)..end);
    parts.filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use meristem_device::{Device, DeviceId, DeviceOptions, Owner};

    use super::*;

    fn refused(spans: Result<Spans>, text: &str) {
        let error = spans.unwrap_err();
        assert!(matches!(error, Error::BadArgument { .. }), "{error:?}");
        assert!(error.to_string().contains(text), "{error}");
    }

    #[test]
    fn adjacent_memory_is_merged_and_windows_cut_pieces() {
        let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
        let (stream, other) = (device.stream("a"), device.stream("b"));
        let make = |len| Tensor::zeros(&stream, [len], DType::F32, Owner::Other).unwrap();
        let (x, y) = (make(100), make(7));
        let view = |start, len| x.view(start, [len]).unwrap();
        let of = |tensors: &[&Tensor]| Spans::new("test", tensors).unwrap();
        let sizes = |spans: &Spans| spans.pieces().iter().map(Tensor::numel).collect::<Vec<_>>();
        let spans = of(&[&view(0, 10), &view(10, 6), &view(20, 5), &y, &view(25, 5), &view(0, 0)]);
        assert_eq!((sizes(&spans), spans.len()), (vec![16, 5, 7, 5], 33));
        // Adjacent, but not in order of address, so not merged.
        assert_eq!(sizes(&of(&[&view(10, 6), &view(0, 10)])), [6, 10]);
        let window = spans.window(15..22).unwrap();
        assert_eq!((sizes(&window), window.len()), (vec![1, 5, 1], 7));
        assert_eq!(window.pieces()[1].address(), view(20, 5).address());
        assert_eq!(sizes(&spans.window(5..5).unwrap()), [0]);
        refused(spans.window(30..34), "`range` must be within the 33 elements, got 30..34");
        let whole = of(&[&make(33)]);
        let cut = parts([&spans, &whole].into_iter(), &(3..30));
        assert_eq!(cut[..], [3..16, 16..21, 21..28, 28..30]);
        assert!(parts([&spans].into_iter(), &(7..7)).is_empty());
        assert_eq!((of(&[&make(0)]).len(), of(&[&make(0), &y, &make(0)]).pieces().len()), (0, 1));
        // Streams and element types must be equal.
        let far = Tensor::zeros(&other, [1], DType::F32, Owner::Other).unwrap();
        let of_two = Spans::new("test", &[&x, &far]);
        refused(of_two, "`test`: `tensors[1]` must be of stream `a`");
        refused(Spans::new("test", &[]), "`test`: `tensors` must be at least one, got none");
    }
}

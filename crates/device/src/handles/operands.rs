//! Operands of a launch: its tensors, each with the kind of access.

use smallvec::SmallVec;

use super::{Stream, Tensor};
use crate::ground::{AccessKind, Error, INLINE_ARGS, Result};
use crate::memory::Storage;
use crate::order::Touch;

/// Operands of a launch.
pub(super) type LaunchOperands<'a> = SmallVec<[(&'a Tensor, AccessKind); INLINE_ARGS]>;

/// The access of a launch to a tensor, for submission.
pub(super) fn touch(tensor: &Tensor, access: AccessKind) -> Touch<'_, Storage<Stream>> {
    let bytes = tensor.offset()..tensor.offset() + tensor.bytes();
    Touch { storage: tensor.storage(), access, bytes }
}

/// Two arguments that share bytes, by their numbers.
pub(super) struct Overlap {
    /// A written one.
    pub(super) written: usize,
    pub(super) other: usize,
}

/// Returns an error if a written argument of a launch shares bytes with another.
pub(super) fn check_overlap(
    operation: &'static str,
    tensors: &[(&Tensor, AccessKind)],
) -> Result<()> {
    match find_overlap(tensors) {
        None => Ok(()),
        Some(Overlap { written, other }) => Err(Error::Overlap {
            operation,
            argument: format!("argument {written}"),
            other: format!("argument {other}"),
        }),
    }
}

/// A written argument that shares bytes with another.
pub(super) fn find_overlap(tensors: &[(&Tensor, AccessKind)]) -> Option<Overlap> {
    let is_written = |i: usize| tensors[i].1 == AccessKind::Write;
    let place = |i: usize| (std::ptr::from_ref(tensors[i].0.storage()), tensors[i].0.offset());
    let with_bytes = (0..tensors.len()).filter(|&i| tensors[i].0.bytes() > 0);
    let mut order: SmallVec<[usize; INLINE_ARGS]> = with_bytes.collect();
    order.sort_unstable_by_key(|&i| place(i));
    // Among the arguments that begin earlier in the same storage, the one that ends last, and the
    // written one that ends last: an argument that overlaps any earlier one overlaps these.
    let (mut any, mut written): (Option<usize>, Option<usize>) = (None, None);
    for &i in &order {
        let earlier = if is_written(i) { any } else { written };
        if let Some(j) = earlier.filter(|&j| tensors[j].0.overlaps(tensors[i].0)) {
            let written = if is_written(i) && (i < j || !is_written(j)) { i } else { j };
            return Some(Overlap { written, other: i + j - written });
        }
        let further = |j: Option<usize>| j.filter(|&j| reaches_as_far(tensors[j].0, tensors[i].0));
        any = further(any).or(Some(i));
        if is_written(i) {
            written = further(written).or(Some(i));
        }
    }
    None
}

/// Whether `earlier` ends at the end of `later`, or after it, in the same storage.
fn reaches_as_far(earlier: &Tensor, later: &Tensor) -> bool {
    let end = |tensor: &Tensor| tensor.offset() + tensor.bytes();
    std::ptr::eq(earlier.storage(), later.storage()) && end(earlier) >= end(later)
}

//! Kernels in parts: the images of a batch in a fixed number of parts, some of which idle workers
//! take over ([`meristem_device::in_parts`]).
//!
//! The shape alone determines the number of parts, and their sums are added in order. So the bits
//! do not depend on the number of workers.
//!
//! A batch has at most eight parts: a power of two, and all of equal size except the last ones, so
//! that two, four or eight workers have equal work. A part of a convolution takes about 50 µs of a
//! core, a part of a norm 10 µs. With several parts, a part's scratch is memory of the worker that
//! runs it. Consecutive kernels find this memory in the caches; separate scratch for each kernel
//! would displace activations. It is not counted in the device's memory; a worker keeps the size of
//! its largest part. A kernel in one part has its scratch in the arena.

use std::cell::RefCell;

use super::PAD;
use meristem_device::in_parts;
use smallvec::SmallVec;
use std::sync::{Mutex, PoisonError};

/// Most parts of a kernel.
pub const MOST: usize = 8;

/// Least multiply-adds of a part, some 50 µs of a core: a part of a convolution may rearrange the
/// weights, and its separate sums are added later.
const LEAST: usize = 4_500_000;

/// Least elements of a part, some 10 µs of a core: handing it over takes about a microsecond.
const LEAST_ELEMENTS: usize = 32 * 1024;

/// Cost of one memory access, in multiply-adds (approximate).
pub const TOUCH: usize = 16;

/// Most elements that may be left in the caches of a core by the kernel before, four times the
/// second-level cache. Fewer keep their order, so that a helper meets the parts that it had before.
const CACHED: usize = 1 << 20;

thread_local! {
    /// Memories of this thread for the scratch of parts, which stay in its caches: one for a part,
    /// and one more for a part within a part.
    static ROOMS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Images of each part, except the last ones: about `block` or more; an image takes `work`
/// multiply-adds.
pub fn images(batch: usize, block: usize, work: usize) -> usize {
    let blocks = batch.div_ceil(block.max(1));
    in_equal_parts(batch, blocks.min(batch.saturating_mul(work) / LEAST))
}

/// Images of each part, except the last ones, if `each` elements of an image are read or written.
pub(crate) fn touched(batch: usize, each: usize) -> usize {
    in_equal_parts(batch, batch.min(batch.saturating_mul(each) / LEAST_ELEMENTS))
}

/// Elements of each part except the last, if elements are read or written one after the other.
pub fn elements(len: usize) -> usize {
    in_equal_parts(len, len / LEAST_ELEMENTS).next_multiple_of(PAD).min(len).max(1)
}

/// Part size when splitting into at most `parts` parts of equal size, except the last ones. Their
/// number is a power of two, so that two, four or eight workers get equal numbers of parts.
fn in_equal_parts(len: usize, parts: usize) -> usize {
    len.div_ceil(1 << parts.clamp(1, MOST).ilog2()).max(1)
}

/// Scratch of a kernel in parts.
#[derive(Debug)]
pub struct PartScratch<'a> {
    /// The caller's scratch, for a kernel in one part.
    pub own: &'a mut [f32],
    /// Elements that each of several parts takes from its thread's memory.
    pub of_part: usize,
}

/// [`each`] for work that needs no scratch.
pub fn each_alone<T: Send>(parts: impl Iterator<Item = T>, run: impl Fn(T) + Sync) {
    each(parts, PartScratch { own: &mut [], of_part: 0 }, |_, part, _| run(part));
}

/// [`each_alone`] for a kernel that reads `len` elements which the kernel before it wrote or read.
/// If they exceed a core's caches, the parts go backwards: the caches hold the last ones, and the
/// next kernel begins with the first part again.
pub(crate) fn each_backwards<T: Send>(
    len: usize,
    parts: impl Iterator<Item = T>,
    run: impl Fn(T) + Sync,
) {
    if len <= CACHED {
        return each_alone(parts, run);
    }
    let parts: SmallVec<[T; MOST]> = parts.collect();
    each_alone(parts.into_iter().rev(), run);
}

/// Runs `run` once for each part, with its number and scratch; at most [`MOST`].
pub fn each<T: Send>(
    parts: impl Iterator<Item = T>,
    scratch: PartScratch<'_>,
    run: impl Fn(usize, T, &mut [f32]) + Sync,
) {
    let mut parts: SmallVec<[Mutex<Option<T>>; MOST]> =
        parts.map(|p| Mutex::new(Some(p))).collect();
    if parts.len() == 1 {
        let part = parts.remove(0).into_inner().unwrap_or_else(PoisonError::into_inner);
        return run(0, part.expect("nobody has taken it"), scratch.own);
    }
    let count = u16::try_from(parts.len()).expect("a few parts");
    in_parts(count, |k| {
        let part = parts[k].lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut room = ROOMS.with_borrow_mut(Vec::pop).unwrap_or_default();
        if room.len() < scratch.of_part {
            // New memory is NaN, so that a read before the first write shows.
            room.resize(scratch.of_part, f32::NAN);
        }
        run(k, part.expect("each part runs once"), &mut room[..scratch.of_part]);
        ROOMS.with_borrow_mut(|rooms| rooms.push(room));
    });
}

/// A sum and partial sums of it, `[parts − 1][len]`: the first part adds to the sum itself.
pub fn sums<'a>(sum: &'a mut [f32], partial: &'a mut [f32]) -> impl Iterator<Item = &'a mut [f32]> {
    let len = sum.len().max(1);
    partial.fill(0.0);
    std::iter::once(sum).chain(partial.chunks_exact_mut(len))
}

/// Adds partial sums in their order.
pub fn add(sum: &mut [f32], partial: &[f32]) {
    for partial in partial.chunks_exact(sum.len().max(1)) {
        sum.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
    }
}

//! Copies between host and device. All of them are ordinary work of a stream, so they are ordered
//! and waited for as kernels are; they are counted as copies.

use crate::counters::Act;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::expect::Expect;
use crate::faults::Fault;
use crate::launch::Launch;
use crate::queue::check_may_wait;
use crate::stream::Stream;
use crate::sync::{Arc, Mutex, lock};
use crate::tensor::Tensor;
use crate::trace::Category;
use std::panic::Location;

type Site = &'static Location<'static>;

/// Copies host bytes into a tensor through a staging buffer of their size; counted as `act`.
pub(crate) fn copy_in(
    tensor: &Tensor,
    bytes: &[u8],
    operation: &'static str,
    act: Option<Act>,
    site: Site,
) -> Result<()> {
    let staged: Box<[u8]> = bytes.into();
    Launch::new(tensor.stream(), operation, act, site)
        .write(tensor)
        .run(move |args| args.bytes_mut(0).copy_from_slice(&staged))
}

/// Copies shared host bytes into a tensor, without staging.
pub(crate) fn copy_in_shared<S>(
    tensor: &Tensor,
    source: Arc<S>,
    start: usize,
    site: Site,
) -> Result<()>
where
    S: AsRef<[u8]> + Send + Sync + ?Sized + 'static,
{
    let operation = "Tensor::copy_from_shared";
    let len = (*source).as_ref().len();
    let end = start.saturating_add(tensor.bytes());
    if end > len {
        return Err(Error::OutOfBounds {
            operation,
            argument: "the source (bytes)",
            start,
            end,
            len,
        });
    }
    Launch::new(tensor.stream(), operation, Some(Act::CopyToDevice), site)
        .write(tensor)
        .run(move |args| args.bytes_mut(0).copy_from_slice(&(*source).as_ref()[start..end]))
}

/// Sets a new tensor to zeros, in stream order.
pub(crate) fn zero(tensor: &Tensor, site: Site) -> Result<()> {
    Launch::new(tensor.stream(), "Tensor::zeros", None, site)
        .write(tensor)
        .run(|args| args.bytes_mut(0).fill(0))
}

/// The bytes of tensors of any streams of one device, each in memory order: ONE counted copy to the
/// host and ONE counted wait for all of them (H1). Nothing is counted for no tensors.
///
/// # Errors
/// [`Error::Mismatch`] if they are not on one device; [`Error::KernelPanicked`];
/// [`Error::InsideKernel`].
#[track_caller]
pub fn read_back(tensors: &[&Tensor]) -> Result<Vec<Vec<u8>>> {
    copy_out(tensors, Location::caller())
}

/// As [`read_back`], for tensors whose elements are all `T`.
///
/// # Errors
/// As [`read_back`], and [`Error::Mismatch`] for another element type.
#[track_caller]
pub fn read_back_as<T: Element>(tensors: &[&Tensor]) -> Result<Vec<Vec<T>>> {
    let expect = Expect::any().dtype(T::DTYPE);
    for (i, tensor) in tensors.iter().enumerate() {
        expect.check("read_back", format_args!("tensors[{i}]"), tensor)?;
    }
    copy_out(tensors, Location::caller())
}

/// As [`read_back_as`], for metrics.
///
/// # Errors
/// As [`read_back_as`].
#[track_caller]
pub fn read_back_f64(tensors: &[&Tensor]) -> Result<Vec<Vec<f64>>> {
    read_back_as(tensors)
}

/// Where the workers leave what they copied.
type Slots<T> = Arc<[Mutex<Vec<T>>]>;

fn copy_out<T: bytemuck::Pod + Send>(tensors: &[&Tensor], site: Site) -> Result<Vec<Vec<T>>> {
    let operation = "read_back";
    check_may_wait(operation)?;
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    let shared = first.device().shared();
    let expect = Expect::device(first.device());
    for (i, tensor) in tensors.iter().enumerate() {
        expect.check(operation, format_args!("tensors[{i}]"), tensor)?;
    }
    shared.counters.note(Act::CopyToHost, operation, site)?;
    shared.counters.note(Act::Synchronize, operation, site)?;
    let _copy = shared.trace_copy(operation, Category::CopyToHost, site);
    let slots: Slots<T> = tensors.iter().map(|_| Mutex::new(Vec::new())).collect();
    // All copies are under way before the first wait.
    let ends = by_stream(tensors)
        .into_iter()
        .map(|(stream, members)| copy_out_of(stream, tensors, members, &slots, site))
        .collect::<Result<Vec<_>>>()?;
    if !shared.faults.has(Fault::NoWaitForReadBack) {
        ends.iter().for_each(|end| end.stream.wait_host(end.seq));
    }
    for end in &ends {
        if let Some(sanitizer) = shared.sanitizer() {
            sanitizer.host_takes(end, first.storage(), site)?;
        }
        end.stream.check_result(end.seq)?;
    }
    Ok(slots.iter().map(|slot| std::mem::take(&mut *lock(slot))).collect())
}

/// The streams of the tensors, each with the positions of its tensors.
fn by_stream<'a>(tensors: &[&'a Tensor]) -> Vec<(&'a Stream, Vec<usize>)> {
    let mut groups: Vec<(&Stream, Vec<usize>)> = Vec::new();
    for (i, tensor) in tensors.iter().enumerate() {
        match groups.iter_mut().find(|(stream, _)| *stream == tensor.stream()) {
            Some((_, members)) => members.push(i),
            None => groups.push((tensor.stream(), vec![i])),
        }
    }
    groups
}

/// Enqueues the copy of one stream's tensors; returns its place in the stream.
fn copy_out_of<T: bytemuck::Pod + Send>(
    stream: &Stream,
    tensors: &[&Tensor],
    members: Vec<usize>,
    slots: &Slots<T>,
    site: Site,
) -> Result<crate::hazard::Access> {
    let mut launch = Launch::new(stream, "read_back", None, site);
    for &i in &members {
        launch = launch.read(tensors[i]);
    }
    let slots = slots.clone();
    launch.run(move |args| {
        for (arg, &i) in members.iter().enumerate() {
            *lock(&slots[i]) = bytemuck::cast_slice(args.bytes(arg)).to_vec();
        }
    })?;
    Ok(stream.record().0)
}

//! Copies and fills. They are ordinary work of a stream, so they are ordered and waited for like
//! kernels. Transfers between host and device are counted as copies, transfers inside of the device
//! as launches.

use std::panic::Location;

use super::expect::Expect;
use super::{Launch, Stream, Tensor};
use crate::execution::{
    Fill, ForeignAddresses, HostBytes, IntoReadBack, Make, ReadBack, Transfer, check_may_wait,
};
use crate::ground::fault::EngineFault;
use crate::ground::sync::{Arc, Mutex, lock};
use crate::ground::{Act, Element, Error, Property, Result};
use crate::hooks::{Category, POISON};
use crate::order::{Access, TrackedMemory};

type CallSite = &'static Location<'static>;

/// Copies host bytes into a tensor through a staging buffer of their size; counted as `act`.
pub(crate) fn copy_in(
    tensor: &Tensor,
    bytes: &[u8],
    operation: &'static str,
    act: Option<Act>,
    site: CallSite,
) -> Result<()> {
    let staged = Transfer::Upload(HostBytes::Staged(bytes.into()));
    Launch::new(tensor.stream(), operation, act, site).write(tensor).transfer(staged)
}

/// Copies shared host bytes into a tensor. A CPU device reads them without staging.
pub(crate) fn copy_in_shared(
    tensor: &Tensor,
    source: Arc<dyn AsRef<[u8]> + Send + Sync>,
    start: usize,
    site: CallSite,
) -> Result<()> {
    let operation = "Tensor::copy_from_shared";
    let (len, bytes) = ((*source).as_ref().len(), tensor.bytes());
    let end = start.saturating_add(bytes);
    if end > len {
        return Err(Error::OutOfBounds {
            operation,
            argument: "the source (bytes)",
            start,
            end,
            len,
        });
    }
    let shared = Transfer::Upload(HostBytes::Shared { source, start, bytes });
    Launch::new(tensor.stream(), operation, Some(Act::CopyToDevice), site)
        .write(tensor)
        .transfer(shared)
}

/// Sets a new tensor to zeros, in stream order.
pub(crate) fn zero(tensor: &Tensor, site: CallSite) -> Result<()> {
    let zero = Transfer::Fill(Fill::Zero);
    Launch::new(tensor.stream(), "Tensor::zeros", None, site).write(tensor).transfer(zero)
}

/// Fills a new tensor with [`POISON`], in stream order.
///
/// # Errors
/// [`Error::Race`] if earlier work may still use the memory.
pub(crate) fn poison(tensor: &Tensor, operation: &'static str, site: CallSite) -> Result<()> {
    let poison = Transfer::Fill(Fill::Word(POISON));
    match Launch::new(tensor.stream(), operation, None, site).write(tensor).transfer(poison) {
        // New memory is available on a failed stream too; nothing on it will run.
        Err(Error::KernelPanicked { .. }) => Ok(()),
        other => other,
    }
}

/// Copies tensors of a stream into other tensors of the stream: one command.
pub(crate) fn copy(
    stream: &Stream,
    operation: &'static str,
    pieces: &[(&Tensor, &Tensor)],
    site: CallSite,
) -> Result<()> {
    let mut launch = Launch::new(stream, operation, Some(Act::Launch), site);
    for (i, &(from, to)) in pieces.iter().enumerate() {
        let expect = Expect::any().dtype(from.dtype()).format(from.format());
        expect.check(operation, format_args!("pieces[{i}].to"), to)?;
        if from.numel() != to.numel() {
            return Err(Error::Mismatch {
                operation,
                argument: format!("pieces[{i}].to"),
                property: Property::Shape,
                expected: format!("of {} elements", from.numel()),
                got: format!("one of {}", to.numel()),
            });
        }
        launch = launch.read(from).write(to);
    }
    launch.transfer(Transfer::Copy)
}

/// Copies memory of the stream's device at addresses into tensors of the stream: one command, for
/// which the host waits.
///
/// # Safety
/// As [`ForeignAddresses::new`].
pub(crate) unsafe fn copy_foreign(
    stream: &Stream,
    operation: &'static str,
    pieces: &[(u64, &Tensor)],
    site: CallSite,
) -> Result<()> {
    // A wait that is refused must be refused before the copy is enqueued.
    stream.count_wait(operation, site)?;
    let addresses = pieces.iter().map(|(address, _)| *address).collect();
    // SAFETY: guaranteed by the caller. The copy is done when this returns, unless the device has
    // failed, which then runs nothing any more.
    let from = unsafe { ForeignAddresses::new(addresses) };
    let launch = Launch::new(stream, operation, Some(Act::Launch), site);
    let launch = pieces.iter().fold(launch, |launch, (_, to)| launch.write(to));
    launch.transfer(Transfer::Foreign(from))?;
    stream.wait_counted(operation, site)
}

/// Overwrites a tensor with the bytes that `make` writes: one command, counted as a copy to the
/// device.
pub(crate) fn upload(
    stream: &Stream,
    operation: &'static str,
    tensor: &Tensor,
    (make, site): (Make, CallSite),
) -> Result<()> {
    let launch = Launch::new(stream, operation, Some(Act::CopyToDevice), site).write(tensor);
    launch.transfer(Transfer::Upload(HostBytes::Made(make)))
}

/// Fills tensors of a stream: one command.
pub(crate) fn fill(
    stream: &Stream,
    operation: &'static str,
    pieces: &[&Tensor],
    (fill, site): (Fill, CallSite),
) -> Result<()> {
    let launch = Launch::new(stream, operation, Some(Act::Launch), site);
    let launch = pieces.iter().fold(launch, |launch, piece| launch.write(piece));
    launch.transfer(Transfer::Fill(fill))
}

/// Reads the bytes of tensors of any streams of one device, each in memory order: ONE counted copy
/// to the host and ONE counted wait for all of them (H1). Nothing is counted for no tensors.
///
/// # Errors
/// [`Error::Mismatch`] if they are not on one device; [`Error::KernelPanicked`];
/// [`Error::DeviceFailed`]; [`Error::HotScope`] if an open scope forbids the copy or the wait;
/// [`Error::InsideKernel`].
#[track_caller]
pub fn read_back(tensors: &[&Tensor]) -> Result<Vec<Vec<u8>>> {
    copy_out(tensors, Location::caller())
}

/// Reads tensors like [`read_back`], with elements of type `T`.
///
/// # Errors
/// The errors of [`read_back`], and [`Error::Mismatch`] for another element type.
#[track_caller]
pub fn read_back_as<T: Element>(tensors: &[&Tensor]) -> Result<Vec<Vec<T>>> {
    let expect = Expect::any().dtype(T::DTYPE);
    for (i, tensor) in tensors.iter().enumerate() {
        expect.check("read_back", format_args!("tensors[{i}]"), tensor)?;
    }
    copy_out(tensors, Location::caller())
}

/// Reads f64 tensors, such as metrics, like [`read_back_as`]; converts no other type.
///
/// # Errors
/// The errors of [`read_back_as`].
#[track_caller]
pub fn read_back_f64(tensors: &[&Tensor]) -> Result<Vec<Vec<f64>>> {
    read_back_as(tensors)
}

fn copy_out<T: bytemuck::Pod + Send>(tensors: &[&Tensor], site: CallSite) -> Result<Vec<Vec<T>>> {
    let operation = "read_back";
    check_may_wait(operation)?;
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    let shared = first.device().shared();
    let expect = Expect::device(first.device());
    for (i, tensor) in tensors.iter().enumerate() {
        expect.check(operation, format_args!("tensors[{i}]"), tensor)?;
    }
    shared.counters.count(Act::CopyToHost, operation, site)?;
    shared.counters.count(Act::Synchronize, operation, site)?;
    let _copy = shared.observers.host_copies(operation, Category::CopyToHost, site);
    let vectors: ReadBack<T> = tensors.iter().map(|_| Mutex::new(Vec::new())).collect();
    // All copies are in flight before the first wait.
    let ends = by_stream(tensors)
        .into_iter()
        .map(|(stream, members)| copy_out_of(stream, tensors, members, &vectors, site))
        .collect::<Result<Vec<_>>>()?;
    if !shared.faults.has(EngineFault::NoWaitForReadBack) {
        ends.iter().for_each(|end| end.stream.wait_host(end.seq));
    }
    for end in &ends {
        let from = first.storage().allocation();
        shared.observers.try_notify(|observer| observer.host_takes(from, end.position(), site))?;
        end.stream.check_result(end.seq)?;
    }
    Ok(vectors.iter().map(|vector| std::mem::take(&mut *lock(vector))).collect())
}

/// The streams of the tensors, each with the indices of its tensors.
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

/// Enqueues the copy of one stream's tensors; returns its position in the stream.
fn copy_out_of<T: bytemuck::Pod + Send>(
    stream: &Stream,
    tensors: &[&Tensor],
    members: Vec<usize>,
    vectors: &ReadBack<T>,
    site: CallSite,
) -> Result<Access> {
    let mut launch = Launch::new(stream, "read_back", None, site);
    for &i in &members {
        launch = launch.read(tensors[i]);
    }
    let into = IntoReadBack { vectors: vectors.clone(), indices: members };
    launch.transfer(Transfer::Download(Box::new(into)))?;
    Ok(stream.record().0)
}

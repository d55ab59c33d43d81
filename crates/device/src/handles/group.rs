//! Groups: launches of several streams that are submitted together and may access each other's
//! tensors.

use super::Tensor;
use super::expect::device_words;
use super::operands::{LaunchOperands, find_overlap, touch};
use crate::execution::StreamWork;
use crate::ground::sync::Arc;
use crate::ground::{AccessKind, Error, Property, Result};
use crate::order::{GroupPart, StreamState, submit_group};

/// Launches of several streams of one device, submitted together. No launch sees the writes of
/// another; each may use tensors of all streams of the group, and several may write different
/// windows of one tensor concurrently. Work that is submitted to any of the streams afterwards runs
/// after all launches of the group.
///
/// For exchanges between streams, such as a reduction in which every stream computes a part of all
/// results. Launches join with [`Launch::join`](crate::Launch::join).
///
/// ```
/// # use meristem_device::*;
/// # fn main() -> Result<()> {
/// let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
/// let (a, b) = (device.stream("a"), device.stream("b"));
/// let x = Tensor::zeros(&a, [2], DType::F32, Owner::Other)?;
/// let (first, second) = (x.view(0, [1])?, x.view(1, [1])?);
/// let mut group = LaunchGroup::default();
/// a.launch("fill").write(&first).join(&mut group, |args| args.write::<f32>(0).fill(1.0))?;
/// b.launch("fill").write(&second).join(&mut group, |args| args.write::<f32>(0).fill(2.0))?;
/// group.run()?;
/// assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
#[must_use = "a group does nothing until `run`"]
pub struct LaunchGroup<'a> {
    pub(super) parts: Vec<GroupedLaunch<'a>>,
}

/// A launch of a group.
pub(super) struct GroupedLaunch<'a> {
    pub(super) operation: &'static str,
    pub(super) stream: &'a Arc<StreamState>,
    pub(super) tensors: LaunchOperands<'a>,
    pub(super) work: StreamWork,
}

impl<'a> LaunchGroup<'a> {
    /// Enqueues all launches, each on its stream. Does not wait for the device; waits for space if
    /// a stream's queue is full. If a kernel panics, all streams of the group fail.
    ///
    /// # Errors
    /// Nothing was enqueued if this returns an error, except with `MERISTEM_LAUNCH_BLOCKING=1`,
    /// where a kernel's own panic is returned.
    /// - [`Error::Mismatch`]: an argument does not belong to a stream of the group.
    /// - [`Error::Overlap`]: a written argument shares bytes with another argument, of any launch.
    ///   The error numbers the launches in the order in which they joined, from 0.
    /// - [`Error::KernelPanicked`], [`Error::DeviceFailed`], [`Error::Race`], as for
    ///   [`Launch::run`](crate::Launch::run).
    pub fn run(self) -> Result<()> {
        self.check_streams()?;
        let all: Vec<(&Tensor, AccessKind)> =
            self.parts.iter().flat_map(|part| part.tensors.iter().copied()).collect();
        check_overlap_of_launches(&self.parts, &all)?;
        let parts =
            self.parts.into_iter().map(|GroupedLaunch { stream, tensors, work, .. }| {
                let touches = tensors
                    .iter()
                    .filter(|(tensor, _)| tensor.bytes() > 0)
                    .map(|&(tensor, access)| (touch(tensor, access), tensor.stream().state()))
                    .collect();
                GroupPart { stream, touches, work: Some(work) }
            });
        submit_group(parts.collect())
    }

    fn check_streams(&self) -> Result<()> {
        let Some(first) = self.parts.first() else { return Ok(()) };
        let mut streams: Vec<_> = self.parts.iter().map(|part| Arc::as_ptr(part.stream)).collect();
        streams.sort_unstable();
        for part in &self.parts {
            let tensors = part.tensors.iter().map(|(tensor, _)| tensor.stream().state());
            for (i, state) in [part.stream].into_iter().chain(tensors).enumerate() {
                let argument =
                    if i == 0 { "stream".to_owned() } else { format!("argument {}", i - 1) };
                let operation = part.operation;
                let mismatch = |property, (expected, got)| {
                    Err(Error::Mismatch { operation, argument, property, expected, got })
                };
                if !Arc::ptr_eq(&state.shared, &first.stream.shared) {
                    let words = device_words(first.stream.shared.id, state.shared.id);
                    return mismatch(Property::Device, words);
                }
                if streams.binary_search(&Arc::as_ptr(state)).is_err() {
                    let names: Vec<&str> = self.parts.iter().map(|p| &**p.stream.name()).collect();
                    let expected = format!("of stream `{}`", names.join("` or `"));
                    let got = format!("one of stream `{}`", state.name());
                    return mismatch(Property::Stream, (expected, got));
                }
            }
        }
        Ok(())
    }
}

/// Returns an error if a written argument of a launch shares bytes with another argument of the
/// launches; `all` are the arguments of all launches.
pub(super) fn check_overlap_of_launches(
    parts: &[GroupedLaunch<'_>],
    all: &[(&Tensor, AccessKind)],
) -> Result<()> {
    let Some(overlap) = find_overlap(all) else { return Ok(()) };
    let of_launch = |(launch, part): (usize, &GroupedLaunch<'_>)| {
        let operation = part.operation;
        (0..part.tensors.len()).map(move |argument| (launch, argument, operation))
    };
    let places: Vec<_> = parts.iter().enumerate().flat_map(of_launch).collect();
    let [written, other] = [overlap.written, overlap.other].map(|argument| places[argument]);
    let (launch, argument, operation) = written;
    let argument = format!("argument {argument} of launch {launch}");
    let (launch, number, name) = other;
    let other = format!("argument {number} of launch {launch} ({name})");
    Err(Error::Overlap { operation, argument, other })
}

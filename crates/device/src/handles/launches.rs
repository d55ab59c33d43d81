//! Independent launches that are enqueued together.

use std::panic::Location;

use super::group::{GroupedLaunch, check_overlap_of_launches};
use super::operands::touch;
use super::{Stream, Tensor};
use crate::execution::{Program, StreamWork};
use crate::ground::sync::Arc;
use crate::ground::{AccessKind, Act, Result};
use crate::order::{GroupPart, StreamState, submit_group, submit_work};

/// Independent launches of any streams of any devices: no launch uses memory that another writes.
/// An example is one step of many networks. On a CPU device each launch is enqueued on its stream,
/// as by [`Launch::run`](crate::Launch::run). The launches of a CUDA device become one graph, in
/// which launches of one [`Program`] share the calls of its kernels. The graph is kept: a later run
/// is one call of the driver, and a copy to the device, which is counted, if the tensors' addresses
/// are not among those that the graph keeps. This needs programs whose calls all state their
/// [pieces](crate::Piece); otherwise each launch of the device is enqueued alone, as on a CPU
/// device. Launches are added with [`Launch::add`](crate::Launch::add).
///
/// ```
/// # use meristem_device::*;
/// # fn main() -> Result<()> {
/// let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
/// let streams = [device.stream("a"), device.stream("b")];
/// let x = Tensor::zeros(&streams[0], [2], DType::F32, Owner::Other)?;
/// let y = Tensor::zeros(&streams[1], [2], DType::F32, Owner::Other)?;
/// let mut launches = Launches::default();
/// for (stream, tensor) in streams.iter().zip([&x, &y]) {
///     let launch = stream.launch("fill").write(tensor);
///     launch.add(&mut launches, |args| args.write::<f32>(0).fill(1.0))?;
/// }
/// launches.run()?;
/// assert_eq!((x.to_vec::<f32>()?, y.to_vec::<f32>()?), (vec![1.0; 2], vec![1.0; 2]));
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
#[must_use = "launches do nothing until `run`"]
pub struct Launches<'a> {
    pub(super) parts: Vec<GroupedLaunch<'a>>,
}

impl<'a> Launches<'a> {
    /// Enqueues all launches. Waits for space if a stream's queue is full, and for a device only to
    /// [trim](crate::Device::trim) it if the driver has no memory for a graph. Building a graph
    /// counts as an allocation, and the launches of one graph count as one launch.
    ///
    /// # Errors
    /// The errors of [`Launch::run`](crate::Launch::run); for launches that become one graph also
    /// [`crate::Error::Overlap`] if one launch writes memory that another uses,
    /// [`crate::Error::HotScope`] if an open scope forbids to build the graph or to copy addresses,
    /// and [`crate::Error::Cuda`] if the graph cannot be built.
    /// Launches before the failing one are enqueued; the launches of one graph are enqueued all or
    /// none. An overlap numbers the launches of the device in the order in which they were added,
    /// from 0.
    pub fn run(self) -> Result<()> {
        let mut devices: Vec<Vec<GroupedLaunch<'a>>> = vec![];
        for part in self.parts {
            let same = |device: &&mut Vec<GroupedLaunch<'a>>| {
                device.first().is_some_and(|of| Arc::ptr_eq(&of.stream.shared, &part.stream.shared))
            };
            match devices.iter_mut().find(same) {
                Some(device) => device.push(part),
                None => devices.push(vec![part]),
            }
        }
        devices.into_iter().try_for_each(run_on_device)
    }
}

/// A planned launch: a program, and the stream on which it will be launched, without tensors.
#[derive(Debug)]
pub struct PlannedLaunch<'a> {
    /// The stream of the launch.
    pub stream: &'a Stream,
    /// Operation, for errors and observers.
    pub operation: &'static str,
    /// The program of the launch.
    pub program: Program,
    /// Number of arguments of the launch.
    pub arguments: usize,
}

impl Launches<'_> {
    /// Builds the graphs that these launches, added in this order, will need on CUDA devices.
    /// Building a graph counts as an allocation. Waits for a device only to load kernels that are
    /// not loaded yet, which counts as a synchronisation, and to [trim](crate::Device::trim) it if
    /// the driver has no memory for a graph. Ignores devices whose launches form no graph: CPU
    /// devices, and devices with a program whose calls do not state the [pieces](crate::Piece) of
    /// the arguments that they use.
    ///
    /// # Errors
    /// [`crate::Error::HotScope`] if an open scope forbids to build a graph or to load kernels;
    /// [`crate::Error::Mismatch`] if a call does not match its kernel's declaration;
    /// [`crate::Error::Cuda`].
    #[track_caller]
    pub fn prepare(launches: Vec<PlannedLaunch<'_>>) -> Result<()> {
        let site = Location::caller();
        let mut rest = launches;
        while let Some(first) = rest.first() {
            let (state, operation) = (first.stream.state().clone(), first.operation);
            let device = first.stream.device().clone();
            let (of_device, others) = rest.into_iter().partition::<Vec<_>, _>(|launch| {
                Arc::ptr_eq(&launch.stream.state().shared, &state.shared)
            });
            rest = others;
            let names_pieces = of_device.iter().all(|launch| launch.program.names_pieces());
            if let Some(cuda_queue) = state.cuda_queue().filter(|_| names_pieces) {
                let programs: Vec<_> =
                    of_device.into_iter().map(|of| (of.program, of.arguments)).collect();
                let reclaim = || {
                    device.trim();
                };
                cuda_queue.prepare(
                    &programs,
                    (operation, site),
                    &state.shared.counters,
                    &reclaim,
                )?;
            }
        }
        Ok(())
    }
}

fn run_on_device(parts: Vec<GroupedLaunch<'_>>) -> Result<()> {
    let names_pieces = |part: &GroupedLaunch<'_>| match &part.work {
        StreamWork::Cuda(task) => task.names_pieces(),
        _ => false,
    };
    if parts.iter().all(names_pieces) {
        run_fused(parts)
    } else {
        parts.into_iter().try_for_each(run_alone)
    }
}

fn run_alone(GroupedLaunch { operation, stream, tensors, work }: GroupedLaunch<'_>) -> Result<()> {
    stream.shared.counters.count(Act::Launch, operation, work.site())?;
    let touching = tensors.iter().filter(|(tensor, _)| tensor.bytes() > 0);
    submit_work(stream, touching.map(|&(tensor, access)| touch(tensor, access)), work)
}

/// Enqueues launches of a CUDA device as one launch, on the stream of the first; the other streams
/// wait for it.
fn run_fused(parts: Vec<GroupedLaunch<'_>>) -> Result<()> {
    let Some((first, operation)) = parts.first().map(|part| (part.stream, part.operation)) else {
        return Ok(());
    };
    let Some(cuda_queue) = first.cuda_queue() else { return Ok(()) };
    let all: Vec<(&Tensor, AccessKind)> =
        parts.iter().flat_map(|part| part.tensors.iter().copied()).collect();
    check_overlap_of_launches(&parts, &all)?;
    let streams: Vec<&Arc<StreamState>> = parts.iter().map(|part| part.stream).collect();
    let tasks = parts.into_iter().filter_map(|part| match part.work {
        StreamWork::Cuda(task) => Some(*task),
        _ => None,
    });
    // If the driver lacks memory for the graph, the pool returns the memory kept for reuse.
    let reclaim = || {
        if let Some((tensor, _)) = all.first() {
            tensor.stream().device().trim();
        }
    };
    let fused = cuda_queue.fuse(tasks.collect(), &first.shared.counters, &reclaim)?;
    let Some(task) = fused else { return Ok(()) };
    let work = StreamWork::Cuda(Box::new(task));
    first.shared.counters.count(Act::Launch, operation, work.site())?;
    let touching = all.iter().filter(|(tensor, _)| tensor.bytes() > 0);
    let touches = touching
        .map(|&(tensor, access)| (touch(tensor, access), tensor.stream().state()))
        .collect();
    let fused = GroupPart { stream: first, touches, work: Some(work) };
    let others =
        streams.into_iter().skip(1).map(|stream| GroupPart { stream, touches: vec![], work: None });
    submit_group([fused].into_iter().chain(others).collect())
}

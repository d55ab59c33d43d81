//! The tensors of parameter groups.

use meristem_device::{DType, Owner, Stream, Tensor};

use crate::error::Result;
use crate::graph::{DrawSource, Graph, Optimiser, OptimiserKind, ParamKind};
use crate::layout::GroupSize;

/// The tensors of one parameter group. Handles: a clone shares the memory.
#[derive(Clone, Debug)]
pub(super) struct GroupTensors {
    /// Packed parameters, f32.
    pub(super) values: Tensor,
    /// State of the optimiser, f32: momentum or an average in the same layout, or two of them.
    pub(super) optimiser_state: Tensor,
    /// Running statistics, f32.
    pub(super) running_stats: Tensor,
    /// `num_batches_tracked`, the steps of parameters, and the count of batches for dropout, i64.
    pub(super) counters: Tensor,
}

impl GroupTensors {
    /// Memory for a group, all zero.
    pub(super) fn zeros(stream: &Stream, size: GroupSize, owner: Owner) -> Result<Self> {
        let zeros = |len, dtype| Tensor::zeros(stream, [len], dtype, owner);
        Ok(Self {
            values: zeros(size.values, DType::F32)?,
            optimiser_state: zeros(size.moments, DType::F32)?,
            running_stats: zeros(size.running_stats, DType::F32)?,
            counters: zeros(size.counters, DType::I64)?,
        })
    }

    /// Memory for a copy of a group, without the optimiser's state. Its content is unspecified.
    pub(super) fn copy_of(group: &GroupTensors, owner: Owner) -> Result<Self> {
        let stream = group.values.stream();
        let like = |of: &Tensor| Tensor::empty(stream, [of.numel()], of.dtype(), owner);
        Ok(Self {
            values: like(&group.values)?,
            optimiser_state: Tensor::empty(stream, [0], DType::F32, owner)?,
            running_stats: like(&group.running_stats)?,
            counters: like(&group.counters)?,
        })
    }

    /// Parameters, optimiser's state, running statistics, counters.
    pub(super) fn tensors(&self) -> [&Tensor; 4] {
        [&self.values, &self.optimiser_state, &self.running_stats, &self.counters]
    }

    /// Parameters, running statistics, counters.
    pub(super) fn weights(&self) -> [&Tensor; 3] {
        [&self.values, &self.running_stats, &self.counters]
    }
}

/// Copies tensors on their device, in one command; tensors without elements are skipped.
#[track_caller]
pub(super) fn copy<'a>(
    stream: &Stream,
    operation: &'static str,
    pieces: impl Iterator<Item = (&'a Tensor, &'a Tensor)>,
) -> Result<()> {
    let pieces: Vec<_> = pieces.filter(|(from, _)| from.numel() > 0).collect();
    if pieces.is_empty() { Ok(()) } else { Ok(stream.copy(operation, &pieces)?) }
}

/// The properties that determine a group's layout: names, shapes and kinds, in order, the
/// optimiser's kind, and whether it counts batches for dropout. Initialisation is not among them.
#[derive(PartialEq)]
struct Members<'a> {
    optimiser: OptimiserKind,
    params: Vec<(&'a str, &'a [usize], ParamKind)>,
    buffers: Vec<(&'a str, usize, bool)>,
    counts_batches: bool,
}

fn members(graph: &Graph, g: usize) -> Members<'_> {
    let params = graph.params.iter().filter(|p| p.group.index() == g);
    let buffers = graph.buffers.iter().filter(|b| b.group.index() == g);
    Members {
        optimiser: graph.groups[g].optimiser.kind(),
        params: params.map(|p| (&*p.name, &*p.shape, p.kind)).collect(),
        buffers: buffers.map(|b| (&*b.name, b.len, b.counter)).collect(),
        counts_batches: graph.dropouts.iter().any(|layer| layer.group.index() == g),
    }
}

/// Numbers of the optimisers of all groups and their variants, in order, then those of the dropout
/// layers.
pub(super) fn numbers(graph: &Graph, draws: DrawSource) -> Vec<f64> {
    let all = graph.groups.iter().flat_map(|group| group.optimisers());
    let layers = graph.dropouts.iter().flat_map(|layer| layer.numbers(draws));
    all.flat_map(Optimiser::hyperparameters).chain(layers).collect()
}

/// [`numbers`] on the device.
pub(super) fn hyperparameters(
    stream: &Stream,
    graph: &Graph,
    draws: DrawSource,
    owner: Owner,
) -> Result<Tensor> {
    let numbers = numbers(graph, draws);
    let tensor = Tensor::empty(stream, [numbers.len()], DType::F64, owner)?;
    tensor.copy_from_slice(&numbers)?;
    Ok(tensor)
}

/// The group of `graph` that has the name and the [`Members`] of group `g` of `of`.
pub(super) fn same_group(graph: &Graph, of: &Graph, g: usize) -> Option<usize> {
    let named = graph.groups.iter().position(|spec| spec.name == of.groups[g].name)?;
    (members(graph, named) == members(of, g)).then_some(named)
}

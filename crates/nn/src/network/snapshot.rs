//! A network's parameters and running statistics, kept on its device to come back to.

use std::sync::Arc;

use meristem_device::{DType, Owner, Stream, Tensor};

use super::Network;
use super::groups::{self, GroupTensors, same_group};
use super::state::GraphWeights;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::layout::ParamLayout;
use crate::metrics;
use crate::ops::StateOp;
use crate::plan::PlanStep;
use crate::state::StateDict;

/// A copy of parameters and buffers, on the device of the network that it was taken from. The
/// optimiser's state is no part of it.
#[derive(Debug)]
pub struct Snapshot {
    graph: Arc<Graph>,
    groups: Vec<GroupTensors>,
}

impl Snapshot {
    /// A snapshot of the groups of a network that `graph` names: all groups, or the groups to keep.
    /// Does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`] if the network lacks one of them; memory.
    pub fn new(network: &Network, graph: &Arc<Graph>) -> Result<Self> {
        let mut it = Self { graph: Arc::clone(graph), groups: vec![] };
        it.groups = it.memory(graph, &sources(network, graph)?)?;
        it.take(network, graph)?;
        Ok(it)
    }

    /// Takes another snapshot into the same memory: only groups that it did not have are allocated.
    /// One launch on the network's stream; does not wait.
    ///
    /// # Errors
    /// As [`Snapshot::new`]; the snapshot is then as it was.
    pub fn take(&mut self, network: &Network, graph: &Arc<Graph>) -> Result<()> {
        let sources = sources(network, graph)?;
        if !Arc::ptr_eq(graph, &self.graph) && *graph != self.graph {
            self.groups = self.memory(graph, &sources)?;
            self.graph = Arc::clone(graph);
        }
        copy(&network.stream, "snapshot", sources.into_iter().zip(&self.groups))
    }

    /// Groups for another graph: unchanged groups keep their memory.
    fn memory(&self, graph: &Graph, sources: &[&GroupTensors]) -> Result<Vec<GroupTensors>> {
        let group = |(g, source): (usize, &&GroupTensors)| match same_group(&self.graph, graph, g) {
            Some(own) if own < self.groups.len() => Ok(self.groups[own].clone()),
            _ => GroupTensors::copy_of(source, Owner::Snapshots),
        };
        sources.iter().enumerate().map(group).collect()
    }

    /// The graph of the stored groups.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// Its contents, under PyTorch's names. One read-back, which waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn state_dict(&self) -> Result<StateDict> {
        self.weights().parameters()?.read_back()
    }

    /// Replaces the snapshot's contents by the contents of `state`. After an error the snapshot
    /// is unchanged. Waits as [`Network::load_state_dict`].
    ///
    /// # Errors
    /// As [`Network::load_state_dict`], strict.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.weights().parameters()?.load(state, true)
    }

    fn weights(&self) -> GraphWeights<'_> {
        GraphWeights { graph: &self.graph, groups: &self.groups }
    }
}

impl Network {
    /// Restores a snapshot: its graph, parameters and buffers, bit for bit. Groups that are not in
    /// the snapshot are removed. The optimiser is reset. The metrics are reset unless the network
    /// already has an equal graph. Dropout goes on counting batches, so that it draws no mask
    /// twice. Does not wait.
    ///
    /// # Errors
    /// As [`Network::set_graph`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        self.set_graph(Arc::clone(&snapshot.graph))?;
        let dropout = ParamLayout::new(self.graph()).dropout;
        // Without the count of batches, the last counter of a group.
        let counters = |tensor: &Tensor, group: usize| match dropout[group] {
            Some(count) => tensor.view(0, [count]),
            None => Ok(tensor.clone()),
        };
        let mut pairs = vec![];
        for (group, (from, to)) in snapshot.groups.iter().zip(&self.groups).enumerate() {
            pairs.push((from.values.clone(), to.values.clone()));
            pairs.push((from.running_stats.clone(), to.running_stats.clone()));
            pairs.push((counters(&from.counters, group)?, counters(&to.counters, group)?));
        }
        groups::copy(&self.stream, "restore", pairs.iter().map(|(from, to)| (from, to)))?;
        self.clear_momentum()
    }

    /// Counts elements that are NaN or infinite among parameters, running statistics and momenta,
    /// into [`Metrics::non_finite`](crate::Metrics::non_finite). One launch; does not wait.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn count_non_finite(&self) -> Result<()> {
        let mut spans = self.group_spans();
        spans.retain(|span| span.dtype == DType::F32);
        let op = StateOp::CountNonFinite(spans.iter().map(|span| span.len).collect());
        let step = PlanStep::new(op, &spans, &[metrics::NON_FINITE]);
        self.launch_steps("count_non_finite", vec![step])
    }

    /// The parameters of a group (by its place in the graph) as they lie on the device, f32, packed
    /// as [`layout`](crate::layout) says. A launch's writes there take effect from the next step
    /// on.
    pub fn packed_parameters(&self, group: usize) -> Option<&Tensor> {
        Some(&self.groups.get(group)?.values)
    }
}

/// The groups of a network that a graph has.
fn sources<'a>(network: &'a Network, graph: &Graph) -> Result<Vec<&'a GroupTensors>> {
    let find = |g: usize| match same_group(network.graph(), graph, g) {
        Some(at) => Ok(&network.groups[at]),
        None => {
            let got = format!("group `{}`, which it does not have", graph.groups[g].name);
            Err(Error::argument("snapshot", "graph", "groups that the network has", got))
        }
    };
    (0..graph.groups.len()).map(find).collect()
}

/// Copies parameters and buffers in one command.
#[track_caller]
fn copy<'a>(
    stream: &Stream,
    operation: &'static str,
    groups: impl Iterator<Item = (&'a GroupTensors, &'a GroupTensors)>,
) -> Result<()> {
    let pairs = groups.flat_map(|(from, to)| from.weights().into_iter().zip(to.weights()));
    groups::copy(stream, operation, pairs)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use meristem_device::{Device, DeviceId, DeviceOptions};

    use crate::graph::{Dims, GraphBuilder, SgdConfig};
    use crate::{Isa, Metrics, Network, NetworkOptions};

    #[test]
    fn what_is_not_finite_is_counted_wherever_it_lies() {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
        let mut b = GraphBuilder::new(Dims { c: 3, h: 4, w: 4 }, sgd);
        let x = b.batch_norm(b.input(), "bn").unwrap();
        let pooled = b.global_avg_pool(x);
        let logits = b.linear(pooled, "classifier", 5, true, None).unwrap();
        let graph = Arc::new(b.finish(logits).unwrap());
        let stream =
            Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().stream("env");
        let network =
            Network::new(&stream, graph, NetworkOptions::new(1, 0, Isa::detect(), 4)).unwrap();
        let count = || {
            network.count_non_finite().unwrap();
            Metrics::parse(&network.metrics().to_vec().unwrap()).non_finite
        };
        let group = &network.groups[0];
        assert_eq!(count(), 0);
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for (before, (tensor, value)) in
            [&group.values, &group.optimiser_state, &group.running_stats]
                .into_iter()
                .zip(values)
                .enumerate()
        {
            tensor.view(1, [1]).unwrap().copy_from_slice(&[value]).unwrap();
            assert_eq!(count(), before as u64 + 1);
        }
    }
}

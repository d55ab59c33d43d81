//! The groups of a graph: new groups, and the state that is carried over when a network grows.

use std::collections::HashMap;

use meristem_device::{Element, Owner, Stream, Tensor};

use super::groups::{GroupTensors, copy, same_group};
use super::state::{GraphWeights, NamedTensor};
use crate::error::Result;
use crate::graph::Graph;
use crate::layout::{ParamLayout, packing};

/// Options of new groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    /// Seed of the initial weights.
    pub(super) seed: u64,
    /// Number of the env.
    pub(super) env: u64,
    /// Owner of the memory.
    pub(super) owner: Owner,
}

/// The groups of a graph. With an earlier graph and its groups, unchanged groups are kept (the same
/// memory), and parameters and buffers of the same name, shape and kind are carried over, on the
/// device.
pub(super) fn build(
    stream: &Stream,
    graph: &Graph,
    old: Option<GraphWeights<'_>>,
    new: Fresh,
) -> Result<Vec<GroupTensors>> {
    let layout = ParamLayout::new(graph);
    let mut groups = vec![];
    for g in 0..graph.groups.len() {
        let kept = old.as_ref().and_then(|old| Some((old, same_group(old.graph, graph, g)?)));
        groups.push(match kept {
            Some((old, before)) => old.groups[before].clone(),
            None => fresh(stream, graph, &layout, g, new)?,
        });
    }
    if let Some(old) = old {
        carry_over(stream, &old, &GraphWeights { graph, groups: &groups })?;
    }
    Ok(groups)
}

/// A group with initial values.
fn fresh(
    stream: &Stream,
    graph: &Graph,
    layout: &ParamLayout,
    g: usize,
    new: Fresh,
) -> Result<GroupTensors> {
    let size = layout.groups[g];
    let group = GroupTensors::zeros(stream, size, new.owner)?;
    let mut values = vec![0.0; size.values];
    for (param, place) in graph.params.iter().zip(&layout.params) {
        if param.group.index() == g {
            let initial = crate::init::values(param, new.seed, new.env);
            packing(param).pack(&initial, &mut values[place.range()]);
        }
    }
    let mut state = vec![0.0; size.running_stats];
    let mut counters = vec![0i64; size.counters];
    for (buffer, place) in graph.buffers.iter().zip(&layout.buffers) {
        match (buffer.group.index() == g, buffer.counter) {
            (true, false) => state[place.range()].fill(buffer.init),
            (true, true) => counters[place.range()].fill(buffer.init as i64),
            (false, _) => {}
        }
    }
    upload(&group.values, &values)?;
    upload(&group.running_stats, &state)?;
    upload(&group.counters, &counters)?;
    Ok(group)
}

fn upload<T: Element>(to: &Tensor, values: &[T]) -> Result<()> {
    if values.is_empty() { Ok(()) } else { Ok(to.copy_from_slice(values)?) }
}

/// Copies on the device the state that new groups have in common with the earlier graph: parameters
/// with their optimiser's state and counts of steps, running statistics, counters. The state of new
/// parameters is zero, and so is their count of steps.
fn carry_over(stream: &Stream, old: &GraphWeights<'_>, new: &GraphWeights<'_>) -> Result<()> {
    let mut pieces = vec![];
    let pairs = [(old.parameters()?, new.parameters()?), (old.moments()?, new.moments()?)];
    for (from, to) in &pairs {
        let from: HashMap<&str, &NamedTensor> =
            from.iter().map(|entry| (entry.name(), entry)).collect();
        for to in to.iter() {
            if let Some(from) = from.get(to.name()).filter(|from| from.is_like(to)) {
                pieces.push((from.memory(), to.memory()));
            }
        }
    }
    // A group that was kept has its memory already.
    pieces.retain(|(from, to)| from.storage_id() != to.storage_id());
    copy(stream, "carry_over", pieces.into_iter())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use meristem_device::{DType, Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Tensor};

    use crate::graph::{ConvGeometry, Dims, Graph, GraphBuilder, GroupId, SgdConfig};
    use crate::{Isa, Network, NetworkOptions};

    const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

    /// A host of a convolution and a classifier, with or without a module in between.
    fn graph(grown: bool) -> Arc<Graph> {
        let mut b = GraphBuilder::new(Dims { c: 3, h: 6, w: 6 }, SGD);
        let input = b.input();
        let mut x = b.conv2d(input, "conv", 8, ConvGeometry::same(3), false).unwrap();
        x = b.relu(x);
        if grown {
            b.group("slots.r0c0", SGD);
            let detached = b.detach(x);
            let y = b.conv2d(detached, "module", 8, ConvGeometry::same(3), true).unwrap();
            x = b.straight_through(x, y).unwrap();
            b.resume_group(GroupId::HOST);
        }
        let pooled = b.global_avg_pool(x);
        let logits = b.linear(pooled, "classifier", 5, true, None).unwrap();
        Arc::new(b.finish(logits).unwrap())
    }

    /// F3: the host's weights are packed when they are made, and stay where they are: every plan
    /// uses the same packed memory, and nothing is packed (on the host) and copied to the device
    /// again.
    #[test]
    fn host_weights_are_packed_once() {
        let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
        let stream = device.stream("env");
        let options = NetworkOptions::new(1, 0, Isa::detect(), 4);
        let mut network = Network::new(&stream, graph(false), options).unwrap();
        let host = |network: &Network| network.groups[GroupId::HOST.index()].values.storage_id();
        let packed = host(&network);
        let (shape, format) = ([4, 3, 6, 6], MemoryFormat::ChannelsLast);
        let x = Tensor::empty_with_format(&stream, shape, DType::F32, format, Owner::Batches);
        let x = x.unwrap();
        x.copy_from_slice(&[0.5f32; 4 * 3 * 6 * 6]).unwrap();
        let y = Tensor::from_slice(&stream, &[0u32, 1, 2, 3], [4], Owner::Batches).unwrap();
        for grown in [false, true, false, true] {
            network.set_graph(graph(grown)).unwrap();
            assert_eq!(host(&network), packed);
            let copies = device.counts().copies_to_device;
            for _ in 0..3 {
                network.train_step(&x, &y).unwrap();
                network.eval_step(&x, &y, 0).unwrap();
                network.infer(&x, 0).unwrap();
            }
            assert_eq!(host(&network), packed);
            assert_eq!(device.counts().copies_to_device, copies);
        }
        // A bare host again: switching to it copies the numbers of its optimiser, and no weights.
        let copies = device.counts().copies_to_device + 1;
        network.set_graph(graph(false)).unwrap();
        assert_eq!((host(&network), device.counts().copies_to_device), (packed, copies));
    }
}

//! The tensors of parameter groups, and how they are carried over when a network grows.

use meristem_device::{DType, Owner, Stream, Tensor};

use crate::error::{Error, Result};
use crate::graph::{BufferSpec, Graph, GroupId, GroupSpec, Optimiser, ParamSpec};
use crate::layout::{GroupSize, Layout, Place, packing};

/// The tensors of one parameter group. Handles: a clone shares the memory.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Packed parameters, f32.
    pub(super) values: Tensor,
    /// What the optimiser remembers, f32: momentum in the same layout, or Adam's two averages.
    pub(super) momentum: Tensor,
    /// Running statistics, f32.
    pub(super) state: Tensor,
    /// `num_batches_tracked` and Adam's steps, i64.
    pub(super) counters: Tensor,
}

/// How new groups are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    /// Seed of the initial weights.
    pub(super) seed: u64,
    /// Number of the env.
    pub(super) env: u64,
    /// Whom the memory belongs to.
    pub(super) owner: Owner,
}

impl Group {
    fn zeros(stream: &Stream, size: GroupSize, owner: Owner) -> Result<Self> {
        let zeros = |len, dtype| Tensor::zeros(stream, [len], dtype, owner);
        Ok(Self {
            values: zeros(size.values, DType::F32)?,
            momentum: zeros(size.moments, DType::F32)?,
            state: zeros(size.state, DType::F32)?,
            counters: zeros(size.counters, DType::I64)?,
        })
    }

    /// Memory for a copy of a group, without what the optimiser remembers. Its content is
    /// unspecified.
    pub(super) fn copy_of(group: &Group, owner: Owner) -> Result<Self> {
        let stream = group.values.stream();
        let like = |of: &Tensor| Tensor::empty(stream, [of.numel()], of.dtype(), owner);
        Ok(Self {
            values: like(&group.values)?,
            momentum: Tensor::empty(stream, [0], DType::F32, owner)?,
            state: like(&group.state)?,
            counters: like(&group.counters)?,
        })
    }

    /// Parameters, what the optimiser remembers, running statistics, counters.
    pub(super) fn tensors(&self) -> [&Tensor; 4] {
        [&self.values, &self.momentum, &self.state, &self.counters]
    }
}

/// Copies tensors on their device, in one command; those without elements are passed over.
#[track_caller]
pub(super) fn copy<'a>(
    stream: &Stream,
    operation: &'static str,
    pieces: impl Iterator<Item = (&'a Tensor, &'a Tensor)>,
) -> Result<()> {
    let pieces: Vec<_> = pieces.filter(|(from, _)| from.numel() > 0).collect();
    match pieces.is_empty() {
        true => Ok(()),
        false => Ok(stream.copy(operation, &pieces)?),
    }
}

/// What a name stood for in the graph before.
#[derive(Clone, Copy)]
struct Old<'a> {
    graph: &'a Graph,
    groups: &'a [Group],
}

/// The groups of a graph. With an earlier graph and its groups, those that are unchanged are kept
/// (the same memory), and what has the same name, shape and kind is carried over, on the device.
pub(super) fn build(
    stream: &Stream,
    graph: &Graph,
    old: Option<(&Graph, &[Group])>,
    new: Fresh,
) -> Result<Vec<Group>> {
    let old = old.map(|(graph, groups)| Old { graph, groups });
    let layout = Layout::new(graph);
    let old_layout = old.map(|o| Layout::new(o.graph));
    let mut groups = vec![];
    for g in 0..graph.groups.len() {
        if let Some(old) = old
            && let Some(before) = same_group(old.graph, graph, g)
        {
            groups.push(old.groups[before].clone());
            continue;
        }
        check_carries(graph, g, old)?;
        let group = fresh(stream, graph, &layout, g, new)?;
        if let (Some(old), Some(old_layout)) = (old, &old_layout) {
            carry_over(stream, (graph, &layout, g, &group), (old, old_layout))?;
        }
        groups.push(group);
    }
    Ok(groups)
}

/// Adam counts its steps per group, so a group that it updates cannot take a parameter in, nor one
/// of its own go elsewhere.
fn check_carries(graph: &Graph, g: usize, old: Option<Old<'_>>) -> Result<()> {
    let adam = |group: &GroupSpec| matches!(group.optimiser, Optimiser::Adam(_));
    let Some(old) = old else { return Ok(()) };
    if !adam(&graph.groups[g]) && !old.graph.groups.iter().any(adam) {
        return Ok(());
    }
    let expected = "groups with SGD, or the same parameters as before";
    let got = format!("group `{}` with others, and Adam", graph.groups[g].name);
    Err(Error::argument("set_graph", "graph", expected, got))
}

/// What decides a group's layout: names, shapes and kinds, in order, and what the optimiser
/// remembers. Not how they are initialised.
#[derive(PartialEq)]
struct Members<'a> {
    moments: usize,
    params: Vec<(&'a str, &'a [usize], crate::graph::ParamKind)>,
    buffers: Vec<(&'a str, usize, bool)>,
}

fn members(graph: &Graph, g: usize) -> Members<'_> {
    let params = graph.params.iter().filter(|p| p.group.index() == g);
    let buffers = graph.buffers.iter().filter(|b| b.group.index() == g);
    Members {
        moments: graph.groups[g].optimiser.moments(),
        params: params.map(|p| (&*p.name, &*p.shape, p.kind)).collect(),
        buffers: buffers.map(|b| (&*b.name, b.len, b.counter)).collect(),
    }
}

/// The group of `graph` that has the name, parameters and buffers of group `g` of `of`.
pub(super) fn same_group(graph: &Graph, of: &Graph, g: usize) -> Option<usize> {
    let named = graph.groups.iter().position(|spec| spec.name == of.groups[g].name)?;
    (members(graph, named) == members(of, g)).then_some(named)
}

/// A group with initial values.
fn fresh(stream: &Stream, graph: &Graph, layout: &Layout, g: usize, new: Fresh) -> Result<Group> {
    let size = layout.groups[g];
    let group = Group::zeros(stream, size, new.owner)?;
    let mut values = vec![0.0; size.values];
    for (param, place) in graph.params.iter().zip(&layout.params) {
        if param.group.index() == g {
            let initial = crate::init::values(param, new.seed, new.env);
            packing(param).pack(&initial, &mut values[place.range()]);
        }
    }
    let mut state = vec![0.0; size.state];
    let mut counters = vec![0i64; size.counters];
    for (buffer, place) in graph.buffers.iter().zip(&layout.buffers) {
        match (buffer.group.index() == g, buffer.counter) {
            (true, false) => state[place.range()].fill(buffer.init),
            (true, true) => counters[place.range()].fill(buffer.init as i64),
            (false, _) => {}
        }
    }
    if !values.is_empty() {
        group.values.copy_from_slice(&values)?;
    }
    if !state.is_empty() {
        group.state.copy_from_slice(&state)?;
    }
    if !counters.is_empty() {
        group.counters.copy_from_slice(&counters)?;
    }
    Ok(group)
}

/// Copies on the device what the group `g` has in common with any group of the earlier graph:
/// parameters with what the optimiser remembers of them, running statistics, counters.
fn carry_over(
    stream: &Stream,
    (graph, layout, g, group): (&Graph, &Layout, usize, &Group),
    (old, old_layout): (Old<'_>, &Layout),
) -> Result<()> {
    let target = GroupId(g);
    let mut pieces: Vec<(Tensor, Tensor)> = vec![];
    let mut carry = |from: (&Tensor, Place), to: (&Tensor, Place)| -> Result<()> {
        let window = |(tensor, place): (&Tensor, Place)| tensor.view(place.start, [place.len]);
        pieces.push((window(from)?, window(to)?));
        Ok(())
    };
    for (param, to) in graph.params.iter().zip(&layout.params).filter(|(_, p)| p.group == target) {
        if let Some(at) = old.graph.params.iter().position(|o| same_param(o, param)) {
            let from = old_layout.params[at];
            let before = &old.groups[from.group.index()];
            carry((&before.values, from), (&group.values, *to))?;
            carry((&before.momentum, from), (&group.momentum, *to))?;
        }
    }
    for (buffer, to) in graph.buffers.iter().zip(&layout.buffers).filter(|(_, p)| p.group == target)
    {
        if let Some(at) = old.graph.buffers.iter().position(|o| same_buffer(o, buffer)) {
            let from = old_layout.buffers[at];
            let before = &old.groups[from.group.index()];
            match buffer.counter {
                true => carry((&before.counters, from), (&group.counters, *to))?,
                false => carry((&before.state, from), (&group.state, *to))?,
            }
        }
    }
    copy(stream, "carry_over", pieces.iter().map(|(from, to)| (from, to)))
}

fn same_param(a: &ParamSpec, b: &ParamSpec) -> bool {
    (&a.name, &a.shape, a.kind) == (&b.name, &b.shape, b.kind)
}

fn same_buffer(a: &BufferSpec, b: &BufferSpec) -> bool {
    (&a.name, a.len, a.counter) == (&b.name, b.len, b.counter)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use meristem_device::{DType, Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Tensor};

    use crate::graph::{ConvGeometry, Dims, Graph, GraphBuilder, GroupId, SgdConfig};
    use crate::{Isa, Network, NetworkOptions};

    const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

    /// A host of a convolution and a classifier, with a module in between or without.
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

    /// F3: the host's weights are packed when they are made, and stay where they are: whatever is
    /// computed with them, and in which plan, uses the same packed memory, and nothing is packed
    /// (on the host) and copied to the device again.
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
        // A bare host again: switching to it copies nothing either.
        let copies = device.counts().copies_to_device;
        network.set_graph(graph(false)).unwrap();
        assert_eq!((host(&network), device.counts().copies_to_device), (packed, copies));
    }
}

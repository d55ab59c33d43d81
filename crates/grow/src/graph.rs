//! Builds the graph of a host, which `meristem-nn` compiles.
//!
//! For one image shape, blueprint set and choice of optimisers, the graph depends only on the
//! topology: the host, and the class, blueprint and blend mode of each slot. A blend node reads
//! alpha from device memory, at the slot's index. Training and evaluation use the same graph. A
//! module of class [`SlotClass::Straight`] does not change the host's value in evaluation, so a
//! plan may omit it.
//!
//! Names are PyTorch's. A host's layer declares its own name, such as `blocks.{i}.conv`. Names in
//! slot s are `slots.{s}.layers.{i}.*`, with the position i in the blueprint's list of layers,
//! `slots.{s}.mix`, and `slots.{s}.gate.{0,2}.*` for a `Sequential(Linear, ReLU, Linear)`.

use meristem_nn::graph::{
    BlendMode, BlendOperands, Dims, Graph, GraphBuilder, GroupId, NodeId, Optimiser,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::lifecycle::{Slot, Stage, Style};
use crate::optimisers::Optimisers;
use crate::spec::{HostSpec, HostVisitor, SlotName, TaskShape};

/// Class of a slot in the topology: equal classes give equal nodes in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotClass {
    /// No module computes (dormant, germinated, pruned, embargoed, resetting).
    Empty,
    /// A module on the host's detached value, with a straight-through output (training, unless
    /// joint).
    Straight {
        /// Index of the blueprint.
        blueprint: usize,
    },
    /// A module on the host's detached value, blended in (blending and holding, unless joint).
    Blended {
        /// Index of the blueprint.
        blueprint: usize,
        /// Blend mode.
        mode: BlendMode,
    },
    /// A module that is blended in, with gradients through its input: a fossilized module, or a
    /// module of [`crate::Birth::Joint`] in training, blending or holding.
    BlendedWithGradient {
        /// Index of the blueprint.
        blueprint: usize,
        /// Blend mode.
        mode: BlendMode,
    },
}

impl SlotClass {
    pub(crate) fn from_slot(slot: &Slot) -> Self {
        let Some(module) = &slot.module else {
            return SlotClass::Empty;
        };
        let (blueprint, mode) = (module.blueprint_index, module.style.blend_mode());
        match slot.stage {
            _ if slot.is_joint() => SlotClass::BlendedWithGradient { blueprint, mode },
            Stage::Training => SlotClass::Straight { blueprint },
            Stage::Blending | Stage::Holding => SlotClass::Blended { blueprint, mode },
            Stage::Fossilized => SlotClass::BlendedWithGradient { blueprint, mode },
            _ => SlotClass::Empty,
        }
    }
}

/// The part of a host that changes its graph during an episode: for one image shape, blueprint set
/// and choice of optimisers, equal keys give equal graphs. Compare the keys of a host to detect a
/// change of its network.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TopologyKey {
    /// The host.
    pub host: HostSpec,
    /// Class of each enabled slot, in index order.
    pub slots: Vec<SlotClass>,
}

/// The graph of a bare host without any slots.
///
/// # Errors
/// [`crate::HostError`] if the host does not fit the image.
pub fn host_graph(
    spec: &HostSpec,
    image: &TaskShape,
    optimiser: impl Into<Optimiser>,
) -> Result<Graph> {
    spec.validate(image)?;
    let optimisers = Optimisers { host: optimiser.into(), ..Optimisers::default() };
    build(spec, image, &mut Modules { slots: &[], optimisers: &optimisers })
}

/// The graph of a host with its modules.
pub(crate) fn grown_graph(
    spec: &HostSpec,
    image: &TaskShape,
    slots: &[Slot],
    optimisers: &Optimisers,
) -> Result<Graph> {
    build(spec, image, &mut Modules { slots, optimisers })
}

fn build(spec: &HostSpec, image: &TaskShape, modules: &mut Modules<'_>) -> Result<Graph> {
    let dims = Dims { c: image.channels, h: image.height, w: image.width };
    let mut b = GraphBuilder::new(dims, modules.optimisers.host);
    let logits = spec.add_to(&mut b, image, modules)?;
    let mut graph = b.finish(logits)?;
    graph.alphas = modules.slots.len();
    Ok(graph)
}

/// Modules of the enabled slots; other slots are the identity.
struct Modules<'a> {
    slots: &'a [Slot],
    optimisers: &'a Optimisers,
}

impl HostVisitor<'_> for Modules<'_> {
    type Error = Error;

    fn slot(&mut self, b: &mut GraphBuilder, name: &SlotName, x: NodeId) -> Result<NodeId> {
        match self.slots.iter().position(|slot| slot.name == *name) {
            Some(index) => grow(b, index, &self.slots[index], self.optimisers.module, x),
            None => Ok(x),
        }
    }
}

/// Adds the module of slot `index` after the node `host`.
fn grow(
    b: &mut GraphBuilder,
    index: usize,
    slot: &Slot,
    optimiser: Optimiser,
    host: NodeId,
) -> Result<NodeId> {
    let class = SlotClass::from_slot(slot);
    let (Some(module), false) = (&slot.module, class == SlotClass::Empty) else {
        return Ok(host);
    };
    let prefix = format!("slots.{}.", slot.name);
    b.group(slot.name.as_str(), optimiser);
    let input = match class {
        SlotClass::BlendedWithGradient { .. } => host,
        _ => b.detach(host),
    };
    let output = module.blueprint.add_to(b, &prefix, input)?;
    let mixed = match class {
        SlotClass::Empty => host,
        SlotClass::Straight { .. } => b.straight_through(host, output)?,
        SlotClass::Blended { mode, .. } | SlotClass::BlendedWithGradient { mode, .. } => {
            let gate = match mode {
                BlendMode::Gate => Some(gate(b, &prefix, input)?),
                BlendMode::Add | BlendMode::Multiply => None,
            };
            b.blend(mode, index, BlendOperands { host, module: output, input, gate })?
        }
    };
    b.resume_group(GroupId::HOST);
    Ok(mixed)
}

/// `sigmoid(linear₂(relu(linear₁(global_avg_pool(x)))))`, one value per sample: linear₁ has
/// `max(8, C/4)` outputs, linear₂ has one.
fn gate(b: &mut GraphBuilder, prefix: &str, x: NodeId) -> Result<NodeId> {
    let hidden = (b.dims(x).c / 4).max(8);
    let pooled = b.global_avg_pool(x);
    let first = b.linear(pooled, &format!("{prefix}gate.0"), hidden, true, None)?;
    let first = b.relu(first);
    let second = b.linear(first, &format!("{prefix}gate.2"), 1, true, None)?;
    Ok(b.sigmoid(second))
}

/// Size of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkSize {
    /// Trained parameters.
    pub parameters: u64,
    /// Multiply-accumulate operations per image, in evaluation.
    pub macs: u64,
}

impl NetworkSize {
    /// Upper bound of the host's size, unless another module germinates or a layer becomes wider:
    /// every module counts as fossilized, with the trained gate of [`Style::LinearGate`].
    pub(crate) fn largest(spec: &HostSpec, image: &TaskShape, slots: &[Slot]) -> Result<Self> {
        let mut slots = slots.to_vec();
        for slot in &mut slots {
            if let Some(module) = &mut slot.module {
                (slot.stage, module.style) = (Stage::Fossilized, Style::LinearGate);
            }
        }
        let graph = grown_graph(spec, image, &slots, &Optimisers::default())?;
        Ok(Self { parameters: graph.parameters(None) as u64, macs: graph.macs() })
    }
}

/// Trained parameters of a host and of its modules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterCounts {
    /// The bare host.
    pub host: usize,
    /// Parameters of module and gate per enabled slot; 0 for a slot without a computing module.
    pub modules: Vec<usize>,
}

impl ParameterCounts {
    /// Counts the parameters of a graph per group; groups of modules have the names of slots.
    pub(crate) fn from_graph(graph: &Graph, slots: &[Slot]) -> Self {
        let mut counts = Self { host: 0, modules: vec![0; slots.len()] };
        for param in &graph.params {
            let elements: usize = param.shape.iter().product();
            let group = &graph.groups[param.group.index()].name;
            match slots.iter().position(|slot| slot.name.as_str() == group) {
                Some(index) => counts.modules[index] += elements,
                None => counts.host += elements,
            }
        }
        counts
    }

    /// Parameters of all modules.
    pub fn grown(&self) -> usize {
        self.modules.iter().sum()
    }

    /// Parameters of host and modules.
    pub fn total(&self) -> usize {
        self.host + self.grown()
    }
}

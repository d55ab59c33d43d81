//! Builds the graph of a host that `meristem-nn` compiles.
//!
//! The graph depends on the topology alone: the host, and per slot its class, blueprint and blend
//! mode. Alpha's value is read from device memory, at the slot's index. One graph serves training
//! and evaluation: in evaluation the value of a module in training is the host's, so nothing reads
//! it and a plan may leave it out.
//!
//! Names are PyTorch's (U5): `blocks.{i}.conv.weight`, `blocks.{i}.bn.*`, `classifier.*`, and in
//! slot s `slots.{s}.layers.{i}.*` with i the position in the blueprint's list (layers without
//! parameters count too), `slots.{s}.mix`, and `slots.{s}.gate.{0,2}.*` as of a `Sequential(Linear,
//! ReLU, Linear)`.

use meristem_nn::graph::{
    BlendMode, ConvGeometry, Dims, Graph, GraphBuilder, GroupId, Init, NodeId, SgdConfig,
};

use crate::blueprint::{Blueprint, Join, Layer, group_norm_groups};
use crate::error::{BlueprintError, Result};
use crate::host::Host;
use crate::slot::Slot;
use crate::slot_name::SlotName;
use crate::spec::{HostSpec, ImageShape};
use crate::stage::Stage;

/// The host's optimiser and clip norm.
pub const HOST_SGD: SgdConfig =
    SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };

/// Each module's optimiser and clip norm: as the host's, without decay.
pub const MODULE_SGD: SgdConfig = SgdConfig { weight_decay: 0.0, ..HOST_SGD };

/// Contribution of a slot to the topology; two slots of equal class give equal graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotClass {
    /// Nothing (dormant, germinated, pruned, embargoed, resetting).
    Empty,
    /// A module on the host's value, detached, under a straight-through (training).
    Straight {
        /// Index of its blueprint.
        blueprint: usize,
    },
    /// A module on the host's value, detached, blended in (blending, holding).
    Blended {
        /// Index of its blueprint.
        blueprint: usize,
        /// Formula.
        mode: BlendMode,
    },
    /// A module blended in and trained with the host: its input is not detached (fossilized).
    Fossilized {
        /// Index of its blueprint.
        blueprint: usize,
        /// Formula.
        mode: BlendMode,
    },
}

impl SlotClass {
    pub(crate) fn of(slot: &Slot) -> Self {
        let Some(module) = &slot.module else {
            return SlotClass::Empty;
        };
        let (blueprint, mode) = (module.blueprint_index, module.style.blend_mode());
        match slot.stage {
            Stage::Training => SlotClass::Straight { blueprint },
            Stage::Blending | Stage::Holding => SlotClass::Blended { blueprint, mode },
            Stage::Fossilized => SlotClass::Fossilized { blueprint, mode },
            _ => SlotClass::Empty,
        }
    }
}

/// The part of a host that its graph depends on: hosts of one description and equal keys have equal
/// graphs. Use it to see whether an action changed the network, and as the key of a plan cache.
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
pub fn host_graph(spec: &HostSpec, image: &ImageShape, sgd: SgdConfig) -> Result<Graph> {
    spec.validate(image)?;
    build(spec, image, sgd, |_, _, x| Ok(x))
}

/// The graph of a host with its modules.
pub(crate) fn grown_graph(
    host: &Host,
    host_sgd: SgdConfig,
    module_sgd: SgdConfig,
) -> Result<Graph> {
    let mut graph = build(host.spec(), host.image(), host_sgd, |b, name, x| {
        match host.slots().iter().position(|slot| slot.name == name) {
            Some(index) => grow(b, (index, &host.slots()[index]), module_sgd, x),
            None => Ok(x),
        }
    })?;
    graph.alphas = host.slots().len();
    Ok(graph)
}

/// The host's layers; `slot` is called at each slot in forward order and returns the node to
/// continue from.
fn build(
    spec: &HostSpec,
    image: &ImageShape,
    sgd: SgdConfig,
    mut slot: impl FnMut(&mut GraphBuilder, SlotName, NodeId) -> Result<NodeId>,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(Dims { c: image.channels, h: image.height, w: image.width }, sgd);
    let mut x = b.input();
    for i in 0..spec.blocks {
        let geometry = ConvGeometry::same(spec.kernel);
        x = b.conv2d(x, &format!("blocks.{i}.conv"), spec.block_channels(i), geometry, false)?;
        x = b.batch_norm(x, &format!("blocks.{i}.bn"))?;
        x = b.relu(x);
        x = slot(&mut b, SlotName::before_pool(i), x)?;
        if i < spec.pools {
            x = b.max_pool2d(x, &format!("blocks.{i}.pool"), 2, 2)?;
        }
        x = slot(&mut b, SlotName::after_pool(i), x)?;
    }
    let pooled = b.global_avg_pool(x);
    let logits = b.linear(pooled, "classifier", image.classes, true, None)?;
    Ok(b.finish(logits)?)
}

fn grow(
    b: &mut GraphBuilder,
    (index, slot): (usize, &Slot),
    sgd: SgdConfig,
    host: NodeId,
) -> Result<NodeId> {
    let class = SlotClass::of(slot);
    let (Some(state), false) = (&slot.module, class == SlotClass::Empty) else {
        return Ok(host);
    };
    let prefix = format!("slots.{}.", slot.name);
    b.group(&slot.name.to_string(), sgd);
    let input = match class {
        SlotClass::Fossilized { .. } => host,
        _ => b.detach(host),
    };
    let output = module(b, &state.blueprint, &prefix, input)?;
    let mixed = match class {
        SlotClass::Empty => host,
        SlotClass::Straight { .. } => b.straight_through(host, output)?,
        SlotClass::Blended { mode, .. } | SlotClass::Fossilized { mode, .. } => {
            let gate = match mode {
                BlendMode::Gate => Some(gate(b, &prefix, input)?),
                BlendMode::Add | BlendMode::Multiply => None,
            };
            b.blend(mode, index, [host, output, input], gate)?
        }
    };
    b.resume_group(GroupId::HOST);
    Ok(mixed)
}

/// `sigmoid(FC1(ReLU(FC C→max(8, C/4)(gap x))))`, one value per sample.
fn gate(b: &mut GraphBuilder, prefix: &str, x: NodeId) -> Result<NodeId> {
    let hidden = (b.dims(x).c / 4).max(8);
    let pooled = b.global_avg_pool(x);
    let first = b.linear(pooled, &format!("{prefix}gate.0"), hidden, true, None)?;
    let first = b.relu(first);
    let second = b.linear(first, &format!("{prefix}gate.2"), 1, true, None)?;
    Ok(b.sigmoid(second))
}

/// The layers of a blueprint and its join; parameters go to the current group.
fn module(
    b: &mut GraphBuilder,
    blueprint: &Blueprint,
    prefix: &str,
    x: NodeId,
) -> Result<NodeId, BlueprintError> {
    let channels = b.dims(x).c;
    let shape =
        |problem: String| BlueprintError::Shape { name: blueprint.name.clone(), channels, problem };
    let mut y = x;
    for (i, layer) in blueprint.layers.iter().enumerate() {
        y = self::layer(b, layer, (&format!("{prefix}layers.{i}"), channels), y)
            .map_err(|problem| shape(format!("layer {i}: {problem}")))?;
    }
    let joined = match blueprint.join {
        Join::Residual => b.add(x, y),
        Join::TanhMix => b.tanh_mix(x, y, &format!("{prefix}mix")),
        Join::ChannelScale { factor } => b.scale_channels(x, y, factor),
    };
    joined.map_err(|error| shape(format!("join: {error}")))
}

fn layer(
    b: &mut GraphBuilder,
    layer: &Layer,
    (name, slot_channels): (&str, usize),
    x: NodeId,
) -> Result<NodeId, String> {
    let channels = b.dims(x).c;
    match *layer {
        Layer::Conv { out, kernel, depthwise } => {
            let out = out.of(slot_channels);
            if kernel.is_multiple_of(2) || kernel > 31 {
                return Err(format!("a kernel is odd and at most 31, got {kernel}"));
            }
            if depthwise && out != channels {
                return Err(format!(
                    "a depthwise convolution keeps its {channels} channels, got {out}"
                ));
            }
            let groups = if depthwise { channels } else { 1 };
            b.conv2d(x, name, out, ConvGeometry { groups, ..ConvGeometry::same(kernel) }, false)
        }
        Layer::GroupNorm { zero } => {
            b.group_norm(x, name, group_norm_groups(channels), if zero { 0.0 } else { 1.0 })
        }
        Layer::Relu => Ok(b.relu(x)),
        Layer::Sigmoid => Ok(b.sigmoid(x)),
        Layer::Tanh => Ok(b.tanh(x)),
        Layer::GlobalAvgPool => Ok(b.global_avg_pool(x)),
        Layer::Linear { out, bias, zero } => {
            b.linear(x, name, out.of(slot_channels), bias, zero.then_some(Init::Constant(0.0)))
        }
    }
    .map_err(|error| error.to_string())
}

/// A module on its own: its input is the graph's, its output the graph's output.
pub(crate) fn module_graph(blueprint: &Blueprint, dims: Dims) -> Result<Graph, BlueprintError> {
    let mut b = GraphBuilder::new(dims, MODULE_SGD);
    let input = b.input();
    let output = module(&mut b, blueprint, "", input)?;
    Ok(b.finish_at(output))
}

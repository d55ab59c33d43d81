//! Blueprints: the modules that can grow in a slot, as data.
//!
//! A new module is one [`Blueprint`] value for [`crate::BlueprintSet::with`]. Its graph, weight
//! names, parameter count and description in a weights file follow from the value.

mod error;
mod layer;

use meristem_nn::graph::{Dims, Graph, GraphBuilder, NodeId, NodeOp, Optimiser};
use serde::{Deserialize, Serialize};

pub use self::error::BlueprintError;
pub use self::layer::{BlueprintLayer, Channels, group_norm_groups};
use crate::optimisers::Optimisers;

/// Formula for the module's output from its input x and the layers' output f(x).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Join {
    /// `x + f(x)`.
    Residual,
    /// `x + tanh(s)·(f(x) − x)` with a trained scalar s, 0 at germination.
    TanhMix,
    /// `factor · x · f(x)`, where f(x) has one value per channel.
    ChannelScale {
        /// Constant factor.
        factor: f32,
    },
}

/// A module that can grow: layers, and the formula that joins them to the host. A module preserves
/// the shape of its input. At germination it is the identity, with a non-zero gradient
/// ([`Blueprint::check`]).
///
/// ```
/// use meristem_grow::{Blueprint, BlueprintSet, Channels, Join, BlueprintLayer};
/// use meristem_nn::graph::Dims;
///
/// # fn main() -> Result<(), meristem_grow::BlueprintError> {
/// let wide = Blueprint::new(
///     "wide_light",
///     vec![
///         BlueprintLayer::Conv { out: Channels::Times { by: 2 }, kernel: 1, depthwise: false },
///         BlueprintLayer::Relu,
///         BlueprintLayer::Conv { out: Channels::Same, kernel: 1, depthwise: false },
///         BlueprintLayer::GroupNorm { zero: true }, // the identity at germination
///     ],
///     Join::Residual,
/// );
/// let set = BlueprintSet::standard().with(wide)?;
/// let slot = Dims { c: 8, h: 32, w: 32 };
/// assert_eq!(set.get(7).map(|own| own.parameters(slot)), Some(Ok(8 * 16 + 16 * 8 + 16)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blueprint {
    /// Name, of the characters `a-z`, `0-9` and `_`.
    pub name: String,
    /// Layers in order.
    pub layers: Vec<BlueprintLayer>,
    /// Formula that joins the layers to the host.
    pub join: Join,
}

impl Blueprint {
    /// A blueprint with this name; unchecked.
    pub fn new(name: &str, layers: Vec<BlueprintLayer>, join: Join) -> Self {
        Self { name: name.into(), layers, join }
    }

    /// Checks the name, the rules for the identity at germination, and that the layers fit together
    /// at 8 and at 32 channels, of images or of vectors.
    ///
    /// The rule for each join:
    /// - `Residual` ends in a `GroupNorm` or a `Linear` that starts at zero, and after it at most
    ///   dropout.
    /// - `ChannelScale` ends in a zero `Linear` and a `Sigmoid`, with factor 2 (2·σ(0) = 1).
    /// - `TanhMix` has at least one layer with parameters.
    ///
    /// No other layer starts at zero: the layers before it would get no gradient.
    ///
    /// # Errors
    /// [`BlueprintError::BadName`], [`BlueprintError::Birth`] or [`BlueprintError::Shape`].
    pub fn check(&self) -> Result<(), BlueprintError> {
        let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        if self.name.is_empty() || !self.name.bytes().all(is_plain) {
            return Err(BlueprintError::BadName { name: self.name.clone() });
        }
        // Number of last layers that make the module the identity.
        let end = match self.join {
            Join::Residual => {
                // Dropout keeps zeros.
                let drops =
                    |layer: &&BlueprintLayer| matches!(layer, BlueprintLayer::Dropout { .. });
                let dropping = self.layers.iter().rev().take_while(drops).count();
                let ends = matches!(
                    self.layers.iter().rev().nth(dropping),
                    Some(
                        BlueprintLayer::GroupNorm { zero: true }
                            | BlueprintLayer::Linear { zero: true, .. }
                    )
                );
                let rule = "a residual blueprint ends in `GroupNorm { zero: true }`, or for \
                            vectors in `Linear { zero: true, .. }`";
                self.require(ends, rule)?;
                dropping + 1
            }
            Join::ChannelScale { factor } => {
                let tail = self.layers.len().saturating_sub(2);
                let ends = matches!(
                    self.layers[tail..],
                    [BlueprintLayer::Linear { zero: true, .. }, BlueprintLayer::Sigmoid]
                );
                let rule =
                    "a channel scale ends in `Linear { zero: true, .. }`, `Sigmoid`, with factor 2";
                self.require(ends && factor == 2.0, rule)?;
                2
            }
            Join::TanhMix => {
                let trains = |layer: &BlueprintLayer| {
                    matches!(
                        layer,
                        BlueprintLayer::Conv { .. }
                            | BlueprintLayer::GroupNorm { .. }
                            | BlueprintLayer::Linear { .. }
                    )
                };
                let rule =
                    "a mix needs a layer with parameters, because a ReLU alone leaves x unchanged";
                self.require(self.layers.iter().any(trains), rule)?;
                0
            }
        };
        let before_end = &self.layers[..self.layers.len() - end];
        let zero = |layer: &BlueprintLayer| {
            matches!(
                layer,
                BlueprintLayer::GroupNorm { zero: true }
                    | BlueprintLayer::Linear { zero: true, .. }
            )
        };
        let rule = "only the layer that makes it the identity may start at zero, because any \
                    other would never learn";
        self.require(!before_end.iter().any(zero), rule)?;
        let of = |c| self.parameters(Dims { c, h: 4, w: 4 });
        [8, 32].into_iter().try_for_each(|channels| of(channels).map(|_| ()))
    }

    fn require(&self, holds: bool, rule: &str) -> Result<(), BlueprintError> {
        if holds {
            return Ok(());
        }
        Err(BlueprintError::Birth { name: self.name.clone(), problem: rule.into() })
    }

    /// Trained parameters of the module in a slot of this shape, without the trained gate of
    /// `Style::LinearGate`. If the module does not fit the shape, the parameters are counted for an
    /// image, or else a vector, with the same number of channels.
    ///
    /// # Errors
    /// [`BlueprintError::Shape`] if the layers fit together neither for images nor for vectors.
    pub fn parameters(&self, slot: Dims) -> Result<usize, BlueprintError> {
        // Counted on the graph, so that no second table can disagree.
        let graph = |dims| self.graph(dims, Optimisers::default().module);
        let square = |side| graph(Dims { h: side, w: side, ..slot });
        let elsewhere = |_| square(4).or_else(|error| square(1).map_err(|_| error));
        Ok(graph(slot).or_else(elsewhere)?.parameters(None))
    }

    /// Whether the module fits a slot of this shape, and can learn there. It cannot learn if a
    /// group of a group norm has only one value, because the norm always makes such a value 0.
    pub(crate) fn fits(&self, slot: Dims) -> bool {
        let Ok(graph) = self.graph(slot, Optimisers::default().module) else { return false };
        graph.nodes.iter().all(|node| match node.op {
            NodeOp::GroupNorm { groups, .. } => node.dims.numel() > groups,
            _ => true,
        })
    }

    /// The graph of the module alone, for instance to count its parameters. Input and output have
    /// the shape `dims`; the weights are named `layers.{i}.…` and `mix`.
    ///
    /// # Errors
    /// [`BlueprintError::Shape`] if the layers do not fit together.
    pub fn graph(
        &self,
        dims: Dims,
        optimiser: impl Into<Optimiser>,
    ) -> Result<Graph, BlueprintError> {
        let mut b = GraphBuilder::new(dims, optimiser);
        let input = b.input();
        let output = self.add_to(&mut b, "", input)?;
        Ok(b.finish_at(output))
    }

    /// Adds the module after `x` to the current group of parameters: the layers, named
    /// `{prefix}layers.{i}.…`, and the join.
    pub(crate) fn add_to(
        &self,
        b: &mut GraphBuilder,
        prefix: &str,
        x: NodeId,
    ) -> Result<NodeId, BlueprintError> {
        let channels = b.dims(x).c;
        let shape =
            |problem: String| BlueprintError::Shape { name: self.name.clone(), channels, problem };
        let mut y = x;
        for (i, layer) in self.layers.iter().enumerate() {
            y = layer
                .add_to(b, &format!("{prefix}layers.{i}"), channels, y)
                .map_err(|problem| shape(format!("layer {i}: {problem}")))?;
        }
        let joined = match self.join {
            Join::Residual => b.add(x, y),
            Join::TanhMix => b.tanh_mix(x, y, &format!("{prefix}mix")),
            Join::ChannelScale { factor } => b.scale_channels(x, y, factor),
        };
        joined.map_err(|error| shape(format!("join: {error}")))
    }
}

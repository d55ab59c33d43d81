//! Blueprints: the modules that can grow in a slot, as data.
//!
//! To add one, write one [`Blueprint`] value and pass it to [`BlueprintSet::with`]; nothing else
//! changes. The graph, the names of its weights, its parameter count and its description in a
//! weights file all follow from the value.

use std::sync::Arc;

use meristem_nn::graph::{Dims, Graph};
use serde::{Deserialize, Serialize};

use crate::error::BlueprintError;
use crate::suggest::nearest;

/// Output channels of a layer, from the channels of the slot (not of the layer before).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Channels {
    /// The slot's number of channels.
    Same,
    /// `max(channels / by, at_least, 1)`.
    Divided {
        /// Divisor (0 is taken as 1).
        by: usize,
        /// The least number of channels.
        at_least: usize,
    },
    /// `channels · by`.
    Times {
        /// Factor.
        by: usize,
    },
}

impl Channels {
    /// Number of output channels in a slot of `channels` channels.
    pub fn of(self, channels: usize) -> usize {
        match self {
            Channels::Same => channels,
            Channels::Divided { by, at_least } => (channels / by.max(1)).max(at_least).max(1),
            Channels::Times { by } => channels.saturating_mul(by),
        }
    }
}

/// One layer of a module. Its parameters are named by its position in [`Blueprint::layers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Layer {
    /// Convolution without bias, stride 1, padding that keeps the image's size.
    Conv {
        /// Output channels.
        out: Channels,
        /// Kernel size, odd.
        kernel: usize,
        /// One filter per channel; `out` must then equal the number of input channels.
        depthwise: bool,
    },
    /// Group norm with [`group_norm_groups`] groups.
    GroupNorm {
        /// Whether its scale starts at 0 rather than 1.
        zero: bool,
    },
    /// `max(x, 0)`.
    Relu,
    /// `1/(1 + e^−x)`.
    Sigmoid,
    /// `tanh x`.
    Tanh,
    /// Mean over the image; the layers after it see a vector.
    GlobalAvgPool,
    /// Linear layer over a vector.
    Linear {
        /// Output features.
        out: Channels,
        /// Whether it has a bias.
        bias: bool,
        /// Whether weight and bias start at 0.
        zero: bool,
    },
}

/// How the layers' output f(x) becomes the module's output.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Join {
    /// `x + f(x)`.
    Residual,
    /// `x + tanh(s)·(f(x) − x)` with a trained scalar s, 0 at birth.
    TanhMix,
    /// `factor · x · f(x)`, f(x) one value per channel.
    ChannelScale {
        /// Constant factor.
        factor: f32,
    },
}

/// A module that can grow: layers, and how they join the host. It keeps the shape of its input, and
/// at birth it is the identity with a gradient that is not zero (checked by [`Blueprint::check`]).
///
/// ```
/// use meristem_grow::{Blueprint, BlueprintSet, Channels, Join, Layer};
///
/// # fn main() -> Result<(), meristem_grow::BlueprintError> {
/// let wide = Blueprint::new(
///     "wide_light",
///     vec![
///         Layer::Conv { out: Channels::Times { by: 2 }, kernel: 1, depthwise: false },
///         Layer::Relu,
///         Layer::Conv { out: Channels::Same, kernel: 1, depthwise: false },
///         Layer::GroupNorm { zero: true }, // the identity at birth
///     ],
///     Join::Residual,
/// );
/// let set = BlueprintSet::standard().with(wide)?;
/// assert_eq!(set.get(7).map(|own| own.parameters(8)), Some(Ok(8 * 16 + 16 * 8 + 16)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blueprint {
    /// Name: `a-z`, `0-9` and `_`.
    pub name: String,
    /// Layers in order.
    pub layers: Vec<Layer>,
    /// How the layers' output joins the host.
    pub join: Join,
}

impl Blueprint {
    /// A blueprint with this name; not checked yet.
    pub fn new(name: &str, layers: Vec<Layer>, join: Join) -> Self {
        Self { name: name.into(), layers, join }
    }

    /// Checks the name, that the module is the identity at birth, that it can learn from there, and
    /// that its layers fit together at 8 and at 32 channels.
    ///
    /// The rule for each join:
    /// - `Residual` ends in a `GroupNorm` that starts at zero.
    /// - `ChannelScale` ends in a zero `Linear` and a `Sigmoid`, with factor 2 (2·σ(0) = 1).
    /// - `TanhMix` needs nothing at its end, but at least one layer with parameters.
    ///
    /// No other layer starts at zero: the layers behind it would have no gradient.
    ///
    /// # Errors
    /// [`BlueprintError::BadName`], [`BlueprintError::Birth`] or [`BlueprintError::Shape`].
    pub fn check(&self) -> Result<(), BlueprintError> {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        if self.name.is_empty() || !self.name.bytes().all(plain) {
            return Err(BlueprintError::BadName { name: self.name.clone() });
        }
        let end = match self.join {
            Join::Residual => {
                let ends = matches!(self.layers.last(), Some(Layer::GroupNorm { zero: true }));
                self.birth(ends, "a residual blueprint ends in `GroupNorm { zero: true }`")?;
                1
            }
            Join::ChannelScale { factor } => {
                let tail = self.layers.len().saturating_sub(2);
                let ends = matches!(
                    self.layers[tail..],
                    [Layer::Linear { zero: true, .. }, Layer::Sigmoid]
                );
                let rule =
                    "a channel scale ends in `Linear { zero: true, .. }`, `Sigmoid`, with factor 2";
                self.birth(ends && factor == 2.0, rule)?;
                2
            }
            Join::TanhMix => {
                let trains = |layer: &Layer| {
                    matches!(
                        layer,
                        Layer::Conv { .. } | Layer::GroupNorm { .. } | Layer::Linear { .. }
                    )
                };
                let rule =
                    "a mix needs a layer with parameters: a ReLU alone leaves x, which is no mix";
                self.birth(self.layers.iter().any(trains), rule)?;
                0
            }
        };
        let before_end = &self.layers[..self.layers.len() - end];
        let zero = |layer: &Layer| {
            matches!(layer, Layer::GroupNorm { zero: true } | Layer::Linear { zero: true, .. })
        };
        let rule = "only the layer that makes it the identity may start at zero, any other is \
         dead for ever";
        self.birth(!before_end.iter().any(zero), rule)?;
        [8, 32].into_iter().try_for_each(|channels| self.parameters(channels).map(|_| ()))
    }

    fn birth(&self, holds: bool, rule: &str) -> Result<(), BlueprintError> {
        match holds {
            true => Ok(()),
            false => Err(BlueprintError::Birth { name: self.name.clone(), problem: rule.into() }),
        }
    }

    /// Trained parameters of the module in a slot of `channels` channels, without a gate.
    ///
    /// # Errors
    /// [`BlueprintError::Shape`] if the layers do not fit together.
    pub fn parameters(&self, channels: usize) -> Result<usize, BlueprintError> {
        // Counted on the graph, so that there is no second table to keep in step.
        Ok(self.graph(Dims { c: channels, h: 4, w: 4 })?.parameters(None))
    }

    /// The module as a graph of its own, for tests and benchmarks of a blueprint. Input and output
    /// have the shape `dims`; the weights are named `layers.{i}.…` and `mix`.
    ///
    /// # Errors
    /// [`BlueprintError::Shape`] if the layers do not fit together.
    pub fn graph(&self, dims: Dims) -> Result<Graph, BlueprintError> {
        crate::build::module_graph(self, dims)
    }
}

/// Groups of a group norm over `channels` channels: the largest of 32, 16, 8, 4, 2, 1 that divides
/// them and leaves at least 16 a group, else the largest of that list that divides them.
pub fn group_norm_groups(channels: usize) -> usize {
    let dividing = |g: &usize| channels.is_multiple_of(*g);
    let groups = [32, 16, 8, 4, 2, 1];
    let wide = groups.into_iter().find(|g| dividing(g) && channels / g >= 16);
    wide.or_else(|| groups.into_iter().find(dividing)).unwrap_or(1)
}

/// The blueprints available to a run, in the index order of the action head. Names are unique.
#[derive(Clone, Debug, PartialEq)]
pub struct BlueprintSet {
    blueprints: Vec<Arc<Blueprint>>,
}

impl BlueprintSet {
    /// An empty set.
    pub fn empty() -> Self {
        Self { blueprints: vec![] }
    }

    /// The seven standard blueprints of `docs/growth.md`: norm, attention, depthwise, bottleneck,
    /// conv_small, conv_light, conv_heavy.
    pub fn standard() -> Self {
        Self { blueprints: standard().into_iter().map(Arc::new).collect() }
    }

    /// This set with one more blueprint at its end.
    ///
    /// # Errors
    /// [`BlueprintError::Duplicate`], or any error of [`Blueprint::check`].
    pub fn with(mut self, blueprint: Blueprint) -> Result<Self, BlueprintError> {
        blueprint.check()?;
        if self.index_of(&blueprint.name).is_some() {
            return Err(BlueprintError::Duplicate { name: blueprint.name });
        }
        self.blueprints.push(Arc::new(blueprint));
        Ok(self)
    }

    /// Number of blueprints.
    pub fn len(&self) -> usize {
        self.blueprints.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.blueprints.is_empty()
    }

    /// The blueprints in index order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Blueprint>> {
        self.blueprints.iter()
    }

    /// The blueprint with this index.
    pub fn get(&self, index: usize) -> Option<&Arc<Blueprint>> {
        self.blueprints.get(index)
    }

    /// The index of the blueprint with this name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.blueprints.iter().position(|blueprint| blueprint.name == name)
    }

    /// The index of the blueprint with this name, or an error that names the nearest one.
    ///
    /// # Errors
    /// [`BlueprintError::Unknown`].
    pub fn find(&self, name: &str) -> Result<usize, BlueprintError> {
        self.index_of(name).ok_or_else(|| BlueprintError::Unknown {
            name: name.into(),
            nearest: nearest(name, self.iter().map(|b| b.name.as_str())).map(Into::into),
        })
    }
}

impl Default for BlueprintSet {
    fn default() -> Self {
        Self::standard()
    }
}

fn standard() -> [Blueprint; 7] {
    use Channels::{Divided, Same};
    use Layer::{GlobalAvgPool, GroupNorm, Linear, Relu, Sigmoid};
    let conv = |kernel| Layer::Conv { out: Same, kernel, depthwise: false };
    let middle = Divided { by: 4, at_least: 8 };
    let (one, zero) = (GroupNorm { zero: false }, GroupNorm { zero: true });
    [
        Blueprint::new("norm", vec![one], Join::TanhMix),
        Blueprint::new(
            "attention",
            vec![
                GlobalAvgPool,
                Linear { out: Divided { by: 4, at_least: 1 }, bias: false, zero: false },
                Relu,
                Linear { out: Same, bias: true, zero: true },
                Sigmoid,
            ],
            Join::ChannelScale { factor: 2.0 },
        ),
        Blueprint::new(
            "depthwise",
            vec![Layer::Conv { out: Same, kernel: 3, depthwise: true }, conv(1), zero],
            Join::Residual,
        ),
        Blueprint::new(
            "bottleneck",
            vec![
                Layer::Conv { out: middle, kernel: 1, depthwise: false },
                Relu,
                Layer::Conv { out: middle, kernel: 3, depthwise: false },
                Relu,
                conv(1),
                zero,
            ],
            Join::Residual,
        ),
        Blueprint::new("conv_small", vec![conv(1), zero], Join::Residual),
        Blueprint::new("conv_light", vec![conv(3), zero], Join::Residual),
        Blueprint::new("conv_heavy", vec![conv(3), one, Relu, conv(3), zero], Join::Residual),
    ]
}

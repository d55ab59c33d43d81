//! Layers of a module, as data, and their nodes in a graph.

use meristem_nn::graph::{ConvGeometry, Dims, GraphBuilder, Init, NodeId};
use serde::{Deserialize, Serialize};

/// Output channels of a layer, relative to the channels of the slot (not of the previous layer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Channels {
    /// The slot's number of channels.
    Same,
    /// `max(channels / by, at_least, 1)`.
    Divided {
        /// Divisor; 0 counts as 1.
        by: usize,
        /// Smallest number of channels.
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
    pub fn count(self, channels: usize) -> usize {
        match self {
            Channels::Same => channels,
            Channels::Divided { by, at_least } => (channels / by.max(1)).max(at_least).max(1),
            Channels::Times { by } => channels.saturating_mul(by),
        }
    }
}

/// Maximum number of output channels of a layer.
const CHANNELS_MAX: usize = 65_536;

/// One layer of a module. Its position in [`Blueprint::layers`](super::Blueprint::layers) names its
/// parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum BlueprintLayer {
    /// Convolution without bias, with stride 1 and padding that preserves the image size. In a
    /// signal, which has one row, the kernel has one row.
    Conv {
        /// Output channels.
        out: Channels,
        /// Kernel size, odd: rows and columns.
        kernel: usize,
        /// One filter per channel; `out` must then equal the number of input channels.
        depthwise: bool,
    },
    /// Group norm with [`group_norm_groups`] groups.
    GroupNorm {
        /// Whether the scale starts at 0 instead of 1.
        zero: bool,
    },
    /// `max(x, 0)`.
    Relu,
    /// `1/(1 + e^−x)`.
    Sigmoid,
    /// `tanh x`.
    Tanh,
    /// `x` above 0, `slope · x` elsewhere.
    LeakyRelu {
        /// Slope below 0: finite, not negative.
        #[serde(default = "leaky_relu_slope")]
        slope: f32,
    },
    /// `x` above 0, `eˣ − 1` elsewhere.
    Elu,
    /// `½·x·(1 + erf(x/√2))`.
    Gelu,
    /// `½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
    GeluTanh,
    /// `x/(1 + e^−x)`.
    Silu,
    /// `ln(1 + eˣ)`.
    Softplus,
    /// `x·min(max(x + 3, 0), 6)/6`.
    HardSwish,
    /// In training each element becomes 0 with probability `p`, or else is divided by `1 − p`; the
    /// identity in evaluation.
    Dropout {
        /// Probability, from 0 to below 1.
        p: f32,
    },
    /// Mean over the image; later layers get a vector.
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

/// PyTorch's default slope of a leaky ReLU.
fn leaky_relu_slope() -> f32 {
    0.01
}

impl BlueprintLayer {
    /// Adds the layer after `x` to the current group of parameters, in a slot of `slot_channels`
    /// channels. The error describes why the layer does not fit.
    pub(super) fn add_to(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        slot_channels: usize,
        x: NodeId,
    ) -> Result<NodeId, String> {
        let Dims { c: channels, h, w } = b.dims(x);
        let output = |out: Channels| match out.count(slot_channels) {
            out @ 0..=CHANNELS_MAX => Ok(out),
            out => Err(format!("a layer has at most {CHANNELS_MAX} channels, got {out}")),
        };
        match *self {
            BlueprintLayer::Conv { out, kernel, depthwise } => {
                let out = output(out)?;
                if kernel.is_multiple_of(2) || kernel > 31 {
                    return Err(format!("a kernel is odd and at most 31, got {kernel}"));
                }
                if depthwise && out != channels {
                    return Err(format!(
                        "a depthwise convolution keeps its {channels} channels, got {out}"
                    ));
                }
                // In a signal further rows of the kernel would only cover padding, at the cost of
                // parameters and operations.
                let size = if h == 1 && w > 1 { [1, kernel] } else { [kernel; 2] };
                let geometry = ConvGeometry::new(size)
                    .padding(size.map(|k| k / 2))
                    .groups(if depthwise { channels } else { 1 });
                b.conv2d(x, name, out, geometry, false)
            }
            BlueprintLayer::GroupNorm { zero } => {
                b.group_norm(x, name, group_norm_groups(channels), if zero { 0.0 } else { 1.0 })
            }
            BlueprintLayer::Relu => Ok(b.relu(x)),
            BlueprintLayer::Sigmoid => Ok(b.sigmoid(x)),
            BlueprintLayer::Tanh => Ok(b.tanh(x)),
            BlueprintLayer::LeakyRelu { slope } => b.leaky_relu(x, slope),
            BlueprintLayer::Elu => Ok(b.elu(x)),
            BlueprintLayer::Gelu => Ok(b.gelu(x)),
            BlueprintLayer::GeluTanh => Ok(b.gelu_tanh(x)),
            BlueprintLayer::Silu => Ok(b.silu(x)),
            BlueprintLayer::Softplus => Ok(b.softplus(x)),
            BlueprintLayer::HardSwish => Ok(b.hard_swish(x)),
            BlueprintLayer::Dropout { p } => b.dropout(x, name, p),
            BlueprintLayer::GlobalAvgPool => Ok(b.global_avg_pool(x)),
            BlueprintLayer::Linear { out, bias, zero } => {
                b.linear(x, name, output(out)?, bias, zero.then_some(Init::Constant(0.0)))
            }
        }
        .map_err(|error| error.to_string())
    }
}

/// Number of groups of a group norm over `channels` channels: the largest divisor among 32, 16, 8,
/// 4, 2, 1 that leaves at least 16 channels per group, else the largest divisor among them.
pub fn group_norm_groups(channels: usize) -> usize {
    let dividing = |g: &usize| channels.is_multiple_of(*g);
    let groups = [32, 16, 8, 4, 2, 1];
    let wide = groups.into_iter().find(|g| dividing(g) && channels / g >= 16);
    wide.or_else(|| groups.into_iter().find(dividing)).unwrap_or(1)
}

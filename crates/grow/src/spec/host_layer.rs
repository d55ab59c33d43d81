//! Layers of a host, as data.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::layer_values::{BranchJoin, DropRate, Features, Slope};
use super::per_axis::{Padding, PerAxis};
use super::slot_name::SlotName;

/// One layer of a host; its output is the input of the next layer. As in PyTorch, `name` is the
/// prefix of the layer's tensor names. An empty name stands for the position in the description,
/// such as `layers.3`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HostLayer {
    /// Convolution (cross-correlation, as in PyTorch).
    Conv2d {
        /// Prefix of the tensor names.
        #[serde(default)]
        name: String,
        /// Output channels.
        out: usize,
        /// Kernel size.
        kernel: PerAxis,
        /// Distance of neighbouring windows.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        stride: PerAxis,
        /// Zeros around the image.
        #[serde(default, skip_serializing_if = "is_same")]
        padding: Padding,
        /// Distance of neighbouring elements of a window.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        dilation: PerAxis,
        /// Number of groups of channels that are convolved separately; equal to the number of
        /// channels for a depthwise convolution.
        #[serde(default = "number_one", skip_serializing_if = "is_number_one")]
        groups: usize,
        /// Whether it has a bias.
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
    },
    /// Convolution of a signal, with weights of PyTorch's `Conv1d`.
    Conv1d {
        /// Prefix of the tensor names.
        #[serde(default)]
        name: String,
        /// Output channels.
        out: usize,
        /// Points of a window.
        kernel: usize,
        /// Distance of neighbouring windows.
        #[serde(default = "number_one", skip_serializing_if = "is_number_one")]
        stride: usize,
        /// Zeros before and after the signal.
        #[serde(default, skip_serializing_if = "is_same")]
        padding: Padding<usize>,
        /// Distance of neighbouring points of a window.
        #[serde(default = "number_one", skip_serializing_if = "is_number_one")]
        dilation: usize,
        /// Number of groups of channels that are convolved separately, as in [`HostLayer::Conv2d`].
        #[serde(default = "number_one", skip_serializing_if = "is_number_one")]
        groups: usize,
        /// Whether it has a bias.
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
    },
    /// Batch norm.
    BatchNorm {
        /// Prefix of the tensor names.
        #[serde(default)]
        name: String,
    },
    /// Group norm.
    GroupNorm {
        /// Prefix of the tensor names.
        #[serde(default)]
        name: String,
        /// Groups of channels.
        groups: usize,
    },
    /// Layer norm over the channels of each pixel, or the features of a vector.
    LayerNorm {
        /// Prefix of the tensor names.
        #[serde(default)]
        name: String,
    },
    /// RMS norm over the channels of each pixel, or the features of a vector.
    RmsNorm {
        /// Prefix of the tensor names.
        #[serde(default)]
        name: String,
    },
    /// `max(x, 0)`.
    Relu,
    /// `1/(1 + e^−x)`.
    Sigmoid,
    /// `tanh x`.
    Tanh,
    /// `x` above 0, `slope · x` elsewhere.
    LeakyRelu {
        /// Slope below 0.
        #[serde(default)]
        slope: Slope,
    },
    /// `x` above 0, `eˣ − 1` elsewhere.
    Elu,
    /// `½·x·(1 + erf(x/√2))`.
    Gelu,
    /// The approximation of [`HostLayer::Gelu`] by tanh.
    GeluTanh,
    /// `x/(1 + e^−x)`.
    Silu,
    /// `ln(1 + eˣ)`.
    Softplus,
    /// `x·min(max(x + 3, 0), 6)/6`.
    HardSwish,
    /// In training each element becomes 0 with probability `p`, or else is divided by `1 − p`; the
    /// identity in evaluation (Srivastava et al. 2014, "Dropout").
    Dropout {
        /// Name, unique in the host; the draws depend on it.
        #[serde(default)]
        name: String,
        /// Probability, from 0 to below 1.
        p: DropRate,
    },
    /// Maximum of each window; padding never wins.
    MaxPool2d {
        /// Name for errors.
        #[serde(default)]
        name: String,
        /// Rows and columns of a window.
        kernel: PerAxis,
        /// Distance of neighbouring windows; `None` for windows without overlap.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<PerAxis>,
        /// Rows and columns around the image, at most half a window.
        #[serde(default = "zero", skip_serializing_if = "is_zero")]
        padding: PerAxis,
    },
    /// Mean of each window; padding counts as zeros.
    AvgPool2d {
        /// Name for errors.
        #[serde(default)]
        name: String,
        /// Rows and columns of a window.
        kernel: PerAxis,
        /// Distance of neighbouring windows; `None` for windows without overlap.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<PerAxis>,
        /// Rows and columns of zeros around the image, at most half a window.
        #[serde(default = "zero", skip_serializing_if = "is_zero")]
        padding: PerAxis,
    },
    /// Maximum of each window of a signal; padding never wins.
    MaxPool1d {
        /// Name for errors.
        #[serde(default)]
        name: String,
        /// Points of a window.
        kernel: usize,
        /// Distance of neighbouring windows; `None` for windows without overlap.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<usize>,
        /// Points before and after the signal, at most half a window.
        #[serde(default, skip_serializing_if = "is_number_zero")]
        padding: usize,
    },
    /// Mean of each window of a signal; padding counts as zeros.
    AvgPool1d {
        /// Name for errors.
        #[serde(default)]
        name: String,
        /// Points of a window.
        kernel: usize,
        /// Distance of neighbouring windows; `None` for windows without overlap.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<usize>,
        /// Points before and after the signal, at most half a window.
        #[serde(default, skip_serializing_if = "is_number_zero")]
        padding: usize,
    },
    /// Place for a module that preserves the shape; the identity without a module.
    Slot {
        /// Name, unique in the host.
        name: SlotName,
    },
    /// Mean over the image; later layers get a vector.
    GlobalAvgPool,
    /// Maximum over the image; later layers get a vector.
    GlobalMaxPool,
    /// The image as a vector, channel by channel, each row by row, as in PyTorch.
    Flatten,
    /// Linear layer over a vector.
    Linear {
        /// Prefix of the tensor names.
        #[serde(default)]
        name: String,
        /// Output features.
        out: Features,
        /// Whether it has a bias.
        #[serde(default = "yes", skip_serializing_if = "is_true")]
        bias: bool,
    },
    /// `body(x) + shortcut(x)` (He et al. 2015, "Deep Residual Learning").
    Residual {
        /// Prefix of the default names of its layers.
        #[serde(default)]
        name: String,
        /// Layers of the residual branch.
        body: Vec<HostLayer>,
        /// Layers of the shortcut; none for the identity.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        shortcut: Vec<HostLayer>,
    },
    /// Branches that each get the input, joined to one value.
    Branches {
        /// Prefix of the default names of its layers.
        #[serde(default)]
        name: String,
        /// Formula that joins the branches.
        join: BranchJoin,
        /// Layers of each branch; a branch without layers is the identity.
        branches: Vec<Vec<HostLayer>>,
    },
    /// Saves its input under a name for a later [`HostLayer::Join`] or [`HostLayer::Load`]; its
    /// output is its input.
    Save {
        /// Name, unique in the host.
        name: String,
    },
    /// A value that was saved before it, in place of the input.
    Load {
        /// Name of the value.
        name: String,
    },
    /// The input joined with values that were saved before it, in this order.
    Join {
        /// Formula that joins them.
        join: BranchJoin,
        /// Names of the values.
        from: Vec<String>,
    },
}

fn one() -> PerAxis {
    PerAxis::both(1)
}

fn is_one(size: &PerAxis) -> bool {
    *size == one()
}

fn zero() -> PerAxis {
    PerAxis::both(0)
}

fn is_zero(size: &PerAxis) -> bool {
    *size == zero()
}

fn number_one() -> usize {
    1
}

fn is_number_one(number: &usize) -> bool {
    *number == 1
}

fn is_number_zero(number: &usize) -> bool {
    *number == 0
}

fn is_same<S>(padding: &Padding<S>) -> bool {
    matches!(padding, Padding::Same)
}

fn yes() -> bool {
    true
}

fn is_true(set: &bool) -> bool {
    *set
}

fn is_false(set: &bool) -> bool {
    !set
}

impl HostLayer {
    /// A convolution with stride 1 and padding that preserves the image size, without bias.
    pub fn conv2d(name: impl Into<String>, out: usize, kernel: impl Into<PerAxis>) -> Self {
        HostLayer::Conv2d {
            name: name.into(),
            out,
            kernel: kernel.into(),
            stride: one(),
            padding: Padding::Same,
            dilation: one(),
            groups: 1,
            bias: false,
        }
    }

    /// Dropout with probability `p`.
    pub fn dropout(name: impl Into<String>, p: f32) -> Self {
        HostLayer::Dropout { name: name.into(), p: DropRate(p) }
    }

    /// Name of the slot; `None` for other layers.
    pub fn slot(&self) -> Option<&SlotName> {
        match self {
            HostLayer::Slot { name } => Some(name),
            _ => None,
        }
    }

    /// Prefix of the tensor names; `None` for a layer without tensors.
    pub fn tensors(&self) -> Option<&str> {
        match self {
            HostLayer::Conv2d { name, .. }
            | HostLayer::Conv1d { name, .. }
            | HostLayer::BatchNorm { name }
            | HostLayer::GroupNorm { name, .. }
            | HostLayer::LayerNorm { name }
            | HostLayer::RmsNorm { name }
            | HostLayer::Linear { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Name of the layer or slot; `None` for a layer without one.
    pub fn name(&self) -> Option<&str> {
        match self {
            HostLayer::Dropout { name, .. }
            | HostLayer::MaxPool2d { name, .. }
            | HostLayer::AvgPool2d { name, .. }
            | HostLayer::MaxPool1d { name, .. }
            | HostLayer::AvgPool1d { name, .. }
            | HostLayer::Residual { name, .. }
            | HostLayer::Branches { name, .. }
            | HostLayer::Save { name } => Some(name),
            HostLayer::Slot { name } => Some(name.as_str()),
            layer => layer.tensors(),
        }
    }

    /// The name, to be filled in; `None` for slots, saved values, and layers without a name.
    pub(super) fn name_mut(&mut self) -> Option<&mut String> {
        match self {
            HostLayer::Conv2d { name, .. }
            | HostLayer::Conv1d { name, .. }
            | HostLayer::BatchNorm { name }
            | HostLayer::GroupNorm { name, .. }
            | HostLayer::LayerNorm { name }
            | HostLayer::RmsNorm { name }
            | HostLayer::Dropout { name, .. }
            | HostLayer::MaxPool2d { name, .. }
            | HostLayer::AvgPool2d { name, .. }
            | HostLayer::MaxPool1d { name, .. }
            | HostLayer::AvgPool1d { name, .. }
            | HostLayer::Linear { name, .. }
            | HostLayer::Residual { name, .. }
            | HostLayer::Branches { name, .. } => Some(name),
            HostLayer::Relu
            | HostLayer::Sigmoid
            | HostLayer::Tanh
            | HostLayer::LeakyRelu { .. }
            | HostLayer::Elu
            | HostLayer::Gelu
            | HostLayer::GeluTanh
            | HostLayer::Silu
            | HostLayer::Softplus
            | HostLayer::HardSwish
            | HostLayer::Slot { .. }
            | HostLayer::GlobalAvgPool
            | HostLayer::GlobalMaxPool
            | HostLayer::Flatten
            | HostLayer::Save { .. }
            | HostLayer::Load { .. }
            | HostLayer::Join { .. } => None,
        }
    }

    /// Names of the saved values that the layer reads.
    pub fn reads(&self) -> Vec<&str> {
        match self {
            HostLayer::Load { name } => vec![name],
            HostLayer::Join { from, .. } => from.iter().map(String::as_str).collect(),
            _ => vec![],
        }
    }

    /// Branches of the layer, each with its key in names and errors; none for a layer without
    /// layers inside. The identity is a branch without layers.
    pub fn branches(&self) -> Vec<(String, &[HostLayer])> {
        match self {
            HostLayer::Residual { body, shortcut, .. } => {
                vec![("body".into(), body), ("shortcut".into(), shortcut)]
            }
            HostLayer::Branches { branches, .. } => {
                let named = branches.iter().enumerate();
                named.map(|(i, branch)| (format!("branches.{i}"), &branch[..])).collect()
            }
            _ => vec![],
        }
    }

    /// As [`HostLayer::branches`].
    pub(super) fn branches_mut(&mut self) -> Vec<(String, &mut Vec<HostLayer>)> {
        match self {
            HostLayer::Residual { body, shortcut, .. } => {
                vec![("body".into(), body), ("shortcut".into(), shortcut)]
            }
            HostLayer::Branches { branches, .. } => {
                let named = branches.iter_mut().enumerate();
                named.map(|(i, branch)| (format!("branches.{i}"), branch)).collect()
            }
            _ => vec![],
        }
    }
}

/// Visits layers in forward order, the layers of branches before the layer that joins them.
pub(super) fn for_each_layer<'a>(layers: &'a [HostLayer], visit: &mut impl FnMut(&'a HostLayer)) {
    for layer in layers {
        for (_, branch) in layer.branches() {
            for_each_layer(branch, visit);
        }
        visit(layer);
    }
}

/// Writes a convolution with its kernel, and its stride, dilation and groups where they are not 1.
fn write_conv<S: fmt::Display + PartialEq>(
    f: &mut fmt::Formatter<'_>,
    [kernel, stride, dilation]: [S; 3],
    one: S,
    groups: usize,
) -> fmt::Result {
    write!(f, "conv {kernel}")?;
    if stride != one {
        write!(f, ", stride {stride}")?;
    }
    if dilation != one {
        write!(f, ", dilation {dilation}")?;
    }
    if groups > 1 { write!(f, ", {groups} groups") } else { Ok(()) }
}

/// Writes a pool with its kernel, and its stride if windows overlap or have gaps.
fn write_pool<S: fmt::Display + PartialEq>(
    f: &mut fmt::Formatter<'_>,
    is_max: bool,
    kernel: S,
    stride: Option<S>,
) -> fmt::Result {
    write!(f, "{} pool {kernel}", if is_max { "max" } else { "average" })?;
    let apart = stride.filter(|stride| *stride != kernel);
    apart.map_or(Ok(()), |stride| write!(f, ", stride {stride}"))
}

impl fmt::Display for HostLayer {
    /// Kind of the layer, with its kernel, and its other sizes where they are unusual.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostLayer::Conv2d { kernel, stride, dilation, groups, .. } => {
                write_conv(f, [*kernel, *stride, *dilation], one(), *groups)
            }
            HostLayer::Conv1d { kernel, stride, dilation, groups, .. } => {
                write_conv(f, [*kernel, *stride, *dilation], 1, *groups)
            }
            HostLayer::BatchNorm { .. } => f.write_str("batch norm"),
            HostLayer::GroupNorm { groups, .. } => write!(f, "group norm, {groups} groups"),
            HostLayer::LayerNorm { .. } => f.write_str("layer norm"),
            HostLayer::RmsNorm { .. } => f.write_str("rms norm"),
            HostLayer::Relu => f.write_str("relu"),
            HostLayer::Sigmoid => f.write_str("sigmoid"),
            HostLayer::Tanh => f.write_str("tanh"),
            HostLayer::LeakyRelu { slope } => write!(f, "leaky relu, slope {}", slope.0),
            HostLayer::Elu => f.write_str("elu"),
            HostLayer::Gelu => f.write_str("gelu"),
            HostLayer::GeluTanh => f.write_str("gelu by tanh"),
            HostLayer::Silu => f.write_str("silu"),
            HostLayer::Softplus => f.write_str("softplus"),
            HostLayer::HardSwish => f.write_str("hard swish"),
            HostLayer::Dropout { p, .. } => write!(f, "dropout, p {}", p.0),
            HostLayer::MaxPool2d { kernel, stride, .. }
            | HostLayer::AvgPool2d { kernel, stride, .. } => {
                let is_max = matches!(self, HostLayer::MaxPool2d { .. });
                write_pool(f, is_max, *kernel, *stride)
            }
            HostLayer::MaxPool1d { kernel, stride, .. }
            | HostLayer::AvgPool1d { kernel, stride, .. } => {
                let is_max = matches!(self, HostLayer::MaxPool1d { .. });
                write_pool(f, is_max, *kernel, *stride)
            }
            HostLayer::Slot { .. } => f.write_str("slot"),
            HostLayer::GlobalAvgPool => f.write_str("global average pool"),
            HostLayer::GlobalMaxPool => f.write_str("global max pool"),
            HostLayer::Flatten => f.write_str("flatten"),
            HostLayer::Linear { .. } => f.write_str("linear"),
            HostLayer::Residual { .. } => f.write_str("residual sum"),
            HostLayer::Branches { join, branches, .. } => {
                write!(f, "{join} of {} branches", branches.len())
            }
            HostLayer::Save { .. } => f.write_str("save"),
            HostLayer::Load { name } => write!(f, "load of {name}"),
            HostLayer::Join { join, from } => write!(f, "{join} with {}", from.join(", ")),
        }
    }
}

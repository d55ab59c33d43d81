//! Layers of a host, as data, and their nodes in a graph.

use std::fmt;

use meristem_nn::Result;
use meristem_nn::graph::{ConvGeometry, Dims, GraphBuilder, NodeId};
use serde::{Deserialize, Serialize};

use super::slot_name::SlotName;
use super::task_shape::TaskShape;

/// One layer of a host; its output is the input of the next layer. As in PyTorch, `name` is the
/// prefix of the layer's tensor names.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HostLayer {
    /// Convolution without bias, with stride 1 and padding that preserves the image size.
    Conv2d {
        /// Prefix of the tensor names.
        name: String,
        /// Output channels.
        out: usize,
        /// Kernel size, odd.
        kernel: usize,
    },
    /// Batch norm.
    BatchNorm {
        /// Prefix of the tensor names.
        name: String,
    },
    /// `max(x, 0)`.
    Relu,
    /// Maximum of each `kernel`×`kernel` window, without overlap or padding.
    MaxPool2d {
        /// Name for errors.
        name: String,
        /// Rows and columns of a window.
        kernel: usize,
    },
    /// Place for a module that preserves the shape; the identity without a module.
    Slot {
        /// Name, unique in the host.
        name: SlotName,
    },
    /// Mean over the image; later layers get a vector.
    GlobalAvgPool,
    /// Linear layer with bias over a vector.
    Linear {
        /// Prefix of the tensor names.
        name: String,
        /// Output features.
        out: Features,
    },
}

/// Output features of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Features {
    /// One per class of the dataset.
    Classes,
}

/// Size of a layer for images of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSize {
    /// Shape of the output per image. A pool that does not fit yields 0 rows or columns.
    pub output: Dims,
    /// Trained parameters (saturating).
    pub parameters: usize,
    /// Multiply-accumulate operations per image (saturating).
    pub macs: usize,
}

impl HostLayer {
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
            | HostLayer::BatchNorm { name }
            | HostLayer::Linear { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Name of the layer or slot; `None` for a layer without one.
    pub fn name(&self) -> Option<&str> {
        match self {
            HostLayer::MaxPool2d { name, .. } => Some(name),
            HostLayer::Slot { name } => Some(name.as_str()),
            layer => layer.tensors(),
        }
    }

    /// Size of the layer for an input of shape `input`, in a network for images of shape `image`.
    pub(super) fn size(&self, input: Dims, image: &TaskShape) -> LayerSize {
        let Dims { c, h, w } = input;
        let without_weights = |output| LayerSize { output, parameters: 0, macs: 0 };
        match *self {
            HostLayer::Conv2d { out, kernel, .. } => {
                let parameters = c.saturating_mul(out).saturating_mul(kernel * kernel);
                let macs = parameters.saturating_mul(h).saturating_mul(w);
                LayerSize { output: Dims { c: out, ..input }, parameters, macs }
            }
            HostLayer::BatchNorm { .. } => {
                LayerSize { parameters: c.saturating_mul(2), ..without_weights(input) }
            }
            HostLayer::Relu | HostLayer::Slot { .. } => without_weights(input),
            HostLayer::MaxPool2d { kernel, .. } => {
                without_weights(Dims { h: h / kernel, w: w / kernel, c })
            }
            HostLayer::GlobalAvgPool => without_weights(Dims { c, h: 1, w: 1 }),
            HostLayer::Linear { out: Features::Classes, .. } => {
                let (output, macs) =
                    (Dims { c: image.classes, h: 1, w: 1 }, c.saturating_mul(image.classes));
                LayerSize { output, parameters: macs.saturating_add(image.classes), macs }
            }
        }
    }

    /// Adds the layer after `x` to the current group of parameters. A slot adds nothing.
    pub(crate) fn add_to(&self, b: &mut GraphBuilder, classes: usize, x: NodeId) -> Result<NodeId> {
        match self {
            HostLayer::Conv2d { name, out, kernel } => {
                b.conv2d(x, name, *out, ConvGeometry::same(*kernel), false)
            }
            HostLayer::BatchNorm { name } => b.batch_norm(x, name),
            HostLayer::Relu => Ok(b.relu(x)),
            HostLayer::MaxPool2d { name, kernel } => b.max_pool2d(x, name, *kernel, *kernel),
            HostLayer::Slot { .. } => Ok(x),
            HostLayer::GlobalAvgPool => Ok(b.global_avg_pool(x)),
            HostLayer::Linear { name, out: Features::Classes } => {
                b.linear(x, name, classes, true, None)
            }
        }
    }
}

impl fmt::Display for HostLayer {
    /// Kind of the layer, with its kernel.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostLayer::Conv2d { kernel, .. } => write!(f, "conv {kernel}×{kernel}"),
            HostLayer::BatchNorm { .. } => f.write_str("batch norm"),
            HostLayer::Relu => f.write_str("relu"),
            HostLayer::MaxPool2d { kernel, .. } => write!(f, "max pool {kernel}×{kernel}"),
            HostLayer::Slot { .. } => f.write_str("slot"),
            HostLayer::GlobalAvgPool => f.write_str("global average pool"),
            HostLayer::Linear { .. } => f.write_str("linear"),
        }
    }
}

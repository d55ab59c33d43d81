//! The nodes of a host's layers in a graph, in forward order.

use meristem_nn::graph::{ConvGeometry, Dims, GraphBuilder, GroupId, NodeId};

use super::error::HostError;
use super::host_layer::{Features, HostLayer};
use super::host_spec::HostSpec;
use super::limits::{MAX_PARAMETERS, SIZE_MAX};
use super::slot_name::SlotName;
use super::task_shape::TaskShape;

/// Actions at slots and after layers while a host is added to a graph.
pub(crate) trait HostVisitor<'a> {
    /// Error of an action.
    type Error: From<HostError>;

    /// Adds the module at a slot after `x`, and returns the node for the next layer.
    ///
    /// # Errors
    /// The module does not fit.
    fn slot(
        &mut self,
        b: &mut GraphBuilder,
        name: &SlotName,
        x: NodeId,
    ) -> Result<NodeId, Self::Error>;

    /// Called after each layer, with its output `x`. `depth` is 0 for layers that are in no other
    /// layer.
    fn added(&mut self, _layer: &'a HostLayer, _depth: usize, _b: &GraphBuilder, _x: NodeId) {}
}

/// Position of a list of layers in the description.
#[derive(Clone, Copy)]
struct Position<'a> {
    /// Host.
    host: &'a HostSpec,
    /// Position of the layer that has the list, with a dot after it; empty for the host's own.
    path: &'a str,
    /// Number of layers around the list.
    depth: usize,
    /// Classes of the dataset.
    classes: usize,
}

impl HostSpec {
    /// Adds all layers after the input, and returns the node of the logits.
    ///
    /// # Errors
    /// [`HostError::Layer`] for a layer that does not fit, [`HostError::TooLarge`],
    /// [`HostError::Output`] for an output with another shape than one value per class, or an error
    /// of `visitor`.
    pub(crate) fn add_to<'a, V: HostVisitor<'a>>(
        &'a self,
        b: &mut GraphBuilder,
        image: &TaskShape,
        visitor: &mut V,
    ) -> Result<NodeId, V::Error> {
        let top = Position { host: self, path: "", depth: 0, classes: image.classes };
        let input = b.input();
        let x = top.add_layers(self.layers(), b, visitor, input)?;
        let (Dims { c, h, w }, classes) = (b.dims(x), image.classes);
        if (c, h, w) != (classes, 1, 1) {
            let output = format!("{c}×{h}×{w}");
            return Err(HostError::Output { host: self.name(), output, classes }.into());
        }
        Ok(x)
    }
}

impl Position<'_> {
    fn add_layers<'a, V: HostVisitor<'a>>(
        self,
        layers: &'a [HostLayer],
        b: &mut GraphBuilder,
        visitor: &mut V,
        mut x: NodeId,
    ) -> Result<NodeId, V::Error> {
        for (i, layer) in layers.iter().enumerate() {
            let place = format!("{}{i}", self.path);
            let fail = |problem: String| {
                let name = layer.name().filter(|name| !name.is_empty());
                let place = name.map_or(place.clone(), |name| format!("{place} \"{name}\""));
                HostError::Layer { host: self.host.name(), place, problem }
            };
            x = match layer {
                HostLayer::Slot { name } => visitor.slot(b, name, x)?,
                HostLayer::Residual { .. } | HostLayer::Branches { .. } => {
                    let mut ends = vec![];
                    for (key, branch) in layer.branches() {
                        let path = format!("{place}.{key}.");
                        let inner = Position { path: &path, depth: self.depth + 1, ..self };
                        ends.push(inner.add_layers(branch, b, visitor, x)?);
                    }
                    sum(b, &ends).map_err(fail)?
                }
                layer => add_layer(layer, b, self.classes, x).map_err(fail)?,
            };
            let Dims { h, w, .. } = b.dims(x);
            if h.max(w) > SIZE_MAX {
                let problem = format!("its output has {h}×{w} pixels, at most {SIZE_MAX} a side");
                return Err(fail(problem).into());
            }
            let parameters = b.so_far().parameters(Some(GroupId::HOST));
            if parameters > MAX_PARAMETERS {
                let (host, limit) = (self.host.name(), MAX_PARAMETERS);
                return Err(HostError::TooLarge { host, parameters, limit }.into());
            }
            visitor.added(layer, self.depth, b, x);
        }
        Ok(x)
    }
}

/// Adds the sum of the ends of branches, from first to last.
fn sum(b: &mut GraphBuilder, ends: &[NodeId]) -> Result<NodeId, String> {
    let (first, others) = ends.split_first().ok_or("it has no branches")?;
    others.iter().enumerate().try_fold(*first, |x, (i, end)| {
        let shape = |node| {
            let Dims { c, h, w } = b.dims(node);
            format!("{c}×{h}×{w}")
        };
        let (expected, got) = (shape(x), shape(*end));
        b.add(x, *end).map_err(|_| {
            format!(
                "its branches differ in shape: the first ends in {expected}, branch {} in {got}; \
                 give the shortcut a convolution with the stride and channels of the other branch",
                i + 1,
            )
        })
    })
}

/// Adds a layer after `x` to the current group of parameters; the error has the problem.
fn add_layer(
    layer: &HostLayer,
    b: &mut GraphBuilder,
    classes: usize,
    x: NodeId,
) -> Result<NodeId, String> {
    let node = match *layer {
        HostLayer::Conv2d { ref name, out, kernel, stride, padding, groups, bias } => {
            let (padding, kernel) = (padding.around(kernel)?.pair(), kernel.pair());
            let geometry = ConvGeometry { kernel, stride: stride.pair(), padding, groups };
            b.conv2d(x, name, out, geometry, bias)
        }
        HostLayer::BatchNorm { ref name } => b.batch_norm(x, name),
        HostLayer::GroupNorm { ref name, groups } => b.group_norm(x, name, groups, 1.0),
        HostLayer::Relu => Ok(b.relu(x)),
        HostLayer::Sigmoid => Ok(b.sigmoid(x)),
        HostLayer::Tanh => Ok(b.tanh(x)),
        HostLayer::MaxPool2d { ref name, kernel, stride } => {
            b.max_pool2d(x, name, kernel, stride.unwrap_or(kernel))
        }
        HostLayer::GlobalAvgPool => Ok(b.global_avg_pool(x)),
        HostLayer::Linear { ref name, out, bias } => {
            let out = match out {
                Features::Classes => classes,
                Features::Count(count) => count,
            };
            b.linear(x, name, out, bias, None)
        }
        HostLayer::Slot { .. } | HostLayer::Residual { .. } | HostLayer::Branches { .. } => Ok(x),
    };
    node.map_err(|error| {
        let text = error.to_string();
        let own = format!("`{}`: ", layer.name().unwrap_or_default());
        text.strip_prefix(&own).map_or(text.clone(), Into::into)
    })
}

//! The nodes of a host's layers in a graph, in forward order.

use std::collections::HashMap;

use meristem_nn::graph::{ConvGeometry, Dims, GraphBuilder, GroupId, NodeId, PoolGeometry};

use super::error::HostError;
use super::host_layer::HostLayer;
use super::host_spec::HostSpec;
use super::layer_values::{BranchJoin, Features};
use super::limits::{FEATURES_MAX, MAX_PARAMETERS, SIZE_MAX};
use super::per_axis::PerAxis;
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

    /// Called after each layer, with its output `x`. `depth` is the number of layers that contain
    /// it.
    fn added(&mut self, _layer: &'a HostLayer, _depth: usize, _b: &GraphBuilder, _x: NodeId) {}
}

/// A host that is being added to a graph.
struct Walk<'a, 'w, V> {
    host: &'a HostSpec,
    /// Classes of the dataset.
    classes: usize,
    b: &'w mut GraphBuilder,
    visitor: &'w mut V,
    /// Values that later layers may join or load, by name.
    saved: HashMap<&'a str, NodeId>,
    /// Position and output of each layer.
    outputs: Vec<(String, NodeId)>,
}

/// Position of a list of layers in the description.
#[derive(Clone, Copy)]
struct Position<'p> {
    /// Position of the layer that has the list, with a dot after it; empty for the host's own.
    path: &'p str,
    /// Number of layers that contain the list.
    depth: usize,
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
        let (input, classes) = (b.input(), image.classes);
        let (saved, outputs) = (HashMap::new(), vec![]);
        let mut walk = Walk { host: self, classes, b, visitor, saved, outputs };
        let x = walk.add_layers(self.layers(), Position { path: "", depth: 0 }, input)?;
        walk.check_used(x)?;
        let Dims { c, h, w } = b.dims(x);
        if (c, h, w) != (classes, 1, 1) {
            let output = format!("{c}×{h}×{w}");
            return Err(HostError::Output { host: self.name(), output, classes }.into());
        }
        Ok(x)
    }
}

impl<'a, V: HostVisitor<'a>> Walk<'a, '_, V> {
    fn add_layers(
        &mut self,
        layers: &'a [HostLayer],
        at: Position<'_>,
        mut x: NodeId,
    ) -> Result<NodeId, V::Error> {
        let host = self.host;
        for (i, layer) in layers.iter().enumerate() {
            let place = format!("{}{i}", at.path);
            let fail = |problem: String| {
                let name = layer.name().filter(|name| !name.is_empty());
                let place = name.map_or(place.clone(), |name| format!("{place} \"{name}\""));
                HostError::Layer { host: host.name(), place, problem }
            };
            x = match layer {
                HostLayer::Slot { name } => self.visitor.slot(self.b, name, x)?,
                HostLayer::Residual { .. } => {
                    let ends = self.add_branches(layer, &place, at.depth, x)?;
                    join(self.b, BranchJoin::Add, &ends).map_err(fail)?
                }
                HostLayer::Branches { join: formula, .. } => {
                    let ends = self.add_branches(layer, &place, at.depth, x)?;
                    join(self.b, *formula, &ends).map_err(fail)?
                }
                HostLayer::Save { name } => {
                    self.saved.insert(name, x);
                    x
                }
                HostLayer::Join { join: formula, from } => {
                    // The parser of the description has checked that all these values are saved.
                    let others = from.iter().filter_map(|name| self.saved.get(name.as_str()));
                    let values: Vec<NodeId> = [x].into_iter().chain(others.copied()).collect();
                    join(self.b, *formula, &values).map_err(fail)?
                }
                HostLayer::Load { name } => self.saved.get(name.as_str()).copied().unwrap_or(x),
                layer => add_layer(layer, self.b, self.classes, x).map_err(fail)?,
            };
            let Dims { c, h, w } = self.b.dims(x);
            if h.max(w) > SIZE_MAX || c > FEATURES_MAX {
                let problem = format!(
                    "its output is {c}×{h}×{w}; at most {SIZE_MAX} rows and columns and \
                     {FEATURES_MAX} channels are supported"
                );
                return Err(fail(problem).into());
            }
            let parameters = self.b.so_far().parameters(Some(GroupId::HOST));
            if parameters > MAX_PARAMETERS {
                let (host, limit) = (host.name(), MAX_PARAMETERS);
                return Err(HostError::TooLarge { host, parameters, limit }.into());
            }
            self.visitor.added(layer, at.depth, self.b, x);
            self.outputs.push((place, x));
        }
        Ok(x)
    }

    /// Checks that the output `x` depends on every layer. A `load` discards the value before it,
    /// which must have been saved and be read by another layer.
    fn check_used(&self, x: NodeId) -> Result<(), HostError> {
        let nodes = &self.b.so_far().nodes;
        let mut used = vec![false; nodes.len()];
        used[x.index()] = true;
        for (i, node) in nodes.iter().enumerate().rev() {
            if used[i] {
                node.op.inputs().into_iter().for_each(|read| used[read.index()] = true);
            }
        }
        let Some((place, _)) = self.outputs.iter().find(|(_, output)| !used[output.index()]) else {
            return Ok(());
        };
        let problem = "no later layer uses its output, because a `load` follows; `save` the output \
                       and `join` or `load` it later, or leave the layer out";
        Err(HostError::Layer {
            host: self.host.name(),
            place: place.clone(),
            problem: problem.into(),
        })
    }

    /// Adds the branches of `layer` at the position `place`, and returns their ends.
    fn add_branches(
        &mut self,
        layer: &'a HostLayer,
        place: &str,
        depth: usize,
        x: NodeId,
    ) -> Result<Vec<NodeId>, V::Error> {
        let branches = layer.branches().into_iter();
        let end = |(key, branch): (String, &'a [HostLayer])| {
            let path = format!("{place}.{key}.");
            self.add_layers(branch, Position { path: &path, depth: depth + 1 }, x)
        };
        branches.map(end).collect()
    }
}

/// Adds the join of values, from first to last. The error describes the problem, without host and
/// layer. In a product a vector scales the channels of an image, as in squeeze-and-excitation
/// (Hu et al. 2018).
fn join(b: &mut GraphBuilder, formula: BranchJoin, values: &[NodeId]) -> Result<NodeId, String> {
    let (first, others) = values.split_first().ok_or("it has no branches")?;
    let is_vector = |Dims { h, w, .. }: Dims| (h, w) == (1, 1);
    let mut joined = b.dims(*first);
    for (i, value) in (2..).zip(others) {
        let got = b.dims(*value);
        let scales = formula == BranchJoin::Multiply && (is_vector(joined) || is_vector(got));
        let alike = (got.h, got.w) == (joined.h, joined.w) || scales;
        if !alike || got.c != joined.c && formula != BranchJoin::Concat {
            let Dims { c, h, w } = joined;
            let Dims { c: channels, h: rows, w: columns } = got;
            let or_scales = match formula {
                BranchJoin::Multiply => ", or an image and one value for each of its channels",
                BranchJoin::Add | BranchJoin::Concat => "",
            };
            return Err(format!(
                "a {formula} needs values of one shape{or_scales}, but the first is {c}×{h}×{w} \
                 and number {i} is {channels}×{rows}×{columns}; give one a convolution with the \
                 stride and channels of the other"
            ));
        }
        if is_vector(joined) {
            joined = got;
        }
    }
    let joined = match formula {
        BranchJoin::Concat => b.concat(values),
        BranchJoin::Add => others.iter().try_fold(*first, |x, value| b.add(x, *value)),
        BranchJoin::Multiply => others.iter().try_fold(*first, |x, value| {
            match (is_vector(b.dims(x)), is_vector(b.dims(*value))) {
                (false, true) => b.scale_channels(x, *value, 1.0),
                (true, false) => b.scale_channels(*value, x, 1.0),
                _ => b.multiply(x, *value),
            }
        }),
    };
    joined.map_err(|error| error.to_string())
}

/// Adds a layer after `x` to the current group of parameters. The error describes the problem,
/// without host and layer.
fn add_layer(
    layer: &HostLayer,
    b: &mut GraphBuilder,
    classes: usize,
    x: NodeId,
) -> Result<NodeId, String> {
    let node = match *layer {
        HostLayer::Conv2d { ref name, out, kernel, stride, padding, dilation, groups, bias } => {
            let padding = padding.around(kernel, dilation)?.pair();
            let (kernel, stride, dilation) = (kernel.pair(), stride.pair(), dilation.pair());
            let geometry = ConvGeometry { kernel, stride, padding, groups, dilation };
            b.conv2d(x, name, out, geometry, bias)
        }
        HostLayer::Conv1d { ref name, out, kernel, stride, padding, dilation, groups, bias } => {
            check_signal(b.dims(x), "conv2d")?;
            let [kernel, stride, dilation] =
                [kernel, stride, dilation].map(|size| PerAxis::of_signal(1, size));
            let padding = padding.of_row().around(kernel, dilation)?.pair();
            let (kernel, stride, dilation) = (kernel.pair(), stride.pair(), dilation.pair());
            let geometry = ConvGeometry { kernel, stride, padding, groups, dilation };
            b.conv1d(x, name, out, geometry, bias)
        }
        HostLayer::BatchNorm { ref name } => b.batch_norm(x, name),
        HostLayer::GroupNorm { ref name, groups } => b.group_norm(x, name, groups, 1.0),
        HostLayer::LayerNorm { ref name } => b.layer_norm(x, name),
        HostLayer::RmsNorm { ref name } => b.rms_norm(x, name),
        HostLayer::Relu => Ok(b.relu(x)),
        HostLayer::Sigmoid => Ok(b.sigmoid(x)),
        HostLayer::Tanh => Ok(b.tanh(x)),
        HostLayer::LeakyRelu { slope } => b.leaky_relu(x, slope.0),
        HostLayer::Elu => Ok(b.elu(x)),
        HostLayer::Gelu => Ok(b.gelu(x)),
        HostLayer::GeluTanh => Ok(b.gelu_tanh(x)),
        HostLayer::Silu => Ok(b.silu(x)),
        HostLayer::Softplus => Ok(b.softplus(x)),
        HostLayer::HardSwish => Ok(b.hard_swish(x)),
        HostLayer::Dropout { ref name, p } => b.dropout(x, name, p.0),
        HostLayer::MaxPool2d { ref name, kernel, stride, padding } => {
            b.max_pool2d_with(x, name, pool_window(kernel, stride, padding))
        }
        HostLayer::AvgPool2d { ref name, kernel, stride, padding } => {
            b.avg_pool2d(x, name, pool_window(kernel, stride, padding))
        }
        HostLayer::MaxPool1d { ref name, kernel, stride, padding } => {
            check_signal(b.dims(x), "max_pool2d")?;
            b.max_pool2d_with(x, name, signal_window(kernel, stride, padding))
        }
        HostLayer::AvgPool1d { ref name, kernel, stride, padding } => {
            check_signal(b.dims(x), "avg_pool2d")?;
            b.avg_pool2d(x, name, signal_window(kernel, stride, padding))
        }
        HostLayer::GlobalAvgPool => Ok(b.global_avg_pool(x)),
        HostLayer::GlobalMaxPool => Ok(b.global_max_pool(x)),
        HostLayer::Flatten => Ok(b.flatten(x)),
        HostLayer::Linear { ref name, out, bias } => {
            let out = match out {
                Features::Classes => classes,
                Features::Count(count) => count,
            };
            b.linear(x, name, out, bias, None)
        }
        // Added by `add_layers`.
        HostLayer::Slot { .. }
        | HostLayer::Residual { .. }
        | HostLayer::Branches { .. }
        | HostLayer::Save { .. }
        | HostLayer::Load { .. }
        | HostLayer::Join { .. } => Ok(x),
    };
    node.map_err(|error| {
        let text = error.to_string();
        let own = format!("`{}`: ", layer.name().unwrap_or_default());
        text.strip_prefix(&own).map_or(text.clone(), Into::into)
    })
}

/// Checks that a value is a signal; `of_images` is the layer for images.
fn check_signal(Dims { c, h, w }: Dims, of_images: &str) -> Result<(), String> {
    if h == 1 {
        return Ok(());
    }
    Err(format!("it takes signals, which have one row, and not {c}×{h}×{w}; use `{of_images}`"))
}

fn signal_window(kernel: usize, stride: Option<usize>, padding: usize) -> PoolGeometry {
    let stride = stride.map(|stride| PerAxis::of_signal(1, stride));
    pool_window(PerAxis::of_signal(1, kernel), stride, PerAxis::of_signal(0, padding))
}

fn pool_window(kernel: PerAxis, stride: Option<PerAxis>, padding: PerAxis) -> PoolGeometry {
    let stride = stride.unwrap_or(kernel).pair();
    PoolGeometry { kernel: kernel.pair(), stride, padding: padding.pair() }
}

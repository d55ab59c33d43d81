//! The tensors of a layer that becomes wider, and of the layer that reads it.

use nalgebra::DMatrix;

use super::FurtherFeatures;
use super::patches::Convolution;
use super::tiny::Pair;
use crate::error::{Error, Result};
use crate::graph::{
    ConvGeometry, Graph, NodeId, NodeOp, ParamId, UnaryFunction, Widening, WidthInit,
};
use crate::network::activations::vector;

/// A layer with further features and its reader, in the wider graph.
#[derive(Clone, Debug)]
pub(super) struct WideLayer {
    /// Number of further features.
    pub(super) features: usize,
    /// Name of the layer's weight.
    weight: String,
    bias: Option<String>,
    /// Number of incoming weights of a feature.
    pub(super) incoming: usize,
    /// Name of the weight of the layer that reads the features.
    pub(super) reader: String,
    reader_bias: Option<String>,
    /// Number of outputs of the reader.
    outputs: usize,
    /// Number of outgoing weights of a feature, which are `[pixels][rows][kernel]`, with several
    /// pixels if the image is flattened.
    pub(super) outgoing: usize,
    /// Inputs of the layer and of its reader.
    inputs: [NodeId; 2],
    /// Whether another layer with parameters, such as batch norm, lies between the two.
    is_apart: bool,
    /// The layer and its reader; `None` if an operation that is not elementwise is between them.
    pair: Option<Pair>,
    /// Whether features with incoming weights 0 are 0 at the reader.
    is_zero_at_zero: bool,
    /// Derivative of a feature at the reader by its pre-activation, just above 0.
    pub(super) slope: f64,
}

/// The operations on the ways from one node to another, without these two.
fn between(graph: &Graph, from: NodeId, to: NodeId) -> Vec<&NodeOp> {
    let (from, to) = (from.index(), to.index());
    // Nodes come after their inputs.
    let mut follows = vec![false; graph.nodes.len()];
    let mut leads = follows.clone();
    (follows[from], leads[to]) = (true, true);
    for at in from + 1..to {
        follows[at] = graph.nodes[at].op.inputs().iter().any(|input| follows[input.index()]);
    }
    for at in (from + 1..=to).rev().filter(|at| follows[*at] || *at == to) {
        if leads[at] {
            graph.nodes[at].op.inputs().iter().for_each(|input| leads[input.index()] = true);
        }
    }
    (from + 1..to).filter(|at| follows[*at] && leads[*at]).map(|at| &graph.nodes[at].op).collect()
}

/// A convolution or linear layer.
struct Layer {
    node: NodeId,
    input: NodeId,
    weight: ParamId,
    bias: Option<ParamId>,
    geometry: ConvGeometry,
}

impl Layer {
    fn convolution(&self, graph: &Graph) -> Convolution {
        let [input, output] = [self.input, self.node].map(|node| graph.nodes[node.index()].dims);
        Convolution { input, geometry: self.geometry, output: [output.h, output.w] }
    }

    /// The layer and its reader as they were before the layer got `further` features. `None` if an
    /// operation that is not elementwise is between them.
    fn pair(&self, reader: &Layer, further: usize, graph: &Graph) -> Option<Pair> {
        let mut reading = reader.convolution(graph);
        let is_linear = reader.geometry == ConvGeometry::new([1, 1]);
        let mut is_flattened = false;
        for op in between(graph, self.node, reader.node) {
            match op {
                NodeOp::Activation(..) | NodeOp::Dropout { .. } => {}
                // The elements of a vector stay where they are.
                NodeOp::Flatten(image) if graph.nodes[image.index()].dims.is_vector() => {}
                NodeOp::Flatten(image) if is_linear => {
                    let input = graph.nodes[image.index()].dims;
                    let geometry = ConvGeometry::new([input.h, input.w]);
                    reading = Convolution { input, geometry, output: [1, 1] };
                    is_flattened = true;
                }
                _ => return None,
            }
        }
        reading.input.c = reading.input.c.checked_sub(further)?;
        let (layer, reader_has_bias) = (self.convolution(graph), reader.bias.is_some());
        Some(Pair { layer, reader: reading, reader_has_bias, is_flattened })
    }
}

impl WideLayer {
    /// Finds the layer.
    ///
    /// # Errors
    /// [`Error::Argument`] unless one layer has further features, and one layer reads them.
    pub(super) fn new(graph: &Graph, widening: &Widening) -> Result<Self> {
        let name = |param: ParamId| &graph.params[param.index()].name;
        let further =
            |param: ParamId| widening.origin(name(param)).map_or((0, 0), |origin| origin.further());
        let layers: Vec<Layer> = graph
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(at, node)| match node.op {
                NodeOp::Conv2d { x, weight, bias, geometry } if geometry.groups == 1 => {
                    Some(Layer { node: NodeId(at), input: x, weight, bias, geometry })
                }
                _ => None,
            })
            .collect();
        let wider: Vec<&Layer> = layers.iter().filter(|of| further(of.weight).0 > 0).collect();
        let readers: Vec<&Layer> = layers.iter().filter(|of| further(of.weight).1 > 0).collect();
        let (&[of_layer], &[of_reader]) = (&wider[..], &readers[..]) else {
            let got = format!("{} wider layers, {} that read them", wider.len(), readers.len());
            return Err(Error::argument("widen", "graph", "one wider layer with one reader", got));
        };
        let &Layer { node, input: x, weight, bias, .. } = of_layer;
        let &Layer { node: reading, input: read, weight: reader, bias: reader_bias, .. } =
            of_reader;
        let features = further(weight).0;
        let elements = |param: ParamId| graph.params[param.index()].shape.iter().product::<usize>();
        let rows = |param: ParamId| graph.params[param.index()].shape.first().copied().unwrap_or(1);
        let columns = |param: ParamId| graph.params[param.index()].shape.get(1).copied();
        let of_column = elements(reader) / columns(reader).unwrap_or(1).max(1);
        let own = [Some(weight), bias].into_iter().flatten().map(name);
        let with_rows = widening.origins().filter(|(_, origin)| origin.further().0 > 0).count();
        let between = between(graph, node, reading);
        let slope = |op: &NodeOp| match op {
            NodeOp::Activation(function, _) => function.slope_above_zero(),
            _ => 1.0,
        };
        Ok(Self {
            features,
            weight: name(weight).clone(),
            bias: bias.map(|bias| name(bias).clone()),
            incoming: elements(weight) / rows(weight).max(1),
            reader: name(reader).clone(),
            reader_bias: reader_bias.map(|bias| name(bias).clone()),
            outputs: rows(reader),
            outgoing: further(reader).1 / features * of_column,
            inputs: [x, read],
            is_apart: with_rows > own.count(),
            pair: of_layer.pair(of_reader, features, graph),
            is_zero_at_zero: !between.iter().any(|op| {
                matches!(
                    op,
                    NodeOp::Activation(UnaryFunction::Sigmoid | UnaryFunction::Softplus, _)
                )
            }),
            slope: between.iter().map(|op| slope(op)).product(),
        })
    }

    /// Checks that an initialisation suits the layer.
    ///
    /// # Errors
    /// [`Error::Argument`] with what the initialisation needs.
    pub(super) fn check(&self, init: WidthInit) -> Result<()> {
        let needs = match init {
            WidthInit::Gradmax if self.is_apart || self.bias.is_none() || !self.is_zero_at_zero => {
                "a layer with a bias, and no norm, convolution, sigmoid or softplus between it and \
                 its reader"
            }
            WidthInit::Tiny if self.is_apart || self.pair.is_none() || self.bias.is_none() => {
                "a layer with a bias, and nothing but activation functions, dropout and flatten \
                 between it and its reader"
            }
            // Features that are not 0 at 0 change the measured outputs, once for each element of
            // the kernel.
            WidthInit::Tiny
                if !self.is_zero_at_zero
                    && self.pair.as_ref().is_some_and(|pair| pair.reader.taps() > 1) =>
            {
                "no sigmoid or softplus between a layer and a reader with a kernel of several \
                 elements"
            }
            _ => return Ok(()),
        };
        let expected = format!("for `{}` {needs}; `zero` and `firefly` suit all", init.name());
        Err(Error::argument("widen", "init", expected, format!("layer `{}`", self.weight)))
    }

    /// The layer and its reader without the further features. `None` if an operation that is not
    /// elementwise is between them, which [`Self::check`] refuses for [`WidthInit::Tiny`].
    pub(super) fn pair(&self) -> Option<&Pair> {
        self.pair.as_ref()
    }

    /// The graph that ends with the input of the layer, and the one with the input of its reader,
    /// as vectors `[channels][rows][columns]`.
    pub(super) fn prefixes(&self, graph: &Graph) -> [Graph; 2] {
        self.inputs.map(|output| vector(graph, output))
    }

    /// Further features with these incoming weights and bias, and these outgoing weights, each
    /// feature in a column.
    pub(super) fn features(
        &self,
        incoming: &DMatrix<f64>,
        outgoing: &DMatrix<f64>,
    ) -> FurtherFeatures {
        let elements = |values: &[f64]| values.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let mut found = FurtherFeatures::default();
        let weights = incoming.rows(0, self.incoming).into_owned();
        found.rows.insert(self.weight.clone(), elements(weights.as_slice()));
        if let Some(bias) = &self.bias {
            let biases = incoming.row(self.incoming).into_owned();
            found.rows.insert(bias.clone(), elements(biases.as_slice()));
        }
        found.columns.insert(self.reader.clone(), elements(outgoing.as_slice()));
        found
    }

    /// `E[δ hᵀ]` from the gradients of a network with [`Self::unit_vectors`]: a row for each unit
    /// vector; the bias is the last column. `rows` returns the gradient of a tensor's further rows.
    pub(super) fn incoming_gradient(&self, rows: impl Fn(&str) -> Vec<f64>) -> DMatrix<f64> {
        let weight = rows(&self.weight);
        let bias = self.bias.as_deref().map(rows).unwrap_or_default();
        DMatrix::from_fn(self.outgoing, self.incoming + 1, |i, j| {
            if j == self.incoming { bias[i] } else { weight[i * self.incoming + j] }
        })
    }

    /// Root mean square, over the features that were there, of the lengths of the gradients of
    /// their incoming weights and bias. `rows` returns the gradient of a tensor's rows that were
    /// there.
    pub(super) fn own_gradient(&self, rows: impl Fn(&str) -> Vec<f64>) -> f64 {
        let weight = rows(&self.weight);
        let bias = self.bias.as_deref().map(rows).unwrap_or_default();
        let features = (weight.len() / self.incoming.max(1)).max(1);
        let squares: f64 = weight.iter().chain(&bias).map(|x| x * x).sum();
        (squares / features as f64).sqrt()
    }

    /// `E[δ bᵀ]`: the gradient of the reader's weights for the features that were there, and of its
    /// bias if it has one. A row for each output.
    pub(super) fn reader_gradient(&self, mean: impl Fn(&str) -> Vec<f64>) -> DMatrix<f64> {
        let weight = mean(&self.reader);
        let bias = self.reader_bias.as_deref().map(mean);
        let columns = weight.len() / self.outputs.max(1);
        let there = columns - self.features * self.outgoing / self.outputs.max(1);
        let width = there + usize::from(bias.is_some());
        DMatrix::from_fn(self.outputs, width, |i, j| match &bias {
            Some(bias) if j == there => bias[i],
            _ => weight[i * columns + j],
        })
    }

    /// Features with incoming weights 0 and this bias, each of which has the outgoing weight 1 at
    /// another place.
    pub(super) fn unit_vectors(&self, bias: f64) -> FurtherFeatures {
        let mut incoming = DMatrix::zeros(self.incoming + 1, self.features);
        incoming.row_mut(self.incoming).fill(bias);
        self.features(&incoming, &DMatrix::identity(self.outgoing, self.features))
    }
}

//! Translates the nodes of a graph into a model's operators.

mod ends;
mod operators;
mod parts;

use std::collections::BTreeSet;

use meristem_nn::graph::{NodeId, NodeOp};

use self::operators::windows;
use super::messages::{
    AttributeProto, DimensionProto, FLOAT, GraphProto, NodeProto, TensorProto, TensorShapeProto,
    TensorTypeProto, TypeProto, ValueInfoProto,
};
use super::{OnnxError, OnnxNetwork};

/// A model under construction.
pub(super) struct OnnxBuilder<'a> {
    network: &'a OnnxNetwork<'a>,
    nodes: Vec<NodeProto>,
    initializers: Vec<TensorProto>,
    /// Names of all initializers.
    named: BTreeSet<String>,
    /// Value of each node of the graph; empty for nodes that the output does not need.
    values: Vec<String>,
}

impl<'a> OnnxBuilder<'a> {
    pub(super) fn new(network: &'a OnnxNetwork<'a>) -> Result<Self, OnnxError> {
        let (graph, channels) = (network.graph, network.graph.input_dims().c);
        let counts = [
            ("alphas", graph.alphas, network.alphas.len()),
            ("channels", channels, network.preprocessing.map_or(channels, |p| p.constants.len())),
            ("outputs", graph.classes(), network.outputs.map_or(graph.classes(), <[_]>::len)),
        ];
        for (what, expected, got) in counts {
            if expected != got {
                return Err(OnnxError::Count { what, expected, got });
            }
        }
        let values = vec![String::new(); graph.nodes.len()];
        Ok(Self { network, nodes: vec![], initializers: vec![], named: BTreeSet::new(), values })
    }

    /// Builds the graph of the model.
    pub(super) fn finish(mut self) -> Result<GraphProto, OnnxError> {
        let graph = self.network.graph;
        let needed = self.needed();
        for (index, node) in graph.nodes.iter().enumerate().filter(|(index, _)| needed[*index]) {
            self.values[index] = self.node(index, &node.op)?;
        }
        let logits = self.value(graph.output);
        let (name, meaning) = self.output(&logits);
        let input = self.input_info();
        Ok(GraphProto {
            node: self.nodes,
            name: "meristem".into(),
            initializer: self.initializers,
            input: vec![input],
            output: vec![value_info(name, FLOAT, &[graph.classes()], meaning)],
        })
    }

    /// Whether the output needs each node.
    fn needed(&self) -> Vec<bool> {
        let nodes = &self.network.graph.nodes;
        let mut needed = vec![false; nodes.len()];
        needed[self.network.graph.output.index()] = true;
        for (index, node) in nodes.iter().enumerate().rev().filter(|(_, n)| n.op.input().is_none())
        {
            if needed[index] {
                let read = self.passed_on(&node.op).map_or_else(|| node.op.inputs(), |id| vec![id]);
                read.into_iter().for_each(|id| needed[id.index()] = true);
            }
        }
        needed
    }

    /// The node whose value an operation passes on unchanged in evaluation; `None` for other
    /// operations.
    fn passed_on(&self, op: &NodeOp) -> Option<NodeId> {
        match *op {
            NodeOp::Detach(x) | NodeOp::Dropout { x, .. } => Some(x),
            NodeOp::StraightThrough { host, .. } => Some(host),
            // As in the engine, a blend with alpha 0 is the host's value, bit for bit.
            NodeOp::Blend { inputs, alpha, .. } if self.network.alphas[alpha] == 0.0 => {
                Some(inputs.host)
            }
            _ => None,
        }
    }

    fn value(&self, id: NodeId) -> String {
        self.values[id.index()].clone()
    }

    /// Adds the operators of a node and returns the name of its value.
    fn node(&mut self, index: usize, op: &NodeOp) -> Result<String, OnnxError> {
        if let Some(source) = self.passed_on(op) {
            return Ok(self.value(source));
        }
        let refuse = |operation| Err(OnnxError::Unsupported { operation });
        Ok(match *op {
            NodeOp::Input(0) => self.input(),
            NodeOp::Input(_) => return refuse("a second input"),
            NodeOp::Indices(_) => return refuse("an input of indices"),
            NodeOp::State(_) => return refuse("a recurrent state"),
            NodeOp::Embedding { .. } => return refuse("an embedding"),
            NodeOp::Lstm { .. } => return refuse("an LSTM"),
            NodeOp::Detach(x) | NodeOp::Dropout { x, .. } => self.value(x),
            NodeOp::StraightThrough { host, .. } => self.value(host),
            NodeOp::Conv2d { x, weight, bias, geometry } => self.conv(x, weight, bias, geometry)?,
            NodeOp::BatchNorm { x, weight, bias, running, eps, .. } => {
                let [scale, shift] = [self.param(weight, None)?, self.param(bias, None)?];
                let [mean, variance] = [self.buffer(running[0])?, self.buffer(running[1])?];
                let inputs = [&self.value(x), &scale, &shift, &mean, &variance];
                self.push(
                    "BatchNormalization",
                    &inputs,
                    vec![AttributeProto::float("epsilon", eps)],
                )
            }
            NodeOp::GroupNorm { x, weight, bias, groups, eps } => {
                self.group_norm(x, weight, bias, groups, eps)?
            }
            NodeOp::LayerNorm { x, weight, bias, eps } => {
                self.layer_norm(x, weight, Some(bias), eps)?
            }
            NodeOp::RmsNorm { x, weight, eps } => self.layer_norm(x, weight, None, eps)?,
            NodeOp::Activation(function, x) => self.activation(function, x),
            NodeOp::MaxPool2d { x, window } => {
                self.push("MaxPool", &[&self.value(x)], windows(&window))
            }
            NodeOp::AvgPool2d { x, window } => {
                let mut attributes = windows(&window);
                attributes.push(AttributeProto::int("count_include_pad", 1));
                self.push("AveragePool", &[&self.value(x)], attributes)
            }
            NodeOp::Flatten(x) => {
                // 0 keeps the batch size, −1 takes the remaining elements.
                let shape = self.shape(&[0, -1, 1, 1]);
                self.push("Reshape", &[&self.value(x), &shape], vec![])
            }
            NodeOp::GlobalAvgPool(x) => self.push("GlobalAveragePool", &[&self.value(x)], vec![]),
            NodeOp::Add(a, b) => self.push("Add", &[&self.value(a), &self.value(b)], vec![]),
            NodeOp::Multiply(a, b) => self.push("Mul", &[&self.value(a), &self.value(b)], vec![]),
            NodeOp::Concat(ref parts) => {
                let parts: Vec<String> = parts.iter().map(|part| self.value(*part)).collect();
                self.push("Concat", &parts.iter().collect::<Vec<_>>(), vec![axis(1)])
            }
            NodeOp::ScaleChannels { x, scale, factor } => {
                let factor = self.constant(&format!("factor.{index}"), &[], &[factor]);
                let scaled = self.push("Mul", &[&factor, &self.value(x)], vec![]);
                self.push("Mul", &[&scaled, &self.value(scale)], vec![])
            }
            NodeOp::TanhMix { x, y, mix } => {
                let mix = self.param(mix, Some(&[]))?;
                let weight = self.push("Tanh", &[&mix], vec![]);
                let difference = self.push("Sub", &[&self.value(y), &self.value(x)], vec![]);
                let change = self.push("Mul", &[&weight, &difference], vec![]);
                self.push("Add", &[&self.value(x), &change], vec![])
            }
            NodeOp::Blend { inputs, mode, alpha } => self.blend(inputs, mode, alpha),
        })
    }
}

/// The dimension over which an operator works.
fn axis(of: usize) -> AttributeProto {
    AttributeProto::int("axis", of)
}

/// Description of an input or output with any batch size.
fn value_info(name: &str, elem_type: i32, dims: &[usize], meaning: &str) -> ValueInfoProto {
    let batch = DimensionProto { dim_value: None, dim_param: Some("N".into()) };
    let fixed =
        dims.iter().map(|dim| DimensionProto { dim_value: Some(*dim as i64), dim_param: None });
    let shape = TensorShapeProto { dim: std::iter::once(batch).chain(fixed).collect() };
    let tensor_type = Some(TensorTypeProto { elem_type, shape: Some(shape) });
    ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto { tensor_type }),
        doc_string: meaning.into(),
    }
}

//! Translates the nodes of a graph into a model's operators.

use std::collections::BTreeSet;

use meristem_nn::graph::{
    BlendMode, BlendOperands, BufferId, ConvGeometry, Dims, NodeId, NodeOp, ParamId, PoolGeometry,
    UnaryFunction,
};

use super::messages::{
    AttributeProto, DimensionProto, FLOAT, GraphProto, INT64, NodeProto, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, UINT8, ValueInfoProto,
};
use super::{LOGITS, OUTPUTS, OnnxError, OnnxNetwork, Preprocessing};

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

    /// The model's output, its name and meaning: the logits, or numbers in the units of the
    /// targets.
    fn output(&mut self, logits: &str) -> (&'static str, &'static str) {
        let Some(constants) = self.network.outputs else {
            self.push_to("Flatten", &[logits], LOGITS, vec![axis(1)]);
            return (LOGITS, "logits, [N, classes]");
        };
        let flat = self.push("Flatten", &[logits], vec![axis(1)]);
        let (scale, shift): (Vec<f32>, Vec<f32>) = constants.iter().copied().unzip();
        let scale = self.constant("outputs.scale", &[scale.len()], &scale);
        let shift = self.constant("outputs.shift", &[shift.len()], &shift);
        let scaled = self.push("Mul", &[&flat, &scale], vec![]);
        self.push_to("Add", &[&scaled, &shift], OUTPUTS, vec![]);
        (OUTPUTS, "numbers, [N, outputs]")
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

    /// Name of the model's input.
    fn input_name(&self) -> &'static str {
        if self.network.sample.len() == 3 { "images" } else { "inputs" }
    }

    /// Whether the model takes images of bytes, whose channels are last, as in files.
    fn takes_pixels(&self) -> bool {
        self.network.sample.len() == 3 && self.network.preprocessing.is_some_and(|p| p.bytes)
    }

    /// Description of the model's input.
    fn input_info(&self) -> ValueInfoProto {
        let Dims { c, h, w } = self.network.graph.input_dims();
        let (name, sample) = (self.input_name(), self.network.sample);
        if self.takes_pixels() {
            let meaning = "images as bytes, [N, rows, columns, channels]";
            return value_info(name, UINT8, &[h, w, c], meaning);
        }
        let axes = match sample.len() {
            1 => "[N, features]",
            2 => "[N, channels, points]",
            _ => "[N, channels, rows, columns]",
        };
        let kind = if name == "images" { "images" } else { "samples" };
        let (element, meaning) = match self.network.preprocessing {
            None => (FLOAT, format!("normalised {kind}, {axes}")),
            Some(Preprocessing { bytes: false, .. }) => (FLOAT, format!("{kind}, {axes}")),
            Some(Preprocessing { bytes: true, .. }) => (UINT8, format!("{kind} as bytes, {axes}")),
        };
        value_info(name, element, sample, &meaning)
    }

    /// The normalised samples, `[N, C, H, W]`.
    fn input(&mut self) -> String {
        let Dims { c, h, w } = self.network.graph.input_dims();
        let mut x = self.input_name().to_string();
        let Some(Preprocessing { bytes, constants }) = self.network.preprocessing else {
            return self.as_image(x, [c, h, w]);
        };
        if bytes {
            let cast = AttributeProto::int("to", FLOAT as usize);
            x = self.push("Cast", &[&x], vec![cast]);
        }
        let pixels = self.takes_pixels();
        if !pixels {
            x = self.as_image(x, [c, h, w]);
        }
        let (scale, shift): (Vec<f32>, Vec<f32>) = constants.iter().copied().unzip();
        // Constants per channel, which is the last axis, or the third from the end.
        let shape: &[usize] = if pixels { &[c] } else { &[c, 1, 1] };
        let scale = self.constant("preprocessing.scale", shape, &scale);
        let shift = self.constant("preprocessing.shift", shape, &shift);
        let scaled = self.push("Mul", &[&x, &scale], vec![]);
        let shifted = self.push("Add", &[&scaled, &shift], vec![]);
        if !pixels {
            return shifted;
        }
        let axes = AttributeProto::ints("perm", &[0, 3, 1, 2]);
        self.push("Transpose", &[&shifted], vec![axes])
    }

    /// Vectors and signals as images of one row.
    fn as_image(&mut self, x: String, [c, h, w]: [usize; 3]) -> String {
        if self.network.sample.len() == 3 {
            return x;
        }
        let shape = self.shape(&[-1, c as i64, h as i64, w as i64]);
        self.push("Reshape", &[&x, &shape], vec![])
    }

    /// A convolution. A linear layer is a convolution with a 1×1 window.
    fn conv(
        &mut self,
        x: NodeId,
        weight: ParamId,
        bias: Option<ParamId>,
        geometry: ConvGeometry,
    ) -> Result<String, OnnxError> {
        let ConvGeometry { kernel, stride, padding: [rows, columns], groups, dilation } = geometry;
        let mut inputs = vec![self.value(x)];
        for (param, is_weight) in [(Some(weight), true), (bias, false)] {
            let Some(id) = param else { continue };
            let shape = &self.network.graph.params[id.index()].shape;
            let of_images = match shape[..] {
                [outputs, of_each] if is_weight => Some([outputs, of_each, 1, 1]),
                [outputs, of_each, points] if is_weight => Some([outputs, of_each, 1, points]),
                _ => None,
            };
            inputs.push(self.param(id, of_images.as_ref().map(|shape| &shape[..]))?);
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let mut attributes = vec![
            AttributeProto::ints("kernel_shape", &kernel),
            AttributeProto::ints("strides", &stride),
            AttributeProto::ints("pads", &[rows, columns, rows, columns]),
            AttributeProto::int("group", groups),
        ];
        if dilation != [1; 2] {
            attributes.push(AttributeProto::ints("dilations", &dilation));
        }
        Ok(self.push("Conv", &inputs, attributes))
    }

    /// Normalises each group as an instance. The operator `GroupNormalization` of this opset scales
    /// groups, while PyTorch scales channels.
    fn group_norm(
        &mut self,
        x: NodeId,
        weight: ParamId,
        bias: ParamId,
        groups: usize,
        eps: f32,
    ) -> Result<String, OnnxError> {
        let Dims { c, h, w } = self.network.graph.nodes[x.index()].dims;
        let [scale, shift] =
            [self.param(weight, Some(&[c, 1, 1]))?, self.param(bias, Some(&[c, 1, 1]))?];
        let (ones, zeros) = (vec![1.0; groups], vec![0.0; groups]);
        let one = self.constant(&format!("ones.{groups}"), &[groups], &ones);
        let zero = self.constant(&format!("zeros.{groups}"), &[groups], &zeros);
        // 0 keeps the batch size, −1 takes the remaining elements.
        let apart = self.shape(&[0, groups as i64, -1]);
        let together = self.shape(&[0, c as i64, h as i64, w as i64]);
        let split = self.push("Reshape", &[&self.value(x), &apart], vec![]);
        let epsilon = vec![AttributeProto::float("epsilon", eps)];
        let normal = self.push("InstanceNormalization", &[&split, &one, &zero], epsilon);
        let whole = self.push("Reshape", &[&normal, &together], vec![]);
        let scaled = self.push("Mul", &[&whole, &scale], vec![]);
        Ok(self.push("Add", &[&scaled, &shift], vec![]))
    }

    /// Normalises over the channels: a layer norm, or without a bias an RMS norm. The operator
    /// `LayerNormalization` goes over the last axes.
    fn layer_norm(
        &mut self,
        x: NodeId,
        weight: ParamId,
        bias: Option<ParamId>,
        eps: f32,
    ) -> Result<String, OnnxError> {
        let c = self.network.graph.nodes[x.index()].dims.c;
        let scale = self.param(weight, Some(&[c, 1, 1]))?;
        let channels = || vec![AttributeProto::ints("axes", &[1])];
        let mut x = self.value(x);
        if bias.is_some() {
            let mean = self.push("ReduceMean", &[&x], channels());
            x = self.push("Sub", &[&x, &mean], vec![]);
        }
        let square = self.push("Mul", &[&x, &x], vec![]);
        let variance = self.push("ReduceMean", &[&square], channels());
        let epsilon = self.constant(&format!("epsilon.{eps:e}"), &[], &[eps]);
        let positive = self.push("Add", &[&variance, &epsilon], vec![]);
        let deviation = self.push("Sqrt", &[&positive], vec![]);
        let normal = self.push("Div", &[&x, &deviation], vec![]);
        let scaled = self.push("Mul", &[&normal, &scale], vec![]);
        let Some(bias) = bias else { return Ok(scaled) };
        let shift = self.param(bias, Some(&[c, 1, 1]))?;
        Ok(self.push("Add", &[&scaled, &shift], vec![]))
    }

    /// A function of one element: its operator, or several where the opset has none.
    fn activation(&mut self, function: UnaryFunction, x: NodeId) -> String {
        let x = self.value(x);
        let operator = match function {
            UnaryFunction::Relu => "Relu",
            UnaryFunction::Sigmoid => "Sigmoid",
            UnaryFunction::Tanh => "Tanh",
            UnaryFunction::LeakyRelu { slope } => {
                return self.push("LeakyRelu", &[&x], vec![AttributeProto::float("alpha", slope)]);
            }
            // The default of its α is 1.
            UnaryFunction::Elu => "Elu",
            UnaryFunction::Gelu => return self.gelu(&x),
            UnaryFunction::GeluTanh => return self.gelu_tanh(&x),
            UnaryFunction::Silu => {
                let gate = self.push("Sigmoid", &[&x], vec![]);
                return self.push("Mul", &[&x, &gate], vec![]);
            }
            UnaryFunction::Softplus => "Softplus",
            UnaryFunction::HardSwish => "HardSwish",
        };
        self.push(operator, &[&x], vec![])
    }

    /// `½·x·(1 + erf(x/√2))`. The operator `Gelu` is of a later opset.
    fn gelu(&mut self, x: &str) -> String {
        let root = self.constant("gelu.root", &[], &[std::f32::consts::FRAC_1_SQRT_2]);
        let [one, half] =
            [("one", 1.0), ("half", 0.5)].map(|(name, value)| self.constant(name, &[], &[value]));
        let argument = self.push("Mul", &[x, &root], vec![]);
        let erf = self.push("Erf", &[&argument], vec![]);
        let sum = self.push("Add", &[&erf, &one], vec![]);
        let product = self.push("Mul", &[x, &sum], vec![]);
        self.push("Mul", &[&half, &product], vec![])
    }

    /// `x·σ(2·√(2/π)·(x + 0.044715·x³))`, which equals `½·x·(1 + tanh(…))`.
    fn gelu_tanh(&mut self, x: &str) -> String {
        let inner = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
        let linear = self.constant("gelu.linear", &[], &[inner]);
        let cubic = self.constant("gelu.cubic", &[], &[inner * 0.044_715]);
        let square = self.push("Mul", &[x, x], vec![]);
        let scaled = self.push("Mul", &[&cubic, &square], vec![]);
        let factor = self.push("Add", &[&linear, &scaled], vec![]);
        let argument = self.push("Mul", &[x, &factor], vec![]);
        let gate = self.push("Sigmoid", &[&argument], vec![]);
        self.push("Mul", &[x, &gate], vec![])
    }

    /// Blends a module into its host, as the engine does for an alpha above 0.
    fn blend(&mut self, inputs: BlendOperands, mode: BlendMode, slot: usize) -> String {
        let alpha = self.constant(&format!("alpha.{slot}"), &[], &[self.network.alphas[slot]]);
        let [host, module, input] =
            [inputs.host, inputs.module, inputs.input].map(|id| self.value(id));
        let gate = inputs.gate.map(|gate| self.value(gate));
        if mode == BlendMode::Multiply {
            let difference = self.push("Sub", &[&module, &input], vec![]);
            let bounded = self.push("Tanh", &[&difference], vec![]);
            let weighted = self.push("Mul", &[&alpha, &bounded], vec![]);
            let one = self.constant("one", &[], &[1.0]);
            let factor = self.push("Add", &[&one, &weighted], vec![]);
            return self.push("Mul", &[&host, &factor], vec![]);
        }
        let weight = match gate {
            // One value per sample, [N, 1, 1, 1].
            Some(gate) => self.push("Mul", &[&alpha, &gate], vec![]),
            None => alpha,
        };
        let difference = self.push("Sub", &[&module, &host], vec![]);
        let change = self.push("Mul", &[&weight, &difference], vec![]);
        self.push("Add", &[&host, &change], vec![])
    }

    /// Adds an operator and returns the name of its output.
    fn push(
        &mut self,
        operator: &str,
        inputs: &[&(impl AsRef<str> + ?Sized)],
        attributes: Vec<AttributeProto>,
    ) -> String {
        let output = format!("{operator}.{}", self.nodes.len());
        let inputs: Vec<&str> = inputs.iter().map(|input| input.as_ref()).collect();
        self.push_to(operator, &inputs, &output, attributes);
        output
    }

    fn push_to(
        &mut self,
        operator: &str,
        inputs: &[&str],
        output: &str,
        attribute: Vec<AttributeProto>,
    ) {
        self.nodes.push(NodeProto {
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec![output.into()],
            name: output.into(),
            op_type: operator.into(),
            attribute,
        });
    }

    /// The initializer of a parameter, in another shape if given.
    fn param(&mut self, id: ParamId, shape: Option<&[usize]>) -> Result<String, OnnxError> {
        let param = &self.network.graph.params[id.index()];
        self.tensor(&param.name, shape.unwrap_or(&param.shape))
    }

    fn buffer(&mut self, id: BufferId) -> Result<String, OnnxError> {
        let buffer = &self.network.graph.buffers[id.index()];
        self.tensor(&buffer.name, &[buffer.len])
    }

    /// The initializer of a tensor in the state.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<String, OnnxError> {
        let expected = shape.iter().product();
        let found = self.network.state.get(name);
        match found.and_then(|tensor| tensor.as_f32()) {
            Some(values) if values.len() == expected => Ok(self.constant(name, shape, values)),
            _ => {
                let got = found.map_or("nothing".into(), |tensor| tensor.form());
                Err(OnnxError::Tensor { name: name.into(), expected, got })
            }
        }
    }

    /// An initializer with floats; added once per name.
    fn constant(&mut self, name: &str, shape: &[usize], values: &[f32]) -> String {
        let bytes = || values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.initializer(name, FLOAT, shape, bytes)
    }

    /// An initializer with the shape for a `Reshape`; added once per shape.
    fn shape(&mut self, dims: &[i64]) -> String {
        let texts: Vec<String> = dims.iter().map(ToString::to_string).collect();
        let bytes = || dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        self.initializer(&format!("shape.{}", texts.join(".")), INT64, &[dims.len()], bytes)
    }

    fn initializer(
        &mut self,
        name: &str,
        data_type: i32,
        shape: &[usize],
        bytes: impl FnOnce() -> Vec<u8>,
    ) -> String {
        if self.named.insert(name.into()) {
            let dims = shape.iter().map(|dim| *dim as i64).collect();
            let raw_data = bytes();
            self.initializers.push(TensorProto { dims, data_type, name: name.into(), raw_data });
        }
        name.into()
    }
}

/// The dimension over which an operator works.
fn axis(of: usize) -> AttributeProto {
    AttributeProto::int("axis", of)
}

/// Attributes of pooling windows; `pads` only where there is padding.
fn windows(of: &PoolGeometry) -> Vec<AttributeProto> {
    let PoolGeometry { kernel, stride, padding: [rows, columns] } = *of;
    let mut attributes = vec![
        AttributeProto::ints("kernel_shape", &kernel),
        AttributeProto::ints("strides", &stride),
    ];
    if [rows, columns] != [0; 2] {
        attributes.push(AttributeProto::ints("pads", &[rows, columns, rows, columns]));
    }
    attributes
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

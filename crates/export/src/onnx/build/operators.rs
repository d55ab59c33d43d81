//! Operations that are several operators, or one with several attributes.

use meristem_nn::graph::{
    BlendMode, BlendOperands, ConvGeometry, Dims, NodeId, ParamId, PoolGeometry, UnaryFunction,
};

use super::OnnxBuilder;
use crate::onnx::OnnxError;
use crate::onnx::messages::AttributeProto;

impl OnnxBuilder<'_> {
    /// A convolution. A linear layer is a convolution with a 1×1 window.
    pub(super) fn conv(
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

    /// Normalises each group as an instance, then scales and shifts channels. Opset 17 has no
    /// operator for a group norm, and `GroupNormalization` of opset 18 scales groups, while PyTorch
    /// scales channels.
    pub(super) fn group_norm(
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
    pub(super) fn layer_norm(
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

    /// An elementwise function: its operator, or several where the opset has none.
    pub(super) fn activation(&mut self, function: UnaryFunction, x: NodeId) -> String {
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
    pub(super) fn blend(&mut self, inputs: BlendOperands, mode: BlendMode, slot: usize) -> String {
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
}

/// Attributes of pooling windows; `pads` only where there is padding.
pub(super) fn windows(of: &PoolGeometry) -> Vec<AttributeProto> {
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

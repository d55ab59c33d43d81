//! Building a [`Graph`] layer by layer: shapes are checked and derived here, and only here.

use std::collections::HashSet;

use super::{
    BlendMode, BlendOperands, BufferId, BufferSpec, ConvGeometry, Dims, DropoutSpec, Graph,
    GroupId, GroupSpec, Init, Node, NodeId, NodeOp, Optimiser, ParamId, ParamKind, ParamSpec,
    UnaryFunction,
};
use crate::error::{Error, Result};

/// Weight of a batch in batch norm's running statistics: PyTorch's default.
pub(crate) const BATCH_NORM_MOMENTUM: f32 = 0.1;

/// Builds a [`Graph`] node by node. Parameters declared after [`GraphBuilder::group`] belong to
/// that group.
pub struct GraphBuilder {
    graph: Graph,
    names: HashSet<String>,
    group: GroupId,
}

impl GraphBuilder {
    /// A graph whose input has `dims` per sample; `host` is the optimiser of group 0.
    pub fn new(dims: Dims, host: impl Into<Optimiser>) -> Self {
        let graph = Graph {
            nodes: vec![Node { op: NodeOp::Input(0), dims }],
            params: vec![],
            buffers: vec![],
            groups: vec![GroupSpec {
                name: "host".into(),
                optimiser: host.into(),
                variants: vec![],
            }],
            output: NodeId(0),
            alphas: 0,
            dropouts: vec![],
            step_factors: None,
        };
        Self { graph, names: HashSet::new(), group: GroupId(0) }
    }

    /// The graph as built so far; its output is the input.
    pub fn so_far(&self) -> &Graph {
        &self.graph
    }

    /// The input node.
    pub fn input(&self) -> NodeId {
        NodeId(0)
    }

    /// An additional input. (A [`Network`](crate::Network) has only one input, the batch.)
    pub fn another_input(&mut self, dims: Dims) -> NodeId {
        let index = self.inputs();
        self.push(NodeOp::Input(index), dims)
    }

    /// The shape of a node's value per sample.
    pub fn dims(&self, x: NodeId) -> Dims {
        self.graph.nodes[x.0].dims
    }

    /// Opens a new parameter group and makes it current.
    pub fn group(&mut self, name: &str, optimiser: impl Into<Optimiser>) -> GroupId {
        let optimiser = optimiser.into();
        self.graph.groups.push(GroupSpec { name: name.into(), optimiser, variants: vec![] });
        self.group = GroupId(self.graph.groups.len() - 1);
        self.group
    }

    /// Makes an earlier group current.
    pub fn resume_group(&mut self, group: GroupId) {
        self.group = group;
    }

    pub(super) fn inputs(&self) -> usize {
        self.graph.inputs()
    }

    pub(super) fn op(&self, x: NodeId) -> &NodeOp {
        &self.graph.nodes[x.0].op
    }

    pub(super) fn push(&mut self, op: NodeOp, dims: Dims) -> NodeId {
        self.graph.nodes.push(Node { op, dims });
        NodeId(self.graph.nodes.len() - 1)
    }

    fn claim(&mut self, name: String) -> Result<String> {
        if !self.names.insert(name.clone()) {
            return Err(Error::DuplicateName { name });
        }
        Ok(name)
    }

    /// Declares a parameter under PyTorch's name and shape.
    pub fn param(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        kind: ParamKind,
        init: Init,
    ) -> Result<ParamId> {
        let name = self.claim(name.into())?;
        let group = self.group;
        self.graph.params.push(ParamSpec {
            name,
            shape: shape.to_vec(),
            kind,
            init,
            group,
            variant: 0,
        });
        Ok(ParamId(self.graph.params.len() - 1))
    }

    fn vector_param(&mut self, name: &str, part: &str, len: usize, init: Init) -> Result<ParamId> {
        self.param(format!("{name}.{part}"), &[len], ParamKind::Vector, init)
    }

    fn buffer(&mut self, name: String, len: usize, init: f32, counter: bool) -> Result<BufferId> {
        let name = self.claim(name)?;
        let group = self.group;
        self.graph.buffers.push(BufferSpec { name, len, init, counter, group });
        Ok(BufferId(self.graph.buffers.len() - 1))
    }

    /// Convolution with weights `{name}.weight` (and `{name}.bias`), initialised as PyTorch does.
    pub fn conv2d(
        &mut self,
        x: NodeId,
        name: &str,
        out: usize,
        geometry: ConvGeometry,
        with_bias: bool,
    ) -> Result<NodeId> {
        let d = self.dims(x);
        let ConvGeometry { kernel, stride, padding, groups, dilation } = geometry;
        let window = [0, 1].map(|axis| dilation[axis] * kernel[axis].saturating_sub(1) + 1);
        let extent = |size: usize, axis: usize| {
            let padded = size + 2 * padding[axis];
            let some = kernel[axis] > 0 && stride[axis] > 0 && dilation[axis] > 0;
            (some && padded >= window[axis]).then(|| (padded - window[axis]) / stride[axis] + 1)
        };
        let (Some(h), Some(w)) = (extent(d.h, 0), extent(d.w, 1)) else {
            return Err(Error::TooSmall { layer: name.into(), dims: d, window });
        };
        if groups == 0 || out == 0 || !d.c.is_multiple_of(groups) || !out.is_multiple_of(groups) {
            return Err(Error::Groups { layer: name.into(), groups, channels: [d.c, out] });
        }
        let shape = [out, d.c / groups, kernel[0], kernel[1]];
        let init = Init::torch_default(shape[1] * kernel[0] * kernel[1]);
        let kind = ParamKind::ConvWeight { groups };
        let weight = self.param(format!("{name}.weight"), &shape, kind, init)?;
        let bias = with_bias.then(|| self.vector_param(name, "bias", out, init)).transpose()?;
        Ok(self.push(NodeOp::Conv2d { x, weight, bias, geometry }, Dims { c: out, h, w }))
    }

    /// Convolution of a signal, an image with one row: as [`GraphBuilder::conv2d`], but with
    /// weights of PyTorch's shape `[out, in/groups, k]`. `geometry` has one row.
    pub fn conv1d(
        &mut self,
        x: NodeId,
        name: &str,
        out: usize,
        geometry: ConvGeometry,
        with_bias: bool,
    ) -> Result<NodeId> {
        let node = self.conv2d(x, name, out, geometry, with_bias)?;
        if let NodeOp::Conv2d { weight, .. } = self.graph.nodes[node.0].op {
            let shape = &mut self.graph.params[weight.0].shape;
            *shape = vec![shape[0], shape[1], geometry.kernel[1]];
        }
        Ok(node)
    }

    /// Batch norm with PyTorch's names, defaults (eps 1e-5, momentum 0.1) and initial values.
    pub fn batch_norm(&mut self, x: NodeId, name: &str) -> Result<NodeId> {
        let d = self.dims(x);
        let (weight, bias) = self.affine(name, d.c, 1.0)?;
        let mut buffer = |part: &str, len: usize, init: f32, counter: bool| {
            self.buffer(format!("{name}.{part}"), len, init, counter)
        };
        let running_mean = buffer("running_mean", d.c, 0.0, false)?;
        let running_var = buffer("running_var", d.c, 1.0, false)?;
        let num_batches_tracked = buffer("num_batches_tracked", 1, 0.0, true)?;
        let running = [running_mean, running_var];
        let (eps, momentum) = (1e-5, BATCH_NORM_MOMENTUM);
        let op = NodeOp::BatchNorm { x, weight, bias, running, num_batches_tracked, eps, momentum };
        Ok(self.push(op, d))
    }

    /// Group norm (eps 1e-5) with initial scale `scale`.
    pub fn group_norm(
        &mut self,
        x: NodeId,
        name: &str,
        groups: usize,
        scale: f32,
    ) -> Result<NodeId> {
        let d = self.dims(x);
        if groups == 0 || !d.c.is_multiple_of(groups) {
            return Err(Error::Groups { layer: name.into(), groups, channels: [d.c, d.c] });
        }
        let (weight, bias) = self.affine(name, d.c, scale)?;
        Ok(self.push(NodeOp::GroupNorm { x, weight, bias, groups, eps: 1e-5 }, d))
    }

    /// PyTorch's `LayerNorm` over the channels of each pixel, or the features of a vector (eps
    /// 1e-5): `LayerNorm(channels)` of an image whose channels come last. The norm over a whole
    /// image with a scale for each channel is [`GraphBuilder::group_norm`] of one group.
    pub fn layer_norm(&mut self, x: NodeId, name: &str) -> Result<NodeId> {
        let d = self.dims(x);
        let (weight, bias) = self.affine(name, d.c, 1.0)?;
        Ok(self.push(NodeOp::LayerNorm { x, weight, bias, eps: 1e-5 }, d))
    }

    /// PyTorch's `RMSNorm` over the channels of each pixel, or the features of a vector (eps 1e-5,
    /// where PyTorch's default is the 1.2e-7 of f32): `x·γ/√(mean of x² + eps)`.
    pub fn rms_norm(&mut self, x: NodeId, name: &str) -> Result<NodeId> {
        let d = self.dims(x);
        let weight = self.vector_param(name, "weight", d.c, Init::Constant(1.0))?;
        Ok(self.push(NodeOp::RmsNorm { x, weight, eps: 1e-5 }, d))
    }

    fn affine(&mut self, name: &str, c: usize, scale: f32) -> Result<(ParamId, ParamId)> {
        let mut param = |part, value| self.vector_param(name, part, c, Init::Constant(value));
        Ok((param("weight", scale)?, param("bias", 0.0)?))
    }

    /// Linear layer over a vector. `init` initialises weight and bias (the bias of an orthogonal
    /// weight is 0); `None` is PyTorch's default.
    pub fn linear(
        &mut self,
        x: NodeId,
        name: &str,
        out: usize,
        with_bias: bool,
        init: Option<Init>,
    ) -> Result<NodeId> {
        let d = self.dims(x);
        if d.h != 1 || d.w != 1 || out == 0 {
            return Err(Error::NotAVector { layer: name.into(), dims: d });
        }
        self.linear_of_pixels(x, name, out, with_bias, init)
    }

    /// One linear layer over the channels of each pixel, as PyTorch's `Linear` of an image whose
    /// channels come last. Initialised as [`GraphBuilder::linear`].
    pub fn linear_of_pixels(
        &mut self,
        x: NodeId,
        name: &str,
        out: usize,
        with_bias: bool,
        init: Option<Init>,
    ) -> Result<NodeId> {
        let d = self.dims(x);
        if out == 0 {
            return Err(Error::NotAVector { layer: name.into(), dims: d });
        }
        let init = init.unwrap_or_else(|| Init::torch_default(d.c));
        let kind = ParamKind::LinearWeight;
        let weight = self.param(format!("{name}.weight"), &[out, d.c], kind, init)?;
        let init = match init {
            Init::Orthogonal { .. } => Init::Constant(0.0),
            init => init,
        };
        let bias = with_bias.then(|| self.vector_param(name, "bias", out, init)).transpose()?;
        let geometry = ConvGeometry::same(1);
        Ok(self.push(NodeOp::Conv2d { x, weight, bias, geometry }, Dims { c: out, ..d }))
    }

    fn activation(&mut self, function: UnaryFunction, x: NodeId) -> NodeId {
        let d = self.dims(x);
        self.push(NodeOp::Activation(function, x), d)
    }

    /// ReLU.
    pub fn relu(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::Relu, x)
    }

    /// Sigmoid.
    pub fn sigmoid(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::Sigmoid, x)
    }

    /// Hyperbolic tangent.
    pub fn tanh(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::Tanh, x)
    }

    /// Leaky ReLU: `x` above 0, `slope · x` elsewhere. PyTorch's default slope is 0.01.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a slope that is negative, infinite or NaN.
    pub fn leaky_relu(&mut self, x: NodeId, slope: f32) -> Result<NodeId> {
        if !(slope.is_finite() && slope >= 0.0) {
            let (layer, expected) = ("leaky_relu".into(), "a finite slope of at least 0");
            return Err(Error::Unsupported { layer, expected, got: slope.to_string() });
        }
        Ok(self.activation(UnaryFunction::LeakyRelu { slope }, x))
    }

    /// ELU with α = 1: `x` above 0, `eˣ − 1` elsewhere.
    pub fn elu(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::Elu, x)
    }

    /// GELU (<https://arxiv.org/abs/1606.08415>): `½·x·(1 + erf(x/√2))`. Backward keeps x.
    pub fn gelu(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::Gelu, x)
    }

    /// GELU's approximation by tanh, from the same article:
    /// `½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`. Backward keeps x.
    pub fn gelu_tanh(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::GeluTanh, x)
    }

    /// SiLU, also known as swish: `x/(1 + e⁻ˣ)`. Backward keeps x.
    pub fn silu(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::Silu, x)
    }

    /// Softplus: `ln(1 + eˣ)`.
    pub fn softplus(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::Softplus, x)
    }

    /// Hard swish (<https://arxiv.org/abs/1905.02244>): `x·min(max(x + 3, 0), 6)/6`. Backward keeps
    /// x.
    pub fn hard_swish(&mut self, x: NodeId) -> NodeId {
        self.activation(UnaryFunction::HardSwish, x)
    }

    /// Dropout with this rate, see [`NodeOp::Dropout`]. Its draws depend on its name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a rate outside `[0, 1)`; [`Error::DuplicateName`].
    pub fn dropout(&mut self, x: NodeId, name: &str, rate: f32) -> Result<NodeId> {
        DropoutSpec::check(name, rate)?;
        let layers = &mut self.graph.dropouts;
        if layers.iter().any(|layer| layer.name == name) {
            return Err(Error::DuplicateName { name: name.into() });
        }
        layers.push(DropoutSpec { name: name.into(), rate, group: self.group });
        let (layer, d) = (layers.len() - 1, self.dims(x));
        Ok(self.push(NodeOp::Dropout { x, layer }, d))
    }

    /// Mean over the image: `C × H × W` to `C × 1 × 1`.
    pub fn global_avg_pool(&mut self, x: NodeId) -> NodeId {
        let c = self.dims(x).c;
        self.push(NodeOp::GlobalAvgPool(x), Dims { c, h: 1, w: 1 })
    }

    /// `C × H × W` to a vector of `C·H·W`, in PyTorch's order: channel by channel, each row by row.
    pub fn flatten(&mut self, x: NodeId) -> NodeId {
        let c = self.dims(x).numel();
        self.push(NodeOp::Flatten(x), Dims { c, h: 1, w: 1 })
    }

    /// Channels of images of one height and width side by side, in PyTorch's order
    /// (`torch.cat(parts, 1)`); vectors are images of one pixel.
    ///
    /// # Errors
    /// [`Error::Dims`] for a part of another height or width; [`Error::Unsupported`] for no part at
    /// all.
    pub fn concat(&mut self, parts: &[NodeId]) -> Result<NodeId> {
        let Some(first) = parts.first() else {
            let (layer, expected) = ("concat".into(), "at least one part");
            return Err(Error::Unsupported { layer, expected, got: "none".into() });
        };
        let Dims { h, w, .. } = self.dims(*first);
        let mut c = 0;
        for part in parts {
            let got = self.dims(*part);
            let expected = Dims { c: got.c, h, w };
            if got != expected {
                return Err(Error::Dims { op: "concat", expected, got });
            }
            c += got.c;
        }
        Ok(self.push(NodeOp::Concat(parts.to_vec()), Dims { c, h, w }))
    }

    fn same_dims(&self, op: &'static str, a: NodeId, b: NodeId) -> Result<Dims> {
        let (expected, got) = (self.dims(a), self.dims(b));
        if expected == got { Ok(expected) } else { Err(Error::Dims { op, expected, got }) }
    }

    /// Residual sum.
    pub fn add(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        let d = self.same_dims("add", a, b)?;
        Ok(self.push(NodeOp::Add(a, b), d))
    }

    /// Product, element by element.
    pub fn multiply(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        let d = self.same_dims("multiply", a, b)?;
        Ok(self.push(NodeOp::Multiply(a, b), d))
    }

    /// `factor · x · scale`, scale one value per sample and channel.
    pub fn scale_channels(&mut self, x: NodeId, scale: NodeId, factor: f32) -> Result<NodeId> {
        let (d, got) = (self.dims(x), self.dims(scale));
        let expected = Dims { c: d.c, h: 1, w: 1 };
        if got != expected {
            return Err(Error::Dims { op: "scale_channels", expected, got });
        }
        Ok(self.push(NodeOp::ScaleChannels { x, scale, factor }, d))
    }

    /// `x + tanh(s)·(y − x)` with the scalar parameter `name`, zero when new.
    pub fn tanh_mix(&mut self, x: NodeId, y: NodeId, name: &str) -> Result<NodeId> {
        let d = self.same_dims("tanh_mix", x, y)?;
        let mix = self.param(name, &[], ParamKind::Vector, Init::Constant(0.0))?;
        Ok(self.push(NodeOp::TanhMix { x, y, mix }, d))
    }

    /// Stops the gradient.
    pub fn detach(&mut self, x: NodeId) -> NodeId {
        let d = self.dims(x);
        self.push(NodeOp::Detach(x), d)
    }

    /// The value of `host`; the gradient goes unchanged to `host` and to `module`.
    pub fn straight_through(&mut self, host: NodeId, module: NodeId) -> Result<NodeId> {
        let d = self.same_dims("straight_through", host, module)?;
        Ok(self.push(NodeOp::StraightThrough { host, module }, d))
    }

    /// Mixes a module into its host; `alpha` is its index in the alpha vector. `gate` belongs to
    /// [`BlendMode::Gate`] and only to it: one value per sample.
    pub fn blend(
        &mut self,
        mode: BlendMode,
        alpha: usize,
        BlendOperands { host, module, input, gate }: BlendOperands,
    ) -> Result<NodeId> {
        let d = self.same_dims("blend", host, module)?;
        self.same_dims("blend", host, input)?;
        let expected = Dims { c: 1, h: 1, w: 1 };
        match (mode == BlendMode::Gate, gate.map(|g| self.dims(g))) {
            (true, Some(got)) if got == expected => {}
            (false, None) => {}
            (_, got) => {
                let got = got.unwrap_or(Dims { c: 0, h: 0, w: 0 });
                return Err(Error::Dims { op: "blend gate", expected, got });
            }
        }
        self.graph.alphas = self.graph.alphas.max(alpha + 1);
        let inputs = BlendOperands { host, module, input, gate };
        Ok(self.push(NodeOp::Blend { inputs, mode, alpha }, d))
    }

    /// The graph, with `logits` (a vector, one value per class) as its output.
    pub fn finish(self, logits: NodeId) -> Result<Graph> {
        let dims = self.dims(logits);
        if dims.h != 1 || dims.w != 1 {
            return Err(Error::NotAVector { layer: "output".into(), dims });
        }
        Ok(self.finish_at(logits))
    }

    /// The graph with any value as its output: a piece of a network, to be run without a loss.
    pub fn finish_at(mut self, output: NodeId) -> Graph {
        self.graph.output = output;
        self.graph
    }
}

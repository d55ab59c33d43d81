//! Cost of a node, counted from its shapes.

use super::{BlendMode, Function, Graph, NodeId, Op};

impl Graph {
    /// Floating-point operations of a node per sample in evaluation. A multiplication and an
    /// addition are one each, as are a comparison, an exponential and a root: a measure to compare
    /// networks by, not a time.
    pub fn flops(&self, node: NodeId) -> u64 {
        let of = |node: NodeId| self.nodes[node.index()].dims;
        let each = of(node).numel();
        let flops = match self.nodes[node.index()].op {
            Op::Input(_) | Op::Indices(_) | Op::State(_) => 0,
            Op::Detach(_) | Op::StraightThrough { .. } => 0,
            Op::Embedding { .. } | Op::Concat(_) => 0,
            // Four gates of two products and biases, three sigmoids, two tanhs, five others.
            Op::Lstm { x, .. } => each * (4 * (2 * (of(x).c + each) + 2) + 3 * 3 + 2 * 4 + 5),
            Op::Conv2d { x, bias, geometry, .. } => {
                let window = geometry.kernel[0] * geometry.kernel[1] * of(x).c / geometry.groups;
                each * (2 * window + usize::from(bias.is_some()))
            }
            Op::BatchNorm { .. } => 2 * each,
            // Mean, variance (square and sum), scale and shift.
            Op::GroupNorm { .. } => 5 * each,
            Op::Activation(Function::Relu, _) | Op::Add(..) => each,
            // 1/(1 + e^−x) and (e^2x − 1)/(e^2x + 1).
            Op::Activation(Function::Sigmoid, _) => 3 * each,
            Op::Activation(Function::Tanh, _) => 4 * each,
            Op::MaxPool2d { kernel, .. } => kernel * kernel * each,
            Op::GlobalAvgPool(x) => of(x).numel(),
            Op::ScaleChannels { .. } => 2 * each,
            Op::TanhMix { .. } => 3 * each,
            Op::Blend { mode: BlendMode::Add | BlendMode::Gate, .. } => 3 * each,
            Op::Blend { mode: BlendMode::Multiply, .. } => 8 * each,
        };
        flops as u64
    }

    /// Multiply-accumulate operations (MACs) per sample of all convolutions, linear layers and
    /// LSTMs, in evaluation.
    pub fn macs(&self) -> u64 {
        let of = |node: NodeId| self.nodes[node.index()].dims;
        let macs = self.nodes.iter().map(|node| match node.op {
            Op::Conv2d { x, geometry, .. } => {
                let window = geometry.kernel[0] * geometry.kernel[1] * of(x).c / geometry.groups;
                node.dims.numel() * window
            }
            Op::Lstm { x, .. } => 4 * node.dims.numel() * (of(x).c + node.dims.numel()),
            _ => 0,
        });
        macs.map(|macs| macs as u64).sum()
    }
}

//! Cost of a node, counted from its shapes.

use super::{BlendMode, Graph, NodeId, NodeOp, UnaryFunction};

impl Graph {
    /// Floating-point operations of a node per sample in evaluation. A multiplication and an
    /// addition are one each, as are a comparison, an exponential and a root: a measure to compare
    /// networks by, not a time.
    pub fn flops(&self, node: NodeId) -> u64 {
        let of = |node: NodeId| self.nodes[node.index()].dims;
        let each = of(node).numel();
        let flops = match self.nodes[node.index()].op {
            NodeOp::Input(_) | NodeOp::Indices(_) | NodeOp::State(_) => 0,
            NodeOp::Detach(_) | NodeOp::StraightThrough { .. } => 0,
            // The identity in evaluation.
            NodeOp::Dropout { .. } => 0,
            NodeOp::Embedding { .. } | NodeOp::Concat(_) | NodeOp::Flatten(_) => 0,
            // Four gates of two products and biases, three sigmoids, two tanhs, five other
            // operations.
            NodeOp::Lstm { x, .. } => each * (4 * (2 * (of(x).c + each) + 2) + 3 * 3 + 2 * 4 + 5),
            NodeOp::Conv2d { x, bias, geometry, .. } => {
                let window = geometry.kernel[0] * geometry.kernel[1] * of(x).c / geometry.groups;
                each * (2 * window + usize::from(bias.is_some()))
            }
            NodeOp::BatchNorm { .. } => 2 * each,
            // Mean, variance (square and sum), scale and shift.
            NodeOp::GroupNorm { .. } | NodeOp::LayerNorm { .. } => 5 * each,
            // Mean square, and scale.
            NodeOp::RmsNorm { .. } => 3 * each,
            NodeOp::Activation(function, _) => of_function(function) * each,
            NodeOp::Add(..) | NodeOp::Multiply(..) => each,
            NodeOp::MaxPool2d { window, .. } | NodeOp::AvgPool2d { window, .. } => {
                window.taps() * each
            }
            NodeOp::GlobalAvgPool(x) => of(x).numel(),
            NodeOp::ScaleChannels { .. } => 2 * each,
            NodeOp::TanhMix { .. } => 3 * each,
            NodeOp::Blend { mode: BlendMode::Add | BlendMode::Gate, .. } => 3 * each,
            NodeOp::Blend { mode: BlendMode::Multiply, .. } => 8 * each,
        };
        flops as u64
    }

    /// Multiply-accumulate operations (MACs) per sample of all convolutions, linear layers and
    /// LSTMs, in evaluation.
    pub fn macs(&self) -> u64 {
        let of = |node: NodeId| self.nodes[node.index()].dims;
        let macs = self.nodes.iter().map(|node| match node.op {
            NodeOp::Conv2d { x, geometry, .. } => {
                let window = geometry.kernel[0] * geometry.kernel[1] * of(x).c / geometry.groups;
                node.dims.numel() * window
            }
            NodeOp::Lstm { x, .. } => 4 * node.dims.numel() * (of(x).c + node.dims.numel()),
            _ => 0,
        });
        macs.map(|macs| macs as u64).sum()
    }
}

/// Floating-point operations of an elementwise function, by its formula.
fn of_function(function: UnaryFunction) -> usize {
    match function {
        UnaryFunction::Relu => 1,
        // 1/(1 + e^−x) and (e^2x − 1)/(e^2x + 1).
        UnaryFunction::Sigmoid => 3,
        UnaryFunction::Tanh => 4,
        // A comparison, and a product.
        UnaryFunction::LeakyRelu { .. } => 2,
        // A comparison, and e^x − 1.
        UnaryFunction::Elu => 3,
        // ½x·(1 + erf(x/√2)), erf like an exponential.
        UnaryFunction::Gelu => 5,
        // ½x·(1 + tanh u), u = √(2/π)·x·(1 + 0.044715·x²).
        UnaryFunction::GeluTanh => 3 + 4 + 5,
        // x/(1 + e^−x).
        UnaryFunction::Silu => 3,
        // A comparison, and log(1 + e^x).
        UnaryFunction::Softplus => 4,
        // x·min(max(x + 3, 0), 6)/6.
        UnaryFunction::HardSwish => 5,
    }
}

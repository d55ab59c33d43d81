//! Layers over sequences and indices.

use super::{Dims, GraphBuilder, Init, LstmParams, NodeId, NodeOp, ParamKind};
use crate::error::{Error, Result};

/// Inputs of an LSTM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LstmNodes {
    /// Input vectors.
    pub x: NodeId,
    /// One value a row: 1, or 0 where the state is reset before the step.
    pub keep: NodeId,
    /// State before the first step, of [`GraphBuilder::lstm_state`].
    pub state: NodeId,
}

impl GraphBuilder {
    /// One more input: `count` indices (u32) a row.
    pub fn indices(&mut self, count: usize) -> NodeId {
        let index = self.inputs();
        self.push(NodeOp::Indices(index), Dims { c: count, h: 1, w: 1 })
    }

    /// One more input: the state of an [`GraphBuilder::lstm`] of this width before the first step,
    /// `[sequences, 2·hidden]`, h then c.
    pub fn lstm_state(&mut self, hidden: usize) -> NodeId {
        let index = self.inputs();
        self.push(NodeOp::State(index), Dims { c: 2 * hidden, h: 1, w: 1 })
    }

    fn vector(&self, x: NodeId, layer: &str) -> Result<usize> {
        match self.dims(x) {
            Dims { c, h: 1, w: 1 } => Ok(c),
            dims => Err(Error::NotAVector { layer: layer.into(), dims }),
        }
    }

    /// PyTorch's `Embedding` with the table `{name}.weight` `[entries, size]`, standard normal when
    /// new. A sample's value is the table's rows at its indices, side by side: `size` features for
    /// each index.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if `x` is not [`GraphBuilder::indices`].
    pub fn embedding(
        &mut self,
        x: NodeId,
        name: &str,
        entries: usize,
        size: usize,
    ) -> Result<NodeId> {
        if !matches!(self.op(x), NodeOp::Indices(_)) {
            let (layer, expected) = (name.into(), "an input of indices");
            return Err(Error::Unsupported { layer, expected, got: format!("{:?}", self.op(x)) });
        }
        let c = self.dims(x).c * size;
        let (kind, shape) = (ParamKind::Vector, [entries, size]);
        let table = self.param(format!("{name}.weight"), &shape, kind, Init::Normal)?;
        Ok(self.push(NodeOp::Embedding { x, table }, Dims { c, h: 1, w: 1 }))
    }

    /// PyTorch's one-layer `LSTM` with parameters `{name}.weight_ih_l0` and so on; the value is h
    /// of every step. Rows of a batch are `[steps][sequences]`;
    /// [`PlanOptions::steps`](crate::PlanOptions) is the number of steps. `keep` has one value a
    /// row: the state before a step is multiplied by it, so that 0 starts a new sequence there.
    /// `state` comes from [`GraphBuilder::lstm_state`]. Initial weights are orthogonal. The forget
    /// gate's bias in `bias_ih` is 1; all other biases are 0.
    ///
    /// ```text
    /// (i, f, g, o) = W_ih x_t + b_ih + W_hh (k_t h_{t−1}) + b_hh
    /// c_t = σ(f) k_t c_{t−1} + σ(i) tanh(g);  h_t = σ(o) tanh(c_t)
    /// ```
    ///
    /// # Errors
    /// [`Error::NotAVector`], [`Error::Dims`] for a `keep` or `state` of another form,
    /// [`Error::DuplicateName`].
    pub fn lstm(&mut self, of: LstmNodes, name: &str) -> Result<NodeId> {
        let LstmNodes { x, keep, state } = of;
        let features = self.vector(x, name)?;
        let hidden = self.dims(state).c / 2;
        let is_state = matches!(self.op(state), NodeOp::State(_));
        for (node, c, fits) in [(keep, 1, true), (state, 2 * hidden, is_state && hidden > 0)] {
            let (expected, got) = (Dims { c, h: 1, w: 1 }, self.dims(node));
            if expected != got || !fits {
                return Err(Error::Dims { op: "lstm", expected, got });
            }
        }
        let gates = 4 * hidden;
        let orthogonal = Init::Orthogonal { gain: 1.0 };
        let mut weight = |part: &str, inputs: usize| {
            let name = format!("{name}.weight_{part}_l0");
            self.param(name, &[gates, inputs], ParamKind::LinearWeight, orthogonal)
        };
        let (weight_ih, weight_hh) = (weight("ih", features)?, weight("hh", hidden)?);
        let mut bias = |part: &str, init: Init| {
            self.param(format!("{name}.bias_{part}_l0"), &[gates], ParamKind::Vector, init)
        };
        let (bias_ih, bias_hh) = (bias("ih", Init::ForgetBias)?, bias("hh", Init::Constant(0.0))?);
        let params = LstmParams { weight_ih, weight_hh, bias_ih, bias_hh };
        Ok(self.push(NodeOp::Lstm { x, keep, state, params }, Dims { c: hidden, h: 1, w: 1 }))
    }
}

//! Steps of batch norm, alone or fused with ReLU and pooling, of group norm, and of layer norm.

use super::operand::{Signature, Slice, SliceMut, StepOperands, f32s, i64s, scratch, u8s, values};
use crate::kernels::norm::{
    self, Activation, BatchNormBackward, BatchNormForward, BatchStats, GroupNormBackward,
    GroupNormForward, GroupNormGrads, GroupNormSaved, LayerNormBackward, LayerNormForward,
    LayerNormGrads, LayerNormSaved,
};
use crate::kernels::{BatchShape, GradOut, Isa};

/// Shape and options of a batch norm with its activation and pooling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    /// Shape of the raw input.
    pub shape: BatchShape,
    /// Added to the variance.
    pub eps: f32,
    /// Activation after it.
    pub act: Activation,
    /// Whether 2×2 max pooling follows.
    pub pool: bool,
}

impl BatchNorm {
    /// Shape of the output, which is pooled if pooling follows.
    pub fn output(&self) -> BatchShape {
        norm::batch::output(&self.shape, self.pool)
    }

    /// Elements of the coefficients of its gradient.
    pub(crate) fn coefficients_len(&self) -> usize {
        3 * self.shape.c
    }

    /// Elements of scratch.
    pub fn scratch_len(&self) -> usize {
        norm::batch::scratch_len(self.shape.c)
    }

    pub(super) fn inputs<'a>(
        &self,
        [x, mean, var, gamma, beta]: [&'a [f32]; 5],
    ) -> BatchNormForward<'a> {
        let Self { eps, act, pool, .. } = *self;
        BatchNormForward { x, mean, var, gamma, beta, eps, act, pool }
    }
}

/// Shape and options of a group norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupNorm {
    /// Shape of input and output.
    pub shape: BatchShape,
    /// Groups of channels.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f32,
}

/// Shape and options of a layer norm or RMS norm over the channels of each pixel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    /// Shape of input and output.
    pub shape: BatchShape,
    /// Added to the variance, or to the mean square in an RMS norm.
    pub eps: f32,
    /// Whether it is a layer norm, which subtracts the mean and has a shift β; otherwise it is an
    /// RMS norm.
    pub centred: bool,
}

impl LayerNorm {
    /// Pixels of the batch.
    pub fn rows(&self) -> usize {
        self.shape.batch * self.shape.pixels()
    }

    /// `len`, or 0 for an RMS norm, which lacks the operand.
    fn if_centred(&self, len: usize) -> usize {
        if self.centred { len } else { 0 }
    }
}

/// The norms' forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormOp {
    /// Reads x; writes mean, biased variance, scratch.
    Statistics(BatchShape),
    /// Reads mean, variance; updates running mean, running variance, and the batches counted, which
    /// are an i64 because an f32 stops counting at 2²⁴.
    UpdateRunning {
        /// Channels.
        channels: usize,
        /// Share of the batch's statistics.
        momentum: f32,
        /// Values per channel.
        count: usize,
    },
    /// Reads x, mean, variance, γ, β; writes y, the codes (if pooled, and optional), scratch.
    Forward(BatchNorm),
    /// Reads x, mean, variance, γ, β, dy, codes (if pooled), y (if pooled, and optional);
    /// writes the coefficients of [`NormOp::InputGradient`]; adds to dγ, dβ; scratch.
    GradientSums(BatchNorm),
    /// Reads x, mean, β, coefficients, dy, codes (if pooled); writes dx.
    InputGradient {
        /// Shape and options.
        norm: BatchNorm,
        /// Add to dx.
        accumulate: bool,
    },
    /// Reads x, γ, β; writes y, the mean and inverse deviation of each group, scratch.
    GroupForward(GroupNorm),
    /// Reads x, γ, mean, inverse deviation, dy; writes dx (optional); adds to dγ, dβ; scratch.
    GroupGradient {
        /// Shape and options.
        norm: GroupNorm,
        /// Add to dx.
        accumulate: bool,
    },
    /// Reads x, γ, β; writes y, the mean and inverse deviation of each pixel. An RMS norm has no β
    /// and no mean.
    LayerForward(LayerNorm),
    /// Reads x, γ, mean, inverse deviation, dy; writes dx (optional); adds to dγ, dβ; scratch. An
    /// RMS norm has no mean and no dβ.
    LayerGradient {
        /// Shape and options.
        norm: LayerNorm,
        /// Add to dx.
        accumulate: bool,
    },
}

impl NormOp {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            NormOp::Statistics(shape) => {
                let (c, rest) = (f32s(shape.c), norm::batch::scratch_len(shape.c));
                Signature::new(&[values(shape.len())], &[c, c, scratch(rest)])
            }
            NormOp::UpdateRunning { channels, .. } => {
                let c = f32s(channels);
                Signature::new(&[c, c], &[c, c, i64s(1)])
            }
            NormOp::Forward(norm) => {
                let (x, c, y) = (values(norm.shape.len()), f32s(norm.shape.c), norm.output().len());
                let codes = u8s(if norm.pool { y } else { 0 }).optional();
                Signature::new(&[x, c, c, c, c], &[values(y), codes, scratch(norm.scratch_len())])
            }
            NormOp::GradientSums(norm) => {
                let (x, c, y) = (values(norm.shape.len()), f32s(norm.shape.c), norm.output().len());
                let pooled = if norm.pool { y } else { 0 };
                let (codes, out) = (u8s(pooled), values(pooled).optional());
                let (with, rest) = (f32s(norm.coefficients_len()), scratch(norm.scratch_len()));
                Signature::new(&[x, c, c, c, c, values(y), codes, out], &[with, c, c, rest])
            }
            NormOp::InputGradient { norm, .. } => {
                let (x, c, y) = (values(norm.shape.len()), f32s(norm.shape.c), norm.output().len());
                let (with, codes) =
                    (f32s(norm.coefficients_len()), u8s(if norm.pool { y } else { 0 }));
                Signature::new(&[x, c, c, with, values(y), codes], &[x])
            }
            NormOp::GroupForward(GroupNorm { shape, groups, .. }) => {
                let (x, c, saved) =
                    (values(shape.len()), f32s(shape.c), f32s(shape.batch * groups));
                let rest = scratch(norm::group::scratch_len(shape.c));
                Signature::new(&[x, c, c], &[x, saved, saved, rest])
            }
            NormOp::GroupGradient { norm: GroupNorm { shape, groups, .. }, .. } => {
                let (x, c, saved) =
                    (values(shape.len()), f32s(shape.c), f32s(shape.batch * groups));
                let rest = scratch(norm::group::scratch_len(shape.c));
                Signature::new(&[x, c, saved, saved, x], &[x.optional(), c, c, rest])
            }
            NormOp::LayerForward(of) => {
                let (x, c, invstd) = (values(of.shape.len()), f32s(of.shape.c), f32s(of.rows()));
                let (beta, mean) = (of.if_centred(of.shape.c), of.if_centred(of.rows()));
                Signature::new(&[x, c, f32s(beta)], &[x, f32s(mean), invstd])
            }
            NormOp::LayerGradient { norm: of, .. } => {
                let (x, c, invstd) = (values(of.shape.len()), f32s(of.shape.c), f32s(of.rows()));
                let (beta, mean) = (of.if_centred(of.shape.c), of.if_centred(of.rows()));
                let rest = scratch(norm::layer::scratch_len(of.shape.c));
                let writes = [x.optional(), c, f32s(beta), rest];
                Signature::new(&[x, c, f32s(mean), invstd, x], &writes)
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match self {
            NormOp::Statistics(shape) => {
                let ([x], [mean, var, scratch]) = operands.floats();
                norm::batch_stats(isa, shape, x, BatchStats { mean, var }, scratch);
            }
            NormOp::UpdateRunning { momentum, count, .. } => {
                let ([mean, var], [running_mean, running_var, batches]) = operands.split();
                let running =
                    BatchStats { mean: running_mean.elements(), var: running_var.elements() };
                norm::update_running(*momentum, *count, mean.elements(), var.elements(), running);
                batches.elements::<i64>()[0] += 1;
            }
            NormOp::Forward(of) => batch_forward(isa, of, operands),
            NormOp::GradientSums(norm) => gradient_sums(isa, norm, operands),
            NormOp::InputGradient { norm, accumulate } => {
                input_gradient(isa, norm, *accumulate, operands);
            }
            NormOp::GroupForward(GroupNorm { shape, groups, eps }) => {
                let ([x, gamma, beta], [y, mean, invstd, scratch]) = operands.floats();
                let of = GroupNormForward { x, gamma, beta, groups: *groups, eps: *eps };
                let saved = GroupNormSaved { mean, invstd };
                norm::group_norm_forward(isa, shape, &of, y, saved, scratch);
            }
            NormOp::GroupGradient { norm: GroupNorm { shape, groups, .. }, accumulate } => {
                let (reads, [dx, dgamma, dbeta, scratch]) = operands.floats();
                let [x, gamma, mean, invstd, dout] = reads;
                let of = GroupNormBackward { x, gamma, groups: *groups, mean, invstd, dout };
                let to = GroupNormGrads {
                    dx: GradOut { values: dx, accumulate: *accumulate },
                    dgamma,
                    dbeta,
                };
                norm::group_norm_backward(isa, shape, &of, to, scratch);
            }
            NormOp::LayerForward(LayerNorm { shape, eps, .. }) => {
                let ([x, gamma, beta], [y, mean, invstd]) = operands.floats();
                let of = LayerNormForward { x, gamma, beta, eps: *eps };
                let saved = LayerNormSaved { mean, invstd };
                norm::layer_norm_forward(isa, shape, &of, y, saved);
            }
            NormOp::LayerGradient { norm, accumulate } => {
                layer_gradient(isa, norm, *accumulate, operands);
            }
        }
    }
}

fn layer_gradient(isa: Isa, of: &LayerNorm, accumulate: bool, operands: StepOperands<'_>) {
    let ([x, gamma, mean, invstd, dout], [dx, dgamma, dbeta, scratch]) = operands.floats();
    let from = LayerNormBackward { x, gamma, mean, invstd, dout };
    let to = LayerNormGrads { dx: GradOut { values: dx, accumulate }, dgamma, dbeta };
    norm::layer_norm_backward(isa, &of.shape, &from, to, scratch);
}

fn batch_forward(isa: Isa, of: &BatchNorm, operands: StepOperands<'_>) {
    let (reads, [y, codes, scratch]) = operands.split::<5, 3>();
    let inputs = of.inputs(reads.map(Slice::elements));
    let codes = codes.elements();
    norm::batch_norm_act_forward(isa, &of.shape, &inputs, y.elements(), codes, scratch.elements());
}

fn gradient_sums(isa: Isa, of: &BatchNorm, operands: StepOperands<'_>) {
    let (reads, writes) = operands.split::<8, 4>();
    let [x, mean, var, gamma, beta, dout, codes, out] = reads;
    let [coefficients, dgamma, dbeta, scratch] = writes.map(SliceMut::elements);
    let forward = of.inputs([x, mean, var, gamma, beta].map(Slice::elements));
    let [dout, out] = [dout, out].map(Slice::elements);
    let from = BatchNormBackward { forward, dout, codes: codes.elements(), out };
    let parameters = [dgamma, dbeta];
    norm::batch_norm_gradient_sums(isa, &of.shape, &from, parameters, coefficients, scratch);
}

fn input_gradient(isa: Isa, of: &BatchNorm, accumulate: bool, operands: StepOperands<'_>) {
    let ([x, mean, beta, coefficients, dout, codes], [dx]) = operands.split();
    let [x, mean, beta, coefficients, dout] =
        [x, mean, beta, coefficients, dout].map(Slice::elements);
    let forward = of.inputs([x, mean, &[], &[], beta]);
    let from = BatchNormBackward { forward, dout, codes: codes.elements(), out: &[] };
    let dx = GradOut { values: dx.elements(), accumulate };
    norm::batch_norm_input_gradient(isa, &of.shape, &from, coefficients, dx);
}

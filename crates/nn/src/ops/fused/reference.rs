//! Fused convolutions, step by step: the definition that a GPU's kernels are compared with. It is
//! slow and allocates, since no plan of a processor has these operations.

use std::borrow::Cow;

use super::{ClassifierHead, FusedConv, FusedOp, InputGradient};
use crate::kernels::norm::{BatchStats, update_running};
use crate::kernels::{BatchShape, GradOut, Isa, pool};
use crate::ops::norm::BatchNorm;
use crate::ops::operand::{OperandRole, Signature, Slice, SliceMut, StepOperands};
use crate::ops::{ConvOp, NormOp};

pub(super) fn run(op: &FusedOp, isa: Isa, operands: StepOperands<'_>) {
    match *op {
        FusedOp::Begin { .. } => {
            let ([], [gradient, tickets]) = operands.split();
            gradient.elements::<f32>().fill(0.0);
            tickets.elements::<u32>().fill(0);
        }
        FusedOp::Forward { conv, momentum: None } => {
            let ([x, mean, var, gamma, beta, weight], [z]) = operands.floats();
            let input = images(isa, &conv, x, [mean, var, gamma, beta]);
            let op = ConvOp::Forward(conv.product());
            run_conv(isa, op, &[&input, weight, &[]], [z]);
        }
        FusedOp::Forward { conv, momentum: Some(momentum) } => {
            forward(isa, &conv, momentum, operands)
        }
        FusedOp::Backward { conv, after, uniform, data } => {
            let of = ReferenceBackward { conv, after, uniform, data };
            of.run(isa, operands);
        }
        FusedOp::Sums(of) => {
            let (reads, [dgamma, dbeta, coefficients, _]) = operands.split::<6, 4>();
            let [z, mean, var, gamma, beta, dy] = reads.map(Slice::elements);
            let [dgamma, dbeta, coefficients] =
                [dgamma, dbeta, coefficients].map(SliceMut::elements);
            let raw = RawImages { norm: of, z, mean, var, gamma, beta };
            raw.sums(dy, dgamma, dbeta, coefficients);
        }
        FusedOp::Head(of) => {
            let (reads, [means, y]) = operands.floats();
            let [z, mean, var, gamma, beta, weight, bias] = reads;
            means.copy_from_slice(&of.means(isa, z, [mean, var, gamma, beta]));
            run_conv(isa, ConvOp::Forward(of.linear()), &[means, weight, bias], [y]);
        }
        FusedOp::HeadGradient(of) => of.gradient(isa, operands),
    }
}

/// Runs another operation with newly allocated scratch.
fn with_scratch<const W: usize>(
    signature: &Signature,
    reads: &[&[f32]],
    writes: [&mut [f32]; W],
    run: impl FnOnce(StepOperands<'_>),
) {
    let scratch = signature.writes.iter().filter(|spec| spec.role == OperandRole::Scratch);
    let mut scratch: Vec<Vec<f32>> = scratch.map(|spec| vec![0.0; spec.len]).collect();
    let reads = reads.iter().map(|read| Slice::from_elements(read)).collect();
    let scratch = scratch.iter_mut().map(|scratch| SliceMut::from_elements(&mut scratch[..]));
    run(StepOperands {
        reads,
        writes: writes.into_iter().map(SliceMut::from_elements).chain(scratch).collect(),
    });
}

fn run_conv<const W: usize>(isa: Isa, op: ConvOp, reads: &[&[f32]], writes: [&mut [f32]; W]) {
    with_scratch(&op.signature(), reads, writes, |operands| op.run(isa, operands));
}

/// Output of a batch norm with ReLU and, in some norms, pooling.
fn normalised(isa: Isa, of: &BatchNorm, x: &[f32], parameters: [&[f32]; 4]) -> Vec<f32> {
    let mut y = vec![0.0; of.output().len()];
    let [mean, var, gamma, beta] = parameters;
    let op = NormOp::Forward(*of);
    let reads = [x, mean, var, gamma, beta];
    with_scratch(&op.signature(), &reads, [&mut y, &mut []], |operands| op.run(isa, operands));
    y
}

/// Images that a fused convolution reads.
fn images<'a>(isa: Isa, conv: &FusedConv, x: &'a [f32], parameters: [&[f32]; 4]) -> Cow<'a, [f32]> {
    match &conv.before {
        Some(norm) => normalised(isa, norm, x, parameters).into(),
        None => x.into(),
    }
}

fn forward(isa: Isa, conv: &FusedConv, momentum: f32, operands: StepOperands<'_>) {
    let (reads, writes) = operands.split::<6, 7>();
    let [x, mean, var, gamma, beta, weight] = reads.map(Slice::elements);
    let [z, batch_mean, batch_var, running_mean, running_var, batches, _] = writes;
    let [z, batch_mean, batch_var] = [z, batch_mean, batch_var].map(SliceMut::elements::<f32>);
    let input = images(isa, conv, x, [mean, var, gamma, beta]);
    let op = ConvOp::ForwardWithStats(conv.product());
    run_conv(isa, op, &[&input, weight, &[]], [z, &mut *batch_mean, &mut *batch_var]);
    let [mean, var] = [running_mean, running_var].map(SliceMut::elements);
    let count = conv.shape.batch * conv.shape.output().pixels();
    update_running(momentum, count, batch_mean, batch_var, BatchStats { mean, var });
    batches.elements::<i64>()[0] += 1;
}

/// Raw images and their batch norm.
struct RawImages<'a> {
    norm: BatchNorm,
    z: &'a [f32],
    mean: &'a [f32],
    var: &'a [f32],
    gamma: &'a [f32],
    beta: &'a [f32],
}

/// For each output element of a norm, the raw elements of its pooling window.
fn windows(norm: &BatchNorm) -> impl Iterator<Item = Vec<usize>> {
    let (BatchShape { h, w, c, .. }, out, pool) = (norm.shape, norm.output(), norm.pool);
    (0..out.len()).map(move |at| {
        let (channel, pixel) = (at % c, at / c);
        let (x, y, image) = (pixel % out.w, pixel / out.w % out.h, pixel / out.pixels());
        let element = |y: usize, x: usize| ((image * h + y) * w + x) * c + channel;
        if pool {
            (0..4).map(|k| element(2 * y + k / 2, 2 * x + k % 2)).collect()
        } else {
            vec![element(y, x)]
        }
    })
}

/// The element of a window with the largest value, and whether ReLU lets it pass. Mean, scale and
/// shift are per channel, `[C]`.
fn winner(z: &[f32], mean: &[f32], scale: &[f32], beta: &[f32], window: &[usize]) -> (usize, bool) {
    let value = |at: usize| {
        let c = at % mean.len();
        (z[at] - mean[c]) * scale[c] + beta[c]
    };
    let mut best = window[0];
    for &at in &window[1..] {
        if value(at) > value(best) || value(at).is_nan() {
            best = at;
        }
    }
    // NaN passes.
    (best, !matches!(value(best).partial_cmp(&0.0), Some(order) if order.is_le()))
}

impl RawImages<'_> {
    /// Adds to dγ and dβ, and writes the coefficients of the gradient of z, from the gradient `dy`
    /// of the norm's output.
    fn sums(&self, dy: &[f32], dgamma: &mut [f32], dbeta: &mut [f32], coefficients: &mut [f32]) {
        let Self { norm, z, mean, var, gamma, beta } = self;
        let c = norm.shape.c;
        let deviation = |i: usize| (f64::from(var[i]) + f64::from(norm.eps)).sqrt();
        let scale: Vec<f32> = (0..c).map(|i| (f64::from(gamma[i]) / deviation(i)) as f32).collect();
        let (mut sums, mut dots) = (vec![0f64; c], vec![0f64; c]);
        for (window, &dy) in windows(norm).zip(dy) {
            let (at, passes) = winner(z, mean, &scale, beta, &window);
            let dz = if passes { f64::from(dy) } else { 0.0 };
            sums[at % c] += dz;
            dots[at % c] += dz * f64::from(z[at] - mean[at % c]);
        }
        let count = (norm.shape.batch * norm.shape.pixels()) as f64;
        for i in 0..c {
            let (dot, factor) = (dots[i] / deviation(i), f64::from(scale[i]));
            dbeta[i] += sums[i] as f32;
            dgamma[i] += dot as f32;
            coefficients[i] = scale[i];
            coefficients[c + i] = (factor * sums[i] / count) as f32;
            coefficients[2 * c + i] = (factor * dot / deviation(i) / count) as f32;
        }
    }
}

struct ReferenceBackward {
    conv: FusedConv,
    after: BatchNorm,
    uniform: bool,
    data: InputGradient,
}

impl ReferenceBackward {
    fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        let (reads, writes) = operands.split::<11, 6>();
        let [x, mean, var, gamma, beta, weight, z, z_mean, z_beta, slopes, dy] =
            reads.map(Slice::elements);
        let [dx, dweight, dgamma, dbeta, coefficients, _] = writes;
        let [dx, dweight, dgamma, dbeta, coefficients] =
            [dx, dweight, dgamma, dbeta, coefficients].map(SliceMut::elements);
        let dz = self.raw_gradient(z, z_mean, z_beta, slopes, dy);
        let input = images(isa, &self.conv, x, [mean, var, gamma, beta]);
        let product = self.conv.product();
        run_conv(isa, ConvOp::WeightGradient(product), &[&input, &dz], [dweight, &mut []]);
        if self.data == InputGradient::Unwanted {
            return;
        }
        let accumulate = self.data == InputGradient::Accumulate;
        run_conv(isa, ConvOp::DataGradient { product, accumulate }, &[&dz, weight], [&mut *dx]);
        if let Some(norm) = self.conv.before {
            RawImages { norm, z: x, mean, var, gamma, beta }.sums(dx, dgamma, dbeta, coefficients);
        }
    }

    /// Gradient of the raw output.
    fn raw_gradient(
        &self,
        z: &[f32],
        mean: &[f32],
        beta: &[f32],
        coefficients: &[f32],
        dy: &[f32],
    ) -> Vec<f32> {
        let (norm, c) = (&self.after, self.after.shape.c);
        let (scale, rest) = coefficients.split_at(c);
        let (offset, slope) = rest.split_at(c);
        let mut dz = vec![0f32; z.len()];
        for (at, window) in windows(norm).enumerate() {
            let image = at / (norm.output().pixels() * c);
            let dy = dy[if self.uniform { image * c + at % c } else { at }];
            let (at, passes) = winner(z, mean, scale, beta, &window);
            dz[at] = if passes { dy } else { 0.0 };
        }
        for (at, dz) in dz.iter_mut().enumerate() {
            let i = at % c;
            *dz = *dz * scale[i] - ((z[at] - mean[i]) * slope[i] + offset[i]);
        }
        dz
    }
}

impl ClassifierHead {
    fn means(&self, isa: Isa, z: &[f32], parameters: [&[f32]; 4]) -> Vec<f32> {
        let shape = self.norm.output();
        let mut means = vec![0.0; shape.batch * shape.c];
        let y = normalised(isa, &self.norm, z, parameters);
        pool::global_avg_forward(isa, &shape, &y, &mut means);
        means
    }

    fn gradient(&self, isa: Isa, operands: StepOperands<'_>) {
        let (reads, writes) = operands.split::<8, 7>();
        let [z, mean, var, gamma, beta, weight, means, dlogits] = reads.map(Slice::elements);
        let [dy, dweight, dbias, dgamma, dbeta, coefficients, _] = writes;
        let [dy, dweight, dbias, dgamma, dbeta, coefficients] =
            [dy, dweight, dbias, dgamma, dbeta, coefficients].map(SliceMut::elements::<f32>);
        let (linear, shape) = (self.linear(), self.norm.output());
        run_conv(isa, ConvOp::WeightGradient(linear), &[means, dlogits], [dweight, dbias]);
        let op = ConvOp::DataGradient { product: linear, accumulate: false };
        run_conv(isa, op, &[dlogits, weight], [&mut *dy]);
        let mut all = vec![0.0; shape.len()];
        pool::global_avg_backward(isa, &shape, dy, GradOut::overwrite(&mut all));
        dy.iter_mut().for_each(|dy| *dy *= 1.0 / shape.pixels() as f32);
        RawImages { norm: self.norm, z, mean, var, gamma, beta }.sums(
            &all,
            dgamma,
            dbeta,
            coefficients,
        );
    }
}

//! Max pooling and global average pooling.

use crate::graph::{NodeId, Op};
use crate::kernels::norm::batch::BLOCKED;
use crate::kernels::pool::{self, PoolShape};
use crate::kernels::{GradOut, ImageShape};
use crate::plan::builder::{Backward, Builder, PooledGradient};
use crate::plan::step::{Call, Context};
use crate::plan::value::ValueId;

/// Elements of f32 that hold `n` bytes.
fn words(n: usize) -> usize {
    n.div_ceil(size_of::<f32>())
}

#[derive(Debug)]
struct Max(PoolShape);

impl Call for Max {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x], [y, argmax]) = cx.operands.split();
        let argmax: &mut [u8] = bytemuck::cast_slice_mut(argmax);
        let argmax = (!argmax.is_empty()).then(|| &mut argmax[..self.0.output().len()]);
        pool::max2d_forward(cx.isa, &self.0, x, y, argmax);
    }
}

#[derive(Debug)]
struct MaxGradient {
    shape: PoolShape,
    accumulate: bool,
}

impl Call for MaxGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([dy, argmax], [dx]) = cx.operands.split();
        let argmax: &[u8] = &bytemuck::cast_slice(argmax)[..self.shape.output().len()];
        let dx = GradOut { values: dx, accumulate: self.accumulate };
        pool::max2d_backward(cx.isa, &self.shape, dy, argmax, dx);
    }
}

/// A max pooling node after its forward step.
#[derive(Clone, Copy)]
struct Pooled {
    node: NodeId,
    x: NodeId,
    shape: PoolShape,
    y: ValueId,
    argmax: ValueId,
}

impl Pooled {
    /// Emits the forward step. Backward needs the winners' positions, one byte each, and no values.
    fn forward(b: &mut Builder<'_>, node: NodeId) -> Option<Self> {
        let Op::MaxPool2d { x, kernel, stride } = b.graph.nodes[node.index()].op else {
            return None;
        };
        let shape = PoolShape { input: b.shape(x), kernel, stride };
        let input = b.node(x);
        let y = b.output(node);
        let saved = b.backward() && b.wants(node);
        let argmax = if saved { b.arena(words(shape.output().len())) } else { ValueId::NONE };
        b.emit(Max(shape), &[input], &[y, argmax]);
        Some(Self { node, x, shape, y, argmax })
    }

    fn backward(self, b: &mut Builder<'_>, dy: ValueId) {
        let Self { node, x, shape, argmax, .. } = self;
        b.send_gradients(node, [x], |b, [dx]| {
            let call = MaxGradient { shape, accumulate: dx.accumulate };
            b.emit(call, &[dy, argmax], &[dx.value]);
        });
    }
}

/// `MaxPool2d`.
pub(super) fn max(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let pooled = Pooled::forward(b, node)?;
    Some(Box::new(move |b, dy| pooled.backward(b, dy)))
}

/// `MaxPool2d` behind a `StraightThrough`: the module gets its gradient as ever, and the norm unit
/// with output `norm` gets the one from before the pooling, as if pooling were part of it.
pub(super) fn straight_max(b: &mut Builder<'_>, node: NodeId, norm: NodeId) -> Option<Backward> {
    let pooled = Pooled::forward(b, node)?;
    Some(Box::new(move |b, dy| {
        let codes = b.arena(words(pooled.shape.output().len()));
        b.emit(NormCodes, &[pooled.y, pooled.argmax], &[codes]);
        b.give_pooled(norm, PooledGradient { dout: dy, codes });
        pooled.backward(b, dy);
    }))
}

/// The codes of the pooled batch norm from those of plain pooling: a window whose maximum ReLU has
/// cut passes no gradient.
#[derive(Debug)]
struct NormCodes;

impl Call for NormCodes {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([y, argmax], [codes]) = cx.operands.split();
        let argmax: &[u8] = bytemuck::cast_slice(argmax);
        let codes: &mut [u8] = bytemuck::cast_slice_mut(codes);
        for ((code, &k), &y) in codes.iter_mut().zip(argmax).zip(y) {
            *code = if y <= 0.0 { BLOCKED } else { k };
        }
    }
}

#[derive(Debug)]
struct Average(ImageShape);

impl Call for Average {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x], [y]) = cx.operands.split();
        pool::global_avg_forward(cx.isa, &self.0, x, y);
    }
}

#[derive(Debug)]
struct AverageGradient {
    shape: ImageShape,
    accumulate: bool,
}

impl Call for AverageGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([dy], [dx]) = cx.operands.split();
        let dx = GradOut { values: dx, accumulate: self.accumulate };
        pool::global_avg_backward(cx.isa, &self.shape, dy, dx);
    }
}

/// `GlobalAvgPool`.
pub(super) fn global_average(b: &mut Builder<'_>, node: NodeId, x: NodeId) -> Backward {
    let shape = b.shape(x);
    let input = b.node(x);
    let y = b.output(node);
    b.emit(Average(shape), &[input], &[y]);
    Box::new(move |b, dy| {
        b.send_gradients(node, [x], |b, [dx]| {
            b.emit(AverageGradient { shape, accumulate: dx.accumulate }, &[dy], &[dx.value]);
        });
    })
}

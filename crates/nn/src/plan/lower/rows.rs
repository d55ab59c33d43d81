//! Embeddings, and vectors side by side.

use crate::graph::{NodeId, ParamId};
use crate::kernels::GradOut;
use crate::kernels::rows::{self, Columns};
use crate::plan::builder::{Backward, Builder};
use crate::plan::step::{Call, Context};

/// `size` of the table's rows.
#[derive(Debug)]
struct Embed {
    size: usize,
}

impl Call for Embed {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([indices, table], [y]) = cx.operands.split();
        rows::embed(cx.isa, self.size, table, bytemuck::cast_slice(indices), y);
    }
}

#[derive(Debug)]
struct EmbedGradient {
    size: usize,
}

impl Call for EmbedGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([indices, dy], [dtable]) = cx.operands.split();
        rows::embed_backward(cx.isa, self.size, bytemuck::cast_slice(indices), dy, dtable);
    }
}

/// `Embedding`. Memory of a plan is f32; indices lie in it as the bits that they are.
pub(super) fn embedding(b: &mut Builder<'_>, node: NodeId, x: NodeId, table: ParamId) -> Backward {
    let size = b.shape(node).c / b.shape(x).c;
    let (indices, values) = (b.node(x), b.param(table));
    let y = b.output(node);
    b.emit(Embed { size }, &[indices, values], &[y]);
    Box::new(move |b, dy| {
        let dtable = b.param_gradient(table);
        b.emit(EmbedGradient { size }, &[indices, dy], &[dtable]);
    })
}

/// One part.
#[derive(Debug)]
struct Put(Columns);

impl Call for Put {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([part], [y]) = cx.operands.split();
        rows::put(cx.isa, self.0, part, y);
    }
}

#[derive(Debug)]
struct Take {
    at: Columns,
    accumulate: bool,
}

impl Call for Take {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([dy], [dx]) = cx.operands.split();
        rows::take(cx.isa, self.at, dy, GradOut { values: dx, accumulate: self.accumulate });
    }
}

/// `Concat`.
pub(super) fn concat(b: &mut Builder<'_>, node: NodeId, parts: &[NodeId]) -> Backward {
    let width = b.shape(node).c;
    let mut first = 0;
    let columns: Vec<(NodeId, Columns)> = parts
        .iter()
        .map(|part| {
            let at = Columns { width, first, count: b.shape(*part).c };
            first += at.count;
            (*part, at)
        })
        .collect();
    let y = b.output(node);
    for (part, at) in &columns {
        let value = b.node(*part);
        b.emit(Put(*at), &[value], &[y]);
    }
    Box::new(move |b, dy| {
        for (part, at) in columns {
            if b.wants(part) {
                b.send_gradients(node, [part], |b, [dx]| {
                    b.emit(Take { at, accumulate: dx.accumulate }, &[dy], &[dx.value]);
                });
            }
        }
    })
}

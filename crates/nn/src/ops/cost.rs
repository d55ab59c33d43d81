//! Cost of operations, counted from their shapes.

use super::Op;
use super::conv::{self, Product};

impl Op {
    /// Multiply-adds of convolutions and linear layers, done directly.
    pub(crate) fn multiply_adds(&self) -> usize {
        match self {
            Op::Conv(
                conv::Op::Forward(of)
                | conv::Op::ForwardWithStats(of)
                | conv::Op::WeightGradient(of)
                | conv::Op::DataGradient { product: of, .. },
            ) => products(of),
            Op::Chain(of) => of.links.iter().map(|link| link.op.multiply_adds()).sum(),
            _ => 0,
        }
    }
}

fn products(Product { shape, .. }: &Product) -> usize {
    shape.output().len() * shape.taps() * shape.in_c / shape.groups
}

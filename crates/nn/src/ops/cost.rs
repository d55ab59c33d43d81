//! Cost of operations, counted from their shapes.

use super::ConvOp;
use super::StepOp;
use super::conv::ConvProduct;

impl StepOp {
    /// Multiply-adds of a convolution or linear layer if each product is computed directly
    /// (Winograd's filtering needs fewer); of a chain, their sum. 0 for all others, fused
    /// convolutions too.
    pub(crate) fn multiply_adds(&self) -> usize {
        match self {
            StepOp::Conv(
                ConvOp::Forward(of)
                | ConvOp::ForwardWithStats(of)
                | ConvOp::WeightGradient(of)
                | ConvOp::DataGradient { product: of, .. },
            ) => products(of),
            StepOp::Chain(of) => of.steps.iter().map(|step| step.op.multiply_adds()).sum(),
            _ => 0,
        }
    }
}

fn products(ConvProduct { shape, .. }: &ConvProduct) -> usize {
    shape.output().len() * shape.taps() * shape.in_c / shape.groups
}

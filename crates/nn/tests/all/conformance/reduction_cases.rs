//! Cases of chains with reductions: statistics of a convolution's output, and the sums of a batch
//! norm's gradient. They must have the bits of the operations alone, because adjacent steps decide
//! whether a plan makes a chain.

use std::sync::Arc;

use meristem_device::DType;
use meristem_nn::Isa;
use meristem_nn::kernels::conv::ConvShape;
use meristem_nn::kernels::conv::winograd::TileSize;
use meristem_nn::kernels::norm::Activation;
use meristem_nn::ops::chain::{
    Chain, ChainOperand, ChainOperands, ChainSizes, ChainStep, OperandPlace,
};
use meristem_nn::ops::conv::ConvProduct;
use meristem_nn::ops::norm::BatchNorm;
use meristem_nn::ops::{ConvOp, NormOp, OpBackend};

use super::case::{Case, Data, case};
use super::cases::packed_weights;
use super::chain_cases::one_by_one;
use super::parts::whole;

use OperandPlace::{Absent, Inner, Read, Write};

/// A convolution, and the sizes of its chain.
#[derive(Clone, Copy, Debug)]
struct Reduced {
    product: ConvProduct,
    sizes: ChainSizes,
}

const fn shape(batch: usize, side: usize, channels: usize, groups: usize) -> ConvShape {
    ConvShape {
        batch,
        in_c: channels,
        in_h: side,
        in_w: side,
        out_c: channels,
        kernel: [3; 2],
        stride: [1; 2],
        padding: [1; 2],
        groups,
        dilation: [1; 2],
    }
}

/// Parts as each operation has alone, and blocks that do not divide them: two parts; four images
/// of 36 pixels whose statistics are summed together; a depthwise convolution.
fn all() -> Vec<Reduced> {
    let of = |shape: ConvShape, tiles, block, part| Reduced {
        product: ConvProduct { tiles, ..ConvProduct::f32(shape) },
        sizes: ChainSizes { batch: shape.batch, block, part },
    };
    vec![
        of(shape(16, 16, 16, 1), None, 3, 8),
        of(shape(16, 16, 16, 1), Some(TileSize::Four), 3, 8),
        of(shape(13, 6, 8, 1), None, 4, 13),
        of(shape(9, 6, 8, 1), None, 8, 9),
        of(shape(7, 16, 16, 16), None, 2, 7),
    ]
}

fn f32s(len: usize, by_sample: bool) -> ChainOperand {
    ChainOperand { dtype: DType::F32, len, by_sample }
}

impl Reduced {
    fn norm(&self, act: Activation) -> BatchNorm {
        BatchNorm { shape: self.product.shape.input(), eps: 1e-5, act, pool: false }
    }

    /// A norm, and the convolution that reads it, with the statistics of its output.
    fn forward(&self, act: Activation) -> Chain {
        let (of, norm) = (self.product, self.norm(act));
        let steps = vec![
            ChainStep::new(
                NormOp::Forward(norm).into(),
                &[Read(0), Read(1), Read(2), Read(3), Read(4)],
                &[Inner(0), Absent],
            ),
            ChainStep::new(
                ConvOp::ForwardWithStats(of).into(),
                &[Inner(0), Read(5), Absent],
                &[Write(0), Write(1), Write(2)],
            ),
        ];
        let [x, c] = [f32s(norm.shape.len(), true), f32s(norm.shape.c, false)];
        let reads = vec![x, c, c, c, c, f32s(of.shape.weight_len(), false)];
        let writes = vec![f32s(of.shape.output().len(), true), c, c];
        Chain::new(self.sizes, steps, ChainOperands { reads, writes, inner: vec![x] })
    }

    /// Gradients of the convolution, and the sums of the gradient of the norm before it.
    fn backward(&self, act: Activation) -> Chain {
        let (of, norm) = (self.product, self.norm(act));
        let steps = vec![
            ChainStep::new(
                ConvOp::WeightGradient(of).into(),
                &[Read(5), Read(6)],
                &[Write(4), Absent],
            ),
            ChainStep::new(
                ConvOp::DataGradient { product: of, accumulate: false }.into(),
                &[Read(6), Read(7)],
                &[Write(0)],
            ),
            ChainStep::new(
                NormOp::GradientSums(norm).into(),
                &[Read(0), Read(1), Read(2), Read(3), Read(4), Write(0), Absent, Absent],
                &[Write(1), Write(2), Write(3)],
            ),
        ];
        let [x, c] = [f32s(norm.shape.len(), true), f32s(norm.shape.c, false)];
        let (y, w) = (f32s(of.shape.output().len(), true), f32s(of.shape.weight_len(), false));
        let reads = vec![x, c, c, c, c, x, y, w];
        let writes = vec![x, f32s(3 * norm.shape.c, false), c, c, w];
        Chain::new(self.sizes, steps, ChainOperands { reads, writes, inner: vec![] })
    }

    /// Variances from 1 to 2, weights with zeros in their padding.
    fn case(&self, chain: Chain, weights: usize) -> Case {
        let shape = &self.product.shape;
        let variances = whole(3, shape.in_c).iter().map(|v| 1.5 + v / 4.0).collect();
        let packed = packed_weights(shape, shape.weight_len());
        case(Arc::new(chain), 0, 0.0).reading(2, Data::F32(variances)).reading(weights, packed)
    }
}

/// Sums have no more terms than a batch has pixels, times those of a window; normalised values are
/// below 3, and the weights below 1. There is no ReLU: its gradient jumps where backends round
/// differently.
pub(super) fn reduction_cases() -> Vec<Case> {
    let each = all().into_iter().flat_map(|of| {
        let shape = of.product.shape;
        let window = 9 * shape.in_c / shape.groups + 1;
        let pixels = shape.output().batch * shape.output().pixels();
        let forward = of.case(of.forward(Activation::None), 5).bounded(window, 3.0);
        let backward = of.case(of.backward(Activation::None), 7).bounded(window, 1.0);
        let forward = (1..3).fold(forward, |case, at| case.bound(at, pixels, 3.0 * 9.0));
        [forward, (1..5).fold(backward, |case, at| case.bound(at, pixels, 9.0 * window as f64))]
    });
    each.collect()
}

#[test]
fn reductions_in_a_chain_have_the_bits_of_their_operations_alone() {
    let with_sets = |of: Reduced| Isa::available().into_iter().map(move |isa| (of, isa));
    for (of, isa) in all().into_iter().flat_map(with_sets) {
        for act in [Activation::None, Activation::Relu] {
            let chains = [(of.forward(act), 5, 0..3), (of.backward(act), 7, 0..4)];
            for (chain, weights, compared) in chains {
                let case = of.case(chain.clone(), weights);
                let operands = case.operands(OpBackend::Cpu(Isa::portable()));
                let expected = one_by_one(&chain, isa, operands.clone());
                let got = case.run_over(OpBackend::Cpu(isa), operands);
                for at in compared {
                    assert!(got[at] == expected[at], "{of:?}, {act:?}, {isa}: write {at}");
                }
            }
        }
    }
}

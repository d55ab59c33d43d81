//! Cases of chains. A chain must give the result of its steps, executed one after the other.

use std::sync::Arc;

use meristem_device::DType;
use meristem_nn::graph::UnaryFunction;
use meristem_nn::kernels::BatchShape;
use meristem_nn::kernels::conv::ConvShape;
use meristem_nn::kernels::conv::winograd::TileSize;
use meristem_nn::kernels::pool::{PoolGeometry, PoolShape};
use meristem_nn::kernels::rows::Matrices;
use meristem_nn::ops::chain::{
    Chain, ChainOperand, ChainOperands, ChainSizes, ChainStep, OperandPlace,
};
use meristem_nn::ops::conv::ConvProduct;
use meristem_nn::ops::norm::GroupNorm;
use meristem_nn::ops::{
    self, ConvOp, ElementwiseOp, NormOp, OpBackend, OperandRole, PlanTarget, PoolOp, RowsOp,
    StepOperands,
};
use meristem_nn::{Isa, ValueType};

use super::case::{Case, Data, Random, case};
use super::cases::{function_case, packed_weights};
use super::parts::whole;
use crate::common::functions::FUNCTIONS;

use OperandPlace::{Inner, Read, Write};

/// Side of an image, and channels.
const SIDE: usize = 6;
const CHANNELS: usize = 8;

/// With and without a smaller last block of a part, and a smaller last part.
const SIZES: [ChainSizes; 4] = [
    ChainSizes { batch: 13, block: 2, part: 6 },
    ChainSizes { batch: 12, block: 3, part: 6 },
    ChainSizes { batch: 7, block: 7, part: 7 },
    ChainSizes { batch: 9, block: 1, part: 9 },
];

/// Algorithms for the products in a chain: direct, and Winograd's.
const TILES: [Option<TileSize>; 2] = [None, Some(TileSize::Four)];

fn images(batch: usize) -> BatchShape {
    BatchShape { batch, h: SIDE, w: SIDE, c: CHANNELS }
}

fn product(batch: usize) -> ConvProduct {
    let (in_c, in_h, in_w) = (CHANNELS, SIDE, SIDE);
    let [kernel, stride, padding] = [[3; 2], [1; 2], [1; 2]];
    let out_c = CHANNELS;
    ConvProduct::f32(ConvShape {
        batch,
        in_c,
        in_h,
        in_w,
        out_c,
        kernel,
        stride,
        padding,
        groups: 1,
        dilation: [1; 2],
    })
}

fn f32s(len: usize, by_sample: bool) -> ChainOperand {
    ChainOperand { dtype: DType::F32, len, by_sample }
}

/// A convolution, the gradients of its weights, and a sum with its input: without operations that
/// compare values, because backends may round differently.
fn smooth(sizes: ChainSizes) -> Chain {
    let batch = sizes.batch;
    let (of, len) = (product(batch), images(batch).len());
    let absent = OperandPlace::Absent;
    let steps = vec![
        ChainStep::new(ConvOp::Forward(of).into(), &[Read(0), Read(1), absent], &[Inner(0)]),
        ChainStep::new(ElementwiseOp::Add { len }.into(), &[Read(0), Inner(0)], &[Write(0)]),
        ChainStep::new(
            ConvOp::WeightGradient(of).into(),
            &[Read(0), Write(0)],
            &[Write(1), absent],
        ),
    ];
    let weights = of.shape.weight_len();
    let reads = vec![f32s(len, true), f32s(weights, false)];
    let writes = vec![f32s(len, true), f32s(weights, false)];
    Chain::new(sizes, steps, ChainOperands { reads, writes, inner: vec![f32s(len, true)] })
}

/// Forward and backward pass of a module, with operands of each kind; products directly or in
/// tiles.
fn module(sizes: ChainSizes, tiles: Option<TileSize>) -> Chain {
    let batch = sizes.batch;
    let (of, shape) = (ConvProduct { tiles, ..product(batch) }, images(batch));
    let len = shape.len();
    let norm = GroupNorm { shape, groups: 2, eps: 1e-5 };
    let pooled = PoolShape::square(shape, 2, 2);
    let (relu, back) = (UnaryFunction::Relu, len / 4);
    let apply = ElementwiseOp::Forward { function: relu, len };
    let cut = ElementwiseOp::Gradient { function: relu, len, accumulate: false };
    let group = NormOp::GroupGradient { norm, accumulate: false };
    let data = ConvOp::DataGradient { product: of, accumulate: true };
    let unpool = PoolOp::MaxGradient { shape: pooled, accumulate: false };
    let (x, w, gamma, beta, dy) = (Read(0), Read(1), Read(2), Read(3), Read(4));
    let absent = OperandPlace::Absent;
    let steps = vec![
        ChainStep::new(ConvOp::Forward(of).into(), &[x, w, absent], &[Write(0)]),
        ChainStep::new(
            NormOp::GroupForward(norm).into(),
            &[Write(0), gamma, beta],
            &[Inner(0), Write(1), Write(2)],
        ),
        ChainStep::new(apply.into(), &[Inner(0)], &[Write(3)]),
        ChainStep::new(ElementwiseOp::Add { len }.into(), &[x, Write(3)], &[Inner(1)]),
        ChainStep::new(PoolOp::Max(pooled).into(), &[Inner(1)], &[Write(4), Inner(4)]),
        ChainStep::new(unpool.into(), &[dy, Inner(4)], &[Inner(2)]),
        ChainStep::new(cut.into(), &[Write(3), Inner(2)], &[Inner(3)]),
        ChainStep::new(
            group.into(),
            &[Write(0), gamma, Write(1), Write(2), Inner(3)],
            &[Inner(0), Write(5), Write(6)],
        ),
        ChainStep::new(ConvOp::WeightGradient(of).into(), &[x, Inner(0)], &[Write(7), absent]),
        ChainStep::new(data.into(), &[Inner(0), w], &[Write(8)]),
    ];
    let (weights, saved) = (of.shape.weight_len(), f32s(2 * batch, true));
    let [all, quarter] = [len, back].map(|len| f32s(len, true));
    let [channels, weights] = [CHANNELS, weights].map(|len| f32s(len, false));
    let positions = ChainOperand { dtype: DType::U8, ..quarter };
    let reads = vec![all, weights, channels, channels, quarter];
    let writes = vec![all, saved, saved, all, quarter, channels, channels, weights, all];
    let inner = vec![all, all, all, all, positions];
    Chain::new(sizes, steps, ChainOperands { reads, writes, inner })
}

/// Pooling windows of more positions than a byte can name, means, and a transpose, whose values are
/// read by the next step.
fn joins(sizes: ChainSizes) -> Chain {
    let batch = sizes.batch;
    let input = BatchShape { batch, h: 18, w: 17, c: CHANNELS };
    let wide = PoolShape { input, window: PoolGeometry { kernel: [18, 15], ..WINDOW } };
    let mean = PoolShape { input, window: PoolGeometry { padding: [1, 0], ..WINDOW } };
    let of = Matrices { count: batch, rows: mean.output().pixels(), columns: CHANNELS };
    let back = PoolOp::MaxGradient { shape: wide, accumulate: false };
    let turn = RowsOp::Transpose { of, accumulate: true };
    let square = ElementwiseOp::Product { len: of.len(), accumulate: true };
    let steps = vec![
        ChainStep::new(PoolOp::Max(wide).into(), &[Read(0)], &[Write(0), Inner(0)]),
        ChainStep::new(back.into(), &[Write(0), Inner(0)], &[Inner(1)]),
        ChainStep::new(PoolOp::WindowAverage(mean).into(), &[Inner(1)], &[Inner(2)]),
        ChainStep::new(turn.into(), &[Inner(2)], &[Write(1)]),
        ChainStep::new(square.into(), &[Write(1), Write(1)], &[Write(2)]),
    ];
    let [all, most, few] = [input, wide.output(), mean.output()].map(|of| f32s(of.len(), true));
    let positions = ChainOperand { dtype: DType::U32, ..most };
    let (reads, writes, inner) = (vec![all], vec![most, few, few], vec![positions, all, few]);
    Chain::new(sizes, steps, ChainOperands { reads, writes, inner })
}

const WINDOW: PoolGeometry = PoolGeometry { kernel: [3, 2], stride: [2, 1], padding: [0, 0] };

/// A function and its gradient, which reads the chain's input or the function's value.
fn function(sizes: ChainSizes, function: UnaryFunction) -> Chain {
    let len = images(sizes.batch).len();
    let (x, y, dy) = (Read(0), Inner(0), Read(1));
    let saved = if function.saves_input() { x } else { y };
    let gradient = ElementwiseOp::Gradient { function, len, accumulate: true };
    let steps = vec![
        ChainStep::new(ElementwiseOp::Forward { function, len }.into(), &[x], &[y]),
        ChainStep::new(ElementwiseOp::Add { len }.into(), &[x, y], &[Write(0)]),
        ChainStep::new(gradient.into(), &[saved, dy], &[Write(1)]),
    ];
    let of = f32s(len, true);
    Chain::new(
        sizes,
        steps,
        ChainOperands { reads: vec![of; 2], writes: vec![of; 2], inner: vec![of] },
    )
}

fn functions() -> impl Iterator<Item = (UnaryFunction, Chain)> {
    SIZES.into_iter().flat_map(|sizes| FUNCTIONS.map(|of| (of, function(sizes, of))))
}

/// Sums are over a window, with factors below 1, and over the pixels of the batch, with factors
/// below a window's sum.
pub(super) fn chain_cases() -> Vec<Case> {
    let window = 9 * CHANNELS;
    let of = |sizes: ChainSizes| {
        let pixels = sizes.batch * SIDE * SIDE;
        let weights = packed_weights(&product(1).shape, product(1).shape.weight_len());
        let of = case(Arc::new(smooth(sizes)), window + 1, 1.0).reading(1, weights);
        of.bound(1, pixels * window, 1.0)
    };
    let functions = functions().map(|(_, chain)| function_case(Arc::new(chain)));
    SIZES.map(of).into_iter().chain(functions).collect()
}

/// Chains in several parts.
pub(super) fn in_parts() -> Vec<Case> {
    let weights = packed_weights(&product(1).shape, product(1).shape.weight_len());
    let chains = SIZES[..2].iter().flat_map(|sizes| TILES.map(|tiles| module(*sizes, tiles)));
    chains.map(|chain| case(Arc::new(chain), 0, 0.0).reading(1, weights.clone())).collect()
}

/// The links, one after the other for the whole batch.
pub(super) fn one_by_one(chain: &Chain, isa: Isa, [reads, writes]: [Vec<Data>; 2]) -> Vec<Data> {
    let mut random = Random(1);
    let inner = chain.inner.iter().map(|of| random.data(&ops::Spec::new(of.dtype, of.len)));
    let (mut writes, mut inner) = (writes, inner.collect::<Vec<Data>>());
    for step in &chain.steps {
        let signature = step.op.signature(PlanTarget::Cpu, ValueType::F32);
        let none = || Data::F32(vec![]);
        let get = |place: &OperandPlace, writes: &[Data], inner: &[Data]| match *place {
            OperandPlace::Absent => none(),
            Read(at) => reads[at].clone(),
            Write(at) => writes[at].clone(),
            Inner(at) => inner[at].clone(),
        };
        let from: Vec<Data> = step.reads.iter().map(|at| get(at, &writes, &inner)).collect();
        let mut to: Vec<Data> = step.writes.iter().map(|at| get(at, &writes, &inner)).collect();
        to.extend(
            signature
                .writes
                .iter()
                .filter(|of| of.role == OperandRole::Scratch)
                .map(|of| random.data(of)),
        );
        let operands = StepOperands {
            reads: from.iter().map(Data::slice).collect(),
            writes: to.iter_mut().map(Data::slice_mut).collect(),
        };
        ops::run(OpBackend::Cpu(isa), &step.op, operands).unwrap();
        for (place, data) in step.writes.iter().zip(to) {
            match *place {
                Write(at) => writes[at] = data,
                Inner(at) => inner[at] = data,
                Read(_) | OperandPlace::Absent => {}
            }
        }
    }
    writes.truncate(chain.writes.len());
    writes
}

/// All sizes with each instruction set.
fn sizes() -> impl Iterator<Item = (ChainSizes, Isa)> {
    SIZES.into_iter().flat_map(|sizes| Isa::available().into_iter().map(move |isa| (sizes, isa)))
}

#[test]
fn what_a_chain_writes_for_each_sample_has_the_bits_of_its_links() {
    for ((sizes, isa), tiles) in sizes().flat_map(|of| TILES.map(|tiles| (of, tiles))) {
        let chain = module(sizes, tiles);
        let weights = packed_weights(&product(1).shape, chain.reads[1].len);
        let of = case(Arc::new(chain.clone()), 0, 0.0).reading(1, weights);
        let operands = of.operands(OpBackend::Cpu(Isa::portable()));
        let expected = one_by_one(&chain, isa, operands.clone());
        let got = of.run_over(OpBackend::Cpu(isa), operands);
        for (at, _) in chain.writes.iter().enumerate().filter(|(_, of)| of.by_sample) {
            assert!(got[at] == expected[at], "{sizes:?}, {tiles:?}, {isa}: write {at}");
        }
    }
}

#[test]
fn pooling_and_transposes_in_a_chain_have_the_bits_of_their_links() {
    for (sizes, isa) in sizes() {
        let chain = joins(sizes);
        let of = case(Arc::new(chain.clone()), 0, 0.0);
        let operands = of.operands(OpBackend::Cpu(Isa::portable()));
        let expected = one_by_one(&chain, isa, operands.clone());
        assert!(of.run_over(OpBackend::Cpu(isa), operands) == expected, "{sizes:?}, {isa}");
    }
}

#[test]
fn functions_in_a_chain_have_the_bits_of_its_links() {
    let of_isa = |isa| functions().map(move |(_, chain)| (chain, isa));
    for (chain, isa) in Isa::available().into_iter().flat_map(of_isa) {
        let of = case(Arc::new(chain.clone()), 0, 0.0);
        let operands = of.operands(OpBackend::Cpu(Isa::portable()));
        let expected = one_by_one(&chain, isa, operands.clone());
        assert!(of.run_over(OpBackend::Cpu(isa), operands) == expected, "{chain:?}, {isa}");
    }
}

/// Sums of whole numbers are exact in any order.
#[test]
fn sums_of_a_chain_are_those_of_its_links() {
    for (sizes, isa) in sizes() {
        let chain = smooth(sizes);
        let shape = product(1).shape;
        let (packed, [x, w]) = (packed_weights(&shape, shape.weight_len()), [0, 1]);
        let Data::F32(packed) = packed else { unreachable!("weights are f32") };
        let weights = packed.iter().map(|w| (2.5 * w).trunc()).collect();
        let of = case(Arc::new(chain.clone()), 0, 0.0)
            .reading(x, Data::F32(whole(1, chain.reads[0].len)))
            .reading(w, Data::F32(weights))
            .writing(1, Data::F32(whole(2, chain.writes[1].len)));
        let operands = of.operands(OpBackend::Cpu(Isa::portable()));
        let expected = one_by_one(&chain, isa, operands.clone());
        assert!(of.run_over(OpBackend::Cpu(isa), operands) == expected, "{sizes:?}, {isa}");
    }
}

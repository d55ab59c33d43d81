//! Cases of every kind of operation.

use meristem_nn::graph::BlendMode;
use meristem_nn::kernels::BatchShape;
use meristem_nn::kernels::conv::ConvShape;
use meristem_nn::kernels::lstm::LstmShape;
use meristem_nn::kernels::rows::{ColumnRange, Matrices};
use meristem_nn::ops::blend;
use meristem_nn::ops::conv::ConvProduct;
use meristem_nn::ops::elementwise::UnaryFunction;
use meristem_nn::ops::rows::Lookup;
use meristem_nn::ops::{
    BlendOp, ConvOp, DropoutOp, ElementwiseOp, LstmOp, PlanTarget, RowsOp, StepOp,
};
use meristem_nn::{Precision, ValueType};

use super::case::{Case, Data, Random, case};
use super::image_cases::{norm_cases, pool_cases};
use super::{chain_cases, fused_cases, policy, reduction_cases, training};
use crate::common::functions::FUNCTIONS;

pub(super) const IMAGE: BatchShape = BatchShape { batch: 3, h: 7, w: 6, c: 20 };

/// Small shapes, and some that only matter on a GPU: more than one tile of rows and columns,
/// strides that leave input pixels unread, a single element, several images in a tile, a part of
/// one.
fn conv_shapes() -> Vec<ConvShape> {
    let shape = |groups, kernel: usize, in_c, out_c| ConvShape {
        batch: 3,
        in_c,
        in_h: 7,
        in_w: 6,
        out_c,
        kernel: [kernel; 2],
        stride: [1; 2],
        padding: [kernel / 2; 2],
        groups,
        dilation: [1; 2],
    };
    let square = |batch, side, shape| ConvShape { batch, in_h: side, in_w: side, ..shape };
    vec![
        shape(1, 3, 3, 8),
        shape(1, 1, 20, 33),
        shape(20, 3, 20, 20),
        shape(2, 3, 8, 6),
        ConvShape::linear(5, 21, 10),
        ConvShape::linear(70, 33, 130),
        ConvShape::linear(1, 1, 1),
        ConvShape { stride: [2, 3], ..shape(1, 3, 5, 18) },
        ConvShape { stride: [3, 2], padding: [0, 2], ..shape(35, 5, 35, 35) },
        ConvShape { stride: [2; 2], padding: [0; 2], ..shape(1, 1, 4, 70) },
        ConvShape { kernel: [5, 2], padding: [1, 0], ..shape(3, 3, 6, 12) },
        ConvShape { padding: [0; 2], ..shape(1, 3, 12, 9) },
        ConvShape { padding: [2; 2], ..shape(1, 3, 2, 3) },
        square(2, 32, shape(1, 3, 3, 8)),
        square(3, 16, shape(1, 3, 8, 16)),
        square(5, 8, shape(1, 3, 17, 40)),
        square(2, 4, shape(1, 3, 70, 100)),
        // More small images than fit in the shared memory of a block.
        square(70, 4, shape(1, 3, 8, 8)),
        square(130, 2, shape(1, 3, 9, 3)),
        square(1, 1, shape(1, 3, 1, 1)),
        square(1, 33, shape(1, 3, 4, 5)),
        // 17 to 32 output channels, which use a special tile.
        square(5, 8, shape(1, 3, 5, 24)),
        square(2, 6, shape(1, 3, 20, 32)),
        // Parts of two tiles each; the last part has one tile.
        ConvShape { in_h: 40, in_w: 1, ..shape(1, 3, 65, 64) },
        // Enough work for narrow tiles in all three passes: forward, data and weights.
        square(2, 64, shape(4, 1, 8, 68)),
        square(2, 64, shape(4, 1, 72, 12)),
        // Elements of the window apart: with strides that divide the distance, that share a divisor
        // with it, and that share none; one filter for each channel.
        ConvShape { dilation: [2, 2], padding: [2, 2], ..shape(1, 3, 8, 8) },
        ConvShape { dilation: [2, 3], stride: [2, 2], padding: [2, 1], ..shape(1, 3, 5, 18) },
        ConvShape { dilation: [2, 1], stride: [4, 3], padding: [3, 0], ..shape(2, 3, 6, 4) },
        ConvShape { dilation: [3, 2], stride: [2, 4], padding: [3, 2], ..shape(20, 3, 20, 20) },
        ConvShape { dilation: [1, 2], padding: [0, 2], ..shape(3, 3, 3, 3) },
        square(2, 64, ConvShape { dilation: [2; 2], padding: [2; 2], ..shape(1, 3, 8, 12) }),
    ]
}

/// The pass for which a shape has enough tiles.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Forward,
    Data,
    Weights,
}

/// Shapes with enough work for wide and large tiles, each with the pass to which this applies. The
/// last tile is partial in both directions.
fn tiled_shapes() -> [(ConvShape, Pass); 9] {
    let strided = ConvShape {
        batch: 1,
        in_c: 12,
        in_h: 192,
        in_w: 192,
        out_c: 132,
        kernel: [3; 2],
        stride: [2; 2],
        padding: [1; 2],
        groups: 4,
        dilation: [1; 2],
    };
    [
        (ConvShape::linear(16_401, 7, 50), Pass::Forward),
        (ConvShape::linear(16_401, 50, 7), Pass::Data),
        (ConvShape::linear(10, 1000, 1100), Pass::Weights),
        (ConvShape::linear(32_801, 7, 50), Pass::Forward),
        (ConvShape::linear(32_801, 50, 7), Pass::Data),
        (ConvShape::linear(10, 1090, 1990), Pass::Weights),
        (strided, Pass::Forward),
        (strided, Pass::Weights),
        // Narrow tiles for each phase of the stride.
        (ConvShape { in_h: 96, in_w: 96, out_c: 36, ..strided }, Pass::Data),
    ]
}

/// Random weights with zero padding lanes.
pub(super) fn packed_weights(shape: &ConvShape, len: usize) -> Data {
    let depthwise = shape.groups > 1 && [shape.in_c, shape.out_c] == [shape.groups; 2];
    let cols = if depthwise { shape.out_c } else { shape.out_c / shape.groups };
    let (step, mut random) = (cols.next_multiple_of(16), Random(7));
    let weight = |i| if i % step < cols { random.unit() } else { 0.0 };
    Data::F32((0..len).map(weight).collect())
}

fn conv_cases() -> Vec<Case> {
    let products = |shape| {
        Precision::ALL.map(|precision| ConvProduct { precision, ..ConvProduct::f32(shape) })
    };
    let all = conv_shapes().into_iter().flat_map(products).flat_map(product_cases);
    all.chain(tiled_cases(Precision::F32)).collect()
}

/// A case for each of the [`tiled_shapes`]. They are slow, so lower precisions run them only where
/// results are compared bit for bit (`precision.rs`).
pub(super) fn tiled_cases(precision: Precision) -> Vec<Case> {
    let of = |(shape, pass)| {
        let mut cases =
            product_cases(ConvProduct { precision, ..ConvProduct::f32(shape) }).into_iter();
        cases.find(|case| pass_of(&case.op) == Some(pass)).expect("each pass has a case")
    };
    tiled_shapes().into_iter().map(of).collect()
}

fn pass_of(op: &StepOp) -> Option<Pass> {
    match op {
        StepOp::Conv(ConvOp::Forward(_)) => Some(Pass::Forward),
        StepOp::Conv(ConvOp::DataGradient { .. }) => Some(Pass::Data),
        StepOp::Conv(ConvOp::WeightGradient(_)) => Some(Pass::Weights),
        _ => None,
    }
}

fn product_cases(product: ConvProduct) -> Vec<Case> {
    let shape = product.shape;
    let taps = shape.kernel[0] * shape.kernel[1] * shape.in_c / shape.groups;
    let outputs = shape.output().batch * shape.output().pixels();
    let back = shape.kernel[0] * shape.kernel[1] * shape.out_c / shape.groups;
    let data = |accumulate| case(ConvOp::DataGradient { product, accumulate }, back + 1, 1.0);
    // Sums of outputs are f64 throughout: only the outputs differ, by `taps` roundings each, and in
    // the variance times twice their size, which is below `taps`.
    let stats = case(ConvOp::ForwardWithStats(product), taps + 1, 1.0);
    let (forward, weights) = (ConvOp::Forward(product), ConvOp::WeightGradient(product));
    let mut cases = vec![
        case(forward, taps + 1, 1.0),
        stats.bound(2, taps + 1, 2.0 * taps as f64),
        case(weights, outputs + 1, 1.0),
        data(true),
    ];
    if product.precision == Precision::F32 {
        let absent = Data::F32(vec![]);
        cases.push(case(forward, taps, 1.0).reading(2, absent.clone()));
        cases.push(case(weights, outputs + 1, 1.0).writing(1, absent));
        cases.push(data(false));
    }
    for case in &mut cases {
        if case.op != weights.into() {
            let len = case.op.signature(PlanTarget::Cpu, ValueType::F32).reads[1].len;
            case.reads.push((1, packed_weights(&shape, len)));
        }
    }
    cases
}

/// `exp` and `tanh` are the same polynomial on every instruction set, up to contraction: a few
/// ulps.
pub(super) const FUNCTION: usize = 12;

fn elementwise_cases() -> Vec<Case> {
    let len = 77;
    let mut cases = vec![
        case(ElementwiseOp::Fill { len, value: 2.5 }, 1, 3.0),
        case(ElementwiseOp::Multiply { len, factor: 0.3 }, 1, 1.0),
        case(ElementwiseOp::Pass { len, accumulate: true }, 2, 1.0),
        case(ElementwiseOp::Add { len }, 2, 1.0),
        case(ElementwiseOp::Narrow { len: 300 }, 1, 0.0),
        case(ElementwiseOp::Widen { len: 300 }, 1, 0.0),
        case(ElementwiseOp::Product { len, accumulate: false }, 1, 1.0),
        case(ElementwiseOp::Product { len: 300, accumulate: true }, 2, 1.0),
        case(ElementwiseOp::Scale { shape: IMAGE, factor: 2.0 }, 2, 2.0),
        case(
            ElementwiseOp::ScaleGradient { shape: IMAGE, factor: 2.0, accumulate: [true, false] },
            IMAGE.pixels(),
            2.0,
        ),
    ];
    // More channels than threads of a warp, and more pixels than rows of threads in a block.
    for (h, w, c) in [(3, 3, 70), (40, 21, 5), (1, 1, 32)] {
        let (shape, accumulate) = (BatchShape { batch: 2, h, w, c }, [false, true]);
        cases.push(case(ElementwiseOp::Scale { shape, factor: 0.5 }, 2, 1.0));
        let gradient = ElementwiseOp::ScaleGradient { shape, factor: 0.5, accumulate };
        cases.push(case(gradient, h * w, 1.0));
    }
    for function in FUNCTIONS {
        cases.push(case(ElementwiseOp::Forward { function, len }, FUNCTION, 1.0));
        let gradient = ElementwiseOp::Gradient { function, len, accumulate: true };
        cases.push(case(gradient, FUNCTION, 1.0));
    }
    cases.extend(FUNCTIONS.into_iter().flat_map(wide_function_cases));
    cases
}

/// A case of a function's values. Every backend performs the same operations in the same order and
/// contracts none, so the bits are the same.
pub(super) fn function_case(op: impl Into<StepOp>) -> Case {
    case(op, 1, 0.0)
}

/// More than one block, values with which functions saturate, the points where their formulas
/// change, NaN and infinities.
fn wide_function_cases(function: UnaryFunction) -> [Case; 3] {
    let special =
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 3.0, -3.0, 20.0, 95.0, -95.0, 1e30];
    let mut random = Random(3);
    let mut wide: Vec<f32> = (0..1000).map(|_| 16.0 * random.unit()).collect();
    wide[..special.len()].copy_from_slice(&special);
    let (len, wide) = (wide.len(), Data::F32(wide));
    let forward = ElementwiseOp::Forward { function, len };
    let forward = function_case(forward).reading(0, wide.clone());
    let gradient = |accumulate| {
        let op = ElementwiseOp::Gradient { function, len, accumulate };
        case(op, 1, 0.0).reading(0, wide.clone())
    };
    [forward, gradient(false), gradient(true)]
}

/// Masks have the same bits on every backend, and so has their application: one product. Numbers:
/// threshold, scale, two words of the key, first sample.
fn dropout_cases() -> Vec<Case> {
    let numbers = |first: f64| Data::F64(vec![858_993_459.0, 1.25, 3e9, 12_345.0, first]);
    let mut cases = vec![case(DropoutOp::Count, 1, 0.0)];
    // Fewer elements than a group of 64, more than a block of threads; first elements within a
    // group, and whose numbers need more than 32 bits.
    for (samples, each, first, batch) in
        [(3, 5, 0.0, 0), (7, 130, 3.0, 77), (40, 64, 1e9, 1 << 40), (150, 500, 70_000_001.0, -1)]
    {
        let draw = case(DropoutOp::Draw { samples, each }, 1, 0.0).reading(0, numbers(first));
        cases.push(draw.reading(1, Data::I64(vec![batch])));
        for accumulate in [false, true] {
            let op = DropoutOp::Apply { len: samples * each, accumulate };
            cases.push(case(op, 1, 0.0).reading(2, numbers(first)));
        }
    }
    cases
}

fn blend_cases() -> Vec<Case> {
    let mut cases = vec![];
    for mode in [BlendMode::Add, BlendMode::Multiply, BlendMode::Gate] {
        let blend = blend::Blend { mode, len: 60, samples: 5 };
        cases.push(case(BlendOp::Forward(blend), FUNCTION, 4.0));
        for accumulate in [[true; 4], [false; 4]] {
            cases.push(case(BlendOp::Gradient { blend, accumulate }, FUNCTION + 12, 4.0));
        }
    }
    cases.push(case(BlendOp::TanhMix { len: 60 }, FUNCTION, 2.0));
    let gradient = BlendOp::TanhMixGradient { len: 60, accumulate: [true, false] };
    cases.push(case(gradient, 60 + FUNCTION, 4.0));
    cases.extend(large_blend_cases());
    cases
}

/// More than one block, no gradient of the gate, an alpha of zero. Portable sums are f32 in 16
/// chains of 64 elements of at most 2, and f64 beyond.
fn large_blend_cases() -> Vec<Case> {
    let mut cases = vec![];
    for mode in [BlendMode::Add, BlendMode::Multiply, BlendMode::Gate] {
        let blend = blend::Blend { mode, len: 3 * 2345, samples: 3 };
        cases.push(case(BlendOp::Forward(blend), FUNCTION, 4.0));
        let host = case(BlendOp::Forward(blend), 1, 0.0).reading(4, Data::F32(vec![0.0]));
        cases.push(host.reading(1, Data::F32(vec![f32::NAN; blend.len])));
        for accumulate in [[true, false, true, false], [false, true, false, true]] {
            let gradient = BlendOp::Gradient { blend, accumulate };
            cases.push(case(gradient, FUNCTION + 12, 4.0).bound(3, 100, 8.0));
            let absent = Data::F32(vec![]);
            let wanted = case(gradient, FUNCTION + 12, 4.0).writing(0, absent.clone());
            cases.push(wanted.writing(3, absent));
        }
    }
    for len in [1, 4096, 4097, 30_001, 1_100_003] {
        cases.push(case(BlendOp::TanhMix { len }, FUNCTION, 2.0));
        let gradient = BlendOp::TanhMixGradient { len, accumulate: [false, true] };
        // Values with which the scalar and every chunk of the sum affect the result.
        let blocks = (len as f64 / 1024.0).ceil();
        let gradient = case(gradient, FUNCTION, 4.0).bound(2, 64, 4.0 * blocks);
        cases.push(gradient.reading(2, Data::F32(vec![0.7])));
    }
    let gradient = BlendOp::TanhMixGradient { len: 300, accumulate: [false; 2] };
    let absent = Data::F32(vec![]);
    let gradient = case(gradient, 64, 4.0).writing(0, absent.clone()).writing(1, absent);
    cases.push(gradient);
    cases
}

fn rows_cases() -> Vec<Case> {
    let of = Lookup { indices: 9, entries: 2, size: 4 };
    let at = ColumnRange { width: 7, first: 2, count: 3 };
    vec![
        case(RowsOp::Embed(of), 1, 1.0),
        case(RowsOp::EmbedGradient(of), 10, 1.0),
        case(RowsOp::CopyIndices { len: 9 }, 1, 0.0),
        case(RowsOp::Put { rows: 5, at }, 1, 1.0),
        case(RowsOp::Take { rows: 5, at, accumulate: true }, 2, 1.0),
        case(RowsOp::CopyIndices { len: 1000 }, 1, 0.0),
    ]
    .into_iter()
    .chain(large_rows_cases())
    .collect()
}

/// More than one block, rows longer than a block, entries used often, once and never. Sums are
/// taken in the order of the indices, and so have the same bits.
fn large_rows_cases() -> Vec<Case> {
    let mut cases = vec![];
    for (indices, entries, size) in [(1000, 7, 33), (300, 50, 4), (129, 3, 300), (1, 1, 1)] {
        let of = Lookup { indices, entries, size };
        let mut random = Random(5);
        let named: Vec<u32> =
            (0..indices).map(|_| (random.bits() % entries as u64) as u32 / 2).collect();
        cases.push(case(RowsOp::Embed(of), 1, 0.0).reading(0, Data::U32(named.clone())));
        cases.push(case(RowsOp::EmbedGradient(of), 1, 0.0).reading(0, Data::U32(named)));
    }
    // Partial squares, one square, vectors, more than one block.
    for [count, rows, columns] in [[3, 5, 7], [2, 16, 16], [4, 1, 9], [1, 33, 1], [5, 40, 17]] {
        let of = Matrices { count, rows, columns };
        for accumulate in [false, true] {
            cases.push(case(RowsOp::Transpose { of, accumulate }, 1, 0.0));
        }
    }
    for [rows, width, first, count] in [[100, 70, 3, 60], [1000, 9, 8, 1], [1, 5, 0, 5]] {
        let at = ColumnRange { width, first, count };
        cases.push(case(RowsOp::Put { rows, at }, 1, 0.0));
        for accumulate in [false, true] {
            cases.push(case(RowsOp::Take { rows, at, accumulate }, 1, 0.0));
        }
    }
    cases
}

fn lstm_cases() -> Vec<Case> {
    let shape = LstmShape { steps: 4, sequences: 3, inputs: 5, hidden: 8 };
    let keep = Data::F32([1.0, 0.0, 1.0].repeat(4));
    let products = [shape.input_product(), shape.state_product()];
    let [ih, hh] = products.map(|of| Data::F32(vec![0.125; of.weight_len()]));
    // Four consecutive steps, each a product of 13 terms and a few functions.
    let terms = 4 * (13 + 4 * FUNCTION);
    let mut cases = vec![
        case(LstmOp::Forward(shape), terms, 1.0)
            .reading(1, keep.clone())
            .reading(3, ih)
            .reading(4, hh.clone()),
        case(LstmOp::Gradient { shape, accumulate: true }, terms, 4.0)
            .reading(0, keep.clone())
            .reading(2, hh),
        case(LstmOp::StatesBefore(shape), 1, 1.0).reading(1, keep),
    ];
    // One row; rows, inputs and gates beyond a tile of a GPU; the largest weights that fit in its
    // shared memory, and the smallest that do not; gates beyond its largest block.
    let last = [[3, 2, 4, 54], [3, 2, 4, 55], [2, 2, 3, 260]];
    for [steps, sequences, inputs, hidden] in
        [[1, 1, 1, 1], [7, 5, 37, 9], [3, 70, 70, 41]].into_iter().chain(last)
    {
        let shape = LstmShape { steps, sequences, inputs, hidden };
        let mut random = Random(hidden as u64);
        let keep = (0..shape.rows()).map(|_| f32::from(u8::from(!random.bits().is_multiple_of(4))));
        let keep = Data::F32(keep.collect());
        // Terms of products are below 1/16.
        let [ih, hh] = [shape.input_product(), shape.state_product()]
            .map(|of| Data::F32((0..of.weight_len()).map(|_| random.unit() / 16.0).collect()));
        let terms = steps * (inputs + hidden + 4 * FUNCTION);
        let forward = case(LstmOp::Forward(shape), terms, 1.0 / 16.0);
        cases.push(forward.reading(1, keep.clone()).reading(3, ih).reading(4, hh.clone()));
        let terms = steps * (4 * hidden + 4 * FUNCTION);
        let gradient = LstmOp::Gradient { shape, accumulate: steps == 7 };
        let gradient = case(gradient, terms, 1.0 / 16.0);
        cases.push(gradient.reading(0, keep.clone()).reading(2, hh));
        cases.push(case(LstmOp::StatesBefore(shape), 1, 0.0).reading(1, keep));
    }
    cases
}

/// Every case.
pub(super) fn cases() -> Vec<Case> {
    let families = [
        conv_cases,
        norm_cases,
        pool_cases,
        elementwise_cases,
        dropout_cases,
        blend_cases,
        rows_cases,
        lstm_cases,
        training::loss_cases,
        training::element_loss_cases,
        training::smoothed_loss_cases,
        training::group_cases,
        training::training_cases,
        policy::ppo_cases,
        policy::sample_cases,
        policy::objective_cases,
        training::state_cases,
        chain_cases::chain_cases,
        reduction_cases::reduction_cases,
        fused_cases::fused_cases,
    ];
    families.into_iter().flat_map(|family| family()).collect()
}

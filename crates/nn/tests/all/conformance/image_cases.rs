//! Cases of norms and pooling.

use meristem_nn::Isa;
use meristem_nn::kernels::BatchShape;
use meristem_nn::kernels::norm::Activation;
use meristem_nn::kernels::pool::{PoolGeometry, PoolShape};
use meristem_nn::ops::norm::{BatchNorm, GroupNorm, LayerNorm};
use meristem_nn::ops::{NormOp, OpBackend, PoolOp};

use super::case::{Case, Data, Random, case};
use super::cases::IMAGE;

fn images(shape: &BatchShape, positive: bool) -> Data {
    let mut random = Random(99);
    let value = |v: f32| if positive { 0.5 + v.abs() } else { v };
    Data::F32((0..shape.len()).map(|_| value(random.unit())).collect())
}

/// Few distinct values, so that windows have ties; among them NaN and both infinities.
fn ties(shape: &BatchShape) -> Data {
    let values = [-0.5, 0.0, 0.25, 0.25, 0.5, -0.0, f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
    let mut random = Random(7);
    let mut value = || match random.bits() as usize % 40 {
        at if at < values.len() => values[at],
        at => values[at % 6],
    };
    Data::F32((0..shape.len()).map(|_| value()).collect())
}

/// No pooled output: it would have to be computed from the same x, and a GPU does not read it.
fn no_output() -> Data {
    Data::F32(vec![])
}

fn per_channel(positive: bool) -> Data {
    images(&BatchShape { batch: 1, h: 1, w: 1, c: IMAGE.c }, positive)
}

/// Variances are at least ½, so a deviation's inverse is at most √2 and a normalised value at most
/// 2·√2·γ; two norms of 126 values per channel.
pub(super) fn norm_cases() -> Vec<Case> {
    let values = IMAGE.batch * IMAGE.pixels();
    let mut cases = vec![
        case(NormOp::Statistics(IMAGE), values, 4.0),
        case(NormOp::UpdateRunning { channels: 20, momentum: 0.1, count: 126 }, 4, 2.0),
    ];
    for (act, pool) in
        [(Activation::None, false), (Activation::Relu, false), (Activation::Relu, true)]
    {
        let norm = BatchNorm { shape: IMAGE, eps: 1e-5, act, pool };
        let forward = case(NormOp::Forward(norm), 8, 3.0).reading(2, per_channel(true));
        let codes = forward.run(OpBackend::Cpu(Isa::portable())).remove(1);
        // The gradient reads the codes of the same forward pass: x, mean, γ, β as there.
        cases.push(forward);
        // dx is four products of exact values and of f64 sums; dγ and dβ are such sums.
        let mut sums = case(NormOp::GradientSums(norm), values, 8.0)
            .bound(0, 16, 8.0)
            .reading(0, images(&IMAGE, false))
            .reading(2, per_channel(true));
        let mut gradient = case(NormOp::InputGradient { norm, accumulate: true }, 16, 8.0)
            .reading(0, images(&IMAGE, false));
        if pool {
            sums = sums.reading(6, codes.clone()).reading(7, no_output());
            gradient = gradient.reading(5, codes);
        }
        cases.extend([sums, gradient]);
    }
    cases.extend(wide_norm_cases());
    cases.extend(group_norm_cases());
    cases.extend(layer_norm_cases());
    cases
}

/// Shapes that several blocks of threads divide: many chunks of pixels, tiles of channels, a
/// partial tile only, one element. Portable sums are f32 in runs of 256 pixels, with an error per
/// pixel of at most 128 times the largest term; statistics are sums of four such chains.
fn wide_norm_cases() -> Vec<Case> {
    let shapes = [[70, 9, 7, 20], [5, 16, 17, 70], [33, 12, 13, 3], [2, 2, 3, 1], [3, 1, 5, 2]];
    let mut cases = vec![];
    for [batch, h, w, c] in shapes {
        let shape = BatchShape { batch, h, w, c };
        let values = batch * shape.pixels();
        let variances = images(&BatchShape { batch: 1, h: 1, w: 1, c }, true);
        cases.push(case(NormOp::Statistics(shape), 8, 8.0));
        let channels = NormOp::UpdateRunning { channels: 20 * c, momentum: 0.1, count: values };
        cases.push(case(channels, 4, 2.0));
        for (act, pool) in
            [(Activation::Relu, false), (Activation::None, true), (Activation::Relu, true)]
        {
            let norm = BatchNorm { shape, eps: 1e-5, act, pool };
            let forward = case(NormOp::Forward(norm), 8, 3.0).reading(2, variances.clone());
            let codes = forward.run(OpBackend::Cpu(Isa::portable())).remove(1);
            cases.push(forward);
            let runs = (values as f64 / 256.0).ceil();
            let sums = case(NormOp::GradientSums(norm), 128, 8.0 * runs)
                .bound(0, 16, 8.0)
                .reading(0, images(&shape, false))
                .reading(2, variances.clone())
                .reading(6, codes.clone())
                .reading(7, no_output());
            cases.push(sums);
            for accumulate in [true, false] {
                let gradient = case(NormOp::InputGradient { norm, accumulate }, 16, 8.0)
                    .reading(0, images(&shape, false))
                    .reading(5, codes.clone());
                cases.push(gradient);
            }
        }
    }
    for act in [Activation::None, Activation::Relu] {
        let norm = BatchNorm { shape: IMAGE, eps: 1e-5, act, pool: true };
        let forward = case(NormOp::Forward(norm), 8, 3.0).reading(0, ties(&IMAGE));
        cases.push(forward.reading(2, per_channel(true)));
    }
    // A constant channel, and a mean far from 0, without cancellation.
    let shape = BatchShape { batch: 70, ..IMAGE };
    let far = (0..shape.len()).map(|i| if i % 20 == 3 { 0.3 } else { 1000.0 + (i % 7) as f32 });
    let far = Data::F32(far.collect());
    cases.push(case(NormOp::Statistics(shape), 8, 16.0).reading(0, far));
    cases
}

/// Groups that share a block and groups with a whole block, with fewer and more channels than
/// threads.
fn group_norm_cases() -> Vec<Case> {
    let shapes = [
        ([3, 7, 6, 20], 2),
        ([37, 5, 3, 70], 7),
        ([2, 16, 17, 48], 2),
        ([3, 9, 9, 96], 6),
        ([40, 1, 1, 600], 1),
        ([3, 3, 3, 5], 5),
        ([1, 1, 1, 1], 1),
    ];
    let mut cases = vec![];
    for ([batch, h, w, c], groups) in shapes {
        let shape = BatchShape { batch, h, w, c };
        let norm = GroupNorm { shape, groups, eps: 1e-2 };
        // The inverse deviation is at most 10, and results are at most 20.
        cases.push(case(NormOp::GroupForward(norm), 8, 20.0));
        let deviations = Data::F32(vec![1.5; batch * groups]);
        for accumulate in [false, true] {
            let gradient = NormOp::GroupGradient { norm, accumulate };
            let runs = (batch * (shape.pixels()).div_ceil(256)) as f64;
            let terms = shape.pixels().min(128);
            let gradient = case(gradient, terms + 2, 4.0 * runs)
                .bound(0, 16, 32.0)
                .reading(3, deviations.clone());
            cases.push(gradient);
        }
    }
    // Without the input's gradient.
    let norm = GroupNorm { shape: IMAGE, groups: 2, eps: 1e-5 };
    let gradient = NormOp::GroupGradient { norm, accumulate: false };
    let deviations = Data::F32(vec![1.5; 6]);
    let gradient = case(gradient, IMAGE.pixels() * 10, 8.0);
    cases.push(gradient.reading(3, deviations).writing(0, Data::F32(vec![])));
    cases
}

/// Rows of fewer and more channels than a warp has threads, partial blocks of rows, several chunks
/// of rows, and rows of more than a block of f32 sums.
fn layer_norm_cases() -> Vec<Case> {
    let shapes = [
        [3, 7, 6, 20],
        [37, 5, 3, 70],
        [5, 1, 1, 600],
        [300, 4, 4, 8],
        [2, 1, 3, 2100],
        [3, 3, 3, 5],
        [1, 1, 1, 1],
    ];
    let mut cases = vec![];
    for ([batch, h, w, c], centred) in
        shapes.into_iter().flat_map(|shape| [(shape, true), (shape, false)])
    {
        let shape = BatchShape { batch, h, w, c };
        let norm = LayerNorm { shape, eps: 1e-2, centred };
        // The inverse deviation is at most 10, and results are at most 20.
        cases.push(case(NormOp::LayerForward(norm), 8, 20.0));
        let deviations = Data::F32(vec![1.5; norm.rows()]);
        for accumulate in [false, true] {
            // Portable sums over rows are f32 in runs of 64, sums over a row in 16 sums of blocks
            // of 64 steps; terms of both are at most 3.
            let runs = norm.rows().div_ceil(64) as f64;
            let blocks = c.div_ceil(1024) as f64;
            let gradient = NormOp::LayerGradient { norm, accumulate };
            let gradient = case(gradient, norm.rows().min(64) + 2, 4.0 * runs)
                .bound(0, 16, 32.0 * blocks)
                .reading(3, deviations.clone());
            cases.push(gradient);
        }
    }
    // Without the input's gradient.
    let norm = LayerNorm { shape: IMAGE, eps: 1e-5, centred: true };
    let gradient = NormOp::LayerGradient { norm, accumulate: false };
    let deviations = Data::F32(vec![1.5; norm.rows()]);
    let gradient = case(gradient, norm.rows() + 2, 8.0);
    cases.push(gradient.reading(3, deviations).writing(0, Data::F32(vec![])));
    cases
}

pub(super) fn pool_cases() -> Vec<Case> {
    let shape = PoolShape::square(IMAGE, 2, 2);
    let mut cases = vec![
        case(PoolOp::Max(shape), 1, 1.0),
        case(PoolOp::MaxGradient { shape, accumulate: true }, 2, 1.0),
        case(PoolOp::NormCodes { len: 37 }, 1, 1.0),
        case(PoolOp::NormCodes { len: 1234 }, 1, 1.0),
        case(PoolOp::Average(IMAGE), IMAGE.pixels(), 1.0),
        case(PoolOp::AverageGradient { shape: IMAGE, accumulate: false }, 2, 1.0),
    ];
    // Windows that overlap, that leave gaps, that fill the image; equals and NaN.
    let inputs = [[2, 11, 13, 20], [5, 3, 3, 33], [70, 4, 4, 1]];
    for ([batch, h, w, c], kernel, stride) in inputs
        .into_iter()
        .flat_map(|input| [(3, 1), (3, 2), (2, 1), (2, 3), (1, 1)].map(|(k, s)| (input, k, s)))
    {
        let input = BatchShape { batch, h, w, c };
        let shape = PoolShape::square(input, kernel, stride);
        let forward = case(PoolOp::Max(shape), 1, 1.0).reading(0, ties(&input));
        let positions = forward.run(OpBackend::Cpu(Isa::portable())).remove(1);
        cases.push(forward);
        for accumulate in [false, true] {
            let gradient = case(PoolOp::MaxGradient { shape, accumulate }, 10, 1.0);
            cases.push(gradient.reading(1, positions.clone()));
        }
    }
    cases.push(case(PoolOp::Max(shape), 1, 1.0).writing(1, Data::U8(vec![])));
    cases.extend(window_cases());
    // Sums of f32 in runs of 256 pixels, divided by their number.
    for [batch, h, w, c] in [[5, 33, 31, 70], [300, 1, 1, 3], [1, 1, 1, 1], [7, 5, 5, 40]] {
        let shape = BatchShape { batch, h, w, c };
        cases.push(case(PoolOp::Average(shape), 12, 1.0));
        for accumulate in [false, true] {
            cases.push(case(PoolOp::AverageGradient { shape, accumulate }, 2, 1.0));
        }
    }
    cases
}

/// Windows that reach into the padding, that are not square, and with more positions than a byte
/// can name; equals and NaN.
fn window_cases() -> Vec<Case> {
    let geometry = |kernel, stride, padding| PoolGeometry { kernel, stride, padding };
    let of = [
        ([2, 11, 13, 20], geometry([3, 3], [2, 2], [1, 1])),
        ([5, 3, 4, 33], geometry([2, 3], [1, 2], [1, 0])),
        ([3, 1, 40, 9], geometry([1, 5], [1, 2], [0, 2])),
        ([70, 2, 2, 1], geometry([4, 2], [3, 1], [2, 1])),
        ([2, 7, 6, 3], geometry([4, 3], [4, 3], [0, 0])),
        ([2, 17, 18, 5], geometry([17, 18], [1, 1], [0, 0])),
        ([1, 19, 18, 9], geometry([17, 18], [2, 1], [8, 9])),
    ];
    let mut cases = vec![];
    for ([batch, h, w, c], window) in of {
        let shape = PoolShape { input: BatchShape { batch, h, w, c }, window };
        let forward = case(PoolOp::Max(shape), 1, 1.0).reading(0, ties(&shape.input));
        let positions = forward.run(OpBackend::Cpu(Isa::portable())).remove(1);
        cases.push(forward);
        let absent = case(PoolOp::Max(shape), 1, 1.0).writing(1, Data::F32(vec![]));
        cases.push(absent);
        // A mean is the sum of a window times a constant, at most 1. An element of a gradient is a
        // sum over the windows that have it, no more than there are outputs in an image.
        cases.push(case(PoolOp::WindowAverage(shape), window.taps() + 1, 1.0));
        let terms = shape.output().pixels().min(window.taps()) + 2;
        for accumulate in [false, true] {
            let gradient = case(PoolOp::MaxGradient { shape, accumulate }, terms, 1.0);
            cases.push(gradient.reading(1, positions.clone()));
            let gradient = PoolOp::WindowAverageGradient { shape, accumulate };
            cases.push(case(gradient, terms, 1.0));
        }
    }
    cases
}

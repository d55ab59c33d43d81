//! Cases of fused convolutions and of classifiers after them.

use meristem_nn::Precision;
use meristem_nn::kernels::BatchShape;
use meristem_nn::kernels::conv::ConvShape;
use meristem_nn::kernels::norm::Activation;
use meristem_nn::ops::fused::{ClassifierHead, FusedConv, FusedOp, InputGradient};
use meristem_nn::ops::norm::BatchNorm;

use super::case::{Case, Data, Random, case};
use super::cases::packed_weights;

/// Variances are at least ½, so that a normalised value is at most 2·√2 + 1.
const NORMALISED: f64 = 4.0;

fn variances(c: usize) -> Data {
    let mut random = Random(99);
    Data::F32((0..c).map(|_| 0.5 + random.unit().abs()).collect())
}

/// Tickets are zero before an operation.
fn tickets(n: usize) -> Data {
    Data::U32(vec![0; n])
}

fn norm(shape: BatchShape, pool: bool) -> BatchNorm {
    BatchNorm { shape, eps: 1e-5, act: Activation::Relu, pool }
}

/// Operations before the convolution.
#[derive(Clone, Copy)]
enum Before {
    Nothing,
    Norm,
    /// Norm and pooling; the windows leave this number of rows and columns unread.
    Pool(usize, usize),
}

/// Batch, height, width and channels of the convolution. Several images in a tile and several tiles
/// in an image; a partial last tile and last slice; more channels than a block covers; partial
/// windows; one pixel.
const CONVOLUTIONS: [([usize; 5], Before); 11] = [
    ([5, 8, 6, 3, 8], Before::Nothing),
    ([2, 32, 32, 3, 8], Before::Nothing),
    ([1, 5, 5, 1, 1], Before::Nothing),
    ([6, 16, 16, 8, 16], Before::Pool(0, 0)),
    ([17, 8, 8, 16, 32], Before::Pool(1, 0)),
    ([3, 5, 7, 20, 40], Before::Norm),
    ([2, 4, 4, 70, 100], Before::Pool(0, 1)),
    ([1, 40, 3, 8, 72], Before::Norm),
    ([40, 2, 2, 8, 8], Before::Pool(1, 1)),
    ([2, 35, 33, 4, 5], Before::Norm),
    ([1, 1, 1, 2, 3], Before::Pool(0, 0)),
];

fn conv([batch, in_h, in_w, in_c, out_c]: [usize; 5], before: Before) -> FusedConv {
    let [kernel, stride, padding] = [[3; 2], [1; 2], [1; 2]];
    let shape = ConvShape {
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
    };
    let raw = |h, w| BatchShape { batch, h, w, c: in_c };
    let before = match before {
        Before::Nothing => None,
        Before::Norm => Some(norm(raw(in_h, in_w), false)),
        Before::Pool(h, w) => Some(norm(raw(2 * in_h + h, 2 * in_w + w), true)),
    };
    FusedConv { shape, before, precision: Precision::F32 }
}

/// Sets the variances of the preceding norm, and the weights.
fn given(conv: &FusedConv, case: Case) -> Case {
    let weights = packed_weights(&conv.shape, conv.shape.weight_len());
    let case = case.reading(5, weights);
    match conv.before {
        Some(norm) => case.reading(2, variances(norm.shape.c)),
        None => case,
    }
}

/// A sum of products of the inputs; the statistics are f64 sums of the outputs. As for a
/// convolution, but with values of up to [`NORMALISED`].
fn forward_cases(conv: FusedConv) -> Vec<Case> {
    let taps = 9 * conv.shape.in_c + 4;
    let of = |momentum| given(&conv, case(FusedOp::Forward { conv, momentum }, taps, NORMALISED));
    let most = 2.0 * NORMALISED * NORMALISED * taps as f64;
    let training = of(Some(0.25)).bound(2, taps, most).bound(4, taps, 2.0 * most);
    vec![training.writing(6, tickets(1)), of(None)]
}

/// The raw output's gradient is at most 4, a sum of few products. The data's is a sum over taps and
/// channels of its products with weights; the gradients of the norm before are f64 sums of it and
/// of its products with distances of at most 2, divided by deviations of at least 0.7. The weights'
/// is an f32 sum over pixels, by the processor in runs of about 256.
fn backward_cases(conv: FusedConv) -> Vec<Case> {
    let (output, wanted) = (conv.shape.output(), conv.before.is_some());
    let data: &[InputGradient] = if wanted {
        &[InputGradient::Overwrite]
    } else {
        &[InputGradient::Unwanted, InputGradient::Overwrite, InputGradient::Accumulate]
    };
    let taps = 9 * conv.shape.out_c + 8;
    let pixels = output.batch * output.pixels();
    let runs = (pixels as f64 / 256.0).ceil();
    let mut cases = vec![];
    for &data in data {
        for (pool, uniform) in [(false, false), (true, false), (true, true)] {
            let after = norm(output, pool);
            if after.output().is_empty() {
                continue;
            }
            let op = FusedOp::Backward { conv, after, uniform, data };
            let sums = 4.0 * 3.0 * pixels as f64;
            let backward = case(op, taps, 4.0)
                .bound(1, pixels.min(256) + 8, 4.0 * NORMALISED * runs)
                .bound(2, taps, sums)
                .bound(3, taps, sums)
                .bound(4, taps, 4.0 * 9.0)
                .writing(5, tickets(conv.tickets()[1]));
            cases.push(given(&conv, backward));
        }
    }
    cases
}

/// Means are sums of pixels, which the processor adds in f32; the sums of a gradient are f64.
fn head_cases() -> Vec<Case> {
    let mut cases = vec![];
    let shapes = [([5, 8, 8, 32], 10), ([3, 7, 9, 70], 33), ([9, 2, 2, 3], 2), ([1, 3, 2, 1], 1)];
    let shapes = shapes.into_iter().flat_map(|of| [false, true].map(|pool| (of, pool)));
    let shapes = shapes.flat_map(|of| Precision::ALL.map(|precision| (of, precision)));
    for ((([batch, h, w, c], classes), pool), precision) in shapes {
        let norm = norm(BatchShape { batch, h, w, c }, pool);
        let (head, pixels) = (ClassifierHead { norm, classes, precision }, norm.output().pixels());
        let linear = ConvShape::linear(batch, c, classes);
        let weights = packed_weights(&linear, linear.weight_len());
        let forward = case(FusedOp::Head(head), pixels + 8, NORMALISED)
            .bound(1, pixels + c + 8, NORMALISED)
            .reading(2, variances(c))
            .reading(5, weights.clone());
        cases.push(forward);
        let (of_batch, sums) = ((batch * pixels) as f64, classes + 2);
        let gradient = case(FusedOp::HeadGradient(head), sums, 1.0)
            .bound(1, batch + 1, 1.0)
            .bound(2, batch + 1, 1.0)
            .bound(3, sums, 3.0 * of_batch)
            .bound(4, sums, of_batch)
            .bound(5, sums, 9.0)
            .reading(2, variances(c))
            .reading(5, weights)
            .writing(6, tickets(1));
        cases.push(gradient);
        // Only the results are rounded.
        let most = 3.0 * of_batch;
        let of_norm = case(FusedOp::Sums(norm), 2, most).reading(2, variances(c));
        cases.push(of_norm.writing(3, tickets(1)));
    }
    cases
}

pub(super) fn fused_cases() -> Vec<Case> {
    let mut cases = vec![case(FusedOp::Begin { gradient: 700, tickets: 3 }, 1, 0.0)];
    for (shape, before) in CONVOLUTIONS {
        for precision in Precision::ALL {
            let conv = FusedConv { precision, ..conv(shape, before) };
            cases.extend(forward_cases(conv));
            cases.extend(backward_cases(conv));
        }
    }
    cases.extend(head_cases());
    cases
}

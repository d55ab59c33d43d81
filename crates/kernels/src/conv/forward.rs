//! Forward convolution.

use super::depthwise::Depthwise;
use super::place::Strides;
use super::shape::ConvGroup;
use super::sliding::{Sliding, SlidingOutput};
use super::{ConvInputs, ConvShape, aligned};
use crate::norm::batch::{ChannelMoments, StatsSums, stats_scratch_len};
use crate::tile::{self, FactorLayout, MatrixLayout, Nest, ProductJob};
use crate::{GradOut, Isa, pad16};

/// Convolution: `y` `[N][out_h][out_w][out_c]` is overwritten.
pub fn forward(
    isa: Isa,
    shape: &ConvShape,
    of: &ConvInputs<'_>,
    y: &mut [f32],
    scratch: &mut [f32],
) {
    shape.check();
    let scratch = aligned(scratch);
    for g in 0..shape.jobs() {
        group(isa, ConvGroup { shape, g }, of, y, scratch, |_| {});
    }
}

/// [`forward`], and the [moments](ChannelMoments) of its output, gathered while each image is in
/// cache.
pub fn forward_with_moments(
    isa: Isa,
    shape: &ConvShape,
    of: &ConvInputs<'_>,
    y: &mut [f32],
    to: ChannelMoments<'_>,
    scratch: &mut [f32],
) {
    let (sums, scratch) = scratch.split_at_mut(stats_scratch_len(shape.out_c));
    let mut sums = StatsSums::new(sums, shape.output());
    forward_with_sums(isa, shape, of, y, &mut sums, scratch);
    sums.finish(to);
}

/// [`forward`], whose output is added to the sums of its [moments](ChannelMoments).
pub fn forward_with_sums(
    isa: Isa,
    shape: &ConvShape,
    of: &ConvInputs<'_>,
    y: &mut [f32],
    sums: &mut StatsSums<'_>,
    scratch: &mut [f32],
) {
    shape.check();
    if shape.jobs() > 1 {
        // An image is complete only after the last group.
        forward(isa, shape, of, y, scratch);
        sums.add_each(isa, y);
    } else {
        let all = ConvGroup { shape, g: 0 };
        group(isa, all, of, y, aligned(scratch), |images| sums.add(isa, images));
    }
}

/// Computes the output channels of job `g`, and shows each block of finished images to `done`.
fn group(
    isa: Isa,
    ConvGroup { shape, g }: ConvGroup<'_>,
    of: &ConvInputs<'_>,
    y: &mut [f32],
    scratch: &mut [f32],
    mut done: impl FnMut(&[f32]),
) {
    let (image, out_image) =
        (shape.input().pixels() * shape.in_c, shape.output().pixels() * shape.out_c);
    let blocks = of.x.chunks(shape.block() * image).zip(y.chunks_mut(shape.block() * out_image));
    if shape.is_depthwise() {
        let depthwise = Depthwise::forward(shape, of.w, of.bias);
        return blocks.for_each(|(x, y)| {
            depthwise.run(isa, x, GradOut::overwrite(y));
            done(y);
        });
    }
    if let Some(sliding) = Sliding::forward(isa, shape) {
        let weights = sliding.pack(of.w, scratch);
        let bias = (!of.bias.is_empty()).then_some(of.bias);
        return blocks.for_each(|(x, y)| {
            sliding.run(x, weights, SlidingOutput { values: &mut *y, bias, accumulate: false });
            done(y);
        });
    }
    let (pairs, scratch) = scratch.split_at_mut(shape.pairs_len());
    let placement = shape.input_placement(g);
    let in_place = shape.input_in_place();
    let strides = in_place.unwrap_or(placement.strides());
    if in_place.is_none() {
        scratch[..shape.block() * strides.image].fill(0.0);
    }
    let channels = g * shape.job_out()..(g + 1) * shape.job_out();
    let weights = &of.w[g * shape.job_weight_len()..(g + 1) * shape.job_weight_len()];
    let depth = window(shape, strides);
    let (b, b_layout) = if in_pairs(isa, shape, channels.len()) {
        tile::to_pairs(&depth, weights, pairs);
        (&*pairs, MatrixLayout::Pairs)
    } else {
        (weights, MatrixLayout::Rows(pad16(channels.len())))
    };
    for (x, y) in blocks {
        let images = x.len() / image;
        let a = match in_place {
            Some(_) => x,
            None => {
                placement.copy(x, scratch);
                &scratch[..images * strides.image]
            }
        };
        tile::run(
            isa,
            ProductJob {
                mode: FactorLayout::Broadcast,
                a,
                rows: pixels(shape, strides, images),
                depth,
                b,
                b_layout,
                c: &mut y[channels.start..],
                c_step: shape.out_c,
                c_runs: None,
                cols: channels.len(),
                bias: of.bias.get(channels.clone()),
                accumulate: false,
            },
        );
        done(y);
    }
}

/// Whether products with `columns` columns multiply two elements of their depth at once.
pub(super) fn in_pairs(isa: Isa, shape: &ConvShape, columns: usize) -> bool {
    !shape.is_dilated() && tile::takes_pairs(isa, columns)
}

/// The output pixels of a block, as offsets of their windows in the (padded) input.
pub(super) fn pixels(shape: &ConvShape, strides: Strides, images: usize) -> Nest {
    Nest {
        counts: [images, shape.out_h(), shape.out_w()],
        strides: [strides.image, shape.stride[0] * strides.row, shape.stride[1] * strides.pixel],
    }
}

/// The elements of a window, in the order of the packed weights.
pub(super) fn window(shape: &ConvShape, strides: Strides) -> Nest {
    let ([kh, kw], channels) = (shape.kernel, shape.job_in());
    let [row, pixel] = [shape.dilation[0] * strides.row, shape.dilation[1] * strides.pixel];
    if shape.is_depthwise() {
        return Nest { counts: [1, kh, kw], strides: [0, row, pixel] };
    }
    if shape.dilation[1] == 1 {
        // A row of the window is contiguous: a pixel holds the job's channels and nothing else.
        return Nest { counts: [1, kh, kw * channels], strides: [0, row, 1] };
    }
    Nest { counts: [kh, kw, channels], strides: [row, pixel, 1] }
}

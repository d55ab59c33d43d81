//! Gradients of a convolution.

use super::depthwise::{self, Depthwise};
use super::forward::{in_pairs, pixels, window};
use super::phases::{Phase, PhasePixels};
use super::shape::ConvGroup;
use super::sliding::{Sliding, SlidingOutput};
use super::{ConvShape, ParamGrads, aligned};
use crate::norm::channels::add_channel_sums;
use crate::tile::{self, FactorLayout, MatrixLayout, ProductJob, paired_len};
use crate::transpose::transpose;
use crate::{GradOut, Isa, pad16};

/// Gradient with respect to the input, from `dy` `[N][out_h][out_w][out_c]` and packed weights.
pub fn backward_data(
    isa: Isa,
    shape: &ConvShape,
    dy: &[f32],
    w: &[f32],
    dx: GradOut<'_>,
    scratch: &mut [f32],
) {
    shape.check();
    let scratch = aligned(scratch);
    let GradOut { values, accumulate } = dx;
    for g in 0..shape.jobs() {
        let w = &w[g * shape.job_weight_len()..(g + 1) * shape.job_weight_len()];
        data_group(isa, ConvGroup { shape, g }, dy, w, GradOut { values, accumulate }, scratch);
    }
}

fn data_group(
    isa: Isa,
    ConvGroup { shape, g }: ConvGroup<'_>,
    dy: &[f32],
    w: &[f32],
    dx: GradOut<'_>,
    scratch: &mut [f32],
) {
    let (image, in_image) =
        (shape.output().pixels() * shape.out_c, shape.input().pixels() * shape.in_c);
    let depth = if shape.is_depthwise() { 1 } else { shape.job_out() };
    let tap_len = depth * pad16(shape.job_in());
    let (flipped, scratch) = scratch.split_at_mut(shape.taps() * tap_len);
    flip(isa, shape, w, flipped);
    if shape.is_depthwise() {
        // All phases of an image, which stays in the cache meanwhile.
        let images = dx.values.chunks_exact_mut(in_image.max(1));
        for (dy, values) in dy.chunks_exact(image).zip(images) {
            let mut weights = &*flipped;
            for phase in shape.phases() {
                let to = GradOut { values: &mut *values, accumulate: dx.accumulate };
                Depthwise::data(shape, &phase, weights).run(isa, dy, to);
                weights = &weights[phase.taps() * tap_len..];
            }
        }
        return;
    }
    if let Some(sliding) = Sliding::data_gradient(isa, shape) {
        let weights = sliding.pack(flipped, scratch);
        let GradOut { values, accumulate } = dx;
        return sliding.run(dy, weights, SlidingOutput { values, bias: None, accumulate });
    }
    let (pairs, scratch) = scratch.split_at_mut(shape.pairs_len());
    let placement = shape.gradient_placement(g);
    let in_place = shape.gradient_in_place();
    let strides = in_place.unwrap_or(placement.strides());
    if in_place.is_none() {
        scratch[..shape.block() * strides.image].fill(0.0);
    }
    let depth_of = |phase: &Phase| phase.depth(shape.job_out(), strides);
    let (weights, b_layout) = if in_pairs(isa, shape, shape.job_in()) {
        // One panel, with the columns of one vector.
        let (mut from, mut to) = (&*flipped, &mut *pairs);
        for phase in shape.phases().filter(|phase| phase.taps() > 0) {
            tile::to_pairs(&depth_of(&phase), from, to);
            from = &from[phase.taps() * tap_len..];
            to = &mut to[paired_len(&depth_of(&phase))..];
        }
        (&*pairs, MatrixLayout::Pairs)
    } else {
        (&*flipped, MatrixLayout::Panels)
    };
    let blocks =
        dy.chunks(shape.block() * image).zip(dx.values.chunks_mut(shape.block() * in_image));
    for (dy, dx_block) in blocks {
        let images = dy.len() / image;
        let a = match in_place {
            Some(_) => dy,
            None => {
                placement.copy(dy, scratch);
                &scratch[..images * strides.image]
            }
        };
        let mut weights = weights;
        if g == 0 && !dx.accumulate && !shape.reaches_all() {
            dx_block.fill(0.0);
        }
        for phase in shape.phases().filter(|phase| phase.taps() > 0) {
            let depth = depth_of(&phase);
            let len = match b_layout {
                MatrixLayout::Pairs => paired_len(&depth),
                _ => phase.taps() * tap_len,
            };
            let (b, rest) = weights.split_at(len);
            weights = rest;
            let PhasePixels { first, runs, step } = phase.pixels(shape);
            let job = ProductJob {
                mode: FactorLayout::Broadcast,
                a: &a[phase.offset(&placement, strides)..],
                rows: phase.windows(images, strides),
                depth,
                b,
                b_layout,
                c: &mut dx_block[first + g * shape.job_in()..],
                c_step: step,
                c_runs: runs,
                cols: shape.job_in(),
                bias: None,
                accumulate: dx.accumulate,
            };
            tile::run(isa, job);
        }
    }
}

/// Packs a job's weights for the data gradient: for each phase its taps in reverse order, input and
/// output channels swapped: `[taps][out][in]` in panels, depthwise `[taps][pad16(C)]`.
fn flip(isa: Isa, shape: &ConvShape, w: &[f32], mut to: &mut [f32]) {
    let (ci, co) = (shape.job_in(), shape.job_out());
    for phase in shape.phases() {
        if shape.is_depthwise() {
            let c = pad16(co);
            for (tap, to) in phase.each_tap(shape).zip(to.chunks_exact_mut(c)) {
                to.copy_from_slice(&w[tap * c..(tap + 1) * c]);
            }
            to = &mut to[phase.taps() * c..];
            continue;
        }
        let tap_len = ci * pad16(co);
        for (i, tap) in phase.each_tap(shape).enumerate() {
            let from = &w[tap * tap_len..(tap + 1) * tap_len];
            transpose(isa, [ci, co], from, to, [phase.taps() * co, i * co]);
        }
        to = &mut to[phase.taps() * co * pad16(ci)..];
    }
}

/// Gradients with respect to the weights and the bias, added to `to`.
pub fn backward_weight(
    isa: Isa,
    shape: &ConvShape,
    x: &[f32],
    dy: &[f32],
    to: ParamGrads<'_>,
    scratch: &mut [f32],
) {
    shape.check();
    let scratch = aligned(scratch);
    add_channel_sums(isa, dy, to.db);
    if to.dw.is_empty() {
        return;
    }
    if let Some(sliding) = Sliding::weights(isa, shape) {
        return sliding.weight_gradient(x, dy, to.dw, scratch);
    }
    if depthwise::sums_in_registers(shape) {
        let sums = &mut scratch[..shape.weight_len()];
        return depthwise::weight_gradient(isa, shape, x, dy, to.dw, sums);
    }
    for (g, dw) in to.dw.chunks_exact_mut(shape.job_weight_len()).enumerate() {
        weight_group(isa, ConvGroup { shape, g }, x, dy, dw, scratch);
    }
}

fn weight_group(
    isa: Isa,
    ConvGroup { shape, g }: ConvGroup<'_>,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    let (image, out_pixels) = (shape.input().pixels() * shape.in_c, shape.output().pixels());
    let placement = shape.input_placement(g);
    let in_place = shape.input_in_place();
    let strides = in_place.unwrap_or(placement.strides());
    let mode = if shape.is_depthwise() { FactorLayout::Lanes } else { FactorLayout::Broadcast };
    let cols = shape.job_out();
    let packed_step = shape.packed_step();
    let (packed, scratch) = scratch.split_at_mut(pad16(shape.block() * out_pixels * packed_step));
    if in_place.is_none() {
        scratch[..shape.block() * strides.image].fill(0.0);
    }
    if packed_step != cols {
        packed.fill(0.0);
    }
    let blocks =
        x.chunks(shape.block() * image).zip(dy.chunks(shape.block() * out_pixels * shape.out_c));
    for (x, dy) in blocks {
        let images = x.len() / image;
        let a = match in_place {
            Some(_) => x,
            None => {
                placement.copy(x, scratch);
                &scratch[..images * strides.image]
            }
        };
        // Whole vectors of channels are read in place if their stride permits, and from a copy
        // otherwise.
        let (b, b_step) = if packed_step == cols {
            (&dy[g * cols..], shape.out_c)
        } else {
            for (to, dy) in packed.chunks_exact_mut(packed_step).zip(dy.chunks_exact(shape.out_c)) {
                to[..cols].copy_from_slice(&dy[g * cols..(g + 1) * cols]);
            }
            (&packed[..], packed_step)
        };
        tile::run(
            isa,
            ProductJob {
                mode,
                a,
                rows: window(shape, strides),
                depth: pixels(shape, strides, images),
                b,
                b_layout: MatrixLayout::Rows(b_step),
                c: &mut *dw,
                c_step: pad16(cols),
                c_runs: None,
                cols,
                bias: None,
                accumulate: true,
            },
        );
    }
}

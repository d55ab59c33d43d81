//! Gradients of a convolution.

use super::forward::{in_pairs, mode, pixels, window, window_of};
use super::shape::ConvGroup;
use super::sliding::{Sliding, SlidingOutput};
use super::{ConvShape, ParamGrads, aligned};
use crate::kernels::norm::channels::add_channel_sums;
use crate::kernels::tile::{self, MatrixLayout, Nest, ProductJob};
use crate::kernels::transpose::transpose;
use crate::kernels::{GradOut, Isa, pad16};

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
    let depthwise = shape.is_depthwise();
    let taps_depth = if depthwise { 1 } else { shape.job_out() };
    let (flipped, scratch) =
        scratch.split_at_mut(shape.taps() * taps_depth * pad16(shape.job_in()));
    flip(isa, shape, w, flipped);
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
    let depth = window_of(shape, shape.job_out(), strides);
    let (b, b_layout) = match (depthwise, in_pairs(isa, shape, shape.job_in())) {
        (true, _) => (&*flipped, MatrixLayout::Rows(pad16(shape.job_in()))),
        (_, true) => {
            // One panel, with the columns of one vector.
            tile::to_pairs(&depth, flipped, pairs);
            (&*pairs, MatrixLayout::Pairs)
        }
        _ => (&*flipped, MatrixLayout::Panels),
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
        let rows = Nest {
            counts: [images, shape.in_h, shape.in_w],
            strides: [strides.image, strides.row, strides.pixel],
        };
        tile::run(
            isa,
            ProductJob {
                mode: mode(shape),
                a,
                rows,
                depth,
                b,
                b_layout,
                c: &mut dx_block[g * shape.job_in()..],
                c_step: shape.in_c,
                cols: shape.job_in(),
                bias: None,
                accumulate: dx.accumulate,
            },
        );
    }
}

/// Packs a job's weights for the data gradient: taps in reverse order, input and output channels
/// swapped: `[kh][kw][out][in]` in panels, depthwise `[kh][kw][pad16(C)]`.
fn flip(isa: Isa, shape: &ConvShape, w: &[f32], to: &mut [f32]) {
    let (ci, co, taps) = (shape.job_in(), shape.job_out(), shape.taps());
    if shape.is_depthwise() {
        let c = pad16(co);
        for (from, to) in w.chunks_exact(c).rev().zip(to.chunks_exact_mut(c)) {
            to.copy_from_slice(from);
        }
        return;
    }
    let tap_len = ci * pad16(co);
    for tap in 0..taps {
        let from = &w[(taps - 1 - tap) * tap_len..(taps - tap) * tap_len];
        transpose(isa, [ci, co], from, to, [taps * co, tap * co]);
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
                mode: mode(shape),
                a,
                rows: window(shape, strides),
                depth: pixels(shape, strides, images),
                b,
                b_layout: MatrixLayout::Rows(b_step),
                c: &mut *dw,
                c_step: pad16(cols),
                cols,
                bias: None,
                accumulate: true,
            },
        );
    }
}

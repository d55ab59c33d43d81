//! Linear layer: a 1 × 1 convolution whose pixels are the samples.

use super::conv::{self, ConvInputs, ConvShape, ParamGrads};
use super::macros::isa_kernels;
use super::tile;
use super::{GradOut, Isa, PAD, check_len, pad16};

/// Shape of a linear layer over a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// Samples.
    pub batch: usize,
    /// Input features.
    pub in_f: usize,
    /// Output features.
    pub out_f: usize,
}

impl LinearShape {
    const fn as_conv(&self) -> ConvShape {
        ConvShape {
            batch: 1,
            in_c: self.in_f,
            in_h: self.batch,
            in_w: 1,
            out_c: self.out_f,
            kernel: [1, 1],
            stride: [1, 1],
            padding: [0, 0],
            groups: 1,
        }
    }

    /// Elements of the packed weights `[in_f][pad16(out_f)]`.
    pub const fn weight_len(&self) -> usize {
        self.as_conv().weight_len()
    }

    /// Scratch that any of this module's functions needs for this shape, in f32.
    pub const fn scratch_len(&self) -> usize {
        self.as_conv().scratch_len()
    }
}

/// `y = W x + b`: `x` `[N][in_f]`, packed weights, `y` `[N][out_f]` overwritten.
pub fn forward(
    isa: Isa,
    shape: &LinearShape,
    of: &ConvInputs<'_>,
    y: &mut [f32],
    scratch: &mut [f32],
) {
    conv::forward(isa, &shape.as_conv(), of, y, scratch);
}

isa_kernels! {
    /// The packed weights `[in_f][pad16(out_f)]` as those of the layer with inputs and outputs swapped:
    /// the `out_f` rows from `first` on of panels with `depth` rows of `in_f` columns, padding lanes zero.
    /// In squares, each by way of one that lies together: rows of weights are often a power of two
    /// apart, and a column of them would find no place in the cache.
    pub(crate) fn transpose(isa: Isa, sizes: [usize; 2], w: &[f32], to: &mut [f32],
                            rows: [usize; 2]) {
        let ([in_f, out_f], [depth, first]) = (sizes, rows);
        let from_step = pad16(out_f);
        check_len("linear::transpose: w", w, in_f * from_step);
        check_len("linear::transpose: to", to, depth * pad16(in_f));
        for i in (0..in_f).step_by(PAD) {
            for o in (0..out_f).step_by(PAD) {
                let mut square = [[0f32; PAD]; PAD];
                let rows = w[i * from_step + o..].chunks(from_step).take(in_f - i);
                for (to, row) in square.iter_mut().zip(rows) {
                    to.copy_from_slice(&row[..PAD]);
                }
                for k in 0..PAD.min(out_f - o) {
                    let at = tile::in_panels([depth, in_f], first + o + k, i);
                    for (to, row) in to[at..at + PAD].iter_mut().zip(&square) {
                        *to = row[k];
                    }
                }
            }
        }
    }
}

/// Gradient with respect to the input: `Wᵀ dy`.
pub fn backward_data(
    isa: Isa,
    shape: &LinearShape,
    dy: &[f32],
    w: &[f32],
    dx: GradOut<'_>,
    scratch: &mut [f32],
) {
    conv::backward_data(isa, &shape.as_conv(), dy, w, dx, scratch);
}

/// Gradients with respect to weights (`x dyᵀ`) and bias (`Σ dy`), added to `to`.
pub fn backward_weight(
    isa: Isa,
    shape: &LinearShape,
    x: &[f32],
    dy: &[f32],
    to: ParamGrads<'_>,
    scratch: &mut [f32],
) {
    conv::backward_weight(isa, &shape.as_conv(), x, dy, to, scratch);
}

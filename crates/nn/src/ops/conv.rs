//! Steps of 2-d convolution, and of linear layers, whose shape is [`ConvShape::linear`].
//!
//! Factors are rounded where they are multiplied (see [`Precision`]): images, weights, and the
//! gradient of the output. The gradient of the bias is a sum of what was not rounded.

use super::operand::{Operands, Signature, f32s, scratch};
use crate::kernels::conv::winograd::{TileSize, Winograd};
use crate::kernels::conv::{self, ConvInputs, ConvShape, ParamGrads};
use crate::kernels::norm::BatchStats;
use crate::kernels::{GradOut, Isa};
use crate::precision::Precision;

/// Products of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Shape of the convolution.
    pub shape: ConvShape,
    /// Precision of the factors.
    pub precision: Precision,
    /// Tiles of Winograd's minimal filtering by which a processor computes them; directly if there
    /// are none. A GPU does not look at it.
    pub tiles: Option<TileSize>,
}

/// A convolution's forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Reads x, weight, bias (optional); writes y, scratch.
    Forward(Product),
    /// As [`Op::Forward`], and writes mean and variance of y per channel between y and scratch.
    ForwardWithStats(Product),
    /// Reads x, dy; adds to dweight and dbias (optional); scratch.
    WeightGradient(Product),
    /// Reads dy, weight; writes dx, scratch.
    DataGradient {
        /// Shape and precision.
        product: Product,
        /// Add to dx.
        accumulate: bool,
    },
}

impl Product {
    /// Products whose factors are not rounded.
    pub const fn f32(shape: ConvShape) -> Self {
        Self { shape, precision: Precision::F32, tiles: None }
    }

    fn winograd(&self) -> Option<Winograd> {
        self.tiles.map(|tile| Winograd { shape: self.shape, tile })
    }

    fn scratch_len(&self) -> usize {
        self.winograd().map_or(self.shape.scratch_len(), |of| of.scratch_len())
    }
}

impl Op {
    fn product(&self) -> Product {
        match *self {
            Op::Forward(product) | Op::ForwardWithStats(product) | Op::WeightGradient(product) => {
                product
            }
            Op::DataGradient { product, .. } => product,
        }
    }

    pub(super) fn signature(&self) -> Signature {
        let product = self.product();
        let shape = product.shape;
        let [x, y] = [shape.input(), shape.output()].map(|image| f32s(image.len()));
        let (w, channels) = (f32s(shape.weight_len()), f32s(shape.out_c));
        let (bias, rest) = (channels.optional(), scratch(product.scratch_len()));
        match self {
            Op::Forward(_) => Signature::new(&[x, w, bias], &[y, rest]),
            Op::ForwardWithStats(_) => {
                Signature::new(&[x, w, bias], &[y, channels, channels, rest])
            }
            Op::WeightGradient(_) => Signature::new(&[x, y], &[w, bias, rest]),
            Op::DataGradient { .. } => Signature::new(&[y, w], &[x, rest]),
        }
    }

    /// Rounded factors are copies, in memory of their own: they are the definition that a GPU's
    /// kernels are compared with, and no plan of a processor has them.
    pub(super) fn run(&self, isa: Isa, operands: Operands<'_>) {
        let product = self.product();
        let (Product { shape, precision, .. }, tiles) = (&product, product.winograd());
        let round = |factor| precision.rounded(factor);
        match self {
            Op::Forward(_) => {
                let ([x, w, bias], [y, scratch]) = operands.floats();
                let (x, w) = (round(x), round(w));
                let of = ConvInputs { x: &x, w: &w, bias };
                match tiles {
                    Some(tiles) => tiles.forward(isa, &of, y, scratch),
                    None => conv::forward(isa, shape, &of, y, scratch),
                }
            }
            Op::ForwardWithStats(_) => {
                let ([x, w, bias], [y, mean, var, scratch]) = operands.floats();
                let (x, w) = (round(x), round(w));
                let of = ConvInputs { x: &x, w: &w, bias };
                let stats = BatchStats { mean, var };
                match tiles {
                    Some(tiles) => tiles.forward_with_stats(isa, &of, y, stats, scratch),
                    None => conv::forward_with_stats(isa, shape, &of, y, stats, scratch),
                }
            }
            Op::WeightGradient(_) => {
                let ([x, dy], [dw, db, scratch]) = operands.floats();
                let (rounded, gradient) = (round(x), round(dy));
                match tiles {
                    Some(tiles) => tiles.backward_weight(isa, [&rounded, &gradient], dw, scratch),
                    None => {
                        let weights = ParamGrads { dw, db: &mut [] };
                        conv::backward_weight(isa, shape, &rounded, &gradient, weights, scratch);
                    }
                }
                let bias = ParamGrads { dw: &mut [], db };
                conv::backward_weight(isa, shape, x, dy, bias, scratch);
            }
            Op::DataGradient { accumulate, .. } => {
                let ([dy, w], [values, scratch]) = operands.floats();
                let dx = GradOut { values, accumulate: *accumulate };
                let (dy, w) = (round(dy), round(w));
                match tiles {
                    Some(tiles) => tiles.backward_data(isa, &dy, &w, dx, scratch),
                    None => conv::backward_data(isa, shape, &dy, &w, dx, scratch),
                }
            }
        }
    }
}

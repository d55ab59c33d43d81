//! 2-d convolution (cross-correlation, as PyTorch's `conv2d`): forward and both gradients.

use super::norm::{self, BatchStats};
use super::{GradOut, ImageShape, Isa, check_len, check_scratch, pad16};

/// Shape of a convolution over a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvShape {
    /// Images.
    pub batch: usize,
    /// Input channels.
    pub in_c: usize,
    /// Input rows.
    pub in_h: usize,
    /// Input columns.
    pub in_w: usize,
    /// Output channels.
    pub out_c: usize,
    /// Kernel height and width.
    pub kernel: [usize; 2],
    /// Vertical and horizontal stride.
    pub stride: [usize; 2],
    /// Zero rows above and below, zero columns left and right.
    pub padding: [usize; 2],
    /// Channel groups; divides both channel counts.
    pub groups: usize,
}

impl ConvShape {
    /// Output rows.
    pub const fn out_h(&self) -> usize {
        (self.in_h + 2 * self.padding[0] - self.kernel[0]) / self.stride[0] + 1
    }

    /// Output columns.
    pub const fn out_w(&self) -> usize {
        (self.in_w + 2 * self.padding[1] - self.kernel[1]) / self.stride[1] + 1
    }

    /// Whether each channel has its own filter, which has its own weight layout.
    pub const fn is_depthwise(&self) -> bool {
        self.groups == self.in_c && self.groups == self.out_c && self.groups > 1
    }

    /// Shape of the input.
    pub const fn input(&self) -> ImageShape {
        ImageShape { batch: self.batch, h: self.in_h, w: self.in_w, c: self.in_c }
    }

    /// Shape of the output.
    pub const fn output(&self) -> ImageShape {
        ImageShape { batch: self.batch, h: self.out_h(), w: self.out_w(), c: self.out_c }
    }

    /// Input channels of a group.
    pub const fn group_in(&self) -> usize {
        self.in_c / self.groups
    }

    /// Output channels of a group.
    pub const fn group_out(&self) -> usize {
        self.out_c / self.groups
    }

    /// Elements of the packed weights (F3), padding included.
    pub const fn weight_len(&self) -> usize {
        let taps = self.kernel[0] * self.kernel[1];
        if self.is_depthwise() {
            taps * pad16(self.out_c)
        } else {
            self.groups * taps * self.group_in() * pad16(self.group_out())
        }
    }

    /// Scratch that any of this module's functions needs for this shape, in f32.
    pub const fn scratch_len(&self) -> usize {
        norm::batch::stats_scratch_len(self.out_c)
    }

    #[track_caller]
    fn check(&self) {
        let Self { in_c, in_h, in_w, out_c, kernel, stride, padding, groups, .. } = *self;
        assert!(
            groups > 0
                && in_c > 0
                && out_c > 0
                && in_c % groups == 0
                && out_c % groups == 0
                && kernel.iter().chain(&stride).all(|&v| v > 0)
                && in_h + 2 * padding[0] >= kernel[0]
                && in_w + 2 * padding[1] >= kernel[1],
            "conv: bad shape {self:?}"
        );
    }

    /// Visits every (sample, output row, column, output channel, input index, weight index).
    fn visit(&self, mut f: impl FnMut(usize, usize, usize)) {
        let Self { batch, in_c, in_h, in_w, out_c, kernel, stride, padding, .. } = *self;
        let (gi, go) = (self.group_in(), self.group_out());
        for n in 0..batch {
            for oy in 0..self.out_h() {
                for ox in 0..self.out_w() {
                    let o = ((n * self.out_h() + oy) * self.out_w() + ox) * out_c;
                    for ky in 0..kernel[0] {
                        for kx in 0..kernel[1] {
                            let (y, x) = (oy * stride[0] + ky, ox * stride[1] + kx);
                            if y < padding[0] || x < padding[1] {
                                continue;
                            }
                            let (y, x) = (y - padding[0], x - padding[1]);
                            if y >= in_h || x >= in_w {
                                continue;
                            }
                            let i = ((n * in_h + y) * in_w + x) * in_c;
                            let tap = ky * kernel[1] + kx;
                            for oc in 0..out_c {
                                let (g, og) = (oc / go, oc % go);
                                if self.is_depthwise() {
                                    f(o + oc, i + oc, tap * pad16(out_c) + oc);
                                    continue;
                                }
                                for ic in 0..gi {
                                    let w = (g * kernel[0] * kernel[1] + tap) * gi + ic;
                                    f(o + oc, i + g * gi + ic, w * pad16(go) + og);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// What a forward convolution reads.
#[derive(Clone, Copy, Debug)]
pub struct ConvInputs<'a> {
    /// Input `[N][H][W][in_c]`.
    pub x: &'a [f32],
    /// Packed weights, [`ConvShape::weight_len`] elements.
    pub w: &'a [f32],
    /// One value per output channel.
    pub bias: Option<&'a [f32]>,
}

/// Where the gradients of the parameters are added.
#[derive(Debug)]
pub struct ParamGrads<'a> {
    /// Gradient of the weights, packed like them; zeros are added to padding lanes.
    pub dw: &'a mut [f32],
    /// Gradient of the bias, one value per output channel (or feature).
    pub db: Option<&'a mut [f32]>,
}

/// Convolution: `y` `[N][out_h][out_w][out_c]` is overwritten.
pub fn forward(
    isa: Isa,
    shape: &ConvShape,
    of: &ConvInputs<'_>,
    y: &mut [f32],
    scratch: &mut [f32],
) {
    let _ = isa;
    shape.check();
    check_len("conv::forward: x", of.x, shape.input().len());
    check_len("conv::forward: w", of.w, shape.weight_len());
    check_len("conv::forward: y", y, shape.output().len());
    check_scratch("conv::forward", scratch, shape.scratch_len());
    match of.bias {
        Some(bias) => y.chunks_exact_mut(shape.out_c).for_each(|y| y.copy_from_slice(bias)),
        None => y.fill(0.0),
    }
    shape.visit(|o, i, w| y[o] += of.x[i] * of.w[w]);
}

/// [`forward`], and the batch statistics of its output, gathered while each image is in cache.
pub fn forward_with_stats(
    isa: Isa,
    shape: &ConvShape,
    of: &ConvInputs<'_>,
    y: &mut [f32],
    stats: BatchStats<'_>,
    scratch: &mut [f32],
) {
    forward(isa, shape, of, y, scratch);
    norm::batch_stats(isa, &shape.output(), y, stats, scratch);
}

/// Gradient with respect to the input, from `dy` `[N][out_h][out_w][out_c]` and packed weights.
pub fn backward_data(
    isa: Isa,
    shape: &ConvShape,
    dy: &[f32],
    w: &[f32],
    dx: GradOut<'_>,
    scratch: &mut [f32],
) {
    let _ = isa;
    shape.check();
    check_len("conv::backward_data: dy", dy, shape.output().len());
    check_len("conv::backward_data: w", w, shape.weight_len());
    check_len("conv::backward_data: dx", dx.values, shape.input().len());
    check_scratch("conv::backward_data", scratch, shape.scratch_len());
    if !dx.accumulate {
        dx.values.fill(0.0);
    }
    shape.visit(|o, i, k| dx.values[i] += dy[o] * w[k]);
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
    let _ = isa;
    shape.check();
    check_len("conv::backward_weight: x", x, shape.input().len());
    check_len("conv::backward_weight: dy", dy, shape.output().len());
    check_len("conv::backward_weight: dw", to.dw, shape.weight_len());
    check_scratch("conv::backward_weight", scratch, shape.scratch_len());
    shape.visit(|o, i, k| to.dw[k] += x[i] * dy[o]);
    if let Some(db) = to.db {
        check_len("conv::backward_weight: db", db, shape.out_c);
        dy.chunks_exact(shape.out_c).for_each(|dy| {
            db.iter_mut().zip(dy).for_each(|(b, &d)| *b += d);
        });
    }
}

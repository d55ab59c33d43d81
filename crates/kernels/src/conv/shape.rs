//! Shapes of convolutions, and the sizes that follow from them.

use super::ALIGNMENT;
use super::place::{Placement, Strides};
use crate::tile::readable_cols;
use crate::{BatchShape, PAD, norm, pad16};

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
    /// Rows and columns from one element of the kernel to the next.
    pub dilation: [usize; 2],
}

/// Smallest number of output pixels in a block of images, unless the batch has fewer. It gives full
/// tiles in the forward pass, and enough depth to amortise the store in the weight gradient.
const BLOCK_PIXELS: usize = 128;

/// A step for rows of `n` elements: multiples of 4 KiB would put all rows of a tile into the same
/// few lines of the nearest cache.
const fn apart(n: usize) -> usize {
    if n.is_multiple_of(1024) { n + PAD } else { n }
}

/// One tile job of a convolution: a group, or all channels of a depthwise one.
#[derive(Clone, Copy)]
pub(super) struct ConvGroup<'a> {
    pub(super) shape: &'a ConvShape,
    /// Its number.
    pub(super) g: usize,
}

impl ConvShape {
    /// A linear layer: `x` `[batch][in_f]`, weights `[in_f][pad16(out_f)]`, `y` `[batch][out_f]`.
    pub const fn linear(batch: usize, in_f: usize, out_f: usize) -> Self {
        Self {
            batch: 1,
            in_c: in_f,
            in_h: batch,
            in_w: 1,
            out_c: out_f,
            kernel: [1, 1],
            stride: [1, 1],
            padding: [0, 0],
            groups: 1,
            dilation: [1, 1],
        }
    }

    /// Rows and columns from the first to the last element of a window, both counted.
    const fn span(&self) -> [usize; 2] {
        let ([kh, kw], [dh, dw]) = (self.kernel, self.dilation);
        [dh * (kh - 1) + 1, dw * (kw - 1) + 1]
    }

    /// Whether the elements of a window are apart.
    pub const fn is_dilated(&self) -> bool {
        self.dilation[0] != 1 || self.dilation[1] != 1
    }

    /// Output rows.
    pub const fn out_h(&self) -> usize {
        (self.in_h + 2 * self.padding[0] - self.span()[0]) / self.stride[0] + 1
    }

    /// Output columns.
    pub const fn out_w(&self) -> usize {
        (self.in_w + 2 * self.padding[1] - self.span()[1]) / self.stride[1] + 1
    }

    /// Whether each channel has a separate filter; these weights have a different layout.
    pub const fn is_depthwise(&self) -> bool {
        self.groups == self.in_c && self.groups == self.out_c && self.groups > 1
    }

    /// Shape of the input.
    pub const fn input(&self) -> BatchShape {
        BatchShape { batch: self.batch, h: self.in_h, w: self.in_w, c: self.in_c }
    }

    /// Shape of the output.
    pub const fn output(&self) -> BatchShape {
        BatchShape { batch: self.batch, h: self.out_h(), w: self.out_w(), c: self.out_c }
    }

    /// Elements of the packed weights, padding included.
    pub const fn weight_len(&self) -> usize {
        self.jobs() * self.job_weight_len()
    }

    /// Scratch that any of this module's functions needs for this shape, in f32.
    pub const fn scratch_len(&self) -> usize {
        let input = self.block() * self.input_placement(0).strides().image;
        let gradient = self.block() * self.gradient_placement(0).strides().image;
        let depth = if self.is_depthwise() { 1 } else { self.job_out() };
        let weights = self.taps() * depth * pad16(self.job_in());
        let packed = self.block() * self.out_h() * self.out_w() * self.packed_step();
        let pieces = [input + pad16(packed), gradient + weights];
        let most = if pieces[0] > pieces[1] { pieces[0] } else { pieces[1] };
        let ways = self.pairs_len() + self.sliding_len();
        most + ways + 4 * ALIGNMENT + norm::batch::stats_scratch_len(self.out_c)
    }

    /// Packed weights of either direction, in one phase or several, that
    /// [`MatrixLayout::Pairs`](crate::tile::MatrixLayout) takes.
    pub(super) const fn pairs_len(&self) -> usize {
        let ([kh, kw], [ci, co]) = (self.kernel, [self.job_in(), self.job_out()]);
        let (least, most) = if ci < co { (ci, co) } else { (co, ci) };
        if self.is_depthwise() || least > 8 { 0 } else { kh * kw * most.div_ceil(2) * PAD }
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        let Self { in_c, in_h, in_w, out_c, kernel, stride, padding, groups, dilation, .. } = *self;
        assert!(
            groups > 0
                && in_c > 0
                && out_c > 0
                && in_c % groups == 0
                && out_c % groups == 0
                && kernel.iter().chain(&stride).chain(&dilation).all(|&v| v > 0)
                && in_h + 2 * padding[0] >= self.span()[0]
                && in_w + 2 * padding[1] >= self.span()[1],
            "conv: bad shape {self:?}"
        );
    }

    /// Weights of a filter for one channel: `kh·kw`.
    pub const fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Tile jobs per image block: one per group, but one for all of a depthwise convolution.
    pub const fn jobs(&self) -> usize {
        if self.is_depthwise() { 1 } else { self.groups }
    }

    /// Input channels of a job.
    pub const fn job_in(&self) -> usize {
        self.in_c / self.jobs()
    }

    /// Output channels of a job.
    pub const fn job_out(&self) -> usize {
        self.out_c / self.jobs()
    }

    /// Elements of a job's packed weights.
    pub(super) const fn job_weight_len(&self) -> usize {
        let depth = if self.is_depthwise() { 1 } else { self.job_in() };
        self.taps() * depth * pad16(self.job_out())
    }

    /// Images that are computed together.
    pub const fn block(&self) -> usize {
        let pixels = self.out_h() * self.out_w();
        let images = BLOCK_PIXELS.div_ceil(if pixels == 0 { 1 } else { pixels });
        if images < self.batch {
            images
        } else if self.batch == 0 {
            1
        } else {
            self.batch
        }
    }

    /// Stride between pixels of the output gradient that the weight gradient reads in vectors.
    pub(super) const fn packed_step(&self) -> usize {
        apart(readable_cols(self.job_out()))
    }

    /// Channels of a pixel in scratch: whole vectors where A is read by vectors.
    pub(super) const fn scratch_channels(&self, channels: usize) -> usize {
        match (self.is_depthwise(), self.taps()) {
            (true, _) => readable_cols(channels),
            (false, 1) => apart(channels),
            (false, _) => channels,
        }
    }

    /// Input with its padding, channels of job `g`.
    pub(super) const fn input_placement(&self, g: usize) -> Placement {
        let c = self.job_in();
        let [ph, pw] = self.padding;
        Placement {
            image: self.input(),
            channels: [g * c, c],
            size: [self.in_h + 2 * ph, self.in_w + 2 * pw, self.scratch_channels(c)],
            origin: [ph as isize, pw as isize],
        }
    }

    /// Strides of the input read in place, if the jobs can: nothing to pad, one job, and whole
    /// vectors of channels where A is read by vectors.
    pub(super) const fn input_in_place(&self) -> Option<Strides> {
        let whole = self.scratch_channels(self.in_c) == self.in_c;
        if self.padding[0] == 0 && self.padding[1] == 0 && self.jobs() == 1 && whole {
            Some(self.input_placement(0).strides())
        } else {
            None
        }
    }
}

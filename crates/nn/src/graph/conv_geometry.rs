//! Geometry of convolutions.

/// Kernel, stride, padding, groups and dilation of a 2-d convolution. A signal is an image with one
/// row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvGeometry {
    /// Kernel height and width.
    pub kernel: [usize; 2],
    /// Vertical and horizontal stride.
    pub stride: [usize; 2],
    /// Zero rows above and below, zero columns left and right.
    pub padding: [usize; 2],
    /// Channel groups; equal to the channels for a depthwise convolution.
    pub groups: usize,
    /// Rows and columns from one element of the kernel to the next; 1 for neighbours.
    pub dilation: [usize; 2],
}

impl ConvGeometry {
    /// A kernel of this height and width: stride 1, no padding, one group, no dilation.
    pub const fn new(kernel: [usize; 2]) -> Self {
        Self { kernel, stride: [1; 2], padding: [0; 2], groups: 1, dilation: [1; 2] }
    }

    /// Stride 1 and the padding that keeps the image's size (odd kernels), one group.
    pub const fn same(kernel: usize) -> Self {
        Self::new([kernel; 2]).padding([kernel / 2; 2])
    }

    /// The same with this stride.
    pub const fn stride(self, stride: [usize; 2]) -> Self {
        Self { stride, ..self }
    }

    /// The same with this padding.
    pub const fn padding(self, padding: [usize; 2]) -> Self {
        Self { padding, ..self }
    }

    /// The same with this number of groups.
    pub const fn groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// The same with this dilation.
    pub const fn dilation(self, dilation: [usize; 2]) -> Self {
        Self { dilation, ..self }
    }
}

//! Shapes of up to four dimensions, and the memory order of their elements.

use std::fmt;

use super::{Error, Result};

/// Largest number of dimensions of a tensor.
pub const MAX_DIMS: usize = 4;

/// Extents of a tensor, outermost first in the user's order: images are (N, C, H, W) whatever their
/// memory format. No dimensions: a scalar.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_DIMS],
    /// Number of dimensions. More than [`MAX_DIMS`] are refused when a tensor is created, so that
    /// conversions into a shape cannot fail.
    rank: usize,
}

impl Shape {
    /// The extents, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank.min(MAX_DIMS)]
    }

    /// Number of elements; `usize::MAX` if the product overflows (no tensor has such a shape).
    pub fn numel(&self) -> usize {
        self.checked_numel().unwrap_or(usize::MAX)
    }

    /// Number of elements, `None` on overflow. It is zero if any extent is zero.
    fn checked_numel(&self) -> Option<usize> {
        if self.dims().contains(&0) {
            return Some(0);
        }
        self.dims().iter().try_fold(1usize, |n, &d| n.checked_mul(d))
    }

    /// Bytes of a tensor of this shape. Refuses impossible shapes.
    pub(crate) fn bytes(&self, op: &'static str, element_bytes: usize) -> Result<usize> {
        let bytes = self.checked_numel().and_then(|n| n.checked_mul(element_bytes));
        match bytes {
            // Rust's slices have at most isize::MAX bytes. Half of that leaves room to round the
            // size up to a size class of the pool.
            Some(bytes) if self.rank <= MAX_DIMS && bytes <= isize::MAX as usize / 2 => Ok(bytes),
            _ => Err(Error::BadShape {
                operation: op,
                argument: "shape",
                expected: format!("at most {MAX_DIMS} dimensions, and a size that memory can have"),
                got: format!("{self:?} ({} dimensions)", self.rank),
            }),
        }
    }
}

impl From<&[usize]> for Shape {
    fn from(given: &[usize]) -> Self {
        let mut dims = [1; MAX_DIMS];
        let kept = given.len().min(MAX_DIMS);
        dims[..kept].copy_from_slice(&given[..kept]);
        Shape { dims, rank: given.len() }
    }
}

impl From<&Vec<usize>> for Shape {
    fn from(dims: &Vec<usize>) -> Self {
        Shape::from(dims.as_slice())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        const { assert!(N <= MAX_DIMS, "a tensor has at most four dimensions") };
        Shape::from(dims.as_slice())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// The order of a tensor's elements in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MemoryFormat {
    /// The last dimension varies fastest.
    #[default]
    Contiguous,
    /// (N, C, H, W) stored as (N, H, W, C): channels vary fastest (F1). Four dimensions only.
    ChannelsLast,
}

impl fmt::Display for MemoryFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryFormat::Contiguous => "contiguous",
            MemoryFormat::ChannelsLast => "channels last",
        })
    }
}

impl MemoryFormat {
    /// Strides in elements along each dimension of `shape`, in the user's order of the dimensions
    /// (F2).
    pub(crate) fn strides(self, shape: &Shape) -> Vec<usize> {
        let dims = shape.dims();
        match (self, dims) {
            (MemoryFormat::ChannelsLast, &[_, c, h, w]) => vec![h * w * c, 1, w * c, c],
            _ => {
                let mut strides = vec![1; dims.len()];
                for i in (1..dims.len()).rev() {
                    strides[i - 1] = strides[i] * dims[i];
                }
                strides
            }
        }
    }

    /// Refuses channels last for anything but four dimensions.
    pub(crate) fn check(self, op: &'static str, shape: &Shape) -> Result<()> {
        if self == MemoryFormat::ChannelsLast && shape.rank != MAX_DIMS {
            return Err(Error::BadShape {
                operation: op,
                argument: "shape",
                expected: "four dimensions (N, C, H, W) for channels last".to_owned(),
                got: format!("{shape:?}"),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(result: Result<()>, shape: &str) {
        let Err(Error::BadShape { operation: "t", got, .. }) = result else {
            panic!("{shape}: {result:?}")
        };
        assert_eq!(got, shape);
    }

    #[test]
    fn numel_and_bytes() {
        assert_eq!(Shape::from([2, 3, 4]).numel(), 24);
        assert_eq!(Shape::from([]).numel(), 1);
        assert_eq!(Shape::from([usize::MAX, 2, 0]).numel(), 0);
        assert_eq!(Shape::from([usize::MAX, 2]).numel(), usize::MAX);
        assert_eq!(Shape::from([2, 3]).bytes("t", 8).unwrap(), 48);
        for (shape, got) in [
            (Shape::from([usize::MAX, 2]), "[18446744073709551615, 2] (2 dimensions)"),
            (Shape::from(&[1usize, 1, 1, 1, 1][..]), "[1, 1, 1, 1] (5 dimensions)"),
        ] {
            refused(shape.bytes("t", 4).map(drop), got);
        }
    }

    #[test]
    fn strides_follow_the_format() {
        let shape = Shape::from([2, 3, 4, 5]);
        assert_eq!(MemoryFormat::Contiguous.strides(&shape), [60, 20, 5, 1]);
        assert_eq!(MemoryFormat::ChannelsLast.strides(&shape), [60, 1, 15, 3]);
        assert_eq!(MemoryFormat::Contiguous.strides(&Shape::from([7])), [1]);
        refused(MemoryFormat::ChannelsLast.check("t", &Shape::from([2, 3])), "[2, 3]");
    }
}

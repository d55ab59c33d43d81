//! Shapes and element types of samples.

use std::fmt;

use meristem_device::DType;
use serde::{Deserialize, Serialize};

/// Shape of a sample: of an image, or of a vector or signal as an image of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SampleShape {
    /// Channels of an image or a signal, features of a vector; at least 1.
    pub channels: usize,
    /// Rows of an image; 1 for a signal or vector.
    pub height: usize,
    /// Columns of an image, points of a signal; 1 for a vector.
    pub width: usize,
}

impl SampleShape {
    /// Number of values in one sample.
    pub fn numel(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// The shape of n samples in the user's axis order.
    pub(crate) fn batch(&self, n: usize) -> [usize; 4] {
        [n, self.channels, self.height, self.width]
    }
}

/// Largest number of channels for which the gather repeats its constants in a block. Images from
/// files have no more channels.
pub(crate) const CHANNELS_BLOCKED: usize = 4;

/// Kinds of sample, by their number of dimensions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InputKind {
    /// F features.
    Vector,
    /// C channels of L points.
    Signal,
    /// C channels of H×W pixels.
    #[default]
    Image,
}

impl InputKind {
    /// A shape as a person writes it: `30 features`, `1×40`, `3×32×32`.
    pub fn describe(self, shape: SampleShape) -> String {
        let SampleShape { channels, height, width } = shape;
        match self {
            Self::Vector if channels == 1 => "1 feature".into(),
            Self::Vector => format!("{channels} features"),
            Self::Signal => format!("{channels}×{width}"),
            Self::Image => format!("{channels}×{height}×{width}"),
        }
    }

    /// A shape in the user's axis order: `[F]`, `[C, L]` or `[C, H, W]`.
    pub fn dims(self, shape: SampleShape) -> Vec<usize> {
        let SampleShape { channels, height, width } = shape;
        match self {
            Self::Vector => vec![channels],
            Self::Signal => vec![channels, width],
            Self::Image => vec![channels, height, width],
        }
    }

    /// The kind and shape of samples with these dimensions: `[F]`, `[C, L]` or `[C, H, W]`.
    pub fn of_dims(dims: &[usize]) -> Option<(Self, SampleShape)> {
        let (kind, [channels, height, width]) = match *dims {
            [features] => (Self::Vector, [features, 1, 1]),
            [channels, points] => (Self::Signal, [channels, 1, points]),
            [channels, height, width] => (Self::Image, [channels, height, width]),
            _ => return None,
        };
        Some((kind, SampleShape { channels, height, width }))
    }

    /// Word for several samples.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Vector => "vectors",
            Self::Signal => "signals",
            Self::Image => "images",
        }
    }
}

impl fmt::Display for InputKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vector => "vector",
            Self::Signal => "signal",
            Self::Image => "image",
        })
    }
}

/// Form of the samples of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SampleForm {
    pub(crate) kind: InputKind,
    pub(crate) shape: SampleShape,
    pub(crate) stored: StoredType,
}

/// Types of a stored value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredType {
    /// A byte b, for the value b / 255.
    U8,
    /// The value itself.
    F32,
}

impl StoredType {
    /// Bytes of one value.
    pub const fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F32 => 4,
        }
    }

    /// Word for several values.
    pub(crate) const fn plural(self) -> &'static str {
        match self {
            Self::U8 => "bytes",
            Self::F32 => "floats",
        }
    }

    pub(crate) const fn dtype(self) -> DType {
        match self {
            Self::U8 => DType::U8,
            Self::F32 => DType::F32,
        }
    }

    /// The stored number whose value is 1.
    pub(crate) const fn one(self) -> f64 {
        match self {
            Self::U8 => 255.0,
            Self::F32 => 1.0,
        }
    }
}

//! Shapes and element types of samples.

use std::borrow::Cow;
use std::fmt;

use half::f16;
use meristem_device::{DType, Element};
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

/// Largest number of channels for which the gather has its constants in blocks of fixed size, and
/// not in a table. Image files have no more channels.
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
    /// The value itself, a 16-bit integer.
    I16,
    /// The value itself, a 16-bit float.
    F16,
    /// The value itself.
    F32,
}

impl StoredType {
    /// Bytes of one value.
    pub const fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::I16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Word for several values.
    pub(crate) const fn plural(self) -> &'static str {
        match self {
            Self::U8 => "bytes",
            Self::I16 => "16-bit integers",
            Self::F16 => "16-bit floats",
            Self::F32 => "floats",
        }
    }

    pub(crate) const fn dtype(self) -> DType {
        match self {
            Self::U8 => DType::U8,
            Self::I16 => DType::I16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }

    /// The stored number whose value is 1.
    pub(crate) const fn one(self) -> f64 {
        match self {
            Self::U8 => 255.0,
            Self::I16 | Self::F16 | Self::F32 => 1.0,
        }
    }

    /// The type that the description of a network names for samples that are stored in this type:
    /// bytes for bytes, else f32. A network depends on the values, and not on the type that stores
    /// them.
    pub const fn of_inputs(self) -> Self {
        match self {
            Self::U8 => Self::U8,
            Self::I16 | Self::F16 | Self::F32 => Self::F32,
        }
    }

    /// Converts stored values of this type to f32, so that equal values have equal checksums;
    /// unsigned bytes are returned unchanged. `stored` are the bytes of the values in native order,
    /// with any alignment; the result is in native order, too.
    pub(crate) fn widened(self, stored: &[u8]) -> Cow<'_, [u8]> {
        match self {
            Self::U8 | Self::F32 => Cow::Borrowed(stored),
            Self::I16 => Cow::Owned(widened::<i16>(stored)),
            Self::F16 => Cow::Owned(widened::<f16>(stored)),
        }
    }
}

fn widened<V: StoredValue>(stored: &[u8]) -> Vec<u8> {
    let values = stored.chunks_exact(size_of::<V>());
    values
        .flat_map(|bytes| bytemuck::pod_read_unaligned::<V>(bytes).value().to_ne_bytes())
        .collect()
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dtype().fmt(f)
    }
}

/// A number that samples can be stored as.
pub trait StoredValue: Element + fmt::Display {
    /// The corresponding stored type.
    const STORED: StoredType;

    /// The number as f32, which is exact for a finite one.
    fn value(self) -> f32;

    /// Whether the number is neither infinite nor a NaN.
    fn is_finite(self) -> bool;
}

impl StoredValue for u8 {
    const STORED: StoredType = StoredType::U8;

    #[inline(always)]
    fn value(self) -> f32 {
        f32::from(self)
    }

    fn is_finite(self) -> bool {
        true
    }
}

impl StoredValue for i16 {
    const STORED: StoredType = StoredType::I16;

    #[inline(always)]
    fn value(self) -> f32 {
        f32::from(self)
    }

    fn is_finite(self) -> bool {
        true
    }
}

impl StoredValue for f16 {
    const STORED: StoredType = StoredType::F16;

    /// Without a branch or a call, so that loops of it are compiled to vectors. The exponent's
    /// bias of an f16 is 112 less than the bias of an f32, so an f32 with the exponent and the
    /// fraction of the f16 is its value times 2⁻¹¹². The product with 2¹¹² is exact, also for
    /// numbers below the smallest normal f16. Stored numbers are finite.
    #[inline(always)]
    fn value(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let (sign, rest) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        let two_to_112 = f32::from_bits((112 + 127) << 23);
        f32::from_bits((f32::from_bits(rest) * two_to_112).to_bits() | sign)
    }

    fn is_finite(self) -> bool {
        Self::is_finite(self)
    }
}

impl StoredValue for f32 {
    const STORED: StoredType = StoredType::F32;

    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    fn is_finite(self) -> bool {
        Self::is_finite(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All finite numbers, against the conversion of a library.
    #[test]
    fn a_16_bit_float_has_its_value() {
        let all = (0..=u16::MAX).map(f16::from_bits).filter(|number| number.is_finite());
        for number in all {
            assert_eq!(number.value().to_bits(), number.to_f32().to_bits(), "{number}");
        }
    }
}

//! Element types.

use std::fmt;

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 16-bit float with the exponent of an f32.
    BF16,
    /// 16-bit float of IEEE 754.
    F16,
    /// Byte.
    U8,
    /// 16-bit signed integer.
    I16,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit signed integer.
    I64,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::BF16 | DType::F16 | DType::I16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::U8 => "u8",
            DType::I16 => "i16",
            DType::U32 => "u32",
            DType::I64 => "i64",
        })
    }
}

mod sealed {
    /// Restricts [`super::Element`] to types with a `DTYPE` of the same layout.
    pub trait Sealed {}
}

/// A Rust type that is the element of some [`DType`]. Sealed: the kernels' slices rely on it.
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// The corresponding element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(f32 => F32, f64 => F64, half::bf16 => BF16, half::f16 => F16);
element!(u8 => U8, i16 => I16, u32 => U32, i64 => I64);

#[cfg(test)]
mod tests {
    use super::*;

    fn size_matches<T: Element>() {
        assert_eq!(T::DTYPE.size(), std::mem::size_of::<T>());
    }

    #[test]
    fn sizes_match_the_rust_types() {
        size_matches::<f32>();
        size_matches::<f64>();
        size_matches::<half::bf16>();
        size_matches::<half::f16>();
        size_matches::<u8>();
        size_matches::<i16>();
        size_matches::<u32>();
        size_matches::<i64>();
    }
}

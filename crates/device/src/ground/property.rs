//! Properties of tensors.

/// A property of a tensor that an operation may require.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Property {
    /// The opened device.
    Device,
    /// The stream that it belongs to.
    Stream,
    /// The element type.
    DType,
    /// The extents.
    Shape,
    /// The memory format.
    Format,
    /// Whether it is only read, or written.
    Access,
}

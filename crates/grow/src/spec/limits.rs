//! Limits of hosts.

/// Largest height or width of an image or of a layer's output, largest number of image channels and
/// of classes, and largest value of the keys `out` and `groups`.
pub(super) const SIZE_MAX: usize = 1 << 16;
/// Largest number of channels of a layer's output, or of features of a vector, such as a flattened
/// image.
pub(super) const FEATURES_MAX: usize = 1 << 24;
/// Largest number of parameters of a host, and of a module (1 GiB of f32).
pub(crate) const MAX_PARAMETERS: usize = 1 << 28;
/// Maximum size of a description, in bytes.
pub const DESCRIPTION_BYTES_MAX: usize = 1 << 20;
/// Maximum number of layers, including layers of branches.
pub(super) const LAYERS_MAX: usize = 4096;
/// Maximum nesting depth of a layer: number of layers that contain it.
pub(super) const DEPTH_MAX: usize = 8;
/// Maximum number of characters of a name.
pub(super) const NAME_CHARS_MAX: usize = 120;
/// Maximum kernel, stride, dilation and padding.
pub(super) const WINDOW_MAX: usize = 1024;

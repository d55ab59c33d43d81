//! Paths in JSON. JSON is Unicode; a path need not be.
//!
//! A struct with a path serialises it with [`serialize`], and has the field `path_is_lossy`, which
//! is in the JSON only where it is true.

use std::path::{Path, PathBuf};

use serde::Serializer;

/// Serialises a path as text, with U+FFFD in place of bytes that are not UTF-8.
///
/// # Errors
/// The serializer refuses text.
pub fn serialize<S: Serializer>(path: impl AsRef<Path>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&path.as_ref().display())
}

/// Serialises a path as [`serialize`] does, and `None` as null.
///
/// # Errors
/// The serializer refuses text.
pub fn serialize_some<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => serialize(path, to),
        None => to.serialize_none(),
    }
}

/// Whether a path is not UTF-8, so that its text is not the path.
pub fn is_lossy(path: &Path) -> bool {
    path.to_str().is_none()
}

/// Whether `path_is_lossy` is false, for `skip_serializing_if`.
pub fn is_exact(path_is_lossy: &bool) -> bool {
    !path_is_lossy
}

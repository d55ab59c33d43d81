//! Hosts from files, and their fit to a dataset.

use std::path::Path;

use meristem_data::{DatasetInfo, InputKind};
use meristem_grow::{DESCRIPTION_BYTES_MAX, HostError, HostSpec};

use crate::error::{Error, Result};
use crate::input_file::read_limited;

/// Whether a host's text is the path of a description, which ends in `.toml` or `.json`.
pub(crate) fn is_file(text: &str) -> bool {
    let extension = Path::new(text).extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("toml" | "json")) && !text.trim_start().starts_with('{')
}

/// The host that a text names: any text that [`HostSpec`] parses, such as `baseline`, `cnn:…`,
/// `mlp:…` or one line of JSON, or the path of a description that ends in `.toml` or `.json`. A
/// description without a name gets the file's.
///
/// # Errors
/// An unknown host, or an unusable description; [`Error::Host`] if it comes from a file.
pub fn read_host(text: &str) -> Result<HostSpec> {
    if !is_file(text) {
        return Ok(text.parse::<HostSpec>().map_err(meristem_grow::Error::from)?);
    }
    let path = Path::new(text);
    let fail = |message: String| Error::Host { path: path.into(), message };
    let bytes = read_limited(path, DESCRIPTION_BYTES_MAX).map_err(fail)?;
    let description = String::from_utf8(bytes).map_err(|error| fail(error.to_string()))?;
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("host");
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '-' };
    let name: String = stem.chars().map(plain).take(40).collect();
    let host = match path.extension() {
        Some(extension) if extension == "toml" => HostSpec::from_toml(&description, &name),
        _ => HostSpec::from_json(&description, &name),
    };
    host.map_err(|error| match error {
        HostError::Description { problem, .. } => fail(problem),
        other => fail(other.to_string()),
    })
}

/// The error of a host that does not fit the samples of a dataset. Most hosts are made for images.
pub(crate) fn misfit(host: &HostSpec, error: HostError, info: &DatasetInfo) -> Error {
    if info.kind == InputKind::Image {
        return meristem_grow::Error::from(error).into();
    }
    let (kind, shape) = (info.kind.plural(), info.kind.describe(info.shape()));
    let example = if info.kind == InputKind::Signal { "conv1d:16,32,64" } else { "mlp:64,64" };
    let expected = format!(
        "a host for {kind} of {shape}, such as {example}, or one of your own (docs/hosts.md)"
    );
    Error::value("host", format!("`{}`", host.name()), expected)
}

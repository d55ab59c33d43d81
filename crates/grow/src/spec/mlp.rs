//! The family `mlp` of hosts: their text form and their layers.

use super::error::HostError;
use super::host_layer::{Features, HostLayer};
use super::limits::SIZE_MAX;

/// Largest number of hidden layers.
const MAX_HIDDEN: usize = 32;
/// Beginning of the text form.
pub(super) const MLP: &str = "mlp:";

/// Layers of a multilayer perceptron, given as the widths of its hidden layers, such as
/// `mlp:256,256`: the image as a vector, then for each width a linear layer, ReLU and the slot
/// `h{i}`, and a linear classifier.
///
/// # Errors
/// [`HostError::BadPart`] for a width that is no number, [`HostError::Size`] for one outside its
/// range, or for too many.
pub(super) fn layers(text: &str) -> Result<Vec<HostLayer>, HostError> {
    let mut layers = vec![HostLayer::Flatten];
    let widths = text.strip_prefix(MLP).unwrap_or(text).split(',').map(str::trim);
    for (i, width) in widths.enumerate() {
        let digits = !width.is_empty() && width.bytes().all(|b| b.is_ascii_digit());
        let bad = || HostError::BadPart { given: text.into(), part: width.into() };
        let out = digits.then(|| width.parse().ok()).flatten().ok_or_else(bad)?;
        HostError::check_size("width of a hidden layer", out, 1, SIZE_MAX)?;
        HostError::check_size("number of hidden layers", i + 1, 1, MAX_HIDDEN)?;
        let (name, out) = (format!("hidden.{i}"), Features::Count(out));
        layers.push(HostLayer::Linear { name, out, bias: true });
        layers.push(HostLayer::Relu);
        layers.push(HostLayer::Slot { name: format!("h{i}").into() });
    }
    let (name, out) = ("classifier".into(), Features::Classes);
    layers.push(HostLayer::Linear { name, out, bias: true });
    Ok(layers)
}

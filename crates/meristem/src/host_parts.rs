//! Parts of the drawing of a host, from the image to the classes.

use meristem::grow::{HostLayer, HostSpec, SlotName};

/// A part of a drawn host.
pub(crate) enum HostPart<'a> {
    /// One or more layers, in one or two lines of text.
    Layers(Vec<String>),
    /// A slot.
    Slot(&'a SlotName),
}

/// Returns the parts in forward order. Batch norm and ReLU have no part; a linear layer after the
/// mean shares its part.
pub(crate) fn host_parts(host: &HostSpec) -> Vec<HostPart<'_>> {
    let mut parts = vec![];
    for layer in host.layers() {
        let lines = match layer {
            HostLayer::Slot { name } => {
                parts.push(HostPart::Slot(name));
                continue;
            }
            HostLayer::BatchNorm { .. } | HostLayer::Relu => continue,
            HostLayer::Conv2d { out, kernel, .. } => {
                vec![format!("conv {kernel}×{kernel}"), format!("{out} channels")]
            }
            HostLayer::MaxPool2d { kernel, .. } => vec![format!("pool {kernel}×{kernel}")],
            HostLayer::GlobalAvgPool => vec!["mean".into()],
            HostLayer::Linear { .. } => match parts.last_mut() {
                Some(HostPart::Layers(lines)) if *lines == ["mean"] => {
                    lines.push("linear".into());
                    continue;
                }
                _ => vec!["linear".into()],
            },
        };
        parts.push(HostPart::Layers(lines));
    }
    parts
}

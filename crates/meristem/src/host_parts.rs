//! Parts of the drawing of a host, from the image to the classes.

use meristem::grow::{BranchJoin, HostLayer, HostSpec, SlotName};

/// A part of a drawn host.
pub(crate) struct HostPart<'a> {
    pub(crate) kind: PartKind<'a>,
    /// Number of residual layers and branches around the part.
    pub(crate) depth: usize,
    /// Earlier parts whose outputs it reads; none for the first part.
    pub(crate) inputs: Vec<usize>,
}

/// Contents of a part.
pub(crate) enum PartKind<'a> {
    /// One or more layers, in one or two lines of text.
    Layers(Vec<String>),
    /// A slot.
    Slot(&'a SlotName),
}

/// Returns the parts in forward order. Norms and activations have no part; a linear layer after the
/// mean shares its part.
pub(crate) fn host_parts(host: &HostSpec) -> Vec<HostPart<'_>> {
    let mut parts = vec![];
    add(&mut parts, host.layers(), 0, None);
    parts
}

/// Adds the parts of layers after the part `end`, and returns the part with their output.
fn add<'a>(
    parts: &mut Vec<HostPart<'a>>,
    layers: &'a [HostLayer],
    depth: usize,
    mut end: Option<usize>,
) -> Option<usize> {
    for layer in layers {
        let branches = layer.branches();
        let mut inputs = vec![];
        for (_, branch) in &branches {
            inputs.extend(add(parts, branch, depth + 1, end));
        }
        if branches.is_empty() {
            inputs.extend(end);
        }
        inputs.dedup();
        let kind = match layer {
            HostLayer::Slot { name } => PartKind::Slot(name),
            HostLayer::Linear { .. } => match end.and_then(|end| parts.get_mut(end)) {
                Some(HostPart { kind: PartKind::Layers(lines), .. }) if *lines == ["mean"] => {
                    lines.push("linear".into());
                    continue;
                }
                _ => PartKind::Layers(vec!["linear".into()]),
            },
            layer => match lines(layer) {
                Some(lines) => PartKind::Layers(lines),
                None => continue,
            },
        };
        parts.push(HostPart { kind, depth, inputs });
        end = Some(parts.len() - 1);
    }
    end
}

/// Text of a layer; `None` for a layer that is not drawn.
fn lines(layer: &HostLayer) -> Option<Vec<String>> {
    Some(match layer {
        HostLayer::Conv2d { out, kernel, .. } => {
            vec![format!("conv {kernel}"), format!("{out} channels")]
        }
        HostLayer::MaxPool2d { kernel, .. } => vec![format!("pool {kernel}×{kernel}")],
        HostLayer::GlobalAvgPool => vec!["mean".into()],
        HostLayer::Residual { .. } => vec!["sum".into()],
        HostLayer::Branches { join: BranchJoin::Add, .. } => vec!["sum".into()],
        HostLayer::Slot { .. } | HostLayer::Linear { .. } => return None,
        HostLayer::BatchNorm { .. }
        | HostLayer::GroupNorm { .. }
        | HostLayer::Relu
        | HostLayer::Sigmoid
        | HostLayer::Tanh => return None,
    })
}

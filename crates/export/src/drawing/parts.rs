//! Parts of the drawing of a host, from the image to the classes.

use std::collections::HashMap;

use meristem_grow::{BranchJoin, HostLayer, HostSpec, SlotName};

/// A part of a drawn host.
#[derive(Clone, Debug)]
pub struct HostPart<'a> {
    /// Contents of the part.
    pub kind: PartKind<'a>,
    /// Nesting depth: number of residual layers and branches that contain the part.
    pub depth: usize,
    /// Indices of the earlier parts whose outputs this part reads; none for the first part.
    pub inputs: Vec<usize>,
}

/// Contents of a part.
#[derive(Clone, Debug)]
pub enum PartKind<'a> {
    /// One or more layers, in one or two lines of text.
    Layers(Vec<String>),
    /// A slot.
    Slot(&'a SlotName),
}

/// Returns the parts in forward order. Norms, activations and dropout have no part; a linear layer
/// after the mean shares its part.
pub fn host_parts(host: &HostSpec) -> Vec<HostPart<'_>> {
    let mut drawing = Drawing::default();
    drawing.add(host.layers(), 0, None);
    drawing.parts
}

#[derive(Default)]
struct Drawing<'a> {
    parts: Vec<HostPart<'a>>,
    /// Part with each saved value, by name.
    saved: HashMap<&'a str, Option<usize>>,
}

impl<'a> Drawing<'a> {
    /// Adds the parts of layers after the part `end`, and returns the part with their output.
    fn add(
        &mut self,
        layers: &'a [HostLayer],
        depth: usize,
        mut end: Option<usize>,
    ) -> Option<usize> {
        for layer in layers {
            let branches = layer.branches();
            let mut inputs = vec![];
            for (_, branch) in &branches {
                inputs.extend(self.add(branch, depth + 1, end));
            }
            if branches.is_empty() {
                inputs.extend(end);
            }
            if let HostLayer::Join { from, .. } = layer {
                inputs.extend(from.iter().filter_map(|name| *self.saved.get(name.as_str())?));
            }
            inputs.dedup();
            let kind = match layer {
                HostLayer::Slot { name } => PartKind::Slot(name),
                HostLayer::Save { name } => {
                    self.saved.insert(name, end);
                    continue;
                }
                HostLayer::Load { name } => {
                    end = self.saved.get(name.as_str()).copied().flatten();
                    continue;
                }
                HostLayer::Linear { .. } => match end.and_then(|end| self.parts.get_mut(end)) {
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
            self.parts.push(HostPart { kind, depth, inputs });
            end = Some(self.parts.len() - 1);
        }
        end
    }
}

/// Text of a layer; `None` for a layer that is not drawn, or that [`Drawing::add`] draws itself.
fn lines(layer: &HostLayer) -> Option<Vec<String>> {
    Some(match layer {
        HostLayer::Conv2d { out, kernel, .. } => {
            vec![format!("conv {kernel}"), format!("{out} channels")]
        }
        HostLayer::Conv1d { out, kernel, .. } => {
            vec![format!("conv {kernel}"), format!("{out} channels")]
        }
        HostLayer::MaxPool1d { kernel, .. } => vec![format!("pool {kernel}")],
        HostLayer::AvgPool1d { kernel, .. } => vec![format!("mean of {kernel}")],
        HostLayer::MaxPool2d { kernel, .. } => vec![format!("pool {kernel}")],
        HostLayer::AvgPool2d { kernel, .. } => vec!["mean of".into(), kernel.to_string()],
        HostLayer::GlobalAvgPool => vec!["mean".into()],
        HostLayer::GlobalMaxPool => vec!["maximum".into()],
        HostLayer::Flatten => vec!["flatten".into()],
        HostLayer::Residual { .. } => vec!["sum".into()],
        HostLayer::Branches { join, .. } | HostLayer::Join { join, .. } => {
            let text = match join {
                BranchJoin::Add => "sum",
                BranchJoin::Multiply => "product",
                BranchJoin::Concat => "concat",
            };
            vec![text.into()]
        }
        HostLayer::Slot { .. }
        | HostLayer::Linear { .. }
        | HostLayer::Save { .. }
        | HostLayer::Load { .. } => return None,
        HostLayer::BatchNorm { .. }
        | HostLayer::GroupNorm { .. }
        | HostLayer::LayerNorm { .. }
        | HostLayer::RmsNorm { .. }
        | HostLayer::Relu
        | HostLayer::Sigmoid
        | HostLayer::Tanh
        | HostLayer::LeakyRelu { .. }
        | HostLayer::Elu
        | HostLayer::Gelu
        | HostLayer::GeluTanh
        | HostLayer::Silu
        | HostLayer::Softplus
        | HostLayer::HardSwish
        | HostLayer::Dropout { .. } => return None,
    })
}

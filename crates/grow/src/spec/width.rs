//! Layers of a host that can become wider.

use meristem_nn::graph::WidthInit;

use super::error::HostError;
use super::host_layer::HostLayer;
use super::host_spec::HostSpec;
use super::layer_values::Features;
use super::limits::NAME_CHARS_MAX;
use super::slot_name::SlotName;

/// End of the name of a host with a layer that became wider.
const SUFFIX: &str = "-widened";

/// A convolution or linear layer that can get more output features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WidenableLayer {
    /// Prefix of the tensor names.
    pub name: String,
    /// Output features.
    pub features: usize,
    /// Slots between the layer and the layer that reads its output. They get wider with the layer.
    pub slots: Vec<SlotName>,
    /// Whether the layer has a bias.
    has_bias: bool,
    /// Whether a norm or a depthwise convolution is between the layer and its reader.
    has_norm_or_depthwise: bool,
    /// Whether an activation function between the layer and its reader is not 0 at 0.
    has_offset: bool,
    /// Name of the reader, the next layer that reads the output of this layer.
    reader: String,
    /// Whether a pool is between the layer and its reader, or flatten before a convolution.
    moves_pixels: bool,
    /// Whether the reader has several weights for each of its outputs and inputs.
    has_kernel: bool,
}

impl WidenableLayer {
    /// Name of the reader, the next layer that reads the output of this layer.
    pub fn reader(&self) -> &str {
        &self.reader
    }

    /// Requirements of a score from the measurement of this initialisation that the layer does not
    /// meet; `None` if it has the score.
    pub fn lacks_for_score(&self, init: WidthInit) -> Option<&'static str> {
        match self.lacks(init) {
            // Features that are not 0 at 0 change the outputs on which the measurement is based.
            None if self.has_offset => Some("a layer without sigmoid or softplus after it"),
            lacks => lacks,
        }
    }

    /// Requirements of an initialisation of further features that the layer does not meet; `None`
    /// if it suits the layer.
    fn lacks(&self, init: WidthInit) -> Option<&'static str> {
        match init {
            WidthInit::Gradmax
                if self.has_norm_or_depthwise || self.has_offset || !self.has_bias =>
            {
                Some(
                    "a layer with a bias, and no norm, convolution, sigmoid or softplus between it \
                     and the next one",
                )
            }
            WidthInit::Tiny if self.has_offset && self.has_kernel => Some(
                "no sigmoid or softplus between a layer and a next one with a kernel of several \
                 elements",
            ),
            WidthInit::Tiny
                if self.has_norm_or_depthwise || self.moves_pixels || !self.has_bias =>
            {
                Some(
                    "a layer with a bias, and nothing but activation functions, dropout and \
                     flatten between it and the next one",
                )
            }
            _ => None,
        }
    }

    /// Checks that an initialisation of further features suits the layer.
    ///
    /// # Errors
    /// The requirements of the initialisation.
    pub fn suits(&self, init: WidthInit) -> Result<(), String> {
        let Some(needs) = self.lacks(init) else { return Ok(()) };
        let init = init.name();
        Err(format!(
            "width-init {init} needs {needs}; zero, net2wider, variance_transfer and firefly suit \
             all layers"
        ))
    }
}

/// Layers between a layer and its reader, the next layer with weights over all features.
#[derive(Default)]
struct Between<'a> {
    /// Depthwise convolutions, which get as many further features as the layer.
    depthwise: Vec<&'a str>,
    slots: Vec<SlotName>,
    has_norm: bool,
    has_pool: bool,
    has_flatten: bool,
    /// Whether an activation function that is not 0 at 0 is among them.
    has_offset: bool,
    reader: &'a str,
    reader_is_linear: bool,
    /// Whether the kernel of the reader has several elements.
    has_kernel: bool,
}

impl HostSpec {
    /// Layers that can become wider without a change of the function that the host computes. The
    /// layers of a list are in forward order, after those of all branches in this list. They are
    /// convolutions without groups and linear layers that are followed, in the same list of layers,
    /// by another such layer, the reader. Between a layer and its reader there may be slots, and
    /// layers that compute each feature by itself: batch norm, activations, dropout, pools,
    /// depthwise convolutions, flatten.
    pub fn widenable(&self) -> Vec<WidenableLayer> {
        let mut found = vec![];
        for_each_list(self.layers(), &mut |layers| {
            for (i, layer) in layers.iter().enumerate() {
                let Some((name, features)) = width_of(layer) else { continue };
                if let Ok(between) = Between::after(&layers[i + 1..], features) {
                    found.push(between.layer(layer, name, features));
                }
            }
        });
        found
    }

    /// A copy of this host with `by` further features of the layer named `layer`.
    ///
    /// # Errors
    /// [`HostError::Layer`] for a layer that is not there or cannot become wider, with the reason.
    pub fn widened(&self, layer: &str, by: usize) -> Result<Self, HostError> {
        let fail = |problem: String| {
            let (host, place) = (self.name(), format!("\"{layer}\""));
            HostError::Layer { host, place, problem }
        };
        let mut between = None;
        for_each_list(self.layers(), &mut |layers| {
            let widths = layers.iter().map(width_of).enumerate();
            let mut named = widths.filter_map(|(i, found)| Some((i, found?)));
            if let Some((i, (_, features))) = named.find(|(_, (name, _))| *name == layer) {
                between = Some(Between::after(&layers[i + 1..], features));
            }
        });
        let between = match between {
            Some(between) => {
                between.map_err(|reason| fail(format!("it cannot become wider: {reason}")))?
            }
            None => {
                return Err(fail(
                    "no convolution or linear layer with a settable width has this name".into(),
                ));
            }
        };
        let mut list = self.list().clone();
        let wider = [layer].into_iter().chain(between.depthwise).collect::<Vec<_>>();
        widen_all(&mut list.layers, &wider, by);
        // The name of a host of a family is its text, such as `mlp:8,8`; a description allows only
        // letters, digits, `_` and `-` in a name.
        let fits = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        let name = self.name();
        let name = name.trim_end_matches(SUFFIX).chars().map(fits);
        let name = name.take(NAME_CHARS_MAX - SUFFIX.len()).collect::<String>() + SUFFIX;
        Ok(Self::from_list(list.named(name)))
    }

    /// Whether this host is at least as wide as `other`: both have the same slots and layers, and
    /// differ only in features, of which every layer of this host has at least as many.
    pub fn is_as_wide_as(&self, other: &Self) -> bool {
        self.slots() == other.slots() && are_at_least_as_wide(self.layers(), other.layers())
    }
}

/// Whether a convolution or linear layer has a bias.
pub(crate) fn has_bias(layer: &HostLayer) -> bool {
    matches!(
        layer,
        HostLayer::Conv2d { bias: true, .. }
            | HostLayer::Conv1d { bias: true, .. }
            | HostLayer::Linear { bias: true, .. }
    )
}

/// Whether a convolution has a kernel of several elements.
fn has_kernel(layer: &HostLayer) -> bool {
    match layer {
        HostLayer::Conv2d { kernel, .. } => kernel.pair() != [1, 1],
        HostLayer::Conv1d { kernel, .. } => *kernel != 1,
        _ => false,
    }
}

/// Name and output features of a convolution or linear layer with a settable width.
fn width_of(layer: &HostLayer) -> Option<(&str, usize)> {
    match layer {
        HostLayer::Conv2d { name, out, groups: 1, .. }
        | HostLayer::Conv1d { name, out, groups: 1, .. } => Some((name, *out)),
        HostLayer::Linear { name, out: Features::Count(out), .. } => Some((name, *out)),
        _ => None,
    }
}

impl<'a> Between<'a> {
    /// Describes a layer that can become wider, from the layers between it and its reader.
    fn layer(self, layer: &HostLayer, name: &str, features: usize) -> WidenableLayer {
        let has_bias = has_bias(layer);
        let has_norm_or_depthwise = self.has_norm || !self.depthwise.is_empty();
        WidenableLayer {
            name: name.to_owned(),
            features,
            slots: self.slots,
            has_bias,
            has_norm_or_depthwise,
            has_offset: self.has_offset,
            reader: self.reader.to_owned(),
            moves_pixels: self.has_pool || self.has_flatten && !self.reader_is_linear,
            has_kernel: self.has_kernel || self.has_flatten,
        }
    }

    /// Follows the `features` outputs of a layer through `layers`, the layers after it, to the
    /// reader. The error is the reason why the layer cannot become wider.
    fn after(layers: &'a [HostLayer], features: usize) -> Result<Self, String> {
        let mut between = Self::default();
        for layer in layers {
            match layer {
                HostLayer::Conv2d { groups: 1, .. }
                | HostLayer::Conv1d { groups: 1, .. }
                | HostLayer::Linear { .. } => {
                    between.reader = layer.name().unwrap_or_default();
                    between.reader_is_linear = matches!(layer, HostLayer::Linear { .. });
                    between.has_kernel = has_kernel(layer);
                    return Ok(between);
                }
                HostLayer::Conv2d { name, groups, out, .. }
                | HostLayer::Conv1d { name, groups, out, .. }
                    if *groups == features && *out == features =>
                {
                    between.depthwise.push(name);
                }
                HostLayer::Slot { name } => between.slots.push(name.clone()),
                HostLayer::BatchNorm { .. } => between.has_norm = true,
                HostLayer::MaxPool2d { .. }
                | HostLayer::AvgPool2d { .. }
                | HostLayer::MaxPool1d { .. }
                | HostLayer::AvgPool1d { .. }
                | HostLayer::GlobalAvgPool
                | HostLayer::GlobalMaxPool => between.has_pool = true,
                HostLayer::Sigmoid | HostLayer::Softplus => between.has_offset = true,
                HostLayer::Relu
                | HostLayer::Tanh
                | HostLayer::LeakyRelu { .. }
                | HostLayer::Elu
                | HostLayer::Gelu
                | HostLayer::GeluTanh
                | HostLayer::Silu
                | HostLayer::HardSwish
                | HostLayer::Dropout { .. } => {}
                HostLayer::Flatten => between.has_flatten = true,
                HostLayer::Conv2d { .. } | HostLayer::Conv1d { .. } => {
                    return Err(format!(
                        "`{}` reads it in groups",
                        layer.name().unwrap_or_default()
                    ));
                }
                HostLayer::GroupNorm { name, .. }
                | HostLayer::LayerNorm { name }
                | HostLayer::RmsNorm { name } => {
                    return Err(format!("`{name}` normalises over several features"));
                }
                HostLayer::Residual { .. } | HostLayer::Branches { .. } => {
                    return Err("several branches read it; widen a layer inside one".into());
                }
                HostLayer::Save { .. } | HostLayer::Load { .. } | HostLayer::Join { .. } => {
                    return Err("its output is saved, or joined with saved values".into());
                }
            }
        }
        Err("it is the last layer of its list, whose width others determine".into())
    }
}

/// Visits a list of layers, and before it the lists of its branches.
fn for_each_list<'a>(layers: &'a [HostLayer], visit: &mut impl FnMut(&'a [HostLayer])) {
    for layer in layers {
        layer.branches().into_iter().for_each(|(_, branch)| for_each_list(branch, visit));
    }
    visit(layers);
}

/// Adds `by` features to the layers with these names.
fn widen_all(layers: &mut [HostLayer], names: &[&str], by: usize) {
    for layer in layers {
        match layer {
            HostLayer::Conv2d { name, out, groups, .. }
            | HostLayer::Conv1d { name, out, groups, .. }
                if names.contains(&name.as_str()) =>
            {
                *out = out.saturating_add(by);
                if *groups > 1 {
                    *groups = *out;
                }
            }
            HostLayer::Linear { name, out: Features::Count(out), .. }
                if names.contains(&name.as_str()) =>
            {
                *out = out.saturating_add(by);
            }
            layer => {
                let branches = layer.branches_mut();
                branches.into_iter().for_each(|(_, branch)| widen_all(branch, names, by));
            }
        }
    }
}

/// A copy of a layer with empty branches.
fn without_branches(layer: &HostLayer) -> HostLayer {
    let mut layer = layer.clone();
    layer.branches_mut().into_iter().for_each(|(_, branch)| branch.clear());
    layer
}

/// Whether `wide` has the layers of `narrow`, with at least their features.
fn are_at_least_as_wide(wide: &[HostLayer], narrow: &[HostLayer]) -> bool {
    let one = |(wide, narrow): (&HostLayer, &HostLayer)| {
        let branches = |layer: &HostLayer| layer.branches().len();
        if branches(wide) > 0 && branches(wide) == branches(narrow) {
            let pairs = wide.branches().into_iter().zip(narrow.branches());
            return without_branches(wide) == without_branches(narrow)
                && pairs
                    .into_iter()
                    .all(|((_, wide), (_, narrow))| are_at_least_as_wide(wide, narrow));
        }
        let mut same = narrow.clone();
        match (&mut same, wide) {
            (
                HostLayer::Conv2d { out, groups, .. },
                HostLayer::Conv2d { out: more, groups: more_groups, .. },
            )
            | (
                HostLayer::Conv1d { out, groups, .. },
                HostLayer::Conv1d { out: more, groups: more_groups, .. },
            ) if more >= out => {
                let is_depthwise = *groups == *out && more_groups == more;
                *groups = if is_depthwise { *more_groups } else { *groups };
                *out = *more;
            }
            (
                HostLayer::Linear { out: Features::Count(out), .. },
                HostLayer::Linear { out: Features::Count(more), .. },
            ) if more >= out => *out = *more,
            _ => {}
        }
        same == *wide
    };
    wide.len() == narrow.len() && wide.iter().zip(narrow).all(one)
}

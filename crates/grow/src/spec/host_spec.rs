//! A host as one value: text, layers and slots.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use meristem_nn::graph::Dims;
use serde::{Deserialize, Serialize};

use super::cnn::{Cnn, PRESETS};
use super::error::HostError;
use super::host_layer::{HostLayer, LayerSize};
use super::slot_name::SlotName;
use super::task_shape::TaskShape;
use crate::suggest::nearest;

/// Version of [`HostList`]. A new version marks a format that older readers would misread.
pub(crate) const LIST_VERSION: u32 = 1;
/// Largest number of parameters of a host, and of a module (1 GiB of f32).
pub(crate) const MAX_PARAMETERS: usize = 1 << 28;
/// Largest height or width of an image, and largest number of image channels and of classes.
const MAX_IMAGE_SIDE: usize = 1 << 16;

/// Layers and slots of a host, as stored in the metadata of a weights file.
#[derive(Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostList {
    version: u32,
    /// Layers in forward order.
    layers: Vec<HostLayer>,
    /// Slots in the order of action indices.
    slots: Vec<SlotName>,
}

/// A host: layers in forward order, and its slots in action-index order. Graph, sizes, drawings and
/// the metadata of weights files follow from the list of layers.
///
/// It is parsed from the text of a [`Cnn`], which files store. Clones share the list, and comparing
/// clones compares one pointer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct HostSpec(Arc<ParsedHost>);

#[derive(Debug, PartialEq, Eq, Hash)]
struct ParsedHost {
    /// The full description, never a preset's name.
    text: String,
    list: HostList,
}

impl HostSpec {
    /// Name of the preset, else the `cnn:…` description; [`fmt::Display`] writes the same.
    pub fn name(&self) -> String {
        let preset = PRESETS.iter().find(|(_, preset)| preset.to_string() == self.description());
        preset.map_or_else(|| self.description(), |(name, _)| name).into()
    }

    /// The description `cnn:channels=…,blocks=…,kernel=…,pools=…`.
    pub fn description(&self) -> &str {
        &self.0.text
    }

    /// Layers in forward order.
    pub fn layers(&self) -> &[HostLayer] {
        &self.0.list.layers
    }

    /// Slots in the order of action indices.
    pub fn slots(&self) -> &[SlotName] {
        &self.0.list.slots
    }

    pub(crate) fn list(&self) -> &HostList {
        &self.0.list
    }

    /// Layers in forward order, each with its size for these images.
    pub fn sizes(&self, image: &TaskShape) -> impl Iterator<Item = (&HostLayer, LayerSize)> {
        let image = *image;
        let mut input = Dims { c: image.channels, h: image.height, w: image.width };
        self.layers().iter().map(move |layer| {
            let size = layer.size(input, &image);
            input = size.output;
            (layer, size)
        })
    }

    /// Number of channels at the slot with this name; 0 for a name that is not a slot.
    pub(crate) fn channels_at(&self, slot: &SlotName, image: &TaskShape) -> usize {
        let mut sizes = self.sizes(image);
        sizes.find(|(layer, _)| layer.slot() == Some(slot)).map_or(0, |(_, size)| size.output.c)
    }

    /// Trained parameters of the bare host for images of this shape (saturating).
    pub fn parameters(&self, image: &TaskShape) -> usize {
        self.sizes(image).fold(0, |sum, (_, size)| sum.saturating_add(size.parameters))
    }

    /// Selects slots, in action-index order. `all` selects every slot. A slot's name selects that
    /// slot. Any other text selects every slot whose name begins with it, unless a digit follows:
    /// `r0` selects `r0c0` and `r0c1`, while `r0c` is an unknown slot.
    ///
    /// # Errors
    /// [`HostError::UnknownSlot`] with the names of the host's slots, [`HostError::DuplicateSlot`].
    pub fn select_slots<'a>(
        &self,
        wanted: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<SlotName>, HostError> {
        let mut names = vec![];
        for text in wanted.into_iter().map(str::trim) {
            let is_name = text.is_empty() || self.slots().iter().any(|slot| slot.as_str() == text);
            let begins = |slot: &&SlotName| {
                let rest = slot.as_str().strip_prefix(text);
                rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
            };
            let group: Vec<SlotName> = match text {
                "all" => self.slots().to_vec(),
                _ if is_name => vec![],
                _ => self.slots().iter().filter(begins).cloned().collect(),
            };
            if group.is_empty() {
                names.push(text.into());
            }
            names.extend(group);
        }
        self.order_slots(&names)
    }

    /// Checks that each slot belongs to this host and is listed once, and sorts the slots in
    /// action-index order.
    pub(crate) fn order_slots(&self, slots: &[SlotName]) -> Result<Vec<SlotName>, HostError> {
        let index = |name: &SlotName| self.slots().iter().position(|slot| slot == name);
        if let Some(unknown) = slots.iter().find(|name| index(name).is_none()) {
            return Err(self.unknown_slot(unknown));
        }
        let mut ordered = slots.to_vec();
        ordered.sort_by_key(index);
        match ordered.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(HostError::DuplicateSlot(pair[0].clone())),
            None => Ok(ordered),
        }
    }

    fn unknown_slot(&self, given: &SlotName) -> HostError {
        let known: Vec<&str> = self.slots().iter().map(SlotName::as_str).collect();
        let nearest = nearest(given.as_str(), known.iter().copied()).map(Into::into);
        HostError::UnknownSlot { given: given.to_string(), nearest, known: known.join(", ") }
    }

    /// Checks the image, and that the host fits it.
    ///
    /// # Errors
    /// [`HostError::Size`], [`HostError::TooLarge`], or [`HostError::TooDeep`] with the suggestion
    /// of a host that fits.
    pub fn validate(&self, image: &TaskShape) -> Result<(), HostError> {
        HostError::check_size("image channels", image.channels, 1, MAX_IMAGE_SIDE)?;
        HostError::check_size("image height", image.height, 1, MAX_IMAGE_SIDE)?;
        HostError::check_size("image width", image.width, 1, MAX_IMAGE_SIDE)?;
        HostError::check_size("classes", image.classes, 1, MAX_IMAGE_SIDE)?;
        let (parameters, limit) = (self.parameters(image), MAX_PARAMETERS);
        if parameters > limit {
            return Err(HostError::TooLarge { host: self.name(), parameters, limit });
        }
        let is_pool = |layer: &HostLayer| matches!(layer, HostLayer::MaxPool2d { .. });
        let pools: Vec<LayerSize> =
            self.sizes(image).filter(|(layer, _)| is_pool(layer)).map(|(_, size)| size).collect();
        let fits = pools.iter().filter(|pool| pool.output.h.min(pool.output.w) > 0).count();
        if fits < pools.len() {
            let shallower = Cnn { pools: fits, ..self.description().parse()? };
            let suggestion = Self::try_from(shallower)?.name();
            let (host, image, pools) = (self.name(), *image, pools.len());
            return Err(HostError::TooDeep { host, image, pools, fits, suggestion });
        }
        Ok(())
    }
}

impl fmt::Display for HostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl TryFrom<Cnn> for HostSpec {
    type Error = HostError;

    fn try_from(cnn: Cnn) -> Result<Self, HostError> {
        cnn.check()?;
        let (version, layers, slots) = (LIST_VERSION, cnn.layers(), cnn.slots());
        let list = HostList { version, layers, slots };
        Ok(Self(Arc::new(ParsedHost { text: cnn.to_string(), list })))
    }
}

impl FromStr for HostSpec {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        text.parse::<Cnn>()?.try_into()
    }
}

impl From<HostSpec> for String {
    fn from(spec: HostSpec) -> Self {
        spec.description().into()
    }
}

impl TryFrom<String> for HostSpec {
    type Error = HostError;

    fn try_from(text: String) -> Result<Self, HostError> {
        text.parse()
    }
}

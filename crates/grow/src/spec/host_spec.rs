//! A host as one value: text, layers and slots.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::cnn::{Cnn, PRESETS};
use super::description::{Form, HostList};
use super::error::HostError;
use super::host_layer::{HostLayer, for_each_layer};
use super::limits::SIZE_MAX;
use super::ready_made::READY_MADE;
use super::slot_name::SlotName;
use super::task_shape::TaskShape;
use super::width_lists::WidthFamily;
use crate::suggest::nearest;

/// A host: layers in forward order, and its slots in action-index order. Graph, sizes, drawings and
/// the metadata of weights files follow from the list of layers.
///
/// It is parsed from the name of a preset or a ready-made host, from the text of a [`Cnn`], from
/// the widths of a multilayer perceptron such as `mlp:256,256` or of convolutions over signals such
/// as `conv1d:16,32`, or from a description in JSON; [`HostSpec::from_toml`] and
/// [`HostSpec::from_json`] read the contents of a file. Hosts are equal if their layers and slots
/// are. Clones share the list.
///
/// ```
/// use meristem_grow::{HostSpec, TaskShape};
///
/// # fn main() -> Result<(), meristem_grow::HostError> {
/// let text = r#"layers = [
///     { conv2d = { out = 16, kernel = 3, stride = 2 } },
///     "batch_norm",
///     "relu",
///     { slot = { name = "early" } },
///     "global_avg_pool",
///     { linear = { out = "classes" } },
/// ]"#;
/// let host = HostSpec::from_toml(text, "tiny")?;
/// let image = TaskShape { channels: 3, height: 32, width: 32, classes: 10 };
/// assert_eq!(host.summary(&image)?.parameters, 3 * 9 * 16 + 2 * 16 + 16 * 10 + 10);
/// assert_eq!(host.description().parse::<HostSpec>()?, host);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct HostSpec(Arc<ParsedHost>);

#[derive(Debug)]
struct ParsedHost {
    /// The full description, never a preset's name.
    description: String,
    list: HostList,
}

impl PartialEq for HostSpec {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.list.same(&other.0.list)
    }
}

impl Eq for HostSpec {}

impl Hash for HostSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.layers(), self.slots()).hash(state);
    }
}

impl HostSpec {
    /// The host of a description in TOML; `name` is its name if the description has none.
    ///
    /// # Errors
    /// [`HostError::Description`] with the place of the mistake.
    pub fn from_toml(text: &str, name: &str) -> Result<Self, HostError> {
        HostList::parse(text, Form::Toml, Some(name)).map(Self::from_list)
    }

    /// The host of a description in JSON; `name` is its name if the description has none.
    ///
    /// # Errors
    /// [`HostError::Description`] with the place of the mistake.
    pub fn from_json(text: &str, name: &str) -> Result<Self, HostError> {
        HostList::parse(text, Form::Json, Some(name)).map(Self::from_list)
    }

    pub(super) fn from_list(list: HostList) -> Self {
        // A list of layers consists of text and numbers, which JSON can represent.
        let description = serde_json::to_string(&list).unwrap_or_default();
        Self(Arc::new(ParsedHost { description, list }))
    }

    /// The name in the description, or `host` if a description in JSON text has none. For hosts of
    /// a family the name of the preset, or else the text, such as `cnn:…` or `mlp:…`.
    /// [`fmt::Display`] writes the same.
    pub fn name(&self) -> String {
        if let Some(name) = &self.0.list.name {
            return name.clone();
        }
        let preset = PRESETS.iter().find(|(_, preset)| preset.to_string() == self.description());
        match preset {
            Some((name, _)) => (*name).into(),
            None if self.description().starts_with('{') => "host".into(),
            None => self.description().into(),
        }
    }

    /// Text that describes the host completely: `cnn:channels=…,blocks=…,kernel=…,pools=…`,
    /// `mlp:…`, `conv1d:…`, or one line of JSON.
    pub fn description(&self) -> &str {
        &self.0.description
    }

    /// Shortest text that is parsed as this host: the name of a preset or ready-made host, or else
    /// the description.
    pub fn text(&self) -> String {
        let name = self.name();
        let is_host = name.parse::<Self>().is_ok_and(|named| named == *self);
        if is_host { name } else { self.description().into() }
    }

    /// Layers in forward order. Some have layers inside ([`HostLayer::branches`]).
    pub fn layers(&self) -> &[HostLayer] {
        &self.0.list.layers
    }

    /// All layers in forward order, the layers of branches before the layer that joins them.
    pub fn all_layers(&self) -> Vec<&HostLayer> {
        let mut all = vec![];
        for_each_layer(self.layers(), &mut |layer| all.push(layer));
        all
    }

    /// Whether it has dropout layers.
    pub fn has_dropout(&self) -> bool {
        self.all_layers().iter().any(|layer| matches!(layer, HostLayer::Dropout { .. }))
    }

    /// Slots in the order of action indices.
    pub fn slots(&self) -> &[SlotName] {
        &self.0.list.slots
    }

    pub(crate) fn list(&self) -> &HostList {
        &self.0.list
    }

    /// Trained parameters of the bare host for images of this shape.
    ///
    /// # Errors
    /// The host does not fit the image.
    pub fn parameters(&self, image: &TaskShape) -> Result<usize, HostError> {
        Ok(self.sizes(image)?.iter().map(|sized| sized.parameters).sum())
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
                "all" => {
                    names.extend(self.slots().to_vec());
                    continue;
                }
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
    /// [`HostError::Size`], [`HostError::TooLarge`], [`HostError::Layer`], [`HostError::Output`];
    /// [`HostError::Description`] for a host without parameters, and for a host of the family
    /// `conv1d` with images; for a host of the family `cnn` [`HostError::TooDeep`] with the
    /// suggestion of a host that fits.
    pub fn validate(&self, image: &TaskShape) -> Result<(), HostError> {
        self.sizes(image).map(|_| ())
    }

    /// Checks the sizes of the image.
    pub(super) fn check_image(image: &TaskShape) -> Result<(), HostError> {
        HostError::check_size("image channels", image.channels, 1, SIZE_MAX)?;
        HostError::check_size("image height", image.height, 1, SIZE_MAX)?;
        HostError::check_size("image width", image.width, 1, SIZE_MAX)?;
        HostError::check_size("classes", image.classes, 1, SIZE_MAX)
    }

    /// Checks that the pools of a host of the family `cnn` fit the image, and that a host for
    /// signals gets signals.
    pub(super) fn check_family(&self, image: &TaskShape) -> Result<(), HostError> {
        if let Some(family) = WidthFamily::of(self.description()) {
            return family.check(&self.name(), image);
        }
        let Ok(cnn) = self.description().parse::<Cnn>() else { return Ok(()) };
        // Each pool halves the shorter side.
        let fits = image.height.min(image.width).max(1).ilog2() as usize;
        if cnn.pools <= fits {
            return Ok(());
        }
        let suggestion = Self::try_from(Cnn { pools: fits, ..cnn })?.name();
        let (host, image, pools) = (self.name(), *image, cnn.pools);
        Err(HostError::TooDeep { host, image, pools, fits, suggestion })
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
        let list = HostList::of_cnn(cnn.layers(), cnn.slots());
        Ok(Self(Arc::new(ParsedHost { description: cnn.to_string(), list })))
    }
}

impl FromStr for HostSpec {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        let given = text.trim();
        if given.starts_with('{') {
            return HostList::parse(given, Form::Json, None).map(Self::from_list);
        }
        let named = PRESETS.iter().any(|(name, _)| *name == given);
        if named || given.starts_with("cnn:") {
            return given.parse::<Cnn>()?.try_into();
        }
        if let Some(family) = WidthFamily::of(given) {
            let list = HostList::of_family(family.layers(given)?);
            return Ok(Self(Arc::new(ParsedHost { description: given.replace(' ', ""), list })));
        }
        match READY_MADE.iter().find(|(name, _)| *name == given) {
            Some((name, toml)) => Self::from_toml(toml, name),
            None => Err(unknown_host(given)),
        }
    }
}

/// The error for a text that is no host.
fn unknown_host(given: &str) -> HostError {
    let presets = PRESETS.iter().map(|(name, _)| *name);
    let names: Vec<&str> = presets.chain(READY_MADE.iter().map(|(name, _)| *name)).collect();
    HostError::UnknownHost {
        given: given.into(),
        nearest: nearest(given, names.iter().copied()).map(Into::into),
        presets: names.join(", "),
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

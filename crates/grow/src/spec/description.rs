//! Descriptions of hosts in TOML and JSON: reading them, with the place of every mistake.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::HostError;
use super::host_layer::{HostLayer, for_each_layer};
use super::layer_values::{BranchJoin, Features};
use super::limits::{
    DEPTH_MAX, DESCRIPTION_BYTES_MAX, LAYERS_MAX, NAME_CHARS_MAX, SIZE_MAX, WINDOW_MAX,
};
use super::per_axis::PerAxis;
use super::slot_name::SlotName;
use crate::json::parse_json;
use crate::suggest::nearest;

/// Version that is written for hosts of the family `cnn`.
const FIRST_VERSION: u32 = 1;
/// Version that is written for all other hosts, and the newest that is read. A new version marks a
/// format that older readers would misread.
pub(crate) const LIST_VERSION: u32 = 2;
/// Kinds of layers, as descriptions write them.
const KINDS: [&str; 31] = [
    "conv2d",
    "conv1d",
    "batch_norm",
    "group_norm",
    "layer_norm",
    "rms_norm",
    "relu",
    "sigmoid",
    "tanh",
    "leaky_relu",
    "elu",
    "gelu",
    "gelu_tanh",
    "silu",
    "softplus",
    "hard_swish",
    "dropout",
    "max_pool2d",
    "avg_pool2d",
    "max_pool1d",
    "avg_pool1d",
    "slot",
    "global_avg_pool",
    "global_max_pool",
    "flatten",
    "linear",
    "residual",
    "branches",
    "save",
    "load",
    "join",
];
/// Names that a slot cannot have: `all` selects every slot, and the parameters of the host itself
/// are the group `host`.
const RESERVED: [&str; 2] = ["all", "host"];

/// A host as descriptions and the metadata of weights files store it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HostList {
    version: u32,
    /// Name for people; `None` for hosts of a family (`cnn`, `mlp`, `conv1d`), and for descriptions
    /// in JSON text without a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    /// Layers in forward order.
    pub(super) layers: Vec<HostLayer>,
    /// Slots in the order of action indices.
    pub(super) slots: Vec<SlotName>,
}

impl HostList {
    /// The list of a host of the family `cnn`.
    pub(super) fn of_cnn(layers: Vec<HostLayer>, slots: Vec<SlotName>) -> Self {
        Self { version: FIRST_VERSION, name: None, layers, slots }
    }

    /// The list of a host of another family, with slots in forward order.
    pub(super) fn of_family(layers: Vec<HostLayer>) -> Self {
        let slots = layers.iter().filter_map(HostLayer::slot).cloned().collect();
        Self { version: LIST_VERSION, name: None, layers, slots }
    }

    /// Parses and checks a description. `name` is the host's name if the description has none.
    ///
    /// # Errors
    /// [`HostError::Description`] with the place of the mistake.
    pub(super) fn parse(text: &str, form: Form, name: Option<&str>) -> Result<Self, HostError> {
        let host = name.unwrap_or("of the description").to_owned();
        let fail = |problem: String| HostError::Description { host: host.clone(), problem };
        if text.len() > DESCRIPTION_BYTES_MAX {
            let bytes = text.len();
            return Err(fail(format!("{bytes} bytes; at most {DESCRIPTION_BYTES_MAX} are read")));
        }
        let value = match form {
            Form::Json => parse_json(text),
            Form::Toml => toml::from_str::<Value>(text).map_err(|error| error.to_string()),
        };
        let mut list = value.and_then(Self::of_value).map_err(fail)?;
        if list.name.is_none() {
            list.name = name.map(Into::into);
        }
        list.check().map_err(fail)?;
        Ok(list)
    }

    fn of_value(value: Value) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Entries {
            version: Option<u32>,
            name: Option<String>,
            layers: Vec<Value>,
            slots: Option<Vec<SlotName>>,
        }
        // Checked before the rest, so that a newer description is reported as newer.
        if let Some(version) = value.get("version").and_then(Value::as_u64)
            && version > u64::from(LIST_VERSION)
        {
            return Err(format!(
                "it has version {version}, and this program reads versions up to {LIST_VERSION}; \
                 use the program that wrote it, or a newer one"
            ));
        }
        let entries: Entries = serde_json::from_value(value).map_err(|error| error.to_string())?;
        if entries.version == Some(0) {
            return Err("`version` must be 1 or 2, got 0".into());
        }
        let mut layers = layers(entries.layers, "layers", 0)?;
        fill_names(&mut layers, "layers");
        let mut forward = vec![];
        for_each_layer(&layers, &mut |layer| forward.extend(layer.slot().cloned()));
        let slots = entries.slots.unwrap_or_else(|| forward.clone());
        check_slots(&forward, &slots)?;
        check_saved(&layers)?;
        Ok(Self { version: LIST_VERSION, name: entries.name, layers, slots })
    }

    /// This list under another name, with version [`LIST_VERSION`].
    pub(super) fn named(self, name: String) -> Self {
        Self { version: LIST_VERSION, name: Some(name), ..self }
    }

    /// Whether two lists describe the same network; their names may differ.
    pub(super) fn same(&self, other: &Self) -> bool {
        self.layers == other.layers && self.slots == other.slots
    }

    fn check(&self) -> Result<(), String> {
        if let Some(name) = &self.name {
            check_name("the host", name, "-")?;
        }
        if self.layers.is_empty() {
            return Err("`layers` is empty; a host needs at least a linear layer".into());
        }
        let (mut count, mut unique_names, mut problem) = (0, HashSet::new(), Ok(()));
        for_each_layer(&self.layers, &mut |layer| {
            count += 1;
            let checked = check_layer(layer, &mut unique_names);
            if problem.is_ok() {
                problem = checked;
            }
        });
        problem?;
        if count > LAYERS_MAX {
            return Err(format!("{count} layers; at most {LAYERS_MAX} are supported"));
        }
        Ok(())
    }
}

/// Text form of a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// JSON.
    Json,
    /// TOML.
    Toml,
}

/// Reads a list of layers; `place` is its place in the description.
fn layers(values: Vec<Value>, place: &str, depth: usize) -> Result<Vec<HostLayer>, String> {
    if depth > DEPTH_MAX {
        return Err(format!("{place}: at most {DEPTH_MAX} layers may be nested in each other"));
    }
    let each = values.into_iter().enumerate();
    each.map(|(i, value)| layer(value, &format!("{place}.{i}"), depth)).collect()
}

/// Advice for a layer with keys beside its kind, such as `{ linear = { out = 8 }, name = "one" }`.
fn misplaced_keys(entry: &Map<String, Value>) -> Option<String> {
    let (kinds, others): (Vec<&str>, Vec<&str>) =
        entry.keys().map(String::as_str).partition(|key| KINDS.contains(key));
    match kinds[..] {
        [kind] => Some(format!("; put `{}` into the braces of `{kind}`", others.join("`, `"))),
        [_, _, ..] => Some("; give each layer braces for itself".into()),
        [] => None,
    }
}

fn layer(value: Value, place: &str, depth: usize) -> Result<HostLayer, String> {
    let (kind, arguments) = match value {
        Value::String(kind) => (kind, Value::Object(Map::new())),
        Value::Object(entry) if entry.len() == 1 => {
            entry.into_iter().next().ok_or_else(|| format!("{place}: no layer"))?
        }
        other => {
            let advice = other.as_object().and_then(misplaced_keys).unwrap_or_default();
            return Err(format!(
                "{place}: expected a layer, such as \"relu\" or {{ conv2d = {{ out = 8, kernel = \
                 3 }} }}, got {}{advice}",
                short(&other)
            ));
        }
    };
    if !KINDS.contains(&kind.as_str()) {
        let hint = nearest(&kind, KINDS).map(|name| format!("; did you mean `{name}`?"));
        let (hint, known) = (hint.unwrap_or_default(), KINDS.join(", "));
        return Err(format!("{place}: unknown layer `{kind}`{hint}\n  layers: {known}"));
    }
    let (Value::Object(mut arguments), fail) =
        (arguments, |error: String| format!("{place}: `{kind}`: {error}"))
    else {
        return Err(format!("{place}: `{kind}`: expected its keys in {{ }}"));
    };
    match kind.as_str() {
        "residual" => {
            let mut inner = |key: &str| match arguments.remove(key) {
                None => Ok(vec![]),
                Some(Value::Array(values)) => layers(values, &format!("{place}.{key}"), depth + 1),
                Some(other) => {
                    Err(format!("{place}.{key}: expected a list, got {}", short(&other)))
                }
            };
            let (body, shortcut) = (inner("body")?, inner("shortcut")?);
            if body.is_empty() {
                return Err(fail("expected at least one layer in `body`".into()));
            }
            Ok(HostLayer::Residual { name: only_name(arguments).map_err(fail)?, body, shortcut })
        }
        "branches" => {
            let join = arguments.remove("join").ok_or_else(|| fail("`join` is missing".into()))?;
            let join: BranchJoin =
                serde_json::from_value(join).map_err(|error| fail(format!("join: {error}")))?;
            let Some(Value::Array(lists)) = arguments.remove("branches") else {
                return Err(fail("expected `branches`, a list of lists of layers".into()));
            };
            if lists.len() < 2 {
                return Err(fail(format!("expected at least 2 branches, got {}", lists.len())));
            }
            let branch = |(i, list): (usize, Value)| match list {
                Value::Array(values) => layers(values, &format!("{place}.branches.{i}"), depth + 1),
                other => {
                    Err(format!("{place}.branches.{i}: expected a list, got {}", short(&other)))
                }
            };
            let branches = lists.into_iter().enumerate().map(branch).collect::<Result<_, _>>()?;
            Ok(HostLayer::Branches { name: only_name(arguments).map_err(fail)?, join, branches })
        }
        _ => {
            // A layer without keys is text in serde's form.
            let text = Value::String(kind.clone());
            let entry = Map::from_iter([(kind.clone(), Value::Object(arguments.clone()))]);
            match serde_json::from_value(text) {
                Ok(layer) if arguments.is_empty() => Ok(layer),
                _ => serde_json::from_value(Value::Object(entry))
                    .map_err(|error| fail(error.to_string())),
            }
        }
    }
}

/// A value as text, shortened for errors.
fn short(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}

/// The name among the keys of a layer with layers inside, which has no other keys.
fn only_name(mut arguments: Map<String, Value>) -> Result<String, String> {
    let name = match arguments.remove("name") {
        None => String::new(),
        Some(Value::String(name)) => name,
        Some(other) => return Err(format!("name: expected text, got {}", short(&other))),
    };
    match arguments.keys().next() {
        None => Ok(name),
        Some(key) => Err(format!("unknown key `{key}`")),
    }
}

/// Gives every layer without a name the name of its position.
fn fill_names(layers: &mut [HostLayer], prefix: &str) {
    for (i, layer) in layers.iter_mut().enumerate() {
        let position = format!("{prefix}.{i}");
        if let Some(name) = layer.name_mut().filter(|name| name.is_empty()) {
            name.clone_from(&position);
        }
        let own = layer.name().map_or(position, Into::into);
        for (key, branch) in layer.branches_mut() {
            fill_names(branch, &format!("{own}.{key}"));
        }
    }
}

fn check_slots(forward: &[SlotName], slots: &[SlotName]) -> Result<(), String> {
    let mut seen = HashSet::new();
    for slot in forward {
        let name = slot.as_str();
        check_name("a slot", name, "")?;
        if RESERVED.contains(&name) {
            return Err(format!("a slot cannot have the name `{name}`; choose another"));
        }
        if !seen.insert(name) {
            return Err(format!("two slots have the name `{name}`; slots are told apart by name"));
        }
    }
    let mut listed = HashSet::new();
    for slot in slots {
        if !seen.contains(slot.as_str()) {
            return Err(format!("`slots` has `{slot}`, but no layer is a slot with that name"));
        }
        if !listed.insert(slot.as_str()) {
            return Err(format!("`slots` has `{slot}` twice"));
        }
    }
    match forward.iter().find(|slot| !listed.contains(slot.as_str())) {
        Some(slot) => Err(format!("`slots` lacks the slot `{slot}`")),
        None => Ok(()),
    }
}

/// Checks that saved values have unique names, and that they are saved before they are read.
fn check_saved(layers: &[HostLayer]) -> Result<(), String> {
    let (mut all, mut before, mut problem) = (HashSet::new(), HashSet::new(), Ok(()));
    for_each_layer(layers, &mut |layer| {
        if let HostLayer::Save { name } = layer
            && !all.insert(name.as_str())
        {
            problem = Err(format!("two values are saved as `{name}`; give each a name"));
        }
    });
    for_each_layer(layers, &mut |layer| match layer {
        HostLayer::Save { name } => {
            before.insert(name.as_str());
        }
        HostLayer::Join { from, .. } if from.is_empty() => {
            problem = Err("`join` has no values in `from`".into());
        }
        HostLayer::Join { .. } | HostLayer::Load { .. } => {
            let absent = layer.reads().into_iter().find(|name| !before.contains(name));
            if let Some(name) = absent {
                let is_join = matches!(layer, HostLayer::Join { .. });
                let hint = nearest(name, before.iter().copied());
                let hint = hint.map_or(String::new(), |near| format!("; did you mean `{near}`?"));
                problem = Err(match (all.contains(name), is_join) {
                    (true, true) => {
                        format!("`{name}` is joined before it is saved; save it earlier")
                    }
                    (true, false) => {
                        format!("`{name}` is loaded before it is saved; save it earlier")
                    }
                    (false, true) => format!(
                        "`join` has `{name}` in `from`, which no `save` has as its name{hint}"
                    ),
                    (false, false) => {
                        format!("`load` has the name `{name}`, which no `save` has{hint}")
                    }
                });
            }
        }
        _ => {}
    });
    problem
}

/// Checks that a name is short, and has only letters, digits, `_` and the characters of `others`.
fn check_name(owner: &str, name: &str, others: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || others.contains(c);
    if name.is_empty() || name.len() > NAME_CHARS_MAX || !name.chars().all(fits) {
        let shown: String = name.chars().take(NAME_CHARS_MAX).collect();
        let and = others.chars().map(|c| format!(", `{c}`")).collect::<String>();
        return Err(format!(
            "the name of {owner} must have 1 to {NAME_CHARS_MAX} letters, digits, `_`{and}, got \
             `{shown}`"
        ));
    }
    Ok(())
}

/// Checks the name of a layer, and that its sizes are in their ranges. `unique_names` are the names
/// of the layers before it that must be unique.
fn check_layer<'a>(
    layer: &'a HostLayer,
    unique_names: &mut HashSet<&'a str>,
) -> Result<(), String> {
    let name = layer.name().unwrap_or_default();
    if let HostLayer::Save { name } = layer {
        check_name("a saved value", name, "")?;
    } else if layer.slot().is_none() && layer.name().is_some() {
        check_name("a layer", name, ".")?;
        if name.split('.').any(str::is_empty) {
            return Err(format!("the name `{name}` has an empty part between dots"));
        }
        match name.split('.').next() {
            Some("slots") => {
                return Err(format!("the name `{name}` begins with `slots`, as modules do"));
            }
            Some("training") => {
                let why = "which every PyTorch module has as an attribute";
                return Err(format!("the name `{name}` begins with `training`, {why}"));
            }
            _ => {}
        }
    }
    let (unique, what) = match layer {
        HostLayer::Dropout { name, .. } => (Some(name.as_str()), "draws"),
        layer => (layer.tensors(), "weights"),
    };
    if let Some(name) = unique
        && !unique_names.insert(name)
    {
        return Err(format!("two layers have the name `{name}`; {what} are told apart by name"));
    }
    let size = |what: &str, got: usize, least: usize, most: usize| {
        if (least..=most).contains(&got) {
            return Ok(());
        }
        Err(format!("`{name}`: `{what}` must be {least} to {most}, got {got}"))
    };
    let window = |what: &str, size_of: PerAxis, least: usize| {
        size(what, size_of.rows, least, WINDOW_MAX)?;
        size(what, size_of.columns, least, WINDOW_MAX)
    };
    match *layer {
        HostLayer::Conv2d { out, kernel, stride, padding, dilation, groups, .. } => {
            size("out", out, 1, SIZE_MAX)?;
            window("kernel", kernel, 1)?;
            window("stride", stride, 1)?;
            window("dilation", dilation, 1)?;
            size("groups", groups, 1, SIZE_MAX)?;
            let around = padding.around(kernel, dilation);
            window("padding", around.map_err(|problem| format!("`{name}`: {problem}"))?, 0)
        }
        HostLayer::Conv1d { out, kernel, stride, padding, dilation, groups, .. } => {
            size("out", out, 1, SIZE_MAX)?;
            size("kernel", kernel, 1, WINDOW_MAX)?;
            size("stride", stride, 1, WINDOW_MAX)?;
            size("dilation", dilation, 1, WINDOW_MAX)?;
            size("groups", groups, 1, SIZE_MAX)?;
            let around = padding
                .of_row()
                .around(PerAxis::of_signal(1, kernel), PerAxis::of_signal(1, dilation));
            let around = around.map_err(|problem| format!("`{name}`: {problem}"))?;
            size("padding", around.columns, 0, WINDOW_MAX)
        }
        HostLayer::GroupNorm { groups, .. } => size("groups", groups, 1, SIZE_MAX),
        HostLayer::LeakyRelu { slope } if !(slope.0.is_finite() && slope.0 >= 0.0) => {
            Err(format!("`leaky_relu`: `slope` must be a number of at least 0, got {}", slope.0))
        }
        HostLayer::Dropout { p, .. } if !(0.0..1.0).contains(&p.0) => {
            Err(format!("`{name}`: `p` must be from 0 to below 1, got {}", p.0))
        }
        HostLayer::MaxPool2d { kernel, stride, padding, .. }
        | HostLayer::AvgPool2d { kernel, stride, padding, .. } => {
            window("kernel", kernel, 1)?;
            window("stride", stride.unwrap_or(kernel), 1)?;
            window("padding", padding, 0)
        }
        HostLayer::MaxPool1d { kernel, stride, padding, .. }
        | HostLayer::AvgPool1d { kernel, stride, padding, .. } => {
            size("kernel", kernel, 1, WINDOW_MAX)?;
            size("stride", stride.unwrap_or(kernel), 1, WINDOW_MAX)?;
            size("padding", padding, 0, WINDOW_MAX)
        }
        HostLayer::Linear { out: Features::Count(out), .. } => size("out", out, 1, SIZE_MAX),
        _ => Ok(()),
    }
}

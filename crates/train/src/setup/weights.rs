//! Weights files: their metadata, and rebuilding a network from one.
//!
//! A file is safetensors with PyTorch's names. Its metadata has `topology` (the host and its
//! modules), `host` (the layers of the host; older files have none), `normalization`
//! (`{"mean": […], "std": […]}` per channel, for pixels in 0..1) and `classes` (their names), and
//! for other samples than images of bytes `inputs` (`{"kind": "vector", "stored": "f32"}`), for
//! other tasks than classify `outputs` (`{"task": "regress", "scale": {"mean": […], "std": […]}}`,
//! where an output stands for `output · std + mean`), and for a table `table` (the rules by which
//! rows became samples). A file without metadata, as PyTorch writes it, is a host without modules.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_data::notes::say;
use meristem_data::{DatasetInfo, InputKind, Normalization, StoredType, TableRules};
use meristem_grow::{
    BlueprintSet, Host, HostLayer, HostSpec, Rules, SlotName, TaskShape, Topology, host_json,
};
use meristem_nn::safetensors::{self, Metadata};
use meristem_nn::{HostTensor, Network, StateDict};

use crate::config::types::TaskKind;
use crate::error::{Error, Result};
use crate::input_file::{InputFile, checksum};
use crate::task::{TargetScale, task_of};

/// Host that a weights file should have.
pub(crate) struct Wanted<'a> {
    /// Description of the host, if requested.
    pub(crate) host: Option<&'a HostSpec>,
    /// Shape of the dataset's images.
    pub(crate) image: &'a TaskShape,
}

/// Contents of a weights file.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    path: PathBuf,
    /// Tensors by name.
    pub(crate) state: StateDict,
    metadata: Metadata,
}

impl Weights {
    /// Reads the file at `path`. A prefix that one of PyTorch's wrappers puts before all names is
    /// removed, with a note.
    ///
    /// # Errors
    /// The file cannot be read, or is not safetensors.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let (state, metadata) = safetensors::load(path)?;
        Ok(Self::unwrapped(path, state, metadata))
    }

    /// As [`Weights::load`], from the contents of the file at `path`.
    ///
    /// # Errors
    /// The contents are not safetensors.
    pub(crate) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        let (state, metadata) = safetensors::from_bytes(path, bytes)?;
        Ok(Self::unwrapped(path, state, metadata))
    }

    /// The contents of a file without the prefix of its names.
    fn unwrapped(path: &Path, mut state: StateDict, metadata: Metadata) -> Self {
        if let Some(prefix) = state.unwrap_names() {
            let path = path.display();
            say(&format!(
                "{path}: the names of all tensors begin with `{prefix}`; the prefix is left out"
            ));
        }
        Self { path: path.into(), state, metadata }
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, which the setting `setting` names, with its checksum.
    pub(crate) fn input(&self, setting: &str) -> InputFile {
        InputFile { setting: setting.into(), path: self.path.clone(), checksum: self.checksum() }
    }

    /// CRC-32 of tensors and metadata.
    pub(crate) fn checksum(&self) -> String {
        let mut crc = crc32fast::Hasher::new();
        crc.update(checksum(&self.state).as_bytes());
        for (key, text) in &self.metadata {
            crc.update(format!("{key}={text};").as_bytes());
        }
        format!("{:08x}", crc.finalize())
    }

    fn fail(&self, message: impl ToString) -> Error {
        Error::Weights { path: self.path.clone(), message: message.to_string() }
    }

    /// The error for weights whose host is neither in the file nor given.
    pub(crate) fn needs_host(&self) -> Error {
        self.fail("its metadata has no `topology`, so --host is required")
    }

    /// The host that these weights belong to, checked against `wanted`. Without a topology in the
    /// file, a host with empty `slots`.
    ///
    /// # Errors
    /// No topology and no requested host; another host or image shape than wanted; a damaged
    /// topology.
    pub(crate) fn host(
        &self,
        wanted: &Wanted<'_>,
        slots: &[SlotName],
        blueprints: &Arc<BlueprintSet>,
        rules: Rules,
    ) -> Result<Host> {
        let Some(json) = self.metadata.get("topology") else {
            let spec = wanted.host.ok_or_else(|| self.needs_host())?;
            return Ok(Host::new(
                spec.clone(),
                *wanted.image,
                slots,
                Arc::clone(blueprints),
                rules,
            )?);
        };
        let topology = Topology::from_json(json).map_err(|e| self.fail(e))?;
        let hosts = [Some(&topology.host), topology.widened_from.as_ref()];
        if let Some(spec) = wanted.host.filter(|spec| !hosts.contains(&Some(spec))) {
            let (made, asked) = (&topology.host, spec);
            return Err(self.fail(format!("made with host `{made}`, but `{asked}` was requested")));
        }
        if let Some(json) = self.metadata.get("host") {
            topology.check_host(json).map_err(|e| self.fail(e))?;
        }
        if topology.image != *wanted.image {
            return Err(self.fail(format!(
                "made for {}, but the dataset has {}",
                describe(&topology.image),
                describe(wanted.image)
            )));
        }
        topology.rebuild(blueprints, rules).map_err(|e| self.fail(e))
    }

    /// The host description in the file, if it has one.
    ///
    /// # Errors
    /// A damaged topology.
    pub(crate) fn host_spec(&self) -> Result<Option<HostSpec>> {
        let Some(json) = self.metadata.get("topology") else { return Ok(None) };
        Ok(Some(Topology::from_json(json).map_err(|e| self.fail(e))?.host))
    }

    /// The shape of the images that the topology in the file is made for, if it has one.
    ///
    /// # Errors
    /// A damaged topology.
    pub(crate) fn image(&self) -> Result<Option<TaskShape>> {
        let Some(json) = self.metadata.get("topology") else { return Ok(None) };
        Ok(Some(Topology::from_json(json).map_err(|e| self.fail(e))?.image))
    }

    /// Channels of the images and number of classes: columns of the first weight, rows of the last.
    ///
    /// # Errors
    /// The file lacks the host's first or last weight.
    pub(crate) fn channels_and_classes(&self, host: &HostSpec) -> Result<[usize; 2]> {
        let mut prefixes = host.all_layers().into_iter().filter_map(HostLayer::tensors);
        let size = |prefix: Option<&str>, axis: usize| {
            let name = format!("{}.weight", prefix.unwrap_or_default());
            let shape = self.state.get(&name).map(|tensor| &tensor.shape);
            let missing = || self.fail(format!("it has no `{name}`, as host `{host}` needs"));
            shape.and_then(|shape| shape.get(axis)).copied().ok_or_else(missing)
        };
        Ok([size(prefixes.next(), 1)?, size(prefixes.next_back(), 0)?])
    }

    /// The form of the samples that the network was trained on; images of bytes, if the metadata
    /// has no `inputs`.
    ///
    /// # Errors
    /// The metadata is damaged.
    pub(crate) fn sample_form(&self) -> Result<InputForm> {
        let Some(json) = self.metadata.get("inputs") else { return Ok(InputForm::PIXELS) };
        serde_json::from_str(json).map_err(|e| self.fail(format!("`inputs`: {e}")))
    }

    /// The task that the network was trained for, and the scale of its outputs, from the metadata
    /// `outputs`. Without it the task is classify if the metadata has `classes`; `None` if it has
    /// neither, as in a file of another program.
    ///
    /// # Errors
    /// The metadata is damaged.
    pub(crate) fn output_form(&self) -> Result<Option<OutputForm>> {
        let Some(json) = self.metadata.get("outputs") else {
            return Ok(self.metadata.get("classes").map(|_| OutputForm::CLASSES));
        };
        serde_json::from_str(json).map(Some).map_err(|e| self.fail(format!("`outputs`: {e}")))
    }

    /// The rules by which rows of the training table became samples, if it was a table.
    ///
    /// # Errors
    /// Damaged or unsound rules.
    pub(crate) fn table_rules(&self) -> Result<Option<TableRules>> {
        let Some(json) = self.metadata.get("table") else { return Ok(None) };
        let rules: TableRules =
            serde_json::from_str(json).map_err(|e| self.fail(format!("`table`: {e}")))?;
        rules.check().map_err(|e| self.fail(e))?;
        Ok(Some(rules))
    }

    /// Checks that the outputs are for the task of a dataset and scaled like its targets, if the
    /// metadata has this information.
    ///
    /// # Errors
    /// Another task, or targets that were standardised by other constants.
    pub(crate) fn check_outputs(&self, info: &DatasetInfo) -> Result<()> {
        let Some(own) = self.check_task(info)? else { return Ok(()) };
        if own.scale != TargetScale::of(info) {
            return Err(self.fail(
                "its outputs are scaled by the mean and standard deviation of other training \
                 targets; evaluate it on the dataset that it was trained on",
            ));
        }
        Ok(())
    }

    /// Checks that training can go on with the targets of a dataset. Prints a note if the outputs
    /// get another scale.
    ///
    /// # Errors
    /// Another task, or a table with other columns or categories.
    pub(crate) fn check_further_training(&self, info: &DatasetInfo) -> Result<()> {
        let Some(own) = self.check_task(info)? else { return Ok(()) };
        if own.scale != TargetScale::of(info) {
            let path = self.path.display();
            say(&format!(
                "{path}: its outputs were scaled by the mean and standard deviation of other \
                 targets; they get those of this dataset"
            ));
        }
        let tables = self.table_rules()?.zip(info.table.as_ref());
        match tables.and_then(|(own, data)| own.other_feature(data)) {
            Some(difference) => Err(self.fail(format!(
                "trained on the columns of another table: {difference}; give a table with the \
                 same columns and categories in the same order"
            ))),
            None => Ok(()),
        }
    }

    /// Checks that the targets of a dataset are for the task of the file. Returns the task and
    /// scale of the file's outputs.
    fn check_task(&self, info: &DatasetInfo) -> Result<Option<OutputForm>> {
        let (own, data) = (self.output_form()?, task_of(info.targets));
        match own {
            Some(own) if own.task != data => Err(self.fail(format!(
                "trained for task {}, but the targets of the dataset are for {data}",
                own.task
            ))),
            own => Ok(own),
        }
    }

    /// The normalisation constants that the network was trained with, if the file has them.
    ///
    /// # Errors
    /// Damaged constants, or not one of each per channel.
    pub(crate) fn normalization(&self, channels: usize) -> Result<Option<Normalization>> {
        #[derive(serde::Deserialize)]
        struct SavedConstants {
            mean: Vec<f32>,
            std: Vec<f32>,
        }
        let Some(json) = self.metadata.get("normalization") else { return Ok(None) };
        let SavedConstants { mean, std } =
            serde_json::from_str(json).map_err(|e| self.fail(format!("`normalization`: {e}")))?;
        let constants = Normalization { mean, std };
        if constants.mean.len() == channels && constants.is_usable() {
            Ok(Some(constants))
        } else {
            Err(self.fail(format!(
                "`normalization` must hold {channels} finite means and positive standard deviations"
            )))
        }
    }

    /// The names of the classes, if the file has them.
    ///
    /// # Errors
    /// Damaged names.
    pub(crate) fn classes(&self) -> Result<Option<Vec<String>>> {
        let Some(json) = self.metadata.get("classes") else { return Ok(None) };
        serde_json::from_str(json).map(Some).map_err(|e| self.fail(format!("`classes`: {e}")))
    }

    /// Checks that the weights have the same classes, in the same order, as a dataset with
    /// `classes`. Names that are only numbers, or absent from the file, are not compared.
    ///
    /// # Errors
    /// Other classes or another order; damaged names.
    pub(crate) fn check_classes(&self, classes: &[String]) -> Result<()> {
        let Some(own) = self.classes()? else { return Ok(()) };
        let numbered = |names: &[String]| names.iter().all(|name| name.parse::<usize>().is_ok());
        let mut pairs = own.iter().zip(classes).enumerate();
        match pairs.find(|(_, (own, data))| own != data) {
            Some((label, (own_name, data))) if !numbered(&own) && !numbered(classes) => Err(self
                .fail(format!(
                    "label {label} is `{own_name}` in these weights and `{data}` in the dataset; \
                     the classes or their order differ"
                ))),
            _ => Ok(()),
        }
    }

    /// Loads the tensors into a network.
    ///
    /// # Errors
    /// A list of tensors that are missing, superfluous, not finite or of another shape, and of
    /// negative variances.
    pub(crate) fn fill(&self, network: &mut Network) -> Result<()> {
        let negative =
            |tensor: &HostTensor| tensor.as_f32().is_some_and(|v| v.iter().any(|v| *v < 0.0));
        let variances = self.state.iter().filter(|(name, _)| name.ends_with("running_var"));
        let bad: Vec<&str> = variances.filter(|(_, v)| negative(v)).map(|(name, _)| name).collect();
        if !bad.is_empty() {
            return Err(self.fail(format!("negative variances: {}", bad.join(", "))));
        }
        network.load_state_dict(&self.state, true).map_err(|e| self.fail(e))
    }
}

fn describe(image: &TaskShape) -> String {
    format!("{image} images of {} classes", image.classes)
}

/// Form of the samples that a network was trained on. Older files, and those of images of bytes, do
/// not have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct InputForm {
    pub(crate) kind: InputKind,
    pub(crate) stored: StoredType,
}

impl InputForm {
    /// Images of bytes.
    pub(crate) const PIXELS: Self = Self { kind: InputKind::Image, stored: StoredType::U8 };
}

/// Meaning of a network's outputs. Older files, and those of networks that classify, do not have
/// it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct OutputForm {
    /// Task that the network was trained for.
    pub(crate) task: TaskKind,
    /// Scale of the outputs, if they are standardised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) scale: Option<TargetScale>,
}

impl OutputForm {
    /// Logits of classes.
    pub(crate) const CLASSES: Self = Self { task: TaskKind::Classify, scale: None };
}

/// Meaning of a network's inputs and outputs, for the metadata of its weights file.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    /// Kind and element type of the samples.
    pub(crate) form: InputForm,
    /// Constants that pixels are normalised with.
    pub(crate) normalization: Normalization,
    /// Names of the classes, of the labels, or of the numbers.
    pub(crate) classes: Vec<String>,
    /// Task and scale of the outputs.
    pub(crate) outputs: OutputForm,
    /// Rules by which rows of a table became samples.
    pub(crate) table: Option<TableRules>,
}

/// Serialises a network's tensors and its host for the weights file at `path`.
///
/// # Errors
/// Never for the networks of a run.
pub(crate) fn to_bytes(
    path: &Path,
    state: &StateDict,
    topology: &Topology,
    interface: &Interface,
) -> Result<Vec<u8>> {
    let Interface { form, normalization: Normalization { mean, std }, classes, outputs, table } =
        interface;
    let json = |value: &serde_json::Value| value.to_string();
    let form = (*form != InputForm::PIXELS).then(|| ("inputs", json(&serde_json::json!(form))));
    let metadata = [
        ("format", "pt".to_string()),
        ("topology", topology.to_json()?),
        ("host", host_json(&topology.host)?),
        ("normalization", json(&serde_json::json!({ "mean": mean, "std": std }))),
        ("classes", json(&serde_json::json!(classes))),
    ];
    let outputs =
        (*outputs != OutputForm::CLASSES).then(|| ("outputs", json(&serde_json::json!(outputs))));
    let table = table.as_ref().map(|rules| ("table", json(&serde_json::json!(rules))));
    let metadata = metadata
        .into_iter()
        .chain(form)
        .chain(outputs)
        .chain(table)
        .map(|(key, text)| (key.to_string(), text))
        .collect();
    Ok(safetensors::to_bytes(path, state, &metadata)?)
}

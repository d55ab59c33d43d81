//! Weights files: what is written beside the tensors, and how a network comes back from one (U5).
//!
//! A file is safetensors under PyTorch's names. Its metadata has `topology` (the host and what grew
//! in it), `normalization` (`{"mean": […], "std": […]}` per channel, of pixels in 0..1) and
//! `classes` (their names). A file without metadata, as PyTorch writes it, is a bare host.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_data::{DatasetInfo, Normalization};
use meristem_grow::{BlueprintSet, Host, HostSpec, ImageShape, Rules, SlotName, Topology};
use meristem_nn::safetensors::{self, Metadata};
use meristem_nn::{HostTensor, Network, StateDict};

use crate::error::{Error, Result};

/// The host that a file is to hold.
pub(crate) struct Wanted<'a> {
    /// Its description, when one was asked for.
    pub(crate) host: Option<&'a HostSpec>,
    /// The images of the dataset at hand.
    pub(crate) image: &'a ImageShape,
}

/// A weights file in memory.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    path: PathBuf,
    /// The tensors.
    pub(crate) state: StateDict,
    metadata: Metadata,
}

impl Weights {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is not safetensors.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let (state, metadata) = safetensors::load(path)?;
        Ok(Self { path: path.into(), state, metadata })
    }

    fn fail(&self, message: impl ToString) -> Error {
        Error::Weights { path: self.path.clone(), message: message.to_string() }
    }

    /// The host that these weights belong to, checked against what is `wanted`. Without a topology
    /// in the file it is a bare host with `slots`.
    ///
    /// # Errors
    /// No topology and no host asked for; another host or image than the one wanted; a damaged
    /// topology.
    pub(crate) fn host(
        &self,
        wanted: &Wanted<'_>,
        slots: &[SlotName],
        blueprints: &Arc<BlueprintSet>,
        rules: Rules,
    ) -> Result<Host> {
        let Some(json) = self.metadata.get("topology") else {
            let Some(spec) = wanted.host else {
                return Err(self.fail("no `topology` in its metadata, so --host must be given"));
            };
            return Ok(Host::new(*spec, *wanted.image, slots, Arc::clone(blueprints), rules)?);
        };
        let topology = Topology::from_json(json).map_err(|e| self.fail(e))?;
        if let Some(spec) = wanted.host.filter(|spec| **spec != topology.host) {
            let (made, asked) = (topology.host, spec);
            return Err(self.fail(format!("made with host `{made}`, asked for `{asked}`")));
        }
        if topology.image != *wanted.image {
            return Err(self.fail(format!(
                "made for {} and the dataset has {}",
                describe(&topology.image),
                describe(wanted.image)
            )));
        }
        topology.rebuild(blueprints, rules).map_err(|e| self.fail(e))
    }

    /// The host description in the file, if there is one.
    ///
    /// # Errors
    /// A damaged topology.
    pub(crate) fn host_spec(&self) -> Result<Option<HostSpec>> {
        let Some(json) = self.metadata.get("topology") else { return Ok(None) };
        Ok(Some(Topology::from_json(json).map_err(|e| self.fail(e))?.host))
    }

    /// The constants that the network was trained with, if the file says so.
    ///
    /// # Errors
    /// They are damaged, or not one per channel.
    pub(crate) fn normalization(&self, channels: usize) -> Result<Option<Normalization>> {
        #[derive(serde::Deserialize)]
        struct Constants {
            mean: Vec<f32>,
            std: Vec<f32>,
        }
        let Some(json) = self.metadata.get("normalization") else { return Ok(None) };
        let Constants { mean, std } =
            serde_json::from_str(json).map_err(|e| self.fail(format!("`normalization`: {e}")))?;
        let usable = mean.len() == channels
            && std.len() == channels
            && mean.iter().all(|m| m.is_finite())
            && std.iter().all(|s| s.is_finite() && *s > 0.0);
        match usable {
            true => Ok(Some(Normalization { mean, std })),
            false => Err(self.fail(format!(
                "`normalization` must hold {channels} finite means and positive deviations"
            ))),
        }
    }

    /// Whether a label means the same to these weights as to a dataset with `classes`. Classes that are only
    /// numbered, or that the file does not name, say nothing.
    ///
    /// # Errors
    /// Other classes, or another order of them; damaged names.
    pub(crate) fn check_classes(&self, classes: &[String]) -> Result<()> {
        let Some(json) = self.metadata.get("classes") else { return Ok(()) };
        let own: Vec<String> =
            serde_json::from_str(json).map_err(|e| self.fail(format!("`classes`: {e}")))?;
        let numbered = |names: &[String]| names.iter().all(|name| name.parse::<usize>().is_ok());
        let mut pairs = own.iter().zip(classes).enumerate();
        match pairs.find(|(_, (own, data))| own != data) {
            Some((label, (own_name, data))) if !numbered(&own) && !numbered(classes) => {
                Err(self.fail(format!(
                    "label {label} is `{own_name}` to these weights and `{data}` in the dataset: they were made with \
                     other classes, or another order of them"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Puts the tensors into a network.
    ///
    /// # Errors
    /// Tensors that are missing, too many, of another shape, or not finite, and variances below 0: each is listed.
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

fn describe(image: &ImageShape) -> String {
    format!("{image} images of {} classes", image.classes)
}

/// The bytes of the file at `path` of a network with these tensors, and with this host.
///
/// # Errors
/// None of what a run makes.
pub(crate) fn to_bytes(
    path: &Path,
    state: &StateDict,
    topology: &Topology,
    info: &DatasetInfo,
) -> Result<Vec<u8>> {
    let json = |value: &serde_json::Value| value.to_string();
    let constants = serde_json::json!({ "mean": info.mean, "std": info.std });
    let metadata = [
        ("format", "pt".to_string()),
        ("topology", topology.to_json()?),
        ("normalization", json(&constants)),
        ("classes", json(&serde_json::json!(info.classes))),
    ];
    let metadata = metadata.into_iter().map(|(key, text)| (key.to_string(), text)).collect();
    Ok(safetensors::to_bytes(path, state, &metadata)?)
}

//! The policy that a run starts from, as read from its file.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_control::{
    Ppo, policy_domain, policy_is_of_sets, policy_observes_layers, policy_seeds, policy_width,
};
use meristem_grow::BlueprintSet;
use meristem_nn::StateDict;
use meristem_nn::safetensors::{self, Metadata};

use super::table::TrainConfig;
use super::types::{ObservationForm, PolicyStart};
use crate::error::{Error, Result};
use crate::input_file::{InputFile, checksum};

/// A policy and its metadata.
#[derive(Debug)]
pub(crate) struct PolicyFile {
    path: PathBuf,
    pub(crate) weights: StateDict,
    metadata: Metadata,
    /// Width of the policy.
    pub(crate) hidden: usize,
    /// Form of its observations.
    pub(crate) form: ObservationForm,
    /// Seeds of the runs that the policy was trained in.
    pub(crate) seeds: Vec<u64>,
}

impl PolicyFile {
    /// Reads the policy that the settings name, if they name one. If they name no policy, no width,
    /// and no form other than that of the shipped policy, the result is the shipped policy,
    /// provided that `blueprints` are the standard ones and that it fits a run with `slots` slots.
    ///
    /// # Errors
    /// [`Error::Value`]: the file is unreadable or has no policy, or its width or form differs from
    /// the requested one.
    pub(crate) fn find(
        config: &TrainConfig,
        slots: usize,
        blueprints: &BlueprintSet,
    ) -> Result<Option<Arc<Self>>> {
        let file = match config.policy_start() {
            Some(PolicyStart::New) => return Ok(None),
            Some(PolicyStart::Shipped) => Self::shipped()?,
            Some(PolicyStart::File(path)) => Self::read(&path)?,
            None => {
                let shipped = Self::shipped()?;
                // Other blueprints may have the standard names.
                let known = *blueprints == BlueprintSet::standard();
                let form = config.policy_form.is_none_or(|form| form == shipped.form);
                let usual = known && form && config.policy_hidden.is_none();
                let fits = usual && shipped.fits(slots, blueprints)?;
                return Ok(fits.then(|| Arc::new(shipped)));
            }
        };
        if let Some(asked) = config.policy_form.filter(|asked| *asked != file.form) {
            let expected =
                format!("{}, the form of the policy in {}", file.form, file.path.display());
            return Err(Error::value("policy-form", asked, expected));
        }
        match config.policy_hidden {
            Some(asked) if asked != file.hidden => {
                let (hidden, path) = (file.hidden, file.path.display());
                let expected = format!("{hidden}, the width of the policy in {path}");
                Err(Error::value("policy-hidden", asked, expected))
            }
            _ => Ok(Some(Arc::new(file))),
        }
    }

    fn read(path: &Path) -> Result<Self> {
        let loaded = safetensors::load(path);
        Self::of_parts(path, loaded.map_err(|error| unfit(path, error.without_path()))?)
    }

    /// The policy that comes with the program; its training is described in
    /// `crates/train/policies/README.md`.
    fn shipped() -> Result<Self> {
        let (path, bytes) =
            (Path::new("shipped"), include_bytes!("../../policies/shipped.safetensors"));
        let parsed = safetensors::from_bytes(path, bytes);
        Self::of_parts(path, parsed.map_err(|error| unfit(path, error.without_path()))?)
    }

    fn of_parts(path: &Path, (weights, metadata): (StateDict, Metadata)) -> Result<Self> {
        let hidden = policy_width(&metadata).map_err(|error| unfit(path, error))?;
        if !weights.iter().any(|(_, tensor)| tensor.shape.contains(&hidden)) {
            let got = format!(
                "{} (its `hidden` of {hidden} is not the width of its tensors)",
                path.display()
            );
            return Err(Error::value("policy", got, "a policy.safetensors written by a run"));
        }
        let seeds = policy_seeds(&metadata).map_err(|error| unfit(path, error))?;
        let of_sets = policy_is_of_sets(&metadata).map_err(|error| unfit(path, error))?;
        let of_layers = policy_observes_layers(&metadata).map_err(|error| unfit(path, error))?;
        let of_any_host = if of_layers { ObservationForm::SetWiden } else { ObservationForm::Set };
        let form = if of_sets { of_any_host } else { ObservationForm::Vector };
        Ok(Self { path: path.to_owned(), weights, metadata, hidden, form, seeds })
    }

    /// The file with its checksum.
    pub(crate) fn input(&self) -> InputFile {
        let (setting, path) = ("policy".to_string(), self.path.clone());
        InputFile { setting, path, checksum: checksum(&self.weights) }
    }

    /// Whether it serves any host, or was trained for `slots` slots and these blueprints.
    fn fits(&self, slots: usize, blueprints: &BlueprintSet) -> Result<bool> {
        if self.form != ObservationForm::Vector {
            return Ok(true);
        }
        let domain = policy_domain(&self.metadata).map_err(|error| unfit(&self.path, error))?;
        let names = blueprints.iter().map(|blueprint| &blueprint.name);
        Ok(domain.slots.len() == slots && names.eq(&domain.blueprints))
    }

    /// Copies the weights into a new policy of the same width. Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Value`]: the policy was made for other slots or blueprints.
    pub(crate) fn fill(&self, ppo: &mut Ppo) -> Result<()> {
        ppo.import(&self.weights, &self.metadata).map_err(|error| match error {
            error @ meristem_control::Error::Policy { .. } => unfit(&self.path, error),
            error => error.into(),
        })
    }
}

fn unfit(path: &Path, problem: impl Display) -> Error {
    Error::value(
        "policy",
        format!("{} ({problem})", path.display()),
        "a policy.safetensors that fits the slots and blueprints of this run",
    )
}

#[cfg(test)]
mod tests {
    use meristem_grow::Blueprint;

    use super::*;
    use crate::config::ConfigLayer;
    use crate::config::types::ControllerKind;

    /// Blueprints from files may have the standard names.
    #[test]
    fn the_shipped_policy_is_for_the_standard_blueprints_only() {
        let controller = Some(ControllerKind::Ppo);
        let flags = ConfigLayer { controller, ..ConfigLayer::default() };
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        let shipped = PolicyFile::shipped().unwrap();
        let slots = policy_domain(&shipped.metadata).unwrap().slots.len();
        let found = |set: &BlueprintSet| PolicyFile::find(&config, slots, set).unwrap().is_some();
        let standard = BlueprintSet::standard();
        assert!(found(&standard));
        // Each blueprint gets the layers of the next standard one.
        let others = standard.iter().skip(1).chain(standard.iter().take(1));
        let pairs = standard.iter().zip(others);
        let renamed = pairs.map(|(one, next)| {
            let name = one.name.clone();
            Blueprint { name, ..(**next).clone() }
        });
        let own = renamed.fold(BlueprintSet::empty(), |set, one| set.with(one).unwrap());
        assert!(shipped.fits(slots, &own).unwrap(), "the names are the same");
        assert!(!found(&own));
    }
}

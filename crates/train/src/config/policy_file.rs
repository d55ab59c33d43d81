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
use super::types::{BuiltInPolicy, ObservationForm, PolicyStart};
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
    /// Reads the policy that the settings name. If they name no policy and no width, the result is
    /// a policy of the program: `shipped` if it fits the run, else `general`; or `None` if the
    /// settings name a form, and no policy of this form fits. `slots` is the number of slots of the
    /// hosts, if all have the same slots.
    ///
    /// # Errors
    /// [`Error::Value`]: the file is unreadable or has no policy, or its width or form differs from
    /// the requested one.
    pub(crate) fn find(
        config: &TrainConfig,
        slots: Option<usize>,
        blueprints: &BlueprintSet,
    ) -> Result<Option<Arc<Self>>> {
        let file = match config.policy_start() {
            Some(PolicyStart::New) => return Ok(None),
            Some(PolicyStart::BuiltIn(policy)) => Self::built_in(policy)?,
            Some(PolicyStart::File(path)) => Self::read(&path)?,
            None if config.policy_hidden.is_some() => return Ok(None),
            None => {
                for policy in [BuiltInPolicy::Shipped, BuiltInPolicy::General] {
                    let file = Self::built_in(policy)?;
                    let has_form = config.policy_form.is_none_or(|form| form == file.form);
                    if has_form && file.fits(slots, blueprints)? {
                        return Ok(Some(Arc::new(file)));
                    }
                }
                return Ok(None);
            }
        };
        if let Some(asked) = config.policy_form.filter(|asked| *asked != file.form) {
            let expected = format!("{}, the form of {}", file.form, file.described());
            return Err(Error::value("policy-form", asked, expected));
        }
        match config.policy_hidden {
            Some(asked) if asked != file.hidden => {
                let expected = format!("{}, the width of {}", file.hidden, file.described());
                Err(Error::value("policy-hidden", asked, expected))
            }
            _ => Ok(Some(Arc::new(file))),
        }
    }

    fn read(path: &Path) -> Result<Self> {
        let loaded = safetensors::load(path);
        Self::of_parts(path, loaded.map_err(|error| unfit(path, error.without_path()))?)
    }

    fn built_in(policy: BuiltInPolicy) -> Result<Self> {
        let path = Path::new(policy.name());
        let parsed = safetensors::from_bytes(path, policy.file());
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

    /// The setting that names it.
    pub(crate) fn start(&self) -> PolicyStart {
        PolicyStart::named(&self.path)
    }

    /// Whether it comes with the program.
    pub(crate) fn is_built_in(&self) -> bool {
        matches!(self.start(), PolicyStart::BuiltIn(_))
    }

    /// How messages name it.
    fn described(&self) -> String {
        let path = self.path.display();
        if self.is_built_in() {
            format!("the policy `{path}`")
        } else {
            format!("the policy in {path}")
        }
    }

    /// The file with its checksum; the path of a policy of the program is its name.
    pub(crate) fn input(&self) -> InputFile {
        let (setting, path) = ("policy".to_string(), self.path.clone());
        InputFile { setting, path, checksum: checksum(&self.weights) }
    }

    /// Whether it serves any host, or was trained for `slots` slots and these blueprints.
    fn fits(&self, slots: Option<usize>, blueprints: &BlueprintSet) -> Result<bool> {
        if self.form != ObservationForm::Vector {
            return Ok(true);
        }
        // Other blueprints may have the standard names.
        if *blueprints != BlueprintSet::standard() {
            return Ok(false);
        }
        let domain = policy_domain(&self.metadata).map_err(|error| unfit(&self.path, error))?;
        let names = blueprints.iter().map(|blueprint| &blueprint.name);
        Ok(slots == Some(domain.slots.len()) && names.eq(&domain.blueprints))
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
    fn the_first_policy_of_the_program_that_fits_is_the_initial_one() {
        let start = |slots, set: &BlueprintSet, flags| {
            let flags = ConfigLayer { controller: Some(ControllerKind::Ppo), ..flags };
            let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
            PolicyFile::find(&config, slots, set).unwrap().map(|file| file.path.clone())
        };
        let standard = BlueprintSet::standard();
        let [shipped, general] = ["shipped", "general"].map(|name| Some(PathBuf::from(name)));
        let usual = ConfigLayer::default;
        assert_eq!(start(Some(3), &standard, usual()), shipped);
        assert_eq!(start(Some(2), &standard, usual()), general);
        assert_eq!(start(None, &standard, usual()), general, "hosts have different slots");
        // Each blueprint gets the layers of the next standard one.
        let others = standard.iter().skip(1).chain(standard.iter().take(1));
        let pairs = standard.iter().zip(others);
        let renamed = pairs.map(|(one, next)| {
            let name = one.name.clone();
            Blueprint { name, ..(**next).clone() }
        });
        let own = renamed.fold(BlueprintSet::empty(), |set, one| set.with(one).unwrap());
        assert_eq!(start(Some(3), &own, usual()), general);
        let form = |form| ConfigLayer { policy_form: Some(Some(form)), ..usual() };
        assert_eq!(start(Some(3), &standard, form(ObservationForm::Vector)), shipped);
        assert_eq!(start(Some(2), &standard, form(ObservationForm::Vector)), None);
        assert_eq!(start(Some(3), &standard, form(ObservationForm::Set)), general);
        assert_eq!(start(Some(3), &standard, form(ObservationForm::SetWiden)), None);
        let width = || ConfigLayer { policy_hidden: Some(Some(64)), ..usual() };
        assert_eq!(start(Some(3), &standard, width()), None);
    }
}

//! A policy as a file: weights under PyTorch's names, and metadata about inputs and outputs. The
//! caller reads and writes the file with [`meristem_nn::safetensors`].

use meristem_nn::StateDict;
use meristem_nn::safetensors::Metadata;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::normalizers::Normalizers;
use super::{PolicyDomain, Ppo, ScalarMoments};
use crate::error::{Error, Result};
use crate::policy::PolicyForm;

/// Version of the metadata of a policy for one number of slots.
const VERSION: &str = "1";

/// Version of the metadata of a policy for any host.
const SET_VERSION: &str = "2";

/// Version of the metadata of a policy that serves any host and can choose WIDEN.
const LAYER_VERSION: &str = "3";

/// Versions that this program reads.
const VERSIONS: [&str; 3] = [VERSION, SET_VERSION, LAYER_VERSION];

/// Key of the form of the observations; only in a policy for any host.
const FORM: &str = "form";

/// The form of a policy for any host.
const SET: &str = "set";

/// The form of a policy that serves any host and can choose WIDEN.
const SET_AND_LAYERS: &str = "set-widen";

/// Key of the seeds.
const SEEDS: &str = "seeds";

/// Key of the normalisers of the elements of sets.
const SET_NORMALIZERS: &str = "set_normalizers";

/// Width of the policy in a file. [`Ppo::import`] requires a [`Ppo`] of the same width.
///
/// # Errors
/// [`Error::Policy`] for a file that is not a policy, or has another version.
pub fn policy_width(metadata: &Metadata) -> Result<usize> {
    let version = entry(metadata, "meristem_policy")?;
    if !VERSIONS.contains(&version) {
        return Err(mismatch(format!(
            "its format has version {version}, this program reads versions {}; \
             use the program that wrote it",
            VERSIONS.join(", ")
        )));
    }
    parse(metadata, "hidden")
}

/// Whether the policy in a file serves any host ([`Ppo::of_sets`], [`Ppo::of_sets_and_layers`]).
///
/// # Errors
/// [`Error::Policy`] for a form that is not known.
pub fn policy_is_of_sets(metadata: &Metadata) -> Result<bool> {
    Ok(form(metadata)?.is_some())
}

/// Whether the policy in a file observes layers and chooses WIDEN ([`Ppo::of_sets_and_layers`]).
///
/// # Errors
/// [`Error::Policy`] for a form that is not known.
pub fn policy_observes_layers(metadata: &Metadata) -> Result<bool> {
    Ok(form(metadata)? == Some(SET_AND_LAYERS))
}

/// The form of a policy for any host; `None` for a policy for one number of slots.
fn form(metadata: &Metadata) -> Result<Option<&'static str>> {
    let Some(form) = metadata.get(FORM) else { return Ok(None) };
    let known = [SET, SET_AND_LAYERS].into_iter().find(|known| known == form);
    known.map(Some).ok_or_else(|| {
        mismatch(format!(
            "its observations have the form {form}, this program knows {SET} and \
             {SET_AND_LAYERS}; use the program that wrote it"
        ))
    })
}

/// The form of a policy.
fn form_of(ppo: &Ppo) -> Option<&'static str> {
    match ppo.policy.shape().form {
        PolicyForm::Vector => None,
        PolicyForm::Set { layers: None, .. } => Some(SET),
        PolicyForm::Set { layers: Some(_), .. } => Some(SET_AND_LAYERS),
    }
}

/// Names of the slots and blueprints that the policy in a file was trained with.
///
/// # Errors
/// [`Error::Policy`] for a file without these names.
pub fn policy_domain(metadata: &Metadata) -> Result<PolicyDomain> {
    Ok(PolicyDomain {
        slots: parse(metadata, "slots")?,
        blueprints: parse(metadata, "blueprints")?,
        layers: vec![],
    })
}

/// Seeds of the runs in which the policy in a file learned, in order. Empty if the file has no
/// list.
///
/// # Errors
/// [`Error::Policy`] for a damaged list.
pub fn policy_seeds(metadata: &Metadata) -> Result<Vec<u64>> {
    metadata.get(SEEDS).map_or_else(|| Ok(vec![]), |_| parse(metadata, SEEDS))
}

/// Weights and metadata of a policy file, as [`Ppo::export`] returns them.
pub(super) fn export(ppo: &Ppo) -> Result<(StateDict, Metadata)> {
    let Normalizers { observations, sets } = &ppo.normalizers;
    let form = form_of(ppo);
    let version = match form {
        None => VERSION,
        Some(SET_AND_LAYERS) => LAYER_VERSION,
        Some(_) => SET_VERSION,
    };
    let of_sets = form
        .zip(sets.as_ref())
        .map(|(form, sets)| Ok::<_, Error>([(FORM, form.into()), (SET_NORMALIZERS, json(sets)?)]));
    let metadata = [
        ("format", "pt".to_string()),
        ("meristem_policy", version.to_string()),
        ("hidden", ppo.config.hidden.to_string()),
        ("slots", json(&ppo.domain.slots)?),
        ("blueprints", json(&ppo.domain.blueprints)?),
        ("normalizer", json(observations)?),
        ("return_scale", json(&ppo.scale)?),
        (SEEDS, json(&ppo.seeds)?),
    ];
    let metadata = metadata.into_iter().chain(of_sets.transpose()?.into_iter().flatten());
    let metadata = metadata.map(|(key, text)| (key.to_string(), text));
    Ok((ppo.policy.state_dict()?, metadata.collect()))
}

/// Imports a policy from a file, as [`Ppo::import`] does.
pub(super) fn import(ppo: &mut Ppo, weights: &StateDict, metadata: &Metadata) -> Result<()> {
    let width = policy_width(metadata)?;
    let form = form(metadata)?;
    let of_sets = form.is_some();
    let sets = of_sets.then(|| parse(metadata, SET_NORMALIZERS)).transpose()?;
    let normalizers = Normalizers { observations: parse(metadata, "normalizer")?, sets };
    let scale: ScalarMoments = parse(metadata, "return_scale")?;
    let learned_with = policy_seeds(metadata)?;
    if form != form_of(ppo) {
        let of = |form| match form {
            None => "one number of slots",
            Some(SET_AND_LAYERS) => "any number of slots and layers",
            Some(_) => "any number of slots",
        };
        let [its, own] = [of(form), of(form_of(ppo))];
        return Err(mismatch(format!(
            "it is a policy for {its}, this run has one for {own}; start the run from the file, \
             or train a new policy"
        )));
    }
    if !of_sets {
        check_domain(&policy_domain(metadata)?, &ppo.domain)?;
    }
    if width != ppo.config.hidden {
        return Err(mismatch(format!(
            "its width is {width}, this run needs {}; set the policy's width to {width}",
            ppo.config.hidden
        )));
    }
    if !ppo.normalizers.accept(&normalizers) || !scale.is_usable() {
        return Err(mismatch(
            "its normaliser is damaged, or its scale of the returns; use another copy".into(),
        ));
    }
    ppo.policy.load_state_dict(weights).map_err(|error| mismatch(error.to_string()))?;
    (ppo.normalizers, ppo.scale) = (normalizers, scale);
    let own = std::mem::replace(&mut ppo.seeds, learned_with);
    for seed in own {
        if !ppo.seeds.contains(&seed) {
            ppo.seeds.push(seed);
        }
    }
    Ok(())
}

/// Checks that a policy for one number of slots was trained with the number of slots and with the
/// blueprints of this run. The names of the slots may differ.
fn check_domain(trained: &PolicyDomain, own: &PolicyDomain) -> Result<()> {
    let PolicyDomain { slots, blueprints, .. } = trained;
    if slots.len() != own.slots.len() {
        return Err(mismatch(format!(
            "it was trained for {} slots ({}), this run has {} ({}); \
             enable the same number of slots, or train a new policy",
            slots.len(),
            slots.join(", "),
            own.slots.len(),
            own.slots.join(", ")
        )));
    }
    if *blueprints != own.blueprints {
        return Err(mismatch(format!(
            "it was trained with the blueprints {}, this run has {}; \
             use the same blueprints, or train a new policy",
            blueprints.join(", "),
            own.blueprints.join(", ")
        )));
    }
    Ok(())
}

fn mismatch(problem: String) -> Error {
    Error::Policy { problem }
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| mismatch(error.to_string()))
}

fn entry<'a>(metadata: &'a Metadata, key: &str) -> Result<&'a str> {
    let missing = || mismatch(format!("no `{key}` in its metadata: it is not a policy file"));
    metadata.get(key).map(String::as_str).ok_or_else(missing)
}

fn parse<T: DeserializeOwned>(metadata: &Metadata, key: &str) -> Result<T> {
    let text = entry(metadata, key)?;
    serde_json::from_str(text).map_err(|error| mismatch(format!("its `{key}` is damaged: {error}")))
}

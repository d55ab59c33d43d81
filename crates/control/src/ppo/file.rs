//! A policy as a file: weights under PyTorch's names, and metadata about inputs and outputs. The
//! caller reads and writes the file with [`meristem_nn::safetensors`].

use meristem_nn::StateDict;
use meristem_nn::safetensors::Metadata;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{PolicyDomain, Ppo, ReturnScale};
use crate::error::{Error, Result};
use crate::normalizer::Normalizer;

/// Version of the metadata.
const VERSION: &str = "1";

/// Key of the seeds.
const SEEDS: &str = "seeds";

/// Width of the policy in a file. [`Ppo::import`] requires a [`Ppo`] of the same width.
///
/// # Errors
/// [`Error::Policy`] for a file that is not a policy, or has another version.
pub fn policy_width(metadata: &Metadata) -> Result<usize> {
    let version = entry(metadata, "meristem_policy")?;
    if version != VERSION {
        return Err(mismatch(format!(
            "its format has version {version}, this program reads version {VERSION}; \
             use the program that wrote it"
        )));
    }
    parse(metadata, "hidden")
}

/// Names of the slots and blueprints that the policy in a file was trained with.
///
/// # Errors
/// [`Error::Policy`] for a file without these names.
pub fn policy_domain(metadata: &Metadata) -> Result<PolicyDomain> {
    Ok(PolicyDomain {
        slots: parse(metadata, "slots")?,
        blueprints: parse(metadata, "blueprints")?,
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
    let metadata = [
        ("format", "pt".to_string()),
        ("meristem_policy", VERSION.to_string()),
        ("hidden", ppo.config.hidden.to_string()),
        ("slots", json(&ppo.domain.slots)?),
        ("blueprints", json(&ppo.domain.blueprints)?),
        ("normalizer", json(&ppo.normalizer)?),
        ("return_scale", json(&ppo.scale)?),
        (SEEDS, json(&ppo.seeds)?),
    ];
    let metadata = metadata.into_iter().map(|(key, text)| (key.to_string(), text));
    Ok((ppo.policy.state_dict()?, metadata.collect()))
}

/// Imports a policy from a file, as [`Ppo::import`] does.
pub(super) fn import(ppo: &mut Ppo, weights: &StateDict, metadata: &Metadata) -> Result<()> {
    let width = policy_width(metadata)?;
    let PolicyDomain { slots, blueprints } = policy_domain(metadata)?;
    let normalizer: Normalizer = parse(metadata, "normalizer")?;
    let scale: ReturnScale = parse(metadata, "return_scale")?;
    let learned_with = policy_seeds(metadata)?;
    let own = &ppo.domain;
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
    if blueprints != own.blueprints {
        return Err(mismatch(format!(
            "it was trained with the blueprints {}, this run has {}; \
             use the same blueprints, or train a new policy",
            blueprints.join(", "),
            own.blueprints.join(", ")
        )));
    }
    if width != ppo.config.hidden {
        return Err(mismatch(format!(
            "its width is {width}, this run needs {}; set the policy's width to {width}",
            ppo.config.hidden
        )));
    }
    if !normalizer.fits(ppo.normalizer.len()) || !scale.is_usable() {
        return Err(mismatch("its normaliser is damaged; use another copy".into()));
    }
    ppo.policy.load_state_dict(weights).map_err(|error| mismatch(error.to_string()))?;
    (ppo.normalizer, ppo.scale) = (normalizer, scale);
    let own = std::mem::replace(&mut ppo.seeds, learned_with);
    for seed in own {
        if !ppo.seeds.contains(&seed) {
            ppo.seeds.push(seed);
        }
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

//! The policy that a run starts from, as read from its file.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_control::{Ppo, policy_seeds, policy_width};
use meristem_nn::StateDict;
use meristem_nn::safetensors::{self, Metadata};

use super::table::TrainConfig;
use crate::error::{Error, Result};

/// A policy and its metadata.
#[derive(Debug)]
pub(crate) struct PolicyFile {
    path: PathBuf,
    pub(crate) weights: StateDict,
    metadata: Metadata,
    /// Width of the policy.
    pub(crate) hidden: usize,
    /// Seeds of the runs that the policy was trained in.
    pub(crate) seeds: Vec<u64>,
}

impl PolicyFile {
    /// Reads the policy that the settings name, if they name one.
    ///
    /// # Errors
    /// [`Error::Value`]: the file is unreadable or has no policy, or its width differs from the
    /// requested width.
    pub(crate) fn of(config: &TrainConfig) -> Result<Option<Arc<Self>>> {
        let Some(path) = config.policy_file() else { return Ok(None) };
        let file = Self::read(path)?;
        match config.policy_hidden {
            Some(asked) if asked != file.hidden => {
                let (hidden, path) = (file.hidden, path.display());
                let expected = format!("{hidden}, the width of the policy in {path}");
                Err(Error::value("policy-hidden", asked, expected))
            }
            _ => Ok(Some(Arc::new(file))),
        }
    }

    fn read(path: &Path) -> Result<Self> {
        let (weights, metadata) =
            safetensors::load(path).map_err(|error| unfit(path, error.without_path()))?;
        let hidden = policy_width(&metadata).map_err(|error| unfit(path, error))?;
        if !weights.iter().any(|(_, tensor)| tensor.shape.contains(&hidden)) {
            let got = format!(
                "{} (its `hidden` of {hidden} is not the width of its tensors)",
                path.display()
            );
            return Err(Error::value("policy", got, "a policy.safetensors written by a run"));
        }
        let seeds = policy_seeds(&metadata).map_err(|error| unfit(path, error))?;
        Ok(Self { path: path.to_owned(), weights, metadata, hidden, seeds })
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

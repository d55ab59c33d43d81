//! Makes the controller that a configuration names, and writes and reads policies.

use std::path::Path;

use meristem_control::{
    Controller, Heuristic, HeuristicConfig, Learning, NoController, Ppo, PpoConfig, PpoSizes,
    RandomController, Script, policy_width,
};
use meristem_device::Stream;
use meristem_nn::safetensors;

use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::settings::ControllerKind;
use crate::setup::Setup;

/// A controller, and whether it is a policy that is to be written.
pub(crate) enum AnyController {
    /// One that does not learn.
    Rules(Box<dyn Controller>),
    /// One that does.
    Policy(Box<Ppo>),
}

impl AnyController {
    /// The controller of a run. A policy works on `stream`.
    ///
    /// # Errors
    /// A script or a policy file that cannot be read or does not fit; memory.
    pub(crate) fn new(setup: &Setup, stream: &Stream) -> Result<Self> {
        let config = &setup.config;
        let rules = |controller: Box<dyn Controller>| Ok(Self::Rules(controller));
        match &config.controller {
            ControllerKind::None => rules(Box::new(NoController)),
            ControllerKind::Random => rules(Box::new(RandomController::new(config.seed))),
            ControllerKind::Heuristic => rules(Box::new(Heuristic::new(heuristic(config)))),
            ControllerKind::Fixed(path) => rules(Box::new(script(setup, path)?)),
            ControllerKind::Ppo => {
                let learns = policy(setup, stream, config.policy.as_deref(), Learning::On)?;
                Ok(Self::Policy(Box::new(learns)))
            }
            ControllerKind::Policy(path) => {
                rules(Box::new(policy(setup, stream, Some(path), Learning::Off)?))
            }
            ControllerKind::Greedy(path) => {
                rules(Box::new(policy(setup, stream, Some(path), Learning::Greedy)?))
            }
        }
    }

    /// To be asked.
    pub(crate) fn get(&mut self) -> &mut dyn Controller {
        match self {
            Self::Rules(controller) => &mut **controller,
            Self::Policy(ppo) => &mut **ppo,
        }
    }

    /// Writes the policy, if it is one; the file appears only when it is complete. Waits for the device.
    ///
    /// # Errors
    /// The file cannot be written, the device failed.
    pub(crate) fn save_policy(&self, path: &Path) -> Result<()> {
        let Self::Policy(ppo) = self else { return Ok(()) };
        let (weights, metadata) = ppo.export()?;
        Ok(safetensors::save(path, &weights, &metadata)?)
    }
}

/// The rules of the heuristic that are settings.
fn heuristic(config: &TrainConfig) -> HeuristicConfig {
    let usual = HeuristicConfig::default();
    HeuristicConfig {
        plateau_steps: config.plateau_steps,
        plateau_gain_pp: config.plateau_gain as f32,
        tempo: config.tempo,
        // Where the gate asks for less, so does the heuristic.
        min_contribution_pp: usual.min_contribution_pp.min(config.min_contribution as f32),
        ..usual
    }
}

fn script(setup: &Setup, path: &Path) -> Result<Script> {
    let unusable = |problem: &dyn std::fmt::Display| {
        let expected = "a readable action script: one JSON object a line";
        Error::value("controller", format!("fixed:{} ({problem})", path.display()), expected)
    };
    let text = std::fs::read_to_string(path).map_err(|error| unusable(&error))?;
    let name = ControllerKind::Fixed(path.into()).to_string();
    Script::parse(&name, &text, &setup.fresh_host()?).map_err(|error| unusable(&error))
}

/// A new policy, or the one from a file, whose width it then has.
fn policy(setup: &Setup, stream: &Stream, file: Option<&Path>, learning: Learning) -> Result<Ppo> {
    let config = &setup.config;
    let file = file.map(safetensors::load).transpose()?;
    let hidden = match &file {
        Some((_, metadata)) => policy_width(metadata)?,
        None => config.policy_hidden,
    };
    let ppo = PpoConfig { hidden, ..PpoConfig::default() };
    let sizes = PpoSizes { envs: config.envs, steps: config.steps };
    let host = setup.fresh_host()?;
    let key = (config.seed, setup.isa);
    let mut ppo = Ppo::new(stream, ppo, (&host, sizes), key, learning)?;
    if let Some((weights, metadata)) = &file {
        ppo.import(weights, metadata)?;
    }
    Ok(ppo)
}

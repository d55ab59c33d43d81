//! A controller for each env: envs of one run may follow different rules.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::controller::Controller;
use crate::error::Result;
use crate::heuristic::Heuristic;
use crate::heuristic_config::HeuristicConfig;
use crate::random::RandomController;
use crate::script::Script;
use crate::state::ControllerState;
use crate::view::EnvView;

/// A controller of one env that neither learns nor looks at other envs.
#[derive(Clone, Debug, PartialEq)]
pub enum EnvController {
    /// Nothing grows.
    None,
    /// The heuristic with these constants.
    Heuristic(Box<HeuristicConfig>),
    /// Legal actions that are drawn with this seed.
    Random(u64),
    /// A script of actions.
    Script(Arc<Script>),
}

impl EnvController {
    /// Whether this controller shares the memory of `default`: both are of one kind, or this
    /// controller grows nothing.
    fn is_like(&self, default: &Self) -> bool {
        *self == Self::None || std::mem::discriminant(self) == std::mem::discriminant(default)
    }
}

/// Memory of all kinds of controllers.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Memories {
    heuristic: Vec<u8>,
    random: Vec<u8>,
    /// Envs that were rolled back in this episode.
    rolled_back: BTreeSet<usize>,
}

/// One controller for each env. Each decides as it would if all envs had the same controller.
#[derive(Clone, Debug)]
pub struct EnvControllers {
    name: String,
    /// Controller of each env that is not in `overrides`.
    default: EnvController,
    overrides: BTreeMap<usize, EnvController>,
    heuristic: Heuristic,
    random: RandomController,
    /// Envs that were rolled back in this episode.
    rolled_back: BTreeSet<usize>,
}

impl EnvControllers {
    /// The controller `default` for all envs. `name` is its name in the configuration.
    pub fn new(name: &str, default: EnvController) -> Self {
        Self {
            name: name.into(),
            default,
            overrides: BTreeMap::new(),
            heuristic: Heuristic::default(),
            random: RandomController::new(0),
            rolled_back: BTreeSet::new(),
        }
    }

    /// Sets the controller of one env, from the next decision on.
    pub fn set_env(&mut self, env: usize, controller: EnvController) {
        self.overrides.insert(env, controller);
    }

    /// The controller of an env.
    pub fn of_env(&self, env: usize) -> &EnvController {
        self.overrides.get(&env).unwrap_or(&self.default)
    }

    fn decide(&mut self, view: &EnvView<'_>) -> Result<Action> {
        Ok(match self.overrides.get(&view.env).unwrap_or(&self.default) {
            EnvController::None => Action::Wait,
            EnvController::Heuristic(config) => self.heuristic.decide(view, config),
            EnvController::Random(seed) => self.random.decide(view, *seed),
            EnvController::Script(script) => {
                script.decide(view, self.rolled_back.contains(&view.env))?
            }
        })
    }
}

impl Controller for EnvControllers {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin_episode(&mut self, env: usize) {
        self.heuristic.begin_episode(env);
        self.rolled_back.remove(&env);
    }

    fn copy_env(&mut self, from: usize, to: usize) {
        self.heuristic.copy_env(from, to);
        self.random.copy_env(from, to);
        if self.rolled_back.contains(&from) {
            self.rolled_back.insert(to);
        } else {
            self.rolled_back.remove(&to);
        }
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        views.iter().map(|view| self.decide(view)).collect()
    }

    fn roll_back(&mut self, env: usize, _cause: Option<usize>, _penalty: f32) -> Result<()> {
        self.rolled_back.insert(env);
        Ok(())
    }

    /// The state of the default controller, if every other env has one of the same kind or grows
    /// nothing; else the states of all kinds of controllers.
    fn save(&self) -> Result<ControllerState> {
        if self.overrides.values().all(|other| other.is_like(&self.default)) {
            return match self.default {
                EnvController::None => Ok(ControllerState::default()),
                EnvController::Heuristic(_) => self.heuristic.save(),
                EnvController::Random(_) => self.random.save(),
                EnvController::Script(_) => {
                    ControllerState::from_memory(&self.name, &self.rolled_back)
                }
            };
        }
        let (heuristic, random) = (self.heuristic.save()?.memory, self.random.save()?.memory);
        let memories = Memories { heuristic, random, rolled_back: self.rolled_back.clone() };
        ControllerState::from_memory(&self.name, &memories)
    }

    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        let of = |memory| ControllerState { memory, ..ControllerState::default() };
        if let Ok(Memories { heuristic, random, rolled_back }) = state.memory(&self.name) {
            let mut restored = self.clone();
            restored.heuristic.restore(&of(heuristic))?;
            restored.random.restore(&of(random))?;
            *self = Self { rolled_back, ..restored };
            return Ok(());
        }
        match self.default {
            EnvController::None => {}
            EnvController::Heuristic(_) => self.heuristic.restore(state)?,
            EnvController::Random(_) => self.random.restore(state)?,
            EnvController::Script(_) => self.rolled_back = state.memory(&self.name)?,
        }
        Ok(())
    }
}

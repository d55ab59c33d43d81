//! Control: actions on a growing host, and the controllers that choose them.
//!
//! - [`Action`] is one decision for one env. [`legal`] checks it against the host, [`apply`]
//!   executes it. [`HEADS`] is the static table of the heads: [`Action::choices`] converts an
//!   action into one choice per head, and [`Action::from_choices`] converts them back.
//! - [`Controller`] is the interface of all controllers: [`NoController`] never grows a module,
//!   [`Heuristic`] follows written rules, [`RandomController`] draws legal actions at random,
//!   [`Script`] follows a file, and [`EnvControllers`] have one of these for each env. A controller
//!   sees an env only as an [`EnvView`]; equal histories give equal actions.
//! - A policy uses [`write_observation`] and [`Normalizer`] to turn a view into numbers, and
//!   [`sample_action`] to turn logits into a legal action. [`Ppo`] draws on its device, with
//!   [`meristem_nn::kernels::sample`]. [`RewardState`] and [`advantages`] compute rewards and
//!   advantages.
//! - [`LossMonitor`] detects an env whose training has failed.
//!
//! ```
//! use std::sync::Arc;
//! use meristem_control::{Action, ActionOp, apply, legal, legal_ops};
//! use meristem_grow::{AlphaTarget, BlueprintSet, Host, TaskShape, Rules, Stage, Style, Tempo};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let image = TaskShape { channels: 1, height: 28, width: 28, classes: 10 };
//! let spec: meristem_grow::HostSpec = "minimal".parse()?;
//! let blueprints = Arc::new(BlueprintSet::standard());
//! let mut host = Host::new(spec.clone(), image, spec.slots(), blueprints, Rules::default())?;
//!
//! let (style, tempo, alpha_target) = (Style::LinearAdd, Tempo::Fast, AlphaTarget::Full);
//! let plant = Action::Germinate { slot: 0, blueprint: 0, style, tempo, alpha_target };
//! apply(&plant, &mut host, &[], None)?;
//! assert_eq!(host.slots()[0].stage, Stage::Germinated);
//! assert!(legal(&plant, &host).is_err(), "the slot is taken");
//! assert!(legal_ops(&host)[ActionOp::Advance.index()]);
//! # Ok(())
//! # }
//! ```
//!
//! `docs/control.md` has the rules and tables.
//!
//! # Modules, the most used ones first
//! - `action`, `heads`, `masks`, `rules`: actions, their choices and their legality;
//! - `view`, `history`, `trend`: an env as a controller sees it;
//! - `controller`, `heuristic` (with `heuristic_config`, `widening`), `random`, `script`,
//!   `per_env`: controllers without a policy;
//! - `observation`, `set_observation`, `layer_observation`, `normalizer`, `sampling`, `reward`,
//!   `gae`: numbers in and out of a policy;
//! - [`policy`], `ppo`, `report`, `state`: the policy, how it learns, and its memory;
//! - `governor`: rules that detect failed training.

#![forbid(unsafe_code)]

mod action;
mod budget;
mod controller;
mod error;
mod gae;
mod governor;
mod heads;
mod heuristic;
mod heuristic_config;
mod history;
mod layer_observation;
mod masks;
mod normalizer;
mod observation;
mod per_env;
pub mod policy;
mod ppo;
mod random;
mod report;
mod reward;
mod rules;
mod sampling;
mod script;
mod set_observation;
mod state;
mod trend;
mod view;
mod widening;

pub use action::{Action, ActionOp, Choices, OpCounts, counted_ops};
pub use controller::{Controller, NoController};
pub use error::{Error, Result};
pub use gae::{Discounts, Trajectories, advantages};
pub use governor::{GovernorConfig, LossMonitor, TrainingFailure};
pub use heads::{ActionHead, Floors, HEADS, HeadKind, HeadSize};
pub use heuristic::Heuristic;
pub use heuristic_config::{
    HeuristicConfig, KeepRule, NoTrigger, WidenPlace, WidenTrigger, WidthScore,
};
pub use history::{LastTwo, SlotHistories, SlotHistory};
pub use masks::{HEAD_COUNT, HeadLayout, Legality};
pub use meristem_grow::LifecycleError as Illegal;
pub use normalizer::{CLIP, Moments, Normalizer};
pub use observation::{
    BaseObservation, RECENT_STEPS, SlotObservation, observation_len, write_observation,
};
pub use per_env::{EnvController, EnvControllers};
pub use ppo::{
    Learning, PolicyDomain, PolicyOutputs, Ppo, PpoConfig, PpoGroup, PpoOptions, TeacherRules,
    policy_domain, policy_is_of_sets, policy_observes_layers, policy_seeds, policy_width,
};
pub use random::RandomController;
pub use report::RoundReport;
pub use reward::{ActionContext, RewardConfig, RewardMode, RewardState, RewardTerms};
pub use rules::{ActionOutcome, apply, legal, legal_blueprints, legal_ops, legal_slots};
pub use sampling::{
    MASKED_LOGIT, SampledAction, SamplingMode, normalized_entropy, probabilities, sample_action,
};
pub use script::{Script, parse_action};
pub use state::ControllerState;
pub use view::{EnvFacts, EnvView, WidthScores};

//! Control: actions on a growing host, and the controllers that choose them.
//!
//! [`Action`] is a controller's answer per step and env; [`legal`] says whether it is allowed and
//! [`apply`] executes it. [`HEADS`] is the static table that turns an action into one choice per
//! head and back (H2). [`Controller`] is the interface: [`NoController`] never grows anything,
//! [`Heuristic`] follows written rules, [`RandomController`] draws among the legal actions,
//! [`Script`] follows a file. A controller sees an [`EnvView`] and nothing else, and gives the same
//! answers to the same history.
//!
//! For a policy: [`write_observation`] and [`Normalizer`] turn a view into numbers; [`draw`] turns
//! logits into a legal action (a [`Ppo`] draws on its device, by [`meristem_nn::kernels::sample`]);
//! [`RewardState`] and [`advantages`] compute its reward and advantage. [`Vitals`] detects an env
//! whose training has failed.
//!
//! The rules and tables are those of `docs/control.md`.

#![forbid(unsafe_code)]

mod action;
mod controller;
mod error;
mod gae;
mod governor;
mod heads;
mod heuristic;
mod history;
mod masks;
mod normalizer;
mod observation;
pub mod policy;
mod ppo;
mod random;
mod report;
mod reward;
mod rules;
mod sampling;
mod script;
mod state;
mod trend;
mod view;

pub use action::{Action, Choices, Op};
pub use controller::{Controller, NoController};
pub use error::{Error, Result};
pub use gae::{Discounts, Trajectories, advantages};
pub use governor::{Failure, GovernorConfig, Vitals};
pub use heads::{Floors, HEADS, Head, HeadKind, HeadSize};
pub use heuristic::{Heuristic, HeuristicConfig};
pub use history::{History, SlotHistory, Tracked};
pub use masks::{HEAD_COUNT, HeadLayout, Legality};
pub use meristem_grow::LifecycleError as Illegal;
pub use normalizer::{CLIP, Moments, Normalizer};
pub use observation::{
    BaseObservation, RECENT_STEPS, SlotObservation, observation_len, write_observation,
};
pub use ppo::{
    Decided, Learning, PolicyDomain, Ppo, PpoConfig, PpoGroup, PpoOptions, policy_domain,
    policy_seeds, policy_width,
};
pub use random::RandomController;
pub use report::RoundReport;
pub use reward::{Deed, RewardConfig, RewardMode, RewardState, RewardTerms};
pub use rules::{Outcome, apply, legal, legal_blueprints, legal_ops, legal_slots};
pub use sampling::{
    Draw, MASKED_LOGIT, Pick, draw, effective_floor, normalized_entropy, probabilities,
};
pub use script::{Script, parse_action};
pub use state::ControllerState;
pub use view::EnvView;

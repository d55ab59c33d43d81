//! Control: what may be done to a growing host, and who decides.
//!
//! [`Action`] is what a controller answers once per step and env; [`legal`] says whether it may be done and
//! [`apply`] does it. [`HEADS`] is the static table that turns an action into one choice per head and back
//! (H2). [`Controller`] is the interface: [`NoController`] never grows anything, [`Heuristic`] follows
//! written rules. A controller sees an [`EnvView`] and nothing else, holds no device state, and answers the
//! same to the same history.
//!
//! The rules and tables come from the project's growth specification, `grow.md`.

#![forbid(unsafe_code)]

mod action;
mod controller;
mod error;
mod heads;
mod heuristic;
mod rules;
mod state;
mod view;

pub use action::{Action, Op};
pub use controller::{Controller, NoController};
pub use error::{Error, Result};
pub use heads::{Choices, HEADS, Head, HeadKind, HeadSize};
pub use heuristic::{Heuristic, HeuristicConfig};
pub use meristem_grow::LifecycleError as Illegal;
pub use rules::{Outcome, apply, legal, legal_ops, legal_slots};
pub use state::ControllerState;
pub use view::EnvView;

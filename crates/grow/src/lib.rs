//! Growth: which host there is, where modules can grow in it, what they are, and what they may do next.
//!
//! Everything here is pure data and arithmetic: no I/O, no device, no threads. A [`Host`] is the thing
//! that grows; [`Host::graph`] turns it into the network that `meristem-nn` compiles, [`Host::alphas`]
//! into the numbers that this network reads from device memory. The two are kept apart on purpose: the
//! graph depends on the topology alone ([`Host::topology_key`]), so a change of alpha is a small copy and
//! never a new plan.
//!
//! Where to look:
//! - [`HostSpec`], [`ImageShape`], [`SlotName`]: hosts and the places in them;
//! - [`Blueprint`], [`Layer`], [`Join`], [`BlueprintSet`]: what can grow, as data;
//! - [`Stage`], [`Slot`], [`Module`], [`Rules`]: the lifecycle and its typed refusals;
//! - [`AlphaController`], [`Curve`], [`Style`]: how a module is blended in;
//! - [`Gates`], [`GateReport`], [`GradientHealth`]: when it may go on;
//! - [`Counterfactual`]: what to evaluate to learn what each module is worth;
//! - [`Topology`]: the host as JSON, for the metadata of a weights file.
//!
//! The formulas and tables are listed in `docs/growth.md`.

#![forbid(unsafe_code)]

mod alpha;
mod blueprint;
mod build;
mod counterfactual;
mod error;
mod gates;
mod health;
mod host;
mod rules;
mod slot;
mod slot_name;
mod spec;
mod stage;
mod suggest;
mod topology;

pub use alpha::{AlphaController, AlphaMode, AlphaTarget, Curve, Speed, Style, Tempo};
pub use blueprint::{Blueprint, BlueprintSet, Channels, Join, Layer, group_norm_groups};
pub use build::{HOST_SGD, MODULE_SGD, SlotClass, TopologyKey, host_graph};
pub use counterfactual::{Configuration, Counterfactual, Interaction, PERMUTATIONS, Scope};
pub use error::{
    AlphaError, BlueprintError, Error, HostError, LifecycleError, Result, TopologyError,
};
pub use gates::{Comparison, Condition, Gate, GateInputs, GateReport, Gates};
pub use health::GradientHealth;
pub use host::{Advance, Germination, Host, ParameterCounts, Retarget};
pub use rules::Rules;
pub use slot::{Module, Slot, StageChange};
pub use slot_name::{Region, SlotName};
pub use spec::{HostSpec, ImageShape, PRESETS};
pub use stage::Stage;
pub use suggest::nearest;
pub use topology::{TOPOLOGY_VERSION, Topology, TopologyModule, TopologySlot};

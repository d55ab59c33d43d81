//! Growth: hosts, the slots where modules can grow, the modules, and their lifecycle.
//!
//! Everything here is pure data and arithmetic: no I/O, no device, no threads. A [`Host`] holds the
//! state of growth; [`Host::graph`] turns it into the network that `meristem-nn` compiles,
//! [`Host::alphas`] into the numbers that this network reads from device memory. The two are
//! separate on purpose: the graph depends on the topology alone ([`Host::topology_key`]), so a
//! change of alpha is a small copy and never a new plan.
//!
//! Contents:
//! - [`HostSpec`], [`ImageShape`], [`SlotName`]: hosts and their slots;
//! - [`Blueprint`], [`Layer`], [`Join`], [`BlueprintSet`]: modules that can grow, as data;
//! - [`Stage`], [`Slot`], [`Module`], [`Rules`]: the lifecycle and its typed refusals;
//! - [`AlphaController`], [`Curve`], [`Style`]: how a module is blended in;
//! - [`Gates`], [`GateReport`], [`GradientHealth`]: conditions for the next stage;
//! - [`Counterfactual`]: configurations to evaluate for each module's contribution;
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

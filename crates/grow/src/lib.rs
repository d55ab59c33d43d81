//! Growth: hosts, the slots where modules can grow, the modules, and their lifecycle.
//!
//! The crate is pure data and arithmetic: no I/O, no device, no threads. A [`Host`] holds the state
//! of growth. [`Host::graph`] is the network, which `meristem-nn` compiles; [`Host::alphas`] are
//! numbers that the network reads from device memory. During an episode the graph changes only with
//! the topology ([`Host::topology_key`]), so a change of alpha is a small copy and never needs a
//! new plan.
//!
//! ```
//! use std::sync::Arc;
//! use meristem_grow::{AlphaTarget, BlueprintSet, GateInputs, Germination, Style, Tempo};
//! use meristem_grow::{Host, HostSpec, TaskShape, Optimisers, Rules};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let spec: HostSpec = "cnn:channels=8,blocks=3,kernel=3,pools=3".parse()?;
//! let image = TaskShape { channels: 3, height: 32, width: 32, classes: 10 };
//! let blueprints = Arc::new(BlueprintSet::standard());
//! let light = blueprints.find("conv_light")?;
//! let mut host = Host::new(spec.clone(), image, spec.slots(), blueprints, Rules::default())?;
//! let bare = host.topology_key();
//!
//! let (style, tempo, alpha_target) = (Style::LinearAdd, Tempo::Fast, AlphaTarget::Full);
//! let plan = Germination { blueprint: light, style, tempo, alpha_target, score_pp: None };
//! host.germinate(0, plan)?;
//! assert_eq!(host.topology_key(), bare, "a germinated module takes no part yet");
//! assert!(host.advance(0, &GateInputs::default())?.report.passed);
//! assert_eq!((host.parameters()?.host, host.parameters()?.grown()), (6_418, 592));
//! let graph = host.graph(&Optimisers::default())?; // what `meristem-nn` compiles
//! # let _ = graph;
//! # Ok(())
//! # }
//! ```
//!
//! # Source modules, from bottom to top
//! - `spec`: hosts as lists of layers ([`HostSpec`], [`HostLayer`], [`SlotName`]), families of
//!   hosts (such as [`Cnn`]), and the shape of images and classes ([`TaskShape`]);
//! - `blueprint`, `blueprint_set`: modules that can grow, as data ([`Blueprint`],
//!   [`BlueprintLayer`], [`Join`], [`BlueprintSet`]);
//! - `lifecycle`: stages, alpha, gates and rules of a module in its slot ([`Stage`], [`Slot`],
//!   [`Module`], [`AlphaController`], [`Gates`], [`GradientHealth`], [`Rules`]), and its errors;
//! - `graph`: the network of a host with its modules ([`TopologyKey`], [`ParameterCounts`]);
//! - `host`: a host with its slots, and the actions on them ([`Host`]);
//! - `counterfactual`: configurations that measure each module's contribution ([`Counterfactual`]);
//! - `topology`: the host as JSON, for the metadata of a weights file ([`Topology`]).
//!
//! Several of these modules use `optimisers`, `suggest`, `json` and `error`.
//!
//! `docs/growth.md` lists the formulas and tables.

#![forbid(unsafe_code)]

mod blueprint;
mod blueprint_set;
mod counterfactual;
mod error;
mod graph;
mod host;
mod json;
mod lifecycle;
mod optimisers;
mod spec;
mod suggest;
mod topology;

pub use blueprint::{Blueprint, BlueprintError, BlueprintLayer, Channels, Join, group_norm_groups};
pub use blueprint_set::BlueprintSet;
pub use counterfactual::{
    Configuration, Contribution, Counterfactual, Interaction, ModuleScope, PERMUTATIONS,
};
pub use error::{Error, Result, TopologyError};
pub use graph::{NetworkSize, ParameterCounts, SlotClass, TopologyKey, host_graph};
pub use host::{GateOutcome, Host, MEASURED_WEIGHTS_MAX, Retarget, WidthChange};
pub use json::parse_json;
pub use lifecycle::{
    AlphaController, AlphaError, AlphaMode, AlphaTarget, Birth, Comparison, Condition, Curve, Gate,
    GateInputs, GateReport, Gates, Germination, GradientHealth, LifecycleError, Module, RuleError,
    Rules, Slot, Speed, Stage, StageChange, Style, Tempo,
};
pub use optimisers::Optimisers;
pub use spec::{
    BranchJoin, Cnn, DESCRIPTION_BYTES_MAX, DropRate, Features, HostError, HostLayer, HostSpec,
    HostSummary, LayerSummary, PRESETS, Padding, PerAxis, READY_MADE, SizedLayer, Slope, SlotName,
    TaskShape, WidenableLayer,
};
pub use suggest::nearest;
pub use topology::{TOPOLOGY_VERSION, Topology, TopologyModule, TopologySlot, host_json};

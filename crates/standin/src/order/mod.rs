//! Streams as queues, graphs, and the machine that runs them when the host has to see a result.

mod graph;
mod links;
mod machine;
mod point;
mod stream;
mod work;

pub(crate) use graph::{BuiltExec, BuiltGraph, GraphNode, GraphPlan};
pub(crate) use links::{
    ExchangeWork, LinkMessage, Links, fails, hangs, mortal, open_group, rest, stalls, vanishes,
};
pub(crate) use machine::{LoadedFunction, SimMachine};
pub(crate) use point::StreamPoint;
pub(crate) use stream::{SimEvent, SimStream};
pub(crate) use work::{CopySource, CopyTarget, CopyWork, DeviceWork, FillWork};

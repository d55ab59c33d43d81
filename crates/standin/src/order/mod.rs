//! Streams as queues, graphs, and the machine that runs them when the host has to see a result.

mod graph;
mod links;
mod machine;
mod point;
mod stream;
mod work;

pub(crate) use graph::{Exec, Graph, Node, Plan};
pub(crate) use links::{
    Exchange, Links, Message, fails, hangs, mortal, open_group, rest, stalls, vanishes,
};
pub(crate) use machine::{Function, Machine};
pub(crate) use point::Point;
pub(crate) use stream::{Event, Stream};
pub(crate) use work::{Copy, Fill, From, To, Work};

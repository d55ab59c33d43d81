//! The processes of a run and their collectives.
//!
//! - `world`: number of processes, division of the envs, collectives;
//! - `meeting`: the protocol of a meeting, independent of the transport;
//! - `link`: the transport of its bytes;
//! - `message`: values and errors as bytes;
//! - `model`: a model check of the protocol over thousands of schedules, in tests.

mod link;
mod meeting;
mod message;
#[cfg(test)]
mod model;
mod world;

pub(crate) use self::world::World;

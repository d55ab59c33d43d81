//! The processes of a run, and how they meet.
//!
//! - `world`: how many there are, which envs each has, and the collectives by which they talk;
//! - `meeting`: the protocol of a meeting, whatever carries the bytes;
//! - `link`: the transport of these bytes;
//! - `message`: values and errors as bytes;
//! - `model`: the protocol on thousands of schedules, in tests.

mod link;
mod meeting;
mod message;
#[cfg(test)]
mod model;
mod world;

pub(crate) use self::world::World;

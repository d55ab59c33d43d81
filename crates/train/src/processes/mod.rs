//! The processes of a run, and how they meet.
//!
//! - `world`: how many there are, which envs each has, and the collectives by which they talk;
//! - `meeting`: the protocol of a meeting, whatever carries the bytes;
//! - `link`: what carries them;
//! - `message`: what they say.

mod link;
mod meeting;
mod message;
mod world;

pub(crate) use self::world::World;

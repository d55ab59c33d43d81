//! The processes of a run.

pub(crate) mod world;

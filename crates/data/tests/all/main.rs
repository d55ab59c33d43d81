//! Tests of the public interface, in one program: each links everything that it uses.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

#[cfg(feature = "parquet")]
mod column_files;
mod common;
#[cfg(feature = "cuda")]
mod cuda;
mod gather;
mod images;
mod inputs;
mod order;
mod parts;
mod refusals;
mod ring;
mod sources;
mod stored_types;
mod tables;
mod target_batches;
mod targets;

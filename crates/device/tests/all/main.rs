//! Tests of the public interface, in one program: each links everything that it uses.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod common;
#[cfg(feature = "cuda")]
mod cuda;
mod environment;
mod expect;
mod failures;
mod group;
mod memory;
mod parts;
mod scopes;
mod scratch;
mod streams;
mod stress;
mod trace;
mod transfers;

//! Tests of the public interface, in one program: each links everything that it uses.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod data_parallel;
mod governor;
mod hot_scope;
mod own_loss;
mod study;

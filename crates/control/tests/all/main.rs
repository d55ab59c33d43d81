//! Tests of the public interface, in one program, which links once.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod acting;
mod actions;
mod common;
mod controllers;
mod golden_ppo;
mod governor;
mod heuristic;
mod learning;
mod learns;
mod observation;
mod policy;
mod ppo;
mod ranks;
mod sampling;
mod set_policy;
mod set_widen;

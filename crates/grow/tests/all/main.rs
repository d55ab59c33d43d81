//! Tests of the public interface, in one program, which links once.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod alpha;
mod blueprints;
mod common;
mod counterfactual;
mod descriptions;
mod golden_blueprints;
mod golden_hosts;
mod hosts;
mod identity;
mod joint;
mod lifecycle;
mod random_hosts;
mod topology;
mod width;

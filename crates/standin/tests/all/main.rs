//! Tests of the stand-in with kernels: their execution, and one planted fault of each kind that the
//! stand-in detects.
//!
//! A process has one machine, and a fault is permanent. So each case runs in separate processes,
//! one for each seed, which load code that the parent compiled once.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod faults;
mod graphs;
mod harness;
mod kernels;
mod unified;

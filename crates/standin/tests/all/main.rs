//! The stand-in with kernels: how they run, and each fault that it is there to find, planted once.
//!
//! A machine is a process's own and a fault stays, so each case runs in processes of its own, one
//! for each seed, which load code that the parent compiled once.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod faults;
mod graphs;
mod harness;
mod kernels;

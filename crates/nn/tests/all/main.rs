//! Tests of the public interface, in one program, because every test program links all dependencies
//! again.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod activations;
mod bad_input;
mod branches;
mod common;
mod conformance;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_mma;
#[cfg(feature = "cuda")]
mod cuda_policy;
#[cfg(feature = "cuda")]
mod cuda_precision;
mod dropout;
mod expect;
mod fleet;
mod fusion;
mod golden_hosts;
mod golden_layers;
mod golden_losses;
mod golden_optimisers;
mod golden_recurrent;
mod gradients;
mod losses;
mod network;
mod own_loop;
mod replicas;
mod rows;
mod snapshot;
mod statistics;
mod step_factors;
mod variance_transfer;
mod widen;
mod width_probes;

//! Conformance of the kernels: every instruction set of this machine against slow, obvious f64
//! versions.
//!
//! Tolerances are derived, see [`support::Exact`]: a sum of K products in f32, in any order and
//! with or without fused rounding, differs from the exact one by at most `(K + 1)·2⁻²⁴·Σ|terms|` to
//! first order.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod activation;
mod conv;
mod element_loss;
mod exact_functions;
mod functions;
mod layer_norm;
mod loss_optim;
mod norm;
mod pool;
mod ppo;
mod rows;
mod sample;
mod support;
mod winograd;

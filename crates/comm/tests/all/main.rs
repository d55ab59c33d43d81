//! Tests of the public interface, in one program, which links once.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod arguments;
mod common;
#[cfg(feature = "cuda")]
mod cuda;
mod dense;
mod devices;
mod exchange;
mod exchange_state;
mod failures;
mod instruction_sets;
mod int8;
mod ok_topk;
mod outer;
mod processes;
mod sparse;
mod topk;

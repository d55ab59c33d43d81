#![no_main]
//! Checkpoints.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| meristem_train::fuzz::checkpoint(bytes));

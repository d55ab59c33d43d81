#![no_main]
//! Descriptions of hosts, TOML and JSON.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| meristem_train::fuzz::hosts(bytes));

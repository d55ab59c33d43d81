#![no_main]
//! Files of blueprints, TOML and JSON.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| meristem_train::fuzz::blueprints(bytes));

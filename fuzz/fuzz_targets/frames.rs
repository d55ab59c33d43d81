#![no_main]
//! Messages between a rank and the hub.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| meristem_comm::fuzz::frames(bytes));

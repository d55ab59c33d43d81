#![no_main]
//! Lines of events.

use meristem_train::reading::{EventTail, RunHistory};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let path = meristem_fuzz::file("events.jsonl", bytes);
    let _ = RunHistory::read(&mut EventTail::new(&path).with_batches());
});

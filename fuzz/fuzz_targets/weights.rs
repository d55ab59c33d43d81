#![no_main]
//! Weights files.

use std::path::Path;

use meristem_nn::safetensors;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok((mut state, _)) = safetensors::from_bytes(Path::new("weights"), bytes) else { return };
    state.unwrap_names();
    assert!(state.iter().all(|(_, tensor)| tensor.is_whole()));
});

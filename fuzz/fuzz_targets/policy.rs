#![no_main]
//! Metadata of policy files.

use std::path::Path;

use meristem_control::{policy_domain, policy_is_of_sets, policy_seeds, policy_width};
use meristem_nn::safetensors;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok((_, metadata)) = safetensors::from_bytes(Path::new("policy"), bytes) else { return };
    let _ = (policy_width(&metadata), policy_domain(&metadata), policy_seeds(&metadata));
    let _ = policy_is_of_sets(&metadata);
});

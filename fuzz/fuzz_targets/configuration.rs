#![no_main]
//! Configuration files, TOML and JSON.

use meristem_train::TrainConfig;
use meristem_train::config::ConfigLayer;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for name in ["config.toml", "config.json"] {
        let path = meristem_fuzz::file(name, bytes);
        let Ok(layer) = meristem_train::config_file::read(&path) else { continue };
        let _ = TrainConfig::resolve(layer, ConfigLayer::default());
    }
});

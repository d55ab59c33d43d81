//! Meristem train.
#![forbid(unsafe_code)]
pub mod config;
pub mod config_file;
pub mod error;
pub mod event_writer;
pub mod events;
pub mod preset;
pub mod run_folder;
pub mod settings;

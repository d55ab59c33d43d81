//! Tests of the command line, in one program, because each test program links all crates.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod bad_input;
mod bench;
mod blueprints;
mod built_in_policies;
mod check;
mod common;
mod control_eval;
#[cfg(feature = "cuda")]
mod cuda;
mod data;
mod devices;
mod dropout;
mod ensembles;
mod every_command;
mod exports;
mod extend;
mod growth_bench;
mod host;
mod inputs;
mod interrupt;
mod learning;
#[cfg(unix)]
mod member_data;
mod member_growth;
mod members;
mod named_files;
#[cfg(target_os = "linux")]
mod odd_paths;
mod older_runs;
mod optimizers;
mod parts;
mod places;
mod policy_training;
mod resume;
mod resume_inputs;
mod run_folders;
mod runs;
mod study_inputs;
mod sweep_reports;
#[cfg(unix)]
mod sweeps;
mod tables;
mod tasks;
mod terminals;
mod trace;
mod train;
mod twin;
mod watched_training;
mod weights;
mod width;

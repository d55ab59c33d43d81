//! Training: from a configuration to a run folder with events, weights and a summary.
//!
//! The rooms, in the order in which a run passes through them:
//! - [`config`], `preset`, [`config_file`], [`settings`]: what can be set, and how preset, file and flags combine (U3);
//! - `setup`: names become objects; what can be refused without training is refused;
//! - [`run_folder`], [`event_writer`], [`events`], `observer`: where it is told what happens (U4);
//! - `fleet`: devices, streams, resident data, gathers; `env`: one host with its network;
//! - `replicas`: one host on several ranks;
//! - `episode`: steps of training, measuring and acting; `growth`: what happens to slots; `evaluate`: control and
//!   test split; `counterfactuals`: what modules are worth; `governor`: what becomes of an env that fails;
//!   `telemetry`: what of a step is only told; `permitted`: what the hot path may do;
//! - `output`: the one rule for files that a user names; [`trace`]: what happened when, in a file for a viewer (H8);
//! - [`study`]: controllers compared on the same hosts, with [`statistics`] of what they reach;
//! - `world`: the processes of a run, and how they come together; `ranks`: over what a policy learns;
//! - `run`: all rounds; `place`: where it is written; `resume`: how it goes on; [`summary`]: what is left of them; `weights`, [`eval`]: networks from and to files (U5).
//!
//! ```no_run
//! use meristem_train::config::{Layer, TrainConfig};
//! use meristem_train::settings::Preset;
//!
//! # fn main() -> meristem_train::Result<()> {
//! let quick = Layer { preset: Some(Preset::Quick), ..Layer::default() };
//! let config = TrainConfig::resolve(Layer::default(), quick)?;
//! let summary = meristem_train::run(&config, &mut meristem_train::Silent)?;
//! println!("{:.1} % of the test images", 100.0 * summary.envs[0].test_accuracy);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod checkpoint;
pub mod config;
pub mod config_file;
mod controller_kind;
mod controllers;
mod counterfactuals;
mod devices;
mod env;
mod episode;
mod error;
pub mod eval;
mod evaluate;
pub mod event_writer;
pub mod events;
mod fleet;
mod governor;
mod growth;
mod keeper;
mod observer;
mod output;
mod permitted;
mod place;
mod policy_file;
mod preset;
mod ranks;
mod replicas;
mod resume;
mod run;
pub mod run_folder;
pub mod settings;
mod setup;
pub mod statistics;
pub mod study;
pub mod summary;
mod telemetry;
pub mod trace;
mod weights;
mod world;

pub use config::TrainConfig;
pub use error::{Error, Result};
pub use events::Event;
pub use observer::{Observer, Silent};
pub use output::check_output;
pub use resume::{ResumeOptions, resume, resume_with};
pub use run::{run, run_with};
pub use setup::dataset_spec;
pub use study::{StudyConfig, compare};
pub use summary::Summary;

//! Training: from a configuration to a run folder with events, weights and a summary.
//!
//! Modules in order of dependency: a module imports only modules above it in this list. `cargo
//! xtask tidy` checks that imports form no circle.
//!
//! | module | contents |
//! |---|---|
//! | `error` | the errors of this crate, their remedies and exit codes |
//! | `position` | the position of a step in a run |
//! | `input_file` | checksums of the files that settings name |
//! | [`statistics`] | means, intervals and paired differences of a few measurements |
//! | `hosts` | hosts from files |
//! | [`config`] | the table of settings; how preset, file and flags combine |
//! | `sweep` | members that end early or copy each other |
//! | [`external`] | blueprints, controllers, searchers and losses that a program passes to a run |
//! | `record` | files of a run: [`events`], [`summary`], [`trace`], [`run_folder`]; [`reading`] |
//! | `task` | the task of a run: its loss and score |
//! | `own_loss` | the program's loss: its batches, sums and cost |
//! | `processes` | the processes of a run and their collectives |
//! | `setup` | hosts, weights and controllers from their settings; checks before training |
//! | `resources` | devices, streams, resident data, gathers; replicas of one host |
//! | `env` | one host with its network and measurements |
//! | `checkpoint` | the state that the next step depends on, in one file |
//! | `step` | one step: train, measure, judge, decide, grow |
//! | `run` | a run: prepare, episodes of steps, resume, close |
//! | [`session`] | a run whose steps and actions the program controls |
//! | [`learners`] | networks that the program trains with its own loop, without a dataset |
//! | [`study`] | comparison of controllers on the same hosts |
//! | [`policy_training`] | training of a policy on many cheap tasks |
//! | [`growth_bench`] | methods of growth on several tasks, with a tuned learning rate for each |
//! | `verify` | files of runs against their checksums |
//! | [`eval`] | evaluation of a weights file, or of the networks of a run as an ensemble |
//! | [`export`] | a weights file as an ONNX model |
//!
//! ```
//! use meristem_train::config::{ConfigLayer, TrainConfig};
//! use meristem_train::settings::{BatchLimit, Preset};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let settings = ConfigLayer {
//!     preset: Some(Preset::Quick),
//!     steps: Some(2),
//!     max_batches: Some(BatchLimit::Count(4)),
//! #   run_dir: Some(Some(folder.path().join("run"))),
//!     ..ConfigLayer::default()
//! };
//! let config = TrainConfig::resolve(ConfigLayer::default(), settings)?;
//! let summary = meristem_train::run(&config, &mut meristem_train::Silent)?;
//! for env in &summary.envs {
//!     println!("{:?} with {} parameters", env.test_score, env.parameters);
//! }
//! assert!(summary.run_dir.join("events.jsonl").exists());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod checkpoint;
pub mod config;
mod env;
mod error;
pub mod eval;
pub mod export;
pub mod external;
pub mod growth_bench;
mod hosts;
mod input_file;
pub mod learners;
mod own_loss;
pub mod policy_training;
mod position;
mod processes;
mod record;
mod resources;
mod run;
pub mod session;
mod setup;
pub mod statistics;
mod step;
pub mod study;
mod sweep;
mod task;
mod verify;

/// Parsers of bytes from files, for `fuzz/`.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzz {
    use std::path::Path;

    use meristem_grow::{BlueprintSet, HostSpec, TaskShape};
    use meristem_nn::graph::Dims;

    use crate::checkpoint::Checkpoint;
    use crate::setup::blueprints;

    /// Reads a checkpoint.
    pub fn checkpoint(bytes: &[u8]) {
        let _ = Checkpoint::from_bytes("checkpoint".as_ref(), bytes);
        let _ = crate::learners::parse_state("learners".as_ref(), bytes);
    }

    /// Reads a description of a host, and builds a valid one for images of some sizes.
    pub fn hosts(bytes: &[u8]) {
        let Ok(text) = str::from_utf8(bytes) else { return };
        for host in [HostSpec::from_toml(text, "own"), HostSpec::from_json(text, "own")] {
            let Ok(host) = host else { continue };
            for [channels, height, width] in [[1, 1, 1], [3, 32, 32], [5, 7, 1]] {
                let image = TaskShape { channels, height, width, classes: 4 };
                let _ = host.summary(&image);
            }
            assert_eq!(host.description().parse::<HostSpec>().ok(), Some(host));
        }
    }

    /// Reads a file of blueprints, and builds the valid ones in slots of some widths.
    pub fn blueprints(bytes: &[u8]) {
        for path in ["own.toml", "own.json"].map(Path::new) {
            let parsed = blueprints::parse(path, bytes);
            let set = parsed.and_then(|all| blueprints::add(BlueprintSet::empty(), path, all));
            for blueprint in set.iter().flat_map(BlueprintSet::iter) {
                for channels in [1, 3, 24] {
                    let _ = blueprint.parameters(Dims { c: channels, h: 4, w: 4 });
                }
            }
        }
    }
}

pub use config::{TrainConfig, file as config_file, types as settings};
pub use error::{Error, Result};
pub use hosts::read_host;
pub use record::events::Event;
pub use record::observer::{HostMemoryReason, Notice, Observer, Silent};
pub use record::output::check_output;
pub use record::score_keys::name_scores;
pub use record::{events, reading, run_folder, summary, tensorboard, trace};
pub use run::{replay, resume, resume_with, run, run_with};
pub use setup::{dataset_spec, with_policy};
pub use study::{StudyConfig, compare};
pub use summary::Summary;
pub use sweep::{EndReason, losers};
pub use task::check_task;
pub use verify::{FileState, VerifiedFile, verify};

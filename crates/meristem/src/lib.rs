//! Meristem: fleets of small neural networks that grow while they train.
//!
//! This crate re-exports all crates of Meristem under one name. The programs in `examples/` use
//! only this crate.
//!
//! - [`device`]: devices, streams, tensors;
//! - [`data`]: datasets, the resident copy, gathered batches;
//! - [`comm`]: sums over ranks, dense and sparse;
//! - [`nn`]: networks as data, compiled into plans, trained on a stream;
//! - [`grow`]: hosts, blueprints, the lifecycle of a module;
//! - [`control`]: controllers, which decide what grows;
//! - [`export`]: ONNX models and event files of TensorBoard, as bytes;
//! - [`train`]: whole runs, from a configuration to a folder.
//!
//! ```
//! use meristem::grow::{HostSpec, TaskShape};
//! use meristem::train::config::{ConfigLayer, TrainConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = TrainConfig::resolve(ConfigLayer::default(), ConfigLayer::default())?;
//! let host: HostSpec = config.host.parse()?;
//! // The images and classes of the dataset that comes with the program.
//! let embedded = TaskShape { channels: 1, height: 28, width: 28, classes: 10 };
//! assert_eq!(host.parameters(&embedded)?, 496);
//! # Ok(())
//! # }
//! ```
//!
//! The program `meristem` trains, resumes and evaluates runs from the command line.
#![forbid(unsafe_code)]

/// The program in the README of the repository.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use meristem_comm as comm;
pub use meristem_control as control;
pub use meristem_data as data;
pub use meristem_device as device;
pub use meristem_export as export;
pub use meristem_grow as grow;
pub use meristem_nn as nn;
pub use meristem_train as train;

//! Meristem: fleets of small neural networks that grow while they train.
//!
//! The facade: everything a program needs, under one name. `examples/` use only this.
//!
//! - [`device`]: devices, streams, tensors;
//! - [`data`]: datasets, the resident copy, gathered batches;
//! - [`comm`]: sums over ranks, dense and sparse;
//! - [`nn`]: networks as data, compiled into plans, trained on a stream;
//! - [`grow`]: hosts, blueprints, the lifecycle of a module;
//! - [`control`]: who decides what grows;
//! - [`train`]: a whole run, from a configuration to a folder.
//!
//! The program `meristem` is the same things from the command line.
#![forbid(unsafe_code)]

pub use meristem_comm as comm;
pub use meristem_control as control;
pub use meristem_data as data;
pub use meristem_device as device;
pub use meristem_grow as grow;
pub use meristem_nn as nn;
pub use meristem_train as train;

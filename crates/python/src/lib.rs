//! The extension module of the Python package `meristem`, `meristem._meristem`.
//!
//! It has what needs the engine; `python/meristem` has the classes that a user sees, their types
//! and their documentation, and calls it. Modules, from the ones that everything uses on:
//!
//! | module | contents |
//! |---|---|
//! | `errors` | errors of the engine as exceptions of one tree |
//! | `calls` | calls of the engine: without the GIL, without panics, in one process |
//! | `settings` | settings from Python values |
//! | `json` | values as Python objects |
//! | `dlpack` | memory that is lent to other libraries' arrays; the only unsafe code |
//! | `runs` | `train`, `resume`, and what a run folder has |
//! | `columns` | events of a run as columns |
//! | `weights` | contents of weights files |
//! | `data` | datasets and gathered batches |
//! | `comm` | collectives of a program's own |
//! | `env` | envs as a controller sees them, and actions, as Python values |
//! | `controller` | a Python function as a controller |
//! | `fleet` | a run that Python steps |
#![deny(unsafe_code)]

mod calls;
mod columns;
mod comm;
mod controller;
mod data;
mod dlpack;
mod env;
mod errors;
mod fleet;
mod json;
mod runs;
mod settings;
mod weights;

use pyo3::prelude::*;

/// The module that Python loads.
#[pymodule]
mod _meristem {
    #[pymodule_export]
    use super::comm::{Membership, TopK};
    #[pymodule_export]
    use super::data::{Gather, Resident, clear_cache};
    #[pymodule_export]
    use super::dlpack::Array;
    #[pymodule_export]
    use super::fleet::Stepped;
    #[pymodule_export]
    use super::runs::{read_events, read_run, resume, train, verify};

    #[pymodule_export]
    use super::weights::{decode_weights, encode_weights, host_json};

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}

//! The extension module of the Python package `meristem`, `meristem._meristem`.
//!
//! This module has the functions that need the engine. `python/meristem` has the public classes
//! with types and documentation, and calls this module. Rust modules:
//!
//! | module | contents |
//! |---|---|
//! | `errors` | errors of the engine as exceptions of one tree |
//! | `calls` | calls to the engine: GIL, panics, forked processes |
//! | `settings` | settings from Python values |
//! | `json` | values as Python objects |
//! | `dlpack` | memory shared with other libraries' arrays; the only unsafe code |
//! | `runs` | `train`, `resume`, and reading of run folders |
//! | `growth` | the benchmark of growth |
//! | `policy` | training of a policy |
//! | `columns` | events of a run as columns |
//! | `weights` | contents of weights files |
//! | `hosts` | hosts without weights |
//! | `data` | datasets and gathered batches |
//! | `comm` | collectives for Python programs |
//! | `exchange` | all-reduce with eight bits, and outer steps of local training |
//! | `env` | conversion of env views and actions |
//! | `controller` | a Python function as a controller |
//! | `searcher` | a Python object as the searcher of a run |
//! | `loss` | a Python function as the loss of a run |
//! | `fleet` | a run that the Python program steps |
//! | `learners` | networks that the Python program trains with its own loop |
#![deny(unsafe_code)]

mod calls;
mod columns;
mod comm;
mod controller;
mod data;
mod dlpack;
mod env;
mod errors;
mod exchange;
mod fleet;
mod growth;
mod hosts;
mod json;
mod learners;
mod loss;
mod policy;
mod runs;
mod searcher;
mod settings;
mod weights;

use pyo3::prelude::*;

/// The module that Python loads.
#[pymodule]
mod _meristem {
    #[pymodule_export]
    use super::comm::{Membership, TopK};
    #[pymodule_export]
    use super::data::{Gather, Resident, clear_cache, user_cache};
    #[pymodule_export]
    use super::dlpack::Array;
    #[pymodule_export]
    use super::exchange::{Int8, Outer};
    #[pymodule_export]
    use super::fleet::FleetSession;
    #[pymodule_export]
    use super::growth::growth_bench;
    #[pymodule_export]
    use super::hosts::{host_description, host_summary, host_svg, host_text};
    #[pymodule_export]
    use super::learners::LearnerLoop;
    #[pymodule_export]
    use super::policy::train_policy;
    #[pymodule_export]
    use super::runs::{
        ensemble, losers, over_seeds, read_events, read_run, replay, resolved, resume, train,
        verify,
    };
    #[pymodule_export]
    use super::weights::{decode_weights, encode_weights, host_json};

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}

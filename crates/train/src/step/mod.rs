//! One step of the envs of this process.

pub(crate) mod counterfactuals;
pub(crate) mod governor;
pub(crate) mod growth;
pub(crate) mod measure;
pub(crate) mod permitted;
pub(crate) mod telemetry;

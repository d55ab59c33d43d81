//! Record of a run: the folder, the files in it, and the observer.

pub(crate) mod directory;
pub(crate) mod event_writer;
pub mod events;
pub(crate) mod journal;
pub(crate) mod lines;
pub(crate) mod observer;
pub(crate) mod output;
pub(crate) mod part;
pub(crate) mod plain_file;
pub mod reading;
pub(crate) mod recorded;
pub mod run_folder;
pub(crate) mod score_keys;
pub(crate) mod sealed;
pub(crate) mod status;
pub mod summary;
pub mod tensorboard;
pub(crate) mod totals;
pub mod trace;

use serde::Deserialize;

/// Reads null as NaN, which JSON lacks.
pub(crate) fn null_as_nan<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

//! Record of a run: the folder, the files in it, and the observer.

pub mod event_writer;
pub mod events;
pub(crate) mod journal;
pub(crate) mod observer;
pub(crate) mod output;
pub mod run_folder;
pub mod summary;
pub(crate) mod totals;
pub mod trace;

//! Datasets on disk, one resident copy on a device, and gathered batches.
//!
//! The path of a batch: [`DatasetFiles`] finds and checks files; [`cache::load`] decodes a split
//! once and stores it, on a device or in a file of the host ([`Residency`]), NHWC;
//! [`GatherBatches`] selects the samples given by [`order`], augments and normalises them in one
//! pass on each env's own stream. Ids in parentheses, such as (D1), are rows of
//! `docs/requirements.md`.
//!
//! ```
//! use meristem_data::{DatasetSpec, GatherBatches, GatherConfig, Residency, Split, cache};
//! use meristem_device::{Device, DeviceId, DeviceOptions};
//!
//! # fn main() -> meristem_data::Result<()> {
//! let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
//! let data = cache::load(&device, &DatasetSpec::embedded(), Split::Train, Residency::Resident)?;
//! let streams = [device.stream("env 0"), device.stream("env 1")];
//! let defaults = GatherConfig::new(128, vec![DeviceId::Cpu(0); 2]);
//! let config = GatherConfig { drop_last: true, seed: 42, ..defaults };
//! let mut batches = GatherBatches::new(&config, &[data], &streams)?;
//! batches.start_epoch(0)?;
//! while let Some(batch_of_each_env) = batches.next()? {
//!     assert_eq!(batch_of_each_env[1].inputs.dims(), [128, 1, 28, 28]);
//! }
//! # cache::clear(|_| true);
//! # Ok(())
//! # }
//! ```
//!
//! # Modules, in order of dependency
//! - `error`, `named`, [`notes`], [`path_text`]: errors, settings with named values, notes for the
//!   user, paths as text;
//! - `shape`: shapes and element types of samples;
//! - `targets`: classes, labels or numbers of samples;
//! - `source`: files of each kind of dataset, checked and decoded;
//! - `normalization`, `augment`: transformations of a pixel and of an image in the gather;
//! - `dataset`, [`cache`], `spool`: the copy on a device, shared by the process, or streamed;
//! - [`order`]: the order of samples;
//! - [`parts`]: the samples that each env trains on and holds out;
//! - `gather`: batches;
//! - `verify`, `import`: checks of a whole dataset, and conversion.
#![forbid(unsafe_code)]

pub mod cache;
pub mod notes;
pub mod order;
pub mod parts;
pub mod path_text;

mod augment;
mod dataset;
mod error;
mod gather;
mod import;
mod named;
mod normalization;
mod shape;
mod source;
mod spool;
mod targets;
mod verify;

pub use augment::Augment;
pub use dataset::{Dataset, Residency};
pub use error::{Error, Mismatch, Result};
pub use gather::{Batch, EnvGather, GatherBatches, GatherConfig};
pub use import::{ImportReport, import_cifar10};
pub use normalization::Normalization;
pub use parts::Subset;
pub use shape::{InputKind, SampleShape, StoredType, StoredValue};
pub use source::table_rules::{MissingValues, TableOptions, TableRules};
pub use source::{
    CHUNK_BYTES, DatasetFiles, DatasetInfo, DatasetSpec, Generated, OptionNumber, Source, Split,
};
pub use source::{decoded, table_rules as table};
pub use targets::{SampleTargets, TargetKind};
pub use verify::{Damage, SplitReport, VerifyReport, verify};

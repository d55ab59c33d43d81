//! Hosts as data: lists of layers with named slots, the families that generate them, and the shape
//! of images and classes.

mod cnn;
mod error;
mod host_layer;
mod host_spec;
mod host_summary;
mod slot_name;
mod task_shape;

pub use cnn::{Cnn, PRESETS};
pub use error::HostError;
pub use host_layer::{Features, HostLayer, LayerSize};
pub use host_spec::HostSpec;
pub(crate) use host_spec::{HostList, LIST_VERSION, MAX_PARAMETERS};
pub use host_summary::{HostSummary, LayerSummary};
pub use slot_name::SlotName;
pub use task_shape::TaskShape;

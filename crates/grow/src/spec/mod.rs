//! Hosts as data: lists of layers with named slots, the texts and families that describe them, and
//! the shape of images and classes.

mod cnn;
mod description;
mod error;
mod host_layer;
mod host_spec;
mod host_summary;
mod layer_values;
mod limits;
mod per_axis;
mod ready_made;
mod slot_name;
mod task_shape;
mod walk;
mod width;
mod width_lists;

pub use cnn::{Cnn, PRESETS};
pub(crate) use description::LIST_VERSION;
pub use error::HostError;
pub use host_layer::HostLayer;
pub use host_spec::HostSpec;
pub use host_summary::{HostSummary, LayerSummary, SizedLayer};
pub use layer_values::{BranchJoin, DropRate, Features, Slope};
pub use limits::DESCRIPTION_BYTES_MAX;
pub(crate) use limits::MAX_PARAMETERS;
pub use per_axis::{Padding, PerAxis};
pub use ready_made::READY_MADE;
pub use slot_name::SlotName;
pub use task_shape::TaskShape;
pub(crate) use walk::HostVisitor;
pub use width::WidenableLayer;
pub(crate) use width::has_bias;

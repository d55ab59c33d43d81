//! Hosts as data: lists of layers with named slots, the families that generate them, and the shape
//! of images and classes.

mod cnn;
mod error;
mod host_layer;
mod host_spec;
mod image;
mod slot_name;

pub use cnn::{Cnn, PRESETS};
pub use error::HostError;
pub use host_layer::{Features, HostLayer, LayerSize};
pub use host_spec::HostSpec;
pub(crate) use host_spec::{HostList, MAX_PARAMETERS};
pub use image::ImageShape;
pub use slot_name::SlotName;

//! Descriptions of hosts: the images that they read, their blocks, and the names of their slots.

mod host_spec;
mod image;
mod slot_name;

pub use host_spec::{HostError, HostSpec, PRESETS};
pub use image::ImageShape;
pub use slot_name::{Region, SlotName, SlotNameError};

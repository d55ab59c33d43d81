//! Drawings: a host as a [`Picture`], shapes as SVG, and their colours.

mod colours;
mod host;
mod parts;
mod picture;
mod svg;

pub use colours::{Hue, SERIES, css, ramp, stage_hue};
pub use host::{DrawnSlot, topology};
pub use parts::{HostPart, PartKind, host_parts};
pub use picture::{Anchor, Colour, Picture, Shape, short, text};
pub use svg::{escaped, inline_svg, svg};

//! Memory of the devices and pinned memory of the host.
//!
//! A device address is a host address. Every allocation lies between inaccessible pages. The gap
//! after it, and the last 256 bytes of the gap before it, are guard zones, whose bytes are checked
//! after each command. Fresh memory is filled with poison. Freed memory keeps its addresses and
//! loses its pages, so that an access faults.

mod asan;
mod mapping;
mod regions;

pub(crate) use asan::Asan;
pub(crate) use mapping::Mapping;
pub(crate) use regions::{AddressSpace, MemoryKind};

/// Bytes of poison, repeated: a NaN as f32, every second bf16 a NaN, a huge number as f64, and an
/// invalid index.
pub(crate) const POISON: [u8; 4] = 0xffa5_a5a5_u32.to_le_bytes();

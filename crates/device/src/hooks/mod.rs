//! The one interface between the engine and what looks on at it.
//!
//! The engine knows nobody who looks on: it counts its acts ([`Counters`]), asks the gate of the
//! calling thread, if there is one ([`set_gate`]), and tells the [`Observer`]s of the device, of
//! which there usually are none: then a hook costs one check. Observers know the engine only by
//! the plain values of this interface. A device is opened with its observers, and they stay.

mod counters;
mod observer;
mod placement;

pub(crate) use counters::{Counters, set_gate};
pub use observer::POISON;
pub(crate) use observer::{
    Allocation, Argument, Asked, Category, HostActivity, Launched, Note, Observed, Observer,
    Observers, Position, Ran, Touched,
};
pub(crate) use placement::log_placement;

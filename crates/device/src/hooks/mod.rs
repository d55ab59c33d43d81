//! The one interface between the engine and its observers.
//!
//! The engine does not depend on any observer. It counts its acts ([`Counters`]), consults the gate
//! of the calling thread if one is set ([`set_gate`]), and notifies the [`DeviceObserver`]s of the
//! device. Usually there are no observers, and a hook costs one check. Observers see the engine
//! only through the plain values of this interface. A device is opened with its observers, and
//! keeps them.

mod counters;
mod observer;
mod placement;

pub(crate) use counters::{Counters, set_gate};
pub use observer::POISON;
pub(crate) use observer::{
    Allocation, Category, CommandPosition, DeviceObserver, DeviceObservers, FinishedLaunch,
    HostActivity, LaunchArgument, LaunchCall, ObservedStream, ObserverState, SubmittedLaunch,
    Touched,
};
pub(crate) use placement::log_placement;

//! Settings, random numbers, handles and faults: used by everything above.

mod fault;
mod handles;
mod random;
mod settings;

pub(crate) use fault::DeviceFault;
pub(crate) use handles::HandleTable;
pub(crate) use random::SeededRandom;
pub(crate) use settings::{SHARED_MAX, StandinSettings};

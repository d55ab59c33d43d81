//! Settings, random numbers, handles and faults: used by everything above.

mod fault;
mod handles;
mod random;
mod settings;

pub(crate) use fault::Fault;
pub(crate) use handles::Table;
pub(crate) use random::Random;
pub(crate) use settings::{SHARED_MAX, Settings};

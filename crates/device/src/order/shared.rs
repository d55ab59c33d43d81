//! State that all streams of a device share.

use crate::ground::fault::EngineFaults;
use crate::ground::sync::Mutex;
use crate::ground::{DeviceId, Isa};
use crate::hooks::{Counters, DeviceObservers};

/// Token of a device's submission lock. The lock protects the order of submissions and the hazards
/// of all storages, which are stored elsewhere.
#[derive(Default)]
pub(crate) struct Submission;

/// State shared by the streams of a device.
pub(crate) struct DeviceShared {
    pub(crate) id: DeviceId,
    /// Instruction set of the kernels.
    pub(crate) isa: Isa,
    /// Whether every launch waits for its kernel (S4).
    pub(crate) launch_blocking: bool,
    pub(crate) faults: EngineFaults,
    pub(crate) counters: Counters,
    pub(crate) observers: DeviceObservers,
    /// Whether an observer checks order: no wait is left out because its target is done.
    pub(crate) checks_order: bool,
    pub(crate) submission: Mutex<Submission>,
}

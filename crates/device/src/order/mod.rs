//! Order: the queues of streams, pending accesses to memory, and submission, which derives the
//! waits between launches (S1).

mod hazard;
mod queue;
mod shared;
mod submit;

pub(crate) use hazard::Hazards;
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use queue::CAPACITY;
pub(crate) use queue::{Access, StreamEngine, StreamState};
pub(crate) use shared::{DeviceShared, Submission};
pub(crate) use submit::{GroupPart, Touch, TrackedMemory};
pub(crate) use submit::{submit_group, submit_work, wait_for, wait_for_producer};

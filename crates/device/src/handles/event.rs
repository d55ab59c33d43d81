//! Events, which are positions in the order of a stream.

use std::fmt;
use std::panic::Location;

use crate::execution::check_may_wait;
use crate::ground::{Act, Result};
use crate::order::Access;

/// A position in a stream's order. It is reached when all work before it is done.
#[derive(Clone)]
pub struct Event(pub(crate) Access);

impl Event {
    /// Whether the stream has reached the event. Does not wait.
    pub fn is_done(&self) -> bool {
        let done = self.0.is_done();
        if done {
            self.0.stream.host_saw(self.0.seq);
        }
        done
    }

    /// Blocks the calling thread until the event is reached. Counted as one synchronisation.
    ///
    /// # Errors
    /// [`crate::Error::KernelPanicked`] if a kernel before it panicked;
    /// [`crate::Error::DeviceFailed`]; [`crate::Error::HotScope`] if an open scope forbids the
    /// wait; [`crate::Error::InsideKernel`] if called inside of a kernel.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let (operation, site) = ("Event::synchronize", Location::caller());
        check_may_wait(operation)?;
        let Access { stream, seq } = &self.0;
        stream.shared.counters.count(Act::Synchronize, operation, site)?;
        let _wait = stream.shared.observers.host_waits(operation, Some(site));
        stream.wait_host(*seq);
        stream.check_result(*seq)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({} of stream `{}`)", self.0.seq, self.0.stream.name())
    }
}

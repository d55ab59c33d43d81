//! Acts that a hot path must avoid, and their counts (V2).

use std::fmt;
use std::ops::Sub;

/// Acts of a device since it was opened; the difference of two counts gives the acts in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Copies from the device to the host; a read-back of several tensors is one copy.
    pub copies_to_host: u64,
    /// Copies from the host to the device.
    pub copies_to_device: u64,
    /// Waits of a host thread for the device; a synchronisation or read-back counts even if the
    /// device is idle. Waits for space in a queue, and the waits of `MERISTEM_LAUNCH_BLOCKING=1`,
    /// are not counted.
    pub synchronizations: u64,
    /// Requests to the memory pool, including those that reuse memory; on a CUDA device also graphs
    /// that are built, and buffers that are added to a ring of host buffers.
    pub allocations: u64,
    /// Launches of kernels, and copies and fills inside of the device ([`Stream::copy`],
    /// [`Stream::fill`]). Host copies and the zeroing of new memory are not counted. The launches
    /// of one graph ([`Launches`](crate::Launches)) count as one.
    ///
    /// [`Stream::copy`]: crate::Stream::copy
    /// [`Stream::fill`]: crate::Stream::fill
    pub launches: u64,
}

impl Counts {
    /// The count of one kind of act.
    pub fn get(&self, act: Act) -> u64 {
        match act {
            Act::CopyToHost => self.copies_to_host,
            Act::CopyToDevice => self.copies_to_device,
            Act::Synchronize => self.synchronizations,
            Act::Allocate => self.allocations,
            Act::Launch => self.launches,
        }
    }

    pub(crate) fn add(&mut self, act: Act) {
        let count = match act {
            Act::CopyToHost => &mut self.copies_to_host,
            Act::CopyToDevice => &mut self.copies_to_device,
            Act::Synchronize => &mut self.synchronizations,
            Act::Allocate => &mut self.allocations,
            Act::Launch => &mut self.launches,
        };
        *count += 1;
    }
}

impl Sub for Counts {
    type Output = Counts;

    /// Acts between `earlier` and `self`.
    fn sub(self, earlier: Counts) -> Counts {
        let since = |now: u64, then: u64| now.saturating_sub(then);
        Counts {
            copies_to_host: since(self.copies_to_host, earlier.copies_to_host),
            copies_to_device: since(self.copies_to_device, earlier.copies_to_device),
            synchronizations: since(self.synchronizations, earlier.synchronizations),
            allocations: since(self.allocations, earlier.allocations),
            launches: since(self.launches, earlier.launches),
        }
    }
}

/// A counted act. A hot path must avoid all but launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    /// A copy from the device to the host.
    CopyToHost,
    /// A copy from the host to the device.
    CopyToDevice,
    /// A host thread waits for the device.
    Synchronize,
    /// A request to the memory pool, or another act that [`Counts::allocations`] counts.
    Allocate,
    /// A launch of a kernel, or a copy or fill inside of the device: counted, and never forbidden.
    Launch,
}

impl Act {
    /// All acts.
    pub const ALL: [Act; 5] =
        [Act::CopyToHost, Act::CopyToDevice, Act::Synchronize, Act::Allocate, Act::Launch];
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Act::CopyToHost => "copy to the host",
            Act::CopyToDevice => "copy to the device",
            Act::Synchronize => "wait for the device",
            Act::Allocate => "allocation",
            Act::Launch => "launch",
        })
    }
}

//! Observers of a device: the hooks, and the values that hooks get.

use std::any::Any;
use std::ops::Range;
use std::panic::Location;
use std::time::Instant;

use smallvec::SmallVec;

use crate::ground::sync::Arc;
use crate::ground::{AccessKind, DType, INLINE_ARGS, MemoryFormat, Owner, Result, Shape};

/// Contents of the memory of [`Tensor::empty`](crate::Tensor::empty) with the race sanitizer on,
/// repeated: a NaN as `f32` and as `f64`, and easy to recognise as an integer.
pub const POISON: u32 = 0x7FFD_EAD5;

/// State that an observer keeps with a stream.
pub(crate) type ObserverState = Box<dyn Any + Send + Sync>;

/// An observer of a device, such as a trace or the race sanitizer. Hooks do nothing by default, and
/// never wait for the device.
pub(crate) trait DeviceObserver: Send + Sync {
    /// Whether it checks the order of launches. The engine then keeps waits for completed work, so
    /// that the order follows from the program and not from timing; fills new memory with
    /// [`POISON`]; and calls the hooks of submission.
    fn checks_order(&self) -> bool {
        false
    }

    /// Whether the observer examines launches after they have run. The engine then records the call
    /// of each launch ([`LaunchCall`]) and calls [`launch_ran`](DeviceObserver::launch_ran).
    fn watches_runs(&self) -> bool {
        false
    }

    /// A stream is opened; returns the state to keep with it.
    fn stream_opened(&self, _name: &Arc<str>) -> Option<ObserverState> {
        None
    }

    /// A launch is about to be enqueued. Under the submission lock, for observers that check order.
    ///
    /// # Errors
    /// Any error refuses the launch.
    fn launch_requested(&self, _launch: &SubmittedLaunch<'_>) -> Result<()> {
        Ok(())
    }

    /// A launch that no observer refused is enqueued. Under the submission lock, for observers that
    /// check order.
    fn launch_submitted(&self, _launch: &SubmittedLaunch<'_>) {}

    /// Waits for `after` are enqueued, the last of them at `_at`. Under the submission lock, for
    /// observers that check order.
    fn waits_submitted(&self, _at: CommandPosition<'_>, _after: &[CommandPosition<'_>]) {}

    /// The memory of a tensor, in the block at `address`, is freed. For observers that check order.
    fn memory_freed(&self, _allocation: &Allocation, _address: u64) {}

    /// The block at this address is about to return to the system.
    fn block_returned(&self, _address: u64) {}

    /// The bytes of an owner have changed to `_bytes`.
    fn memory_changed(&self, _owner: Owner, _bytes: usize) {}

    /// A stream has reached a wait. Called again for the same wait when a parked stream continues.
    /// Called on the stream's worker; never for streams of a CUDA device.
    fn wait_begins(&self, _stream: &ObservedStream) {}

    /// The wait at `_at` is over: `_producer` is done. Called on the stream's worker; never for
    /// streams of a CUDA device.
    fn wait_ended(&self, _at: CommandPosition<'_>, _producer: CommandPosition<'_>) {}

    /// A launch has run; no other thread can observe its end yet. For observers that watch runs.
    /// Called on the stream's worker; for a CUDA device on the thread whose poll of the device
    /// finds the launch complete.
    fn launch_ran(&self, _ran: &FinishedLaunch<'_>) {}

    /// The calling host thread begins a wait or a copy, which ends when the result is dropped.
    fn host_begins(&self, _activity: HostActivity) -> Option<Box<dyn Any>> {
        None
    }

    /// A host thread has seen the end of a command.
    fn host_saw(&self, _at: CommandPosition<'_>) {}

    /// A host thread is about to use the result of the copy at `_end`, a part of a read-back;
    /// `_from` is the memory of the first tensor of the read-back.
    ///
    /// # Errors
    /// Any error is returned instead of the result.
    fn host_takes(
        &self,
        _from: &Allocation,
        _end: CommandPosition<'_>,
        _site: &'static Location<'static>,
    ) -> Result<()> {
        Ok(())
    }
}

/// The observers of a device, usually none.
#[derive(Clone)]
pub(crate) struct DeviceObservers(Arc<[Arc<dyn DeviceObserver>]>);

impl DeviceObservers {
    pub(crate) fn new(observers: Vec<Arc<dyn DeviceObserver>>) -> Self {
        DeviceObservers(observers.into())
    }

    /// Whether there are none.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        // `meristem_bare`: only in the build that measures the cost of hooks (bench/README.md).
        cfg!(meristem_bare) || self.0.is_empty()
    }

    /// Calls a hook of each observer, one after the other.
    #[inline]
    pub(crate) fn notify(&self, hook: impl FnMut(&dyn DeviceObserver)) {
        if !self.is_empty() {
            self.notify_each(hook);
        }
    }

    #[cold]
    fn notify_each(&self, mut hook: impl FnMut(&dyn DeviceObserver)) {
        self.0.iter().for_each(|observer| hook(&**observer));
    }

    /// Calls a hook that may refuse, for each observer, one after the other.
    ///
    /// # Errors
    /// The first error of an observer; later observers are not called.
    #[inline]
    pub(crate) fn try_notify(
        &self,
        hook: impl Fn(&dyn DeviceObserver) -> Result<()>,
    ) -> Result<()> {
        if self.is_empty() { Ok(()) } else { self.try_notify_each(hook) }
    }

    #[cold]
    fn try_notify_each(&self, hook: impl Fn(&dyn DeviceObserver) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(|observer| hook(&**observer))
    }

    /// Whether an observer [checks order](DeviceObserver::checks_order).
    pub(crate) fn check_order(&self) -> bool {
        !self.is_empty() && self.0.iter().any(|observer| observer.checks_order())
    }

    /// Whether an observer [watches runs](DeviceObserver::watches_runs).
    #[inline]
    pub(crate) fn watch_runs(&self) -> bool {
        !self.is_empty() && self.0.iter().any(|observer| observer.watches_runs())
    }

    /// Notifies observers that the calling host thread waits for the device until the result is
    /// dropped.
    pub(crate) fn host_waits(
        &self,
        operation: &'static str,
        site: Option<&'static Location<'static>>,
    ) -> HostSpan {
        self.host_begins(HostActivity { operation, category: Category::Wait, site })
    }

    /// Notifies observers that the calling host thread copies, or waits for a copy, until the
    /// result is dropped.
    pub(crate) fn host_copies(
        &self,
        operation: &'static str,
        category: Category,
        site: &'static Location<'static>,
    ) -> HostSpan {
        self.host_begins(HostActivity { operation, category, site: Some(site) })
    }

    fn host_begins(&self, activity: HostActivity) -> HostSpan {
        let mut spans = Vec::new();
        self.notify(|observer| spans.extend(observer.host_begins(activity)));
        HostSpan(spans)
    }

    /// Opens a stream.
    pub(crate) fn open_stream(&self, name: &str) -> ObservedStream {
        let name = name.into();
        let states = self.0.iter().filter_map(|observer| observer.stream_opened(&name));
        ObservedStream { states: states.collect(), name }
    }
}

/// A wait or a copy of a host thread; it ends when this is dropped.
#[must_use = "the span ends when it is dropped"]
pub(crate) struct HostSpan(#[expect(dead_code, reason = "dropped at the end")] Vec<Box<dyn Any>>);

/// A stream: its name, and the state that observers keep with it.
pub(crate) struct ObservedStream {
    pub(crate) name: Arc<str>,
    states: Box<[ObserverState]>,
}

impl ObservedStream {
    /// The state of type `T` that an observer keeps.
    pub(crate) fn state<T: 'static>(&self) -> Option<&T> {
        self.states.iter().find_map(|state| state.downcast_ref())
    }
}

/// A command of a stream, by its number from 1.
#[derive(Clone, Copy)]
pub(crate) struct CommandPosition<'a> {
    pub(crate) stream: &'a ObservedStream,
    pub(crate) seq: u64,
}

/// Memory of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    /// Unique in this process.
    pub(crate) id: u64,
    pub(crate) owner: Owner,
    /// Call site that allocated it.
    pub(crate) origin: &'static Location<'static>,
    pub(crate) bytes: usize,
}

/// Access of a launch to a part of an allocation.
#[derive(Clone)]
pub(crate) struct Touched<'a> {
    pub(crate) allocation: &'a Allocation,
    /// Address of its block, which a later allocation may get.
    pub(crate) address: u64,
    pub(crate) access: AccessKind,
    /// Bytes of the block.
    pub(crate) bytes: Range<usize>,
}

/// A launch at its submission.
pub(crate) struct SubmittedLaunch<'a> {
    /// Position of the launch.
    pub(crate) at: CommandPosition<'a>,
    pub(crate) operation: &'static str,
    pub(crate) site: &'static Location<'static>,
    /// Waits enqueued before it.
    pub(crate) after: &'a [CommandPosition<'a>],
    pub(crate) touched: &'a [Touched<'a>],
}

/// The call of a launch, recorded with the launch if an observer watches runs.
pub(crate) struct LaunchCall {
    pub(crate) category: Category,
    /// Time of the call.
    pub(crate) at: Instant,
    pub(crate) arguments: SmallVec<[LaunchArgument; INLINE_ARGS]>,
}

/// An argument of a launch.
pub(crate) struct LaunchArgument {
    pub(crate) access: AccessKind,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) format: MemoryFormat,
}

/// A launch after it has run.
pub(crate) struct FinishedLaunch<'a> {
    pub(crate) at: CommandPosition<'a>,
    pub(crate) operation: &'static str,
    pub(crate) site: &'static Location<'static>,
    pub(crate) call: &'a Arc<LaunchCall>,
    /// Time at which it began.
    pub(crate) start: Instant,
    /// Time at which it ended.
    pub(crate) end: Instant,
    /// Whether it was dropped because a kernel before it panicked.
    pub(crate) dropped: bool,
}

/// A wait or a copy of a host thread.
#[derive(Clone, Copy)]
pub(crate) struct HostActivity {
    pub(crate) operation: &'static str,
    pub(crate) category: Category,
    pub(crate) site: Option<&'static Location<'static>>,
}

/// Category of an activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Category {
    Launch,
    CopyToDevice,
    CopyToHost,
    /// A copy made by the host thread itself.
    HostCopy,
    /// A copy inside of the device.
    Copy,
    Fill,
    /// A wait of the host for the device, or of a stream for another stream.
    Wait,
    /// A span named by the program.
    Scope,
}

impl Category {
    /// Lower-case name, as in traces.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Category::Launch => "launch",
            Category::CopyToDevice => "copy_to_device",
            Category::CopyToHost => "copy_to_host",
            Category::HostCopy => "host_copy",
            Category::Copy => "copy",
            Category::Fill => "fill",
            Category::Wait => "wait",
            Category::Scope => "scope",
        }
    }
}

//! Host spans, which begin and end on the lane of their thread.

use std::borrow::Cow;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::panic::Location;

use super::entry::TraceEntry;
use super::recorder::{HOST_PROCESS, Recorder, TraceLane};
use crate::ground::sync::Arc;
use crate::hooks::Category;

thread_local! {
    /// The thread's lane in each trace, by the recorder's number.
    static LANES: RefCell<Vec<(u64, Arc<TraceLane>)>> = const { RefCell::new(Vec::new()) };
}

/// A span of a host thread, from [`Trace::span`](crate::Trace::span) until it is dropped.
#[must_use = "a span ends when it is dropped"]
pub struct TraceSpan {
    /// The lane; `None` if the beginning was not recorded.
    lane: Option<Arc<TraceLane>>,
    /// Not `Send`: a span ends on the thread on which it began.
    of_thread: PhantomData<*const ()>,
}

impl TraceSpan {
    pub(super) fn begin(
        recorder: &Arc<Recorder>,
        name: Cow<'static, str>,
        category: Category,
        site: Option<&'static Location<'static>>,
    ) -> TraceSpan {
        let lane = if recorder.is_on() { lane(recorder) } else { None };
        let at = recorder.now();
        let begun =
            |lane: &Arc<TraceLane>| lane.push(TraceEntry::Begin { at, name, category, site });
        TraceSpan { lane: lane.filter(begun), of_thread: PhantomData }
    }
}

impl Drop for TraceSpan {
    fn drop(&mut self) {
        if let Some(lane) = &self.lane {
            lane.push(TraceEntry::End { at: lane.recorder.now() });
        }
    }
}

/// The calling thread's lane; `None` while the thread ends.
fn lane(recorder: &Arc<Recorder>) -> Option<Arc<TraceLane>> {
    LANES
        .try_with(|lanes| {
            let mut lanes = lanes.borrow_mut();
            if let Some((_, lane)) = lanes.iter().find(|(id, _)| *id == recorder.id) {
                return lane.clone();
            }
            lanes.retain(|(_, lane)| lane.recorder.is_on());
            let thread = std::thread::current();
            let name = thread.name().map_or_else(|| format!("{:?}", thread.id()), str::to_owned);
            let lane = recorder.lane(HOST_PROCESS, &name);
            lanes.push((recorder.id, lane.clone()));
            lane
        })
        .ok()
}

//! Pending exchanges of a membership, from which the device's progress is computed.

use std::collections::VecDeque;

use crate::execution::cuda::driver::CudaEvent;
use crate::ground::sync::Arc;

/// An exchange that has not been seen to end.
#[derive(Default)]
pub(super) struct PendingExchange {
    /// Recorded before it.
    pub(super) before: Option<Arc<CudaEvent>>,
    /// Recorded after it, once NCCL has enqueued it.
    pub(super) after: Option<Arc<CudaEvent>>,
    /// Whether the device has begun it.
    pub(super) reached: bool,
}

/// Exchanges that have not been seen to end, in order.
#[derive(Default)]
pub(super) struct PendingExchanges {
    pub(super) all: VecDeque<PendingExchange>,
    /// Events for reuse.
    pub(super) spare: Vec<Arc<CudaEvent>>,
    pub(super) ended: u64,
}

impl PendingExchanges {
    /// Counts a new exchange, and returns its number, from 1.
    pub(super) fn submit(&mut self) -> u64 {
        self.all.push_back(PendingExchange::default());
        self.ended + self.all.len() as u64
    }

    /// The exchange of this number, unless it counts as ended.
    pub(super) fn exchange_of(&mut self, number: u64) -> Option<&mut PendingExchange> {
        let at = number.checked_sub(self.ended + 1)?;
        self.all.get_mut(at as usize)
    }

    /// The next event that the device reaches, if it is recorded.
    pub(super) fn next(&self) -> Option<Arc<CudaEvent>> {
        let first = self.all.front()?;
        if first.reached { first.after.clone() } else { first.before.clone() }
    }

    /// Records that the device has reached this event, if it is still the next.
    pub(super) fn advance(&mut self, event: &Arc<CudaEvent>) {
        if !self.next().is_some_and(|next| Arc::ptr_eq(&next, event)) {
            return;
        }
        let Some(first) = self.all.front_mut() else { return };
        if !first.reached {
            first.reached = true;
        } else if let Some(PendingExchange { before, after, .. }) = self.all.pop_front() {
            self.ended += 1;
            self.spare.extend(before.into_iter().chain(after));
        }
    }
}

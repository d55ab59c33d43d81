//! One exchange of one rank: all sends and receives, polled until they complete, a rank fails, or
//! the deadline passes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mpi::point_to_point::{Message, Status};
use mpi::request::{LocalScope, Request};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination as _, Equivalence as _, Source as _};

use super::chunks::chunks;
use super::device_memory::{DeviceChunk, DeviceMemory};
use super::group::{MpiGroup, MpiTags, RankDeparture};
use crate::agree;
use crate::error::{Error, Result};
use crate::transport::CollectiveCall;
use crate::wire::{CallHeader, Content, RankNotice};

/// Extra wait, as a share of the deadline, while several ranks are missing. Most of them may only
/// be waiting for the lost rank. A rank that misses only the lost rank then reports it first.
const GRACE: f64 = 0.1;

/// Elements for another rank.
pub(super) struct Outgoing {
    pub(super) peer: usize,
    pub(super) content: Content,
    pub(super) memory: SendMemory,
}

/// Elements to send.
pub(super) enum SendMemory {
    Host(Arc<Vec<u8>>),
    Device(DeviceMemory),
}

/// Room for elements from another rank.
pub(super) struct Incoming {
    pub(super) peer: usize,
    pub(super) content: Content,
    pub(super) memory: ReceiveMemory,
}

/// Memory that elements are received into.
pub(super) enum ReceiveMemory {
    Host(Vec<u8>),
    Device(DeviceMemory),
}

/// Makes the context of the device current on this thread if elements are in its memory. All
/// elements of an exchange are on one device.
///
/// # Errors
/// [`Error::Device`].
pub(super) fn make_context_current(sends: &[Outgoing], receives: &[Incoming]) -> Result<()> {
    let sent = sends.iter().find_map(|outgoing| match &outgoing.memory {
        SendMemory::Host(_) => None,
        SendMemory::Device(memory) => Some(memory),
    });
    let received = || {
        receives.iter().find_map(|incoming| match &incoming.memory {
            ReceiveMemory::Host(_) => None,
            ReceiveMemory::Device(memory) => Some(memory),
        })
    };
    let memory = sent.or_else(received);
    Ok(memory.map_or(Ok(()), DeviceMemory::make_context_current)?)
}

/// Headers to send to each rank before the elements.
pub(super) fn headers(group: &MpiGroup, call: &CollectiveCall, sends: &[Outgoing]) -> Vec<Vec<u8>> {
    let header = |peer: usize| {
        let own = sends.iter().filter(|outgoing| outgoing.peer == peer);
        let parcels = own.map(|outgoing| outgoing.content).collect();
        CallHeader { step: group.step, call: *call, parcels }.encode()
    };
    (0..group.members.len()).map(header).collect()
}

/// Callback that answers watching threads during an exchange.
type AnswerWatches<'f> = dyn FnMut(&mut MpiGroup) + 'f;

/// A send or receive in flight.
enum PendingRequest<'s, 'a> {
    Host(Request<'a, [u8], &'s LocalScope<'a>>),
    Device(Request<'a, DeviceChunk, &'s LocalScope<'a>>),
}

impl PendingRequest<'_, '_> {
    /// The request, if it has not ended.
    fn test(self) -> Option<Self> {
        match self {
            PendingRequest::Host(request) => request.test().err().map(PendingRequest::Host),
            PendingRequest::Device(request) => request.test().err().map(PendingRequest::Device),
        }
    }
}

/// Memory for a parcel.
struct ReceiveBuffer<'a> {
    content: Content,
    memory: &'a mut ReceiveMemory,
}

pub(super) struct MpiTransfer<'s, 'a> {
    world: &'s SimpleCommunicator,
    scope: &'s LocalScope<'a>,
    group: &'s mut MpiGroup,
    tags: MpiTags,
    call: CollectiveCall,
    /// Header received from each rank.
    headers: Vec<Option<CallHeader>>,
    /// Buffers for each rank's parcels, until the rank's header arrives.
    buffers: Vec<Vec<ReceiveBuffer<'a>>>,
    /// Requests in flight, each with the other rank.
    requests: Vec<(usize, PendingRequest<'s, 'a>)>,
    /// The error for a parcel without a matching buffer.
    mismatch: Option<Error>,
    agreed: bool,
    /// Last time at which a header arrived or a message completed.
    last_sign: Instant,
}

impl<'s, 'a> MpiTransfer<'s, 'a> {
    pub(super) fn new(
        world: &'s SimpleCommunicator,
        scope: &'s LocalScope<'a>,
        group: &'s mut MpiGroup,
        call: &CollectiveCall,
    ) -> Self {
        let n = group.members.len();
        let tags = MpiTags::for_group(group.context);
        let (headers, buffers) = (vec![None; n], (0..n).map(|_| Vec::new()).collect());
        MpiTransfer {
            world,
            scope,
            group,
            tags,
            call: *call,
            headers,
            buffers,
            requests: Vec::new(),
            mismatch: None,
            agreed: false,
            last_sign: Instant::now(),
        }
    }

    /// Begins all sends, and stores the receive buffers.
    pub(super) fn begin(
        &mut self,
        headers: &'a [Vec<u8>],
        sends: &'a [Outgoing],
        receives: &'a mut [Incoming],
    ) {
        for peer in self.group.peers() {
            self.send(peer, &headers[peer], self.tags.header);
        }
        for Outgoing { peer, memory, .. } in sends {
            match memory {
                SendMemory::Host(bytes) => {
                    let mut rest = &bytes[..];
                    for len in chunks(bytes.len()) {
                        let (chunk, more) = rest.split_at(len);
                        self.send(*peer, chunk, self.tags.elements);
                        rest = more;
                    }
                }
                SendMemory::Device(memory) => self.send_from_device(*peer, memory),
            }
        }
        for Incoming { peer, content, memory } in receives {
            self.buffers[*peer].push(ReceiveBuffer { content: *content, memory });
        }
    }

    fn send(&mut self, peer: usize, bytes: &'a [u8], tag: i32) {
        let process = self.world.process_at_rank(self.group.members[peer]);
        let request = process.immediate_send_with_tag(self.scope, bytes, tag);
        self.requests.push((peer, PendingRequest::Host(request)));
    }

    fn send_from_device(&mut self, peer: usize, memory: &'a DeviceMemory) {
        let process = self.world.process_at_rank(self.group.members[peer]);
        for chunk in memory.chunks() {
            let (scope, tag) = (self.scope, self.tags.elements);
            let request = process.immediate_send_with_tag(scope, chunk, tag);
            self.requests.push((peer, PendingRequest::Device(request)));
        }
    }

    /// Completes the exchange. After an error, requests stay in flight and their memory must never
    /// be freed. The bool of an error is true if this rank detected the error and must notify the
    /// others, and false if they already know it. `answer_watches` is called repeatedly, and may
    /// fail the group.
    pub(super) fn finish(
        mut self,
        answer_watches: &mut AnswerWatches<'_>,
    ) -> Result<(), (Error, bool)> {
        let outcome = self.poll(answer_watches);
        self.requests.into_iter().for_each(|(_, request)| std::mem::forget(request));
        outcome
    }

    /// Polls until everything is sent and received.
    fn poll(&mut self, answer_watches: &mut AnswerWatches<'_>) -> Result<(), (Error, bool)> {
        let mut idle = Backoff::default();
        loop {
            let before = self.last_sign;
            self.read_headers().map_err(|error| (error, true))?;
            if let Some(error) = read_notices(self.world, self.group) {
                return Err((error.at(self.call.operation), false));
            }
            answer_watches(self.group);
            if let Some(error) = &self.group.failure {
                return Err((error.at(self.call.operation), false));
            }
            self.test();
            if self.agreed && self.requests.is_empty() {
                return Ok(());
            }
            if self.last_sign == before {
                self.check_patience().map_err(|error| (error, true))?;
                idle.rest();
            } else {
                idle = Backoff::default();
            }
        }
    }

    /// Reads the headers that have arrived, and begins to receive the announced parcels. After the
    /// last header, compares the calls.
    fn read_headers(&mut self) -> Result<()> {
        for peer in self.group.peers() {
            if self.headers[peer].is_some() {
                continue;
            }
            let process = self.world.process_at_rank(self.group.members[peer]);
            if let Some(found) = process.immediate_matched_probe_with_tag(self.tags.header) {
                let header = CallHeader::decode(&take(found));
                let step = self.group.step;
                let header = header.filter(|header| header.step == step);
                let reason = "it sent data that this version does not send";
                let header = header.ok_or_else(|| self.gone(peer, reason))?;
                self.receive(peer, &header);
                self.headers[peer] = Some(header);
                self.last_sign = Instant::now();
            } else if let Some(RankDeparture { panicked, .. }) =
                self.group.left[peer].filter(|left| left.steps < self.group.step)
            {
                let reason = if panicked { "its thread panicked" } else { "it left the group" };
                return Err(self.gone(peer, reason));
            }
        }
        let all = self.group.peers().all(|peer| self.headers[peer].is_some());
        if all && !self.agreed {
            let call = |header: &Option<CallHeader>| header.as_ref().map_or(self.call, |h| h.call);
            let calls: Vec<CollectiveCall> = self.headers.iter().map(call).collect();
            agree::check(&calls)?;
            self.mismatch.take().map_or(Ok(()), Err)?;
            self.agreed = true;
        }
        Ok(())
    }

    /// Begins to receive a rank's parcels if they match the buffers.
    fn receive(&mut self, peer: usize, header: &CallHeader) {
        let buffers = std::mem::take(&mut self.buffers[peer]);
        let expected = buffers.iter().map(|room| room.content);
        if !expected.clone().eq(header.parcels.iter().copied()) {
            if self.mismatch.is_none() {
                let (mut sent, mut wanted) = (header.parcels.iter().copied(), expected);
                let (expected, got) = loop {
                    match (wanted.next(), sent.next()) {
                        (None, None) => return,
                        (wanted, sent) if wanted == sent => {}
                        (wanted, sent) => break (describe(wanted), describe(sent)),
                    }
                };
                let (operation, rank, what) = (self.call.operation, peer, "a message of");
                self.mismatch = Some(Error::Disagreement { operation, rank, what, expected, got });
            }
            return;
        }
        let process = self.world.process_at_rank(self.group.members[peer]);
        let (scope, tag) = (self.scope, self.tags.elements);
        for ReceiveBuffer { memory, .. } in buffers {
            match memory {
                ReceiveMemory::Host(buffer) => {
                    let mut rest = &mut buffer[..];
                    for len in chunks(rest.len()) {
                        let (chunk, more) = rest.split_at_mut(len);
                        let request = process.immediate_receive_into_with_tag(scope, chunk, tag);
                        self.requests.push((peer, PendingRequest::Host(request)));
                        rest = more;
                    }
                }
                ReceiveMemory::Device(memory) => {
                    for chunk in memory.chunks_mut() {
                        let request = process.immediate_receive_into_with_tag(scope, chunk, tag);
                        self.requests.push((peer, PendingRequest::Device(request)));
                    }
                }
            }
        }
    }

    /// Drops completed requests.
    fn test(&mut self) {
        let before = self.requests.len();
        let requests = std::mem::take(&mut self.requests).into_iter();
        let still = |(peer, request): (usize, PendingRequest<'s, 'a>)| {
            request.test().map(|request| (peer, request))
        };
        self.requests = requests.filter_map(still).collect();
        if self.requests.len() < before {
            self.last_sign = Instant::now();
        }
    }

    /// Returns an error if nothing has arrived until the deadline.
    fn check_patience(&self) -> Result<()> {
        let (waited, deadline) = (self.last_sign.elapsed(), self.group.deadline);
        if waited < deadline {
            return Ok(());
        }
        let silent = |peer: &usize| self.headers[*peer].is_none();
        let unfinished = |peer: &usize| self.requests.iter().any(|(other, _)| other == peer);
        let mut missing = self.group.peers().filter(|peer| silent(peer) || unfinished(peer));
        let Some(rank) = missing.next() else { return Ok(()) };
        if missing.next().is_some() && waited < deadline.mul_f64(1.0 + GRACE) {
            return Ok(());
        }
        let (operation, seconds) = (self.call.operation, deadline.as_secs_f64());
        Err(Error::RankLate { operation, rank, seconds })
    }

    fn gone(&self, rank: usize, reason: &'static str) -> Error {
        Error::RankGone { operation: self.call.operation, rank, reason }
    }
}

fn describe(content: Option<Content>) -> String {
    match content {
        None => "nothing".to_owned(),
        Some((None, len)) => format!("{len} bytes"),
        Some((Some(dtype), len)) => format!("{len} x {dtype}"),
    }
}

/// Reads the notices that have arrived: records ranks that left, and returns a failure.
pub(super) fn read_notices(world: &SimpleCommunicator, group: &mut MpiGroup) -> Option<Error> {
    let tag = MpiTags::for_group(group.context).notice;
    while let Some(found) = world.any_process().immediate_matched_probe_with_tag(tag) {
        let source = found.1.source_rank();
        let rank = group.members.iter().position(|member| *member == source)?;
        match RankNotice::decode(&take(found)) {
            Some(RankNotice::Left { steps, panicked, in_order }) => {
                group.left[rank] = Some(RankDeparture { steps, panicked, in_order });
            }
            Some(RankNotice::Ended { membership, exchanges }) => {
                group.ended[rank] = group.ended[rank].max((membership, exchanges));
            }
            Some(RankNotice::Failed(error)) => return Some(error),
            None => {
                let reason = "it sent data that this version does not send";
                return Some(Error::RankGone { operation: "exchange", rank, reason });
            }
        }
    }
    None
}

/// Reads a message. Headers and notices are small enough to arrive whole.
fn take((message, status): (Message, Status)) -> Vec<u8> {
    let len = status.count(u8::equivalent_datatype());
    let mut bytes = vec![0u8; usize::try_from(len).unwrap_or(0)];
    message.matched_receive_into(&mut bytes[..]);
    bytes
}

/// Back-off between two polls: spinning, then yielding, then sleeping. With fewer cores than ranks,
/// the other ranks need this rank's core.
#[derive(Default)]
pub(super) struct Backoff(u32);

impl Backoff {
    pub(super) fn rest(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..50 => std::hint::spin_loop(),
            50..2000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that arrives just before the deadline gets a full deadline for its elements.
    #[test]
    fn an_arriving_header_restarts_the_deadline() {
        let universe = mpi::initialize().unwrap();
        let (world, deadline) = (universe.world(), Duration::from_millis(400));
        // Both ranks are this process, which receives its own messages.
        let mut group = MpiGroup::new(0, Arc::new([0, 0]), 0, deadline);
        let call = CollectiveCall::new("test");
        let (content, elements) = ((None, 3), [7u8, 8, 9]);
        let announced = [Outgoing { peer: 1, content, memory: SendMemory::Host(Arc::default()) }];
        let headers = headers(&group, &call, &announced);
        let memory = ReceiveMemory::Host(vec![0; 3]);
        let mut receives = [Incoming { peer: 1, content, memory }];
        let (outcome, waited) = mpi::request::scope(|scope| {
            let mut transfer = MpiTransfer::new(&world, scope, &mut group, &call);
            transfer.begin(&headers, &[], &mut receives);
            while !transfer.requests.is_empty() {
                transfer.test();
            }
            let began = Instant::now();
            transfer.last_sign = began.checked_sub(deadline.mul_f64(0.75)).unwrap();
            let ended = (transfer.poll(&mut |_| {}), began.elapsed());
            // Requests in flight must end before their memory is freed.
            transfer.send(1, &elements, transfer.tags.elements);
            while !transfer.requests.is_empty() {
                transfer.test();
            }
            ended
        });
        assert!(matches!(outcome, Err((Error::RankLate { rank: 1, .. }, true))), "{outcome:?}");
        assert!(waited >= deadline, "{waited:?}");
        let [Incoming { memory: ReceiveMemory::Host(received), .. }] = &receives[..] else {
            panic!("host memory")
        };
        assert_eq!(received[..], elements);
    }
}

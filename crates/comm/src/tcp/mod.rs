//! Ranks that are processes, connected over TCP; environment variables name the address.
//!
//! Every collective is a meeting at a hub in the process of rank 0, which forwards all messages.
//! The transport is therefore for messages that are small compared with the computation, and for
//! agreement about calls whose elements move over [`nccl`](crate::nccl).

mod frame;
mod hub;
mod place;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use meristem_device::Stream;

use self::frame::{
    Greeting, GroupMember, HubRequest, SentMessage, TcpAnswer, TcpArguments, TcpArrival,
};
use self::hub::{HubGroup, TcpHub};
pub(crate) use self::place::ProcessPlace;
use crate::check::GroupRank;
use crate::error::{Error, Result};
use crate::host;
use crate::log::COMM_LOG;
use crate::spans::Spans;
use crate::sync::Arc;
use crate::threads::board::LeaveReason;
use crate::transport::{CollectiveCall, Parcel, Parcels, Sum, Transport, check_parcels};
use crate::watch::{GroupStatus, GroupWatch, Heartbeat, SILENT};

/// Time between two attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// Time for an address of rank 0 to answer before the next address is tried.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Extra time for an answer; the hub enforces the deadline itself.
const GRACE: Duration = Duration::from_secs(5);

/// The transport of a rank.
struct Tcp {
    connection: HubLink,
    /// Address of the hub.
    address: SocketAddr,
    member: GroupMember,
    deadline: Duration,
    failure: Option<Error>,
    /// Whether the hub was notified that no more calls come.
    has_left: bool,
}

/// The connection of a rank to the hub.
enum HubLink {
    /// In this process.
    Here {
        hub: Arc<TcpHub>,
        group: Arc<HubGroup>,
    },
    There(TcpStream),
}

/// Joins the processes that were started together. Waits until all have joined.
///
/// # Errors
/// [`Error::BadArgument`] for an invalid place, a rank 0 that cannot listen or be reached, and a
/// place that rank 0 rejects; [`Error::RankLate`] for a rank that does not join.
pub(crate) fn world(place: &ProcessPlace, deadline: Duration) -> Result<Box<dyn Transport>> {
    let addresses = place.addresses()?;
    let member = GroupMember { group: 0, rank: place.rank as u64, size: place.size as u64 };
    let (connection, address) = if place.rank == 0 {
        let hub = TcpHub::open(&addresses, place.size, deadline);
        let hub = hub.map_err(|error| place.cannot_listen(&error))?;
        let group = hub.add_local_rank(member).map_err(|reason| place.refused(&reason))?;
        let address = hub.address();
        (HubLink::Here { hub, group }, address)
    } else {
        let greeting = Greeting { member, watches: false };
        let connection =
            connect_to_hub(&addresses, greeting, deadline).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => place.refused(&error.to_string()),
                _ => place.unreachable(&error),
            });
        let (address, stream) = connection?;
        (HubLink::There(stream), address)
    };
    let mut world = Tcp { connection, address, member, deadline, failure: None, has_left: false };
    world.barrier(&CollectiveCall::new("rendezvous"))?;
    let GroupMember { rank, size, .. } = member;
    tracing::debug!(target: COMM_LOG, rank, size, address = %world.address, "all have come");
    Ok(Box::new(world))
}

/// Connects to the hub as soon as it listens, and joins a group. A rejection is
/// [`io::ErrorKind::PermissionDenied`] with the reason.
fn connect_to_hub(
    addresses: &[SocketAddr],
    greeting: Greeting,
    deadline: Duration,
) -> io::Result<(SocketAddr, TcpStream)> {
    let end = Instant::now() + deadline;
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    loop {
        for address in addresses {
            let left = end.saturating_duration_since(Instant::now()).clamp(RETRY, ATTEMPT);
            let connected = TcpStream::connect_timeout(address, left);
            match connected.and_then(|stream| join_group(stream, greeting, deadline)) {
                Ok(stream) => return Ok((*address, stream)),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
                Err(error) => last = error,
            }
        }
        if Instant::now() >= end {
            return Err(last);
        }
        thread::sleep(RETRY);
    }
}

/// Joins a group over a new connection.
fn join_group(
    mut stream: TcpStream,
    greeting: Greeting,
    deadline: Duration,
) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(deadline.saturating_add(GRACE)))?;
    stream.set_write_timeout(Some(deadline.saturating_add(GRACE)))?;
    frame::write(&mut stream, &greeting.encode())?;
    let reason = frame::read(&mut stream)?;
    if reason.is_empty() {
        return Ok(stream);
    }
    let reason = String::from_utf8_lossy(&reason).into_owned();
    Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
}

/// Sends a request to the hub and reads the answer.
fn send_request(
    stream: &mut TcpStream,
    request: &HubRequest,
) -> io::Result<Option<Result<TcpAnswer>>> {
    frame::write(stream, &request.encode())?;
    Ok(frame::decode(&frame::read(stream)?))
}

/// The error for a hub that does not answer, or sends invalid bytes.
fn hub_lost(operation: &'static str, error: Option<&io::Error>, deadline: Duration) -> Error {
    let rank = 0;
    match error.map(io::Error::kind) {
        Some(kind) if frame::is_timeout(kind) => {
            Error::RankLate { operation, rank, seconds: deadline.as_secs_f64() }
        }
        Some(_) => Error::RankGone { operation, rank, reason: LeaveReason::Closed.text() },
        None => Error::RankGone { operation, rank, reason: LeaveReason::InvalidData.text() },
    }
}

impl Tcp {
    fn meet(&mut self, call: &CollectiveCall, arguments: TcpArguments) -> Result<TcpAnswer> {
        if let Some(failure) = &self.failure {
            return Err(failure.at(call.operation));
        }
        let arrival = TcpArrival { call: *call, arguments };
        let (operation, deadline) = (call.operation, self.deadline);
        let answer = match &mut self.connection {
            HubLink::Here { hub, group } => hub.meet(group, self.member.rank as usize, arrival),
            HubLink::There(stream) => match send_request(stream, &HubRequest::Meet(arrival)) {
                Ok(Some(answer)) => answer,
                Ok(None) => Err(hub_lost(operation, None, deadline)),
                Err(error) => Err(hub_lost(operation, Some(&error), deadline)),
            },
        };
        answer.inspect_err(|error| self.failure = Some(error.clone()))
    }

    /// The error for an answer of the wrong kind.
    fn wrong_answer(&mut self, call: &CollectiveCall) -> Error {
        self.failure.insert(hub_lost(call.operation, None, self.deadline)).clone()
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn rank(&self) -> usize {
        self.member.rank as usize
    }

    fn size(&self) -> usize {
        self.member.size as usize
    }

    fn exchange(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        let group = GroupRank { rank: self.rank(), size: self.size() };
        check_parcels(call.operation, stream, group, Parcels { sends, receives })?;
        let content = |elements: &Spans| (Some(elements.dtype()), elements.len());
        let bytes = host::fetch(sends)?;
        let sends = sends.iter().zip(bytes).map(|(Parcel { peer, elements }, bytes)| SentMessage {
            peer: *peer,
            content: content(elements),
            bytes,
        });
        let expected = receives.iter().map(|Parcel { peer, elements }| (*peer, content(elements)));
        let arguments =
            TcpArguments::Exchange { sends: sends.collect(), receives: expected.collect() };
        let messages = match self.meet(call, arguments)? {
            TcpAnswer::Received(messages) if messages.len() == receives.len() => messages,
            _ => return Err(self.wrong_answer(call)),
        };
        let pairs = receives.iter().zip(&messages);
        pairs.into_iter().try_for_each(|(parcel, bytes)| host::deliver(&parcel.elements, bytes))
    }

    fn all_reduce(&mut self, _: &CollectiveCall, _: &Stream, _: &Sum<'_, Spans>) -> Result<bool> {
        Ok(false)
    }

    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        let arguments = TcpArguments::Exchange { sends: Vec::new(), receives: Vec::new() };
        self.meet(call, arguments).map(drop)
    }

    fn abort(&mut self, reason: &str) {
        if self.failure.is_some() {
            return;
        }
        match &mut self.connection {
            HubLink::Here { group, .. } => group.abort(self.member.rank as usize, reason),
            HubLink::There(stream) => {
                // A lost hub needs no notice.
                let _ = frame::write(stream, &HubRequest::Aborted(reason.to_owned()).encode());
            }
        }
    }

    fn leave(&mut self) {
        let reason = LeaveReason::of_this_thread();
        match &mut self.connection {
            HubLink::Here { group, .. } => group.leave(self.member.rank as usize, reason),
            HubLink::There(_) if self.has_left => {}
            HubLink::There(stream) => {
                let panicked = reason == LeaveReason::Panicked;
                // A lost hub needs no notice.
                let _ = frame::write(stream, &HubRequest::Left { panicked }.encode());
            }
        }
        self.has_left = true;
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn watch(&mut self) -> Result<Box<dyn GroupWatch>> {
        let (member, deadline) = (self.member, self.deadline);
        let to = match &self.connection {
            HubLink::Here { group, .. } => WatchLink::Here(group.clone()),
            HubLink::There(_) => {
                let greeting = Greeting { member, watches: true };
                let connected = connect_to_hub(&[self.address], greeting, deadline);
                let (_, stream) =
                    connected.map_err(|error| hub_lost("watch", Some(&error), deadline))?;
                // The hub answers heartbeats without waiting for other ranks.
                let patience = Some(deadline.max(SILENT));
                let set = stream.set_read_timeout(patience);
                set.and_then(|()| stream.set_write_timeout(patience))
                    .map_err(|error| hub_lost("watch", Some(&error), deadline))?;
                WatchLink::There(stream)
            }
        };
        Ok(Box::new(TcpWatch { to, rank: member.rank as usize, deadline, failure: None }))
    }

    fn split(&mut self, call: &CollectiveCall, color: u64, key: u64) -> Result<Box<dyn Transport>> {
        let member = match self.meet(call, TcpArguments::Split { color, key })? {
            TcpAnswer::Group(member) => member,
            _ => return Err(self.wrong_answer(call)),
        };
        let (address, deadline) = (self.address, self.deadline);
        let connection = match &self.connection {
            HubLink::Here { hub, .. } => {
                let refused = |_| hub_lost(call.operation, None, deadline);
                let group = hub.add_local_rank(member).map_err(refused)?;
                HubLink::Here { hub: hub.clone(), group }
            }
            HubLink::There(_) => {
                let greeting = Greeting { member, watches: false };
                let connected = connect_to_hub(&[address], greeting, deadline);
                let (_, stream) =
                    connected.map_err(|error| hub_lost(call.operation, Some(&error), deadline))?;
                HubLink::There(stream)
            }
        };
        Ok(Box::new(Tcp { connection, address, member, deadline, failure: None, has_left: false }))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        match &self.connection {
            HubLink::Here { hub, group } => {
                hub.leave(group, self.member, LeaveReason::of_this_thread())
            }
            HubLink::There(_) => self.leave(),
        }
    }
}

/// The watching thread's view of the group.
struct TcpWatch {
    to: WatchLink,
    rank: usize,
    deadline: Duration,
    /// The loss of the hub.
    failure: Option<Error>,
}

enum WatchLink {
    Here(Arc<HubGroup>),
    There(TcpStream),
}

impl GroupWatch for TcpWatch {
    fn heartbeat(&mut self, heartbeat: &Heartbeat) -> GroupStatus {
        if let Some(failure) = &self.failure {
            return GroupStatus::Lost(failure.clone());
        }
        let stream = match &mut self.to {
            WatchLink::Here(group) => return group.heartbeat(self.rank, heartbeat),
            WatchLink::There(stream) => stream,
        };
        let hub_lost = |error| hub_lost("exchange", error, self.deadline);
        let failure = match send_request(stream, &HubRequest::Heartbeat(heartbeat.clone())) {
            Ok(Some(Ok(TcpAnswer::Sound))) => return GroupStatus::Sound,
            Ok(Some(Ok(TcpAnswer::Ended))) => return GroupStatus::Ended,
            Ok(Some(Err(error))) => return GroupStatus::Lost(error),
            Ok(_) => hub_lost(None),
            Err(error) => hub_lost(Some(&error)),
        };
        GroupStatus::Lost(self.failure.insert(failure).clone())
    }
}

impl Drop for TcpWatch {
    fn drop(&mut self) {
        match &mut self.to {
            WatchLink::Here(group) => group.unwatch(self.rank),
            WatchLink::There(stream) => {
                // A lost hub needs no notice.
                let _ = frame::write(stream, &HubRequest::Left { panicked: false }.encode());
            }
        }
    }
}

/// Decodes bytes both as a message to the hub and as a message from it.
#[cfg(fuzzing)]
pub(crate) fn decode_both(bytes: &[u8]) {
    let _ = (HubRequest::decode(bytes), frame::decode(bytes));
}

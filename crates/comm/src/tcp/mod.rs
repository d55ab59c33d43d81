//! Ranks that are processes and find each other by their environment variables, over TCP.
//!
//! Every collective is a meeting at a hub in the process of rank 0, which passes messages on. So
//! this is for messages that are small compared with the computation, and for agreement about calls
//! whose elements move in another way ([`nccl`](crate::nccl)).

mod frame;
mod hub;
mod place;

use crate::error::{Error, Result};
use crate::host;
use crate::log::COMM_LOG;
use crate::spans::Spans;
use crate::sync::Arc;
use crate::transport::{Call, Parcel, Sum, Transport, check_parcels};
use frame::{Answer, Arrival, Greeting, Request, Sent, Wish};
use hub::{Group, Hub};
use meristem_device::Stream;
pub(crate) use place::Place;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// Time that an answer may take in addition to the deadline, which the hub keeps.
const GRACE: Duration = Duration::from_secs(5);

/// The link of a rank to the hub.
struct Tcp {
    seat: Seat,
    /// Address of the hub.
    address: SocketAddr,
    rank: usize,
    size: usize,
    deadline: Duration,
    failure: Option<Error>,
}

/// Where the hub is.
enum Seat {
    /// In this process.
    Here {
        hub: Arc<Hub>,
        group: Arc<Group>,
    },
    There(TcpStream),
}

/// Joins the processes that were started together. Waits until all have come.
///
/// # Errors
/// [`Error::BadArgument`] for a place that does not fit; [`Error::RankLate`] for a rank that does
/// not come.
pub(crate) fn world(place: &Place, deadline: Duration) -> Result<Box<dyn Transport>> {
    let addresses = place.addresses()?;
    let greeting = Greeting { group: 0, rank: place.rank as u64, size: place.size as u64 };
    let mut world = if place.rank == 0 {
        let hub = Hub::open(&addresses, place.size, deadline);
        let hub = hub.map_err(|error| place.cannot_listen(&error))?;
        let group = hub.take_here(greeting).map_err(|reason| place.refused(&reason))?;
        let address = hub.address();
        Tcp::new(Seat::Here { hub, group }, address, greeting, deadline)
    } else {
        let (address, stream) = reach(&addresses, deadline).map_err(|e| place.unreachable(&e))?;
        let seat = sit(stream, greeting, deadline).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => place.refused(&error.to_string()),
            _ => place.unreachable(&error),
        })?;
        Tcp::new(seat, address, greeting, deadline)
    };
    world.barrier(&Call::of("rendezvous"))?;
    let (rank, size) = (world.rank, world.size);
    tracing::debug!(target: COMM_LOG, rank, size, address = %world.address, "all have come");
    Ok(Box::new(world))
}

/// Connects to the hub, as soon as it listens.
fn reach(addresses: &[SocketAddr], deadline: Duration) -> io::Result<(SocketAddr, TcpStream)> {
    let end = Instant::now() + deadline;
    loop {
        let left = end.saturating_duration_since(Instant::now()).max(RETRY);
        let connect = |address: &SocketAddr| -> io::Result<(SocketAddr, TcpStream)> {
            Ok((*address, TcpStream::connect_timeout(address, left)?))
        };
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in addresses {
            match connect(address) {
                Ok(connected) => return Ok(connected),
                Err(error) => last = error,
            }
        }
        if Instant::now() >= end {
            return Err(last);
        }
        thread::sleep(RETRY);
    }
}

/// Takes a place at the hub. A refusal is [`io::ErrorKind::PermissionDenied`] with the reason.
fn sit(mut stream: TcpStream, greeting: Greeting, deadline: Duration) -> io::Result<Seat> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(deadline.saturating_add(GRACE)))?;
    frame::write(&mut stream, &greeting.encode())?;
    let reason = frame::read(&mut stream)?;
    match reason.is_empty() {
        true => Ok(Seat::There(stream)),
        false => {
            let reason = String::from_utf8_lossy(&reason).into_owned();
            Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
        }
    }
}

impl Tcp {
    fn new(seat: Seat, address: SocketAddr, greeting: Greeting, deadline: Duration) -> Tcp {
        let (rank, size) = (greeting.rank as usize, greeting.size as usize);
        Tcp { seat, address, rank, size, deadline, failure: None }
    }

    fn meet(&mut self, call: &Call, wish: Wish) -> Result<Answer> {
        if let Some(failure) = &self.failure {
            return Err(failure.at(call.operation));
        }
        let arrival = Arrival { call: *call, wish };
        let answer = match &mut self.seat {
            Seat::Here { hub, group } => hub.meet(group, self.rank, arrival),
            Seat::There(stream) => {
                let asked = frame::write(stream, &Request::Meet(arrival).encode());
                let answer = asked.and_then(|()| frame::read(stream));
                let answer = answer.map_err(|error| gone(call, &error, self.deadline));
                answer.and_then(|bytes| {
                    let reason = "it sent data that this version does not send";
                    let strange = || Error::RankGone { operation: call.operation, rank: 0, reason };
                    frame::decode(&bytes).unwrap_or_else(|| Err(strange()))
                })
            }
        };
        answer.inspect_err(|error| self.failure = Some(error.clone()))
    }

    fn tell(&mut self, request: &Request) {
        match (&mut self.seat, request) {
            (Seat::There(stream), request) => {
                // A hub that is gone needs no notice.
                let _ = frame::write(stream, &request.encode());
            }
            (Seat::Here { hub, group }, Request::Left { panicked }) => {
                hub.leave(group, self.rank, *panicked);
            }
            (Seat::Here { hub, group }, Request::Aborted(reason)) => {
                hub.abort(group, self.rank, reason);
            }
            (Seat::Here { .. }, Request::Meet(_)) => {}
        }
    }
}

/// The error for a hub that does not answer.
fn gone(call: &Call, error: &io::Error, deadline: Duration) -> Error {
    let (operation, rank) = (call.operation, 0);
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Error::RankLate { operation, rank, seconds: deadline.as_secs_f64() }
        }
        _ => Error::RankGone { operation, rank, reason: "its connection closed" },
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn exchange(
        &mut self,
        call: &Call,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        check_parcels(call.operation, stream, (self.rank, self.size), [sends, receives])?;
        let content = |elements: &Spans| (Some(elements.dtype()), elements.len());
        let bytes = host::fetch(sends)?;
        let sends = sends.iter().zip(bytes).map(|(Parcel { peer, elements }, bytes)| Sent {
            peer: *peer,
            content: content(elements),
            bytes,
        });
        let expected = receives.iter().map(|Parcel { peer, elements }| (*peer, content(elements)));
        let wish = Wish::Exchange { sends: sends.collect(), receives: expected.collect() };
        let Answer::Received(messages) = self.meet(call, wish)? else {
            unreachable!("calls are checked to be exchanges on all ranks")
        };
        let pairs = receives.iter().zip(&messages);
        pairs.into_iter().try_for_each(|(parcel, bytes)| host::deliver(&parcel.elements, bytes))
    }

    fn all_reduce(&mut self, _: &Call, _: &Stream, _: &Sum<'_, Spans>) -> Result<bool> {
        Ok(false)
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        let wish = Wish::Exchange { sends: Vec::new(), receives: Vec::new() };
        self.meet(call, wish).map(drop)
    }

    fn abort(&mut self, reason: &str) {
        if self.failure.is_none() {
            self.tell(&Request::Aborted(reason.to_owned()));
        }
    }

    fn split(&mut self, call: &Call, color: u64, key: u64) -> Result<Box<dyn Transport>> {
        let Answer::Group(greeting) = self.meet(call, Wish::Split { color, key })? else {
            unreachable!("calls are checked to be splits on all ranks")
        };
        let (address, deadline) = (self.address, self.deadline);
        let gone = |error: &io::Error| gone(call, error, deadline);
        let seat = match &self.seat {
            Seat::Here { hub, .. } => {
                let lost = |_| gone(&io::ErrorKind::NotConnected.into());
                let group = hub.take_here(greeting).map_err(lost)?;
                Seat::Here { hub: hub.clone(), group }
            }
            Seat::There(_) => {
                let (_, stream) = reach(&[address], deadline).map_err(|error| gone(&error))?;
                sit(stream, greeting, deadline).map_err(|error| gone(&error))?
            }
        };
        Ok(Box::new(Tcp::new(seat, address, greeting, deadline)))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.tell(&Request::Left { panicked: thread::panicking() });
    }
}

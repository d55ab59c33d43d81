//! Messages between a rank and the hub: a length, then the contents.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::transport::CollectiveCall;
use crate::watch::{ExchangeProblem, Heartbeat};
use crate::wire::{CallHeader, Content, RankNotice, WireReader, WireWriter};

/// First number of a greeting, which identifies this protocol.
const MAGIC: u64 = u64::from_le_bytes(*b"meristm3");
/// Largest greeting in bytes; a longer one is not from a rank.
const GREETING_MAX: u64 = 64;
/// Largest message in bytes.
const MESSAGE_MAX: u64 = 1 << 40;

/// A rank of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupMember {
    /// Number of the group.
    pub(super) group: u64,
    pub(super) rank: u64,
    pub(super) size: u64,
}

/// First message of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) member: GroupMember,
    /// Whether the connection is the rank's second one, for its watching thread.
    pub(super) watches: bool,
}

impl Greeting {
    pub(super) fn encode(self) -> Vec<u8> {
        let Greeting { member: GroupMember { group, rank, size }, watches } = self;
        let mut out = WireWriter::default();
        out.number(MAGIC).number(group).number(rank).number(size).number(u64::from(watches));
        out.0
    }

    /// Reads the greeting of a connection until `end`; `None` if it is invalid.
    pub(super) fn read(from: &mut TcpStream, end: Instant) -> io::Result<Option<Greeting>> {
        let bytes = read_at_most(&mut DeadlineReader { stream: from, end }, GREETING_MAX)?;
        let mut from = WireReader(&bytes);
        if from.number() != Some(MAGIC) {
            return Ok(None);
        }
        let mut numbers = || Some([from.number()?, from.number()?, from.number()?, from.number()?]);
        Ok(numbers().map(|[group, rank, size, watches]| Greeting {
            member: GroupMember { group, rank, size },
            watches: watches == 1,
        }))
    }
}

/// A connection with a deadline for the whole read, however slowly bytes arrive.
struct DeadlineReader<'a> {
    stream: &'a mut TcpStream,
    end: Instant,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(to)
    }
}

/// Elements for another rank.
#[derive(Debug, Clone)]
pub(super) struct SentMessage {
    pub(super) peer: usize,
    pub(super) content: Content,
    pub(super) bytes: Arc<Vec<u8>>,
}

/// Contribution of a rank to a meeting.
#[derive(Debug)]
pub(super) struct TcpArrival {
    pub(super) call: CollectiveCall,
    pub(super) arguments: TcpArguments,
}

/// Arguments of a rank's call.
#[derive(Debug)]
pub(super) enum TcpArguments {
    /// Messages to send, and the contents expected from each rank.
    Exchange {
        sends: Vec<SentMessage>,
        receives: Vec<(usize, Content)>,
    },
    Split {
        color: u64,
        key: u64,
    },
}

/// Answer of the hub to a rank.
#[derive(Debug)]
pub(super) enum TcpAnswer {
    /// The messages to the rank, in the expected order.
    Received(Vec<Arc<Vec<u8>>>),
    /// The rank's place in its new group.
    Group(GroupMember),
    /// No rank is known to be lost.
    Sound,
    /// No rank is known to be lost, and all devices have ended at least this device's exchanges.
    Ended,
}

/// Message from a rank to the hub.
#[derive(Debug)]
pub(super) enum HubRequest {
    Meet(TcpArrival),
    /// The rank makes no more calls; on the connection of its watching thread: no more heartbeats
    /// come.
    Left {
        panicked: bool,
    },
    /// The rank failed alone; contains the reason.
    Aborted(String),
    /// State of the rank's device.
    Heartbeat(Heartbeat),
}

impl HubRequest {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = WireWriter::default();
        match self {
            HubRequest::Meet(TcpArrival { call, arguments }) => {
                let header = CallHeader { step: 0, call: *call, parcels: Vec::new() };
                match arguments {
                    TcpArguments::Split { color, key } => {
                        out.number(1).bytes(&header.encode()).number(*color).number(*key);
                    }
                    TcpArguments::Exchange { sends, receives } => {
                        out.number(0).bytes(&header.encode()).number(sends.len() as u64);
                        for SentMessage { peer, content: (dtype, len), bytes } in sends {
                            out.number(*peer as u64).dtype(*dtype).number(*len as u64).bytes(bytes);
                        }
                        for (peer, (dtype, len)) in receives {
                            out.number(*peer as u64).dtype(*dtype).number(*len as u64);
                        }
                    }
                }
            }
            HubRequest::Left { panicked } => {
                out.number(2).number(u64::from(*panicked));
            }
            HubRequest::Aborted(reason) => {
                out.number(3).bytes(reason.as_bytes());
            }
            HubRequest::Heartbeat(Heartbeat { membership, reached, ended, closing, problem }) => {
                out.number(4).number(*membership).number(*reached).number(*ended);
                out.number(u64::from(*closing));
                match problem {
                    None => out.number(0),
                    Some(ExchangeProblem::Overdue) => out.number(1),
                    Some(ExchangeProblem::Failed(reason)) => out.number(2).bytes(reason.as_bytes()),
                    Some(ExchangeProblem::Lost) => out.number(3),
                    Some(ExchangeProblem::Stuck) => out.number(4),
                };
            }
        }
        out.0
    }

    /// Decodes a request; `None` for bytes that this version does not write.
    pub(super) fn decode(bytes: &[u8]) -> Option<HubRequest> {
        let mut from = WireReader(bytes);
        Some(match from.number()? {
            0 => {
                let call = CallHeader::decode(from.bytes()?)?.call;
                let sends = from.number()?;
                let sends: Option<Vec<SentMessage>> = (0..sends)
                    .map(|_| {
                        let (peer, content) = (from.number()? as usize, content(&mut from)?);
                        Some(SentMessage { peer, content, bytes: Arc::new(from.bytes()?.to_vec()) })
                    })
                    .collect();
                let mut receives = Vec::new();
                while !from.0.is_empty() {
                    receives.push((from.number()? as usize, content(&mut from)?));
                }
                HubRequest::Meet(TcpArrival {
                    call,
                    arguments: TcpArguments::Exchange { sends: sends?, receives },
                })
            }
            1 => {
                let call = CallHeader::decode(from.bytes()?)?.call;
                let (color, key) = (from.number()?, from.number()?);
                HubRequest::Meet(TcpArrival { call, arguments: TcpArguments::Split { color, key } })
            }
            2 => HubRequest::Left { panicked: from.number()? == 1 },
            3 => HubRequest::Aborted(text(&mut from)?),
            4 => {
                let (membership, reached) = (from.number()?, from.number()?);
                let (ended, closing) = (from.number()?, from.number()? == 1);
                let problem = match from.number()? {
                    0 => None,
                    1 => Some(ExchangeProblem::Overdue),
                    2 => Some(ExchangeProblem::Failed(text(&mut from)?)),
                    3 => Some(ExchangeProblem::Lost),
                    4 => Some(ExchangeProblem::Stuck),
                    _ => return None,
                };
                HubRequest::Heartbeat(Heartbeat { membership, reached, ended, closing, problem })
            }
            _ => return None,
        })
    }
}

fn text(from: &mut WireReader<'_>) -> Option<String> {
    String::from_utf8(from.bytes()?.to_vec()).ok()
}

fn content(from: &mut WireReader<'_>) -> Option<Content> {
    Some((from.dtype()?, from.number()? as usize))
}

/// Encodes an answer.
pub(super) fn encode(answer: &Result<TcpAnswer>) -> Vec<u8> {
    let mut out = WireWriter::default();
    match answer {
        Ok(TcpAnswer::Received(messages)) => {
            out.number(0);
            messages.iter().for_each(|bytes| {
                out.bytes(bytes);
            });
        }
        Ok(TcpAnswer::Group(GroupMember { group, rank, size })) => {
            out.number(1).number(*group).number(*rank).number(*size);
        }
        Ok(TcpAnswer::Sound) => {
            out.number(3);
        }
        Ok(TcpAnswer::Ended) => {
            out.number(4);
        }
        Err(error) => {
            out.number(2).bytes(&RankNotice::Failed(error.clone()).encode());
        }
    }
    out.0
}

/// Decodes an answer; `None` for bytes that this version does not write.
pub(super) fn decode(bytes: &[u8]) -> Option<Result<TcpAnswer>> {
    let mut from = WireReader(bytes);
    Some(match from.number()? {
        0 => {
            let mut messages = Vec::new();
            while !from.0.is_empty() {
                messages.push(Arc::new(from.bytes()?.to_vec()));
            }
            Ok(TcpAnswer::Received(messages))
        }
        1 => {
            let (group, rank, size) = (from.number()?, from.number()?, from.number()?);
            Ok(TcpAnswer::Group(GroupMember { group, rank, size }))
        }
        3 => Ok(TcpAnswer::Sound),
        4 => Ok(TcpAnswer::Ended),
        _ => match RankNotice::decode(from.bytes()?)? {
            RankNotice::Failed(error) => Err(error),
            RankNotice::Left { .. } | RankNotice::Ended { .. } => return None,
        },
    })
}

/// The error for the other ranks: a rank's own error becomes [`Error::RankFailed`].
pub(super) fn broadcast_form(rank: usize, error: Error) -> Error {
    if error.is_own() { Error::RankFailed { rank, reason: error.to_string() } } else { error }
}

/// Whether an error is a timeout of a connection.
pub(super) fn is_timeout(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Writes a message.
pub(super) fn write(to: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&(bytes.len() as u64).to_le_bytes())?;
    to.write_all(bytes)
}

/// Reads a message.
pub(super) fn read(from: &mut TcpStream) -> io::Result<Vec<u8>> {
    read_at_most(from, MESSAGE_MAX)
}

fn read_at_most(from: &mut impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > most {
        return Err(io::Error::other(format!("a message of {len} bytes")));
    }
    let mut bytes = Vec::new();
    from.take(len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == len { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

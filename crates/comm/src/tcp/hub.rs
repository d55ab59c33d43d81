//! The hub, in the process of rank 0: a board per group, at which threads of the hub represent the
//! other ranks.
//!
//! Invariants
//! - A rank has one connection per group, served by one thread of the hub. The thread writes the
//!   answer of a meeting before it reads the next request. The watching thread of a rank has a
//!   second connection, with a second thread of the hub.
//! - A rank leaves its group with a notice, or when its connection ends without one, when the
//!   thread that serves it panics, or when its watching thread is silent until the deadline.
//! - Other connections (port scanners, ranks of another version) change nothing, and are served for
//!   a limited time.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{
    self, Greeting, GroupMember, HubRequest, SentMessage, TcpAnswer, TcpArguments, TcpArrival,
};
use crate::agree;
use crate::error::{Error, Result};
use crate::sync::{Arc, Condvar, Mutex, lock, wait_until};
use crate::threads::board::{LeaveReason, RankBoard};
use crate::transport::CollectiveCall;
use crate::watch::{GroupStatus, Heartbeat, SILENT};
use crate::wire::Content;

/// Time for a connection to send its greeting.
const GREETING: Duration = Duration::from_secs(10);
/// Largest number of connections without a greeting. Further connections are closed, and their
/// ranks retry.
const GREETING_MAX: usize = 256;
/// Delay after a failed accept, for example without free file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// A group at the hub.
pub(super) struct HubGroup {
    board: RankBoard<TcpArrival, TcpAnswer>,
    members: Mutex<HubMembers>,
}

/// The members of a group.
struct HubMembers {
    /// Whether each rank has joined.
    joined: Vec<bool>,
    /// Number of ranks that have left.
    left: usize,
}

impl HubGroup {
    /// See [`RankBoard::abort`].
    pub(super) fn abort(&self, rank: usize, reason: &str) {
        self.board.abort(rank, reason);
    }

    /// See [`RankBoard::leave`].
    pub(super) fn leave(&self, rank: usize, reason: LeaveReason) {
        self.board.leave(rank, reason);
    }

    /// See [`RankBoard::heartbeat`].
    pub(super) fn heartbeat(&self, rank: usize, heartbeat: &Heartbeat) -> GroupStatus {
        self.board.heartbeat(rank, heartbeat)
    }

    /// See [`RankBoard::unwatch`].
    pub(super) fn unwatch(&self, rank: usize) {
        self.board.unwatch(rank);
    }

    fn new(size: usize, deadline: Duration) -> Arc<HubGroup> {
        let members = Mutex::new(HubMembers { joined: vec![false; size], left: 0 });
        Arc::new(HubGroup { board: RankBoard::new(size, deadline), members })
    }
}

/// State of the hub.
struct HubState {
    groups: HashMap<u64, Arc<HubGroup>>,
    /// Number of the next group.
    next: u64,
    /// Number of open connections of ranks and of their watching threads.
    connected: usize,
    /// Number of groups that have a rank in this process.
    here: usize,
    /// Number of connections without a greeting.
    ungreeted: usize,
}

/// All groups of the connected processes.
pub(super) struct TcpHub {
    address: SocketAddr,
    deadline: Duration,
    state: Mutex<HubState>,
    left: Condvar,
}

impl TcpHub {
    /// Opens a hub that listens, with group 0 of `size` ranks.
    pub(super) fn open(
        address: &[SocketAddr],
        size: usize,
        deadline: Duration,
    ) -> io::Result<Arc<TcpHub>> {
        let listener = TcpListener::bind(address)?;
        let groups = HashMap::from([(0, HubGroup::new(size, deadline))]);
        let state = Mutex::new(HubState { groups, next: 1, connected: 0, here: 0, ungreeted: 0 });
        let address = listener.local_addr()?;
        let hub = Arc::new(TcpHub { address, deadline, state, left: Condvar::new() });
        let weak = Arc::downgrade(&hub);
        thread::Builder::new().name("rendezvous".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let Some(hub) = weak.upgrade() else { return };
                match stream {
                    Ok(stream) => hub.accept(stream),
                    Err(_) => thread::sleep(ACCEPT_AGAIN),
                }
            }
        })?;
        Ok(hub)
    }

    /// Address at which the hub listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts a thread for a connection. Without a thread the connection closes, and its rank
    /// retries.
    fn accept(self: Arc<Self>, stream: TcpStream) {
        {
            let mut state = lock(&self.state);
            if state.ungreeted >= GREETING_MAX {
                return;
            }
            state.ungreeted += 1;
        }
        let hub = self.clone();
        let serve = move || hub.serve(stream);
        if thread::Builder::new().name("rank".to_owned()).spawn(serve).is_err() {
            lock(&self.state).ungreeted -= 1;
        }
    }

    fn group(&self, member: GroupMember) -> Result<Arc<HubGroup>, String> {
        let group = lock(&self.state).groups.get(&member.group).cloned();
        let group = group.ok_or("there is no such group")?;
        let size = group.board.size() as u64;
        if size != member.size {
            return Err(format!("rank 0 was started with WORLD_SIZE {size}"));
        }
        if member.rank >= size {
            return Err(format!("a RANK below {size} was expected"));
        }
        Ok(group)
    }

    /// Adds a rank to its group, once; otherwise returns the reason.
    fn add_rank(&self, member: GroupMember) -> Result<Arc<HubGroup>, String> {
        let group = self.group(member)?;
        let taken = std::mem::replace(&mut lock(&group.members).joined[member.rank as usize], true);
        if taken { Err(format!("another process has RANK {}", member.rank)) } else { Ok(group) }
    }

    /// Adds a rank of this process to its group; see [`add_rank`](TcpHub::add_rank).
    pub(super) fn add_local_rank(&self, member: GroupMember) -> Result<Arc<HubGroup>, String> {
        let group = self.add_rank(member)?;
        lock(&self.state).here += 1;
        Ok(group)
    }

    /// Removes a rank from its group. A group is removed after its last rank has left. Group 0
    /// remains, so that late processes get the reason why they cannot join.
    fn remove_rank(&self, group: &HubGroup, member: GroupMember, reason: LeaveReason) {
        group.board.leave(member.rank as usize, reason);
        let left = {
            let mut members = lock(&group.members);
            members.left += 1;
            members.left
        };
        if left == group.board.size() && member.group != 0 {
            lock(&self.state).groups.remove(&member.group);
        }
    }

    /// Serves a connection until it ends.
    fn serve(self: Arc<Self>, mut stream: TcpStream) {
        let greeting = self.read_greeting(&mut stream);
        lock(&self.state).ungreeted -= 1;
        // A connection without a valid greeting is not from a rank.
        let Ok(Some(Greeting { member, watches })) = greeting else { return };
        let found = if watches { self.group(member) } else { self.add_rank(member) };
        let words = found.as_ref().err().cloned().unwrap_or_default();
        let answered = frame::write(&mut stream, words.as_bytes());
        let Ok(group) = found else { return };
        if watches {
            let _connection = Connection::open(&self);
            return serve_watch(&mut stream, &group, member.rank as usize);
        }
        if answered.is_err() {
            // The rank does not know that it has joined, and may retry.
            lock(&group.members).joined[member.rank as usize] = false;
            return;
        }
        let connection = Connection::open(&self);
        let reason = LeaveReason::Panicked;
        let mut seat = Connected { connection, group: &group, member, reason };
        seat.reason = self.serve_rank(&mut stream, &group, member.rank as usize);
    }

    /// Reads the first message of a connection.
    fn read_greeting(&self, stream: &mut TcpStream) -> io::Result<Option<Greeting>> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(self.deadline))?;
        let greeting = Greeting::read(stream, Instant::now() + GREETING)?;
        stream.set_read_timeout(None)?;
        Ok(greeting)
    }

    /// Serves a rank; returns how it left.
    fn serve_rank(&self, stream: &mut TcpStream, group: &HubGroup, rank: usize) -> LeaveReason {
        loop {
            let Ok(bytes) = frame::read(stream) else { return LeaveReason::Closed };
            match HubRequest::decode(&bytes) {
                Some(HubRequest::Meet(arrival)) => {
                    let answer = self.meet(group, rank, arrival);
                    let answer = answer.map_err(|error| frame::broadcast_form(0, error));
                    if frame::write(stream, &frame::encode(&answer)).is_err() {
                        return LeaveReason::Closed;
                    }
                }
                Some(HubRequest::Left { panicked: true }) => return LeaveReason::Panicked,
                Some(HubRequest::Left { panicked: false }) => return LeaveReason::Orderly,
                Some(HubRequest::Aborted(reason)) => group.board.abort(rank, &reason),
                Some(HubRequest::Heartbeat(_)) | None => return LeaveReason::InvalidData,
            }
        }
    }

    /// Takes part in a meeting of a group, for one rank.
    pub(super) fn meet(
        &self,
        group: &HubGroup,
        rank: usize,
        arrival: TcpArrival,
    ) -> Result<TcpAnswer> {
        let operation = arrival.call.operation;
        group.board.meet(operation, rank, arrival, |arrivals, answers| {
            let arrivals: Vec<&TcpArrival> = arrivals.iter().flatten().collect();
            let calls: Vec<CollectiveCall> = arrivals.iter().map(|arrival| arrival.call).collect();
            agree::check(&calls)?;
            // Equal calls have equal kinds of arguments, unless a rank sent invalid bytes.
            let kind = |arrival: &&TcpArrival| std::mem::discriminant(&arrival.arguments);
            if let Some(rank) = arrivals.iter().position(|a| kind(a) != kind(&arrivals[0])) {
                let reason = LeaveReason::InvalidData.text();
                return Err(Error::RankGone { operation, rank, reason });
            }
            match arrivals[0].arguments {
                TcpArguments::Exchange { .. } => route(&arrivals, answers),
                TcpArguments::Split { .. } => {
                    self.split(&arrivals, answers);
                    Ok(())
                }
            }
        })
    }

    /// Removes this process's rank from a group. After its last group, waits for the other
    /// processes.
    pub(super) fn leave(&self, group: &HubGroup, member: GroupMember, reason: LeaveReason) {
        self.remove_rank(group, member, reason);
        let mut state = lock(&self.state);
        state.here -= 1;
        let last = state.here == 0;
        drop(state);
        if last {
            self.wait_for_others();
        }
    }

    /// Creates a group per color.
    fn split(&self, arrivals: &[&TcpArrival], answers: &mut [Option<TcpAnswer>]) {
        let mut members: Vec<(u64, u64, usize)> = Vec::with_capacity(arrivals.len());
        for (rank, arrival) in arrivals.iter().enumerate() {
            if let TcpArguments::Split { color, key } = arrival.arguments {
                members.push((color, key, rank));
            }
        }
        members.sort_unstable();
        let mut state = lock(&self.state);
        for group in members.chunk_by(|a, b| a.0 == b.0) {
            let (number, size) = (state.next, group.len());
            state.next += 1;
            state.groups.insert(number, HubGroup::new(size, self.deadline));
            for (rank, (_, _, old)) in group.iter().enumerate() {
                let (rank, size) = (rank as u64, size as u64);
                answers[*old] = Some(TcpAnswer::Group(GroupMember { group: number, rank, size }));
            }
        }
    }

    /// Waits until all connections have ended, at most for the deadline: the last answers must
    /// arrive before this process ends.
    fn wait_for_others(&self) {
        let end = Instant::now() + self.deadline;
        let mut state = lock(&self.state);
        while state.connected > 0 && Instant::now() < end {
            state = wait_until(&self.left, state, end);
        }
    }
}

/// A counted connection of a rank or its watching thread. The hub's process waits for the end of
/// all of them.
struct Connection<'a>(&'a TcpHub);

impl Connection<'_> {
    fn open(hub: &TcpHub) -> Connection<'_> {
        lock(&hub.state).connected += 1;
        Connection(hub)
    }
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).connected -= 1;
        self.0.left.notify_all();
    }
}

/// A rank with a connection. Dropping it removes the rank from its group, also after a panic of the
/// serving thread.
struct Connected<'a> {
    connection: Connection<'a>,
    group: &'a HubGroup,
    member: GroupMember,
    reason: LeaveReason,
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.connection.0.remove_rank(self.group, self.member, self.reason);
    }
}

/// Answers heartbeats of a rank's watching thread until the thread announces its end. If the
/// connection ends before the announcement, the process is gone; if heartbeats stop, the machine is
/// gone. While the hub's thread for the rank waits in a meeting, it does not read the rank's own
/// connection and detects neither.
fn serve_watch(stream: &mut TcpStream, group: &HubGroup, rank: usize) {
    let patience = group.board.deadline().max(SILENT);
    if stream.set_read_timeout(Some(patience)).is_err() {
        return group.leave(rank, LeaveReason::Closed);
    }
    loop {
        let bytes = match frame::read(stream) {
            Ok(bytes) => bytes,
            Err(error) if frame::is_timeout(error.kind()) => {
                return group.leave(rank, LeaveReason::Vanished);
            }
            Err(_) => return group.leave(rank, LeaveReason::Closed),
        };
        let heartbeat = match HubRequest::decode(&bytes) {
            Some(HubRequest::Heartbeat(heartbeat)) => heartbeat,
            Some(HubRequest::Left { .. }) => return group.unwatch(rank),
            _ => return group.leave(rank, LeaveReason::InvalidData),
        };
        let answer = match group.heartbeat(rank, &heartbeat) {
            GroupStatus::Sound => Ok(TcpAnswer::Sound),
            GroupStatus::Ended => Ok(TcpAnswer::Ended),
            GroupStatus::Lost(error) => Err(frame::broadcast_form(0, error)),
        };
        if frame::write(stream, &frame::encode(&answer)).is_err() {
            return group.leave(rank, LeaveReason::Closed);
        }
    }
}

impl Drop for TcpHub {
    fn drop(&mut self) {
        // Wakes the listening thread, which then finds no hub and ends.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

/// Delivers the messages that ranks sent to each other.
fn route(arrivals: &[&TcpArrival], answers: &mut [Option<TcpAnswer>]) -> Result<()> {
    let operation = arrivals[0].call.operation;
    let parts = |arrival: &'_ TcpArrival| -> (Vec<SentMessage>, Vec<(usize, Content)>) {
        match &arrival.arguments {
            TcpArguments::Exchange { sends, receives } => (sends.clone(), receives.clone()),
            TcpArguments::Split { .. } => (Vec::new(), Vec::new()),
        }
    };
    let all: Vec<_> = arrivals.iter().map(|arrival| parts(arrival)).collect();
    for (to, answer) in answers.iter_mut().enumerate() {
        let mut messages: Vec<Option<Arc<Vec<u8>>>> = vec![None; all[to].1.len()];
        for (from, (sends, _)) in all.iter().enumerate() {
            let mut sent = sends.iter().filter(|sent| sent.peer == to);
            let places = all[to].1.iter().enumerate().filter(|(_, (peer, _))| *peer == from);
            let mut expected = places.map(|(place, (_, content))| (place, *content));
            loop {
                match (sent.next(), expected.next()) {
                    (None, None) => break,
                    (Some(sent), Some((place, content))) if sent.content == content => {
                        messages[place] = Some(sent.bytes.clone());
                    }
                    (sent, expected) => {
                        let expected = describe(expected.map(|(_, content)| content));
                        let got = describe(sent.map(|sent| sent.content));
                        let (rank, what) = (from, "a message of");
                        return Err(Error::Disagreement { operation, rank, what, expected, got });
                    }
                }
            }
        }
        *answer = Some(TcpAnswer::Received(messages.into_iter().flatten().collect()));
    }
    Ok(())
}

fn describe(content: Option<Content>) -> String {
    match content {
        None => "nothing".to_owned(),
        Some((None, len)) => format!("{len} bytes"),
        Some((Some(dtype), len)) => format!("{len} x {dtype}"),
    }
}

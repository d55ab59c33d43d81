//! The hub, in the process of rank 0: a board for each group, at which its threads stand for the
//! other ranks.
//!
//! Invariants
//! - A rank has one connection to each of its groups, and one thread of the hub. The thread writes
//!   the answer of a meeting before it reads the next request.
//! - A connection that ends without a word leaves the group.

use super::frame::{self, Answer, Arrival, Greeting, Request, Sent, Wish};
use crate::agree;
use crate::error::{Error, Result};
use crate::sync::{Arc, Condvar, Mutex, lock, wait_until};
use crate::threads::board::Board;
use crate::transport::Call;
use crate::wire::Content;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Time for which a connection may be silent before it has said who it is.
const GREETING: Duration = Duration::from_secs(10);

/// A group, as the hub knows it.
pub(super) struct Group {
    board: Board<Arrival, Answer>,
    /// Ranks that have come.
    seats: Mutex<Vec<bool>>,
}

impl Group {
    fn new(size: usize, deadline: Duration) -> Arc<Group> {
        let seats = Mutex::new(vec![false; size]);
        Arc::new(Group { board: Board::new(size, deadline), seats })
    }
}

/// State of the hub.
struct State {
    groups: HashMap<u64, Arc<Group>>,
    /// Number of the next group.
    next: u64,
    /// Connections of ranks, and places of this process.
    connected: usize,
    here: usize,
}

/// All groups of the processes that found each other.
pub(super) struct Hub {
    address: SocketAddr,
    deadline: Duration,
    state: Mutex<State>,
    left: Condvar,
}

impl Hub {
    /// A hub that listens, with a first group of so many ranks, whose number is 0.
    pub(super) fn open(
        address: &[SocketAddr],
        size: usize,
        deadline: Duration,
    ) -> io::Result<Arc<Hub>> {
        let listener = TcpListener::bind(address)?;
        let groups = HashMap::from([(0, Group::new(size, deadline))]);
        let state = Mutex::new(State { groups, next: 1, connected: 0, here: 0 });
        let address = listener.local_addr()?;
        let hub = Arc::new(Hub { address, deadline, state, left: Condvar::new() });
        let weak = Arc::downgrade(&hub);
        thread::Builder::new().name("rendezvous".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let (Some(hub), Ok(stream)) = (weak.upgrade(), stream) else { return };
                let serve = move || hub.serve(stream);
                // Without a thread the connection closes, which its rank reports.
                let _ = thread::Builder::new().name("rank".to_owned()).spawn(serve);
            }
        })?;
        Ok(hub)
    }

    /// Address at which it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The place of a rank in a group, which is taken once; the reason if it cannot be.
    fn take(&self, greeting: Greeting) -> Result<Arc<Group>, String> {
        let Greeting { group: number, rank, size } = greeting;
        let group = lock(&self.state).groups.get(&number).cloned();
        let group = group.ok_or("there is no such group")?;
        let mut seats = lock(&group.seats);
        if seats.len() as u64 != size {
            return Err(format!("rank 0 was started with WORLD_SIZE {}", seats.len()));
        }
        match seats.get_mut(rank as usize) {
            None => return Err(format!("a RANK below {size} was expected")),
            Some(true) => return Err(format!("another process has RANK {rank}")),
            Some(seat) => *seat = true,
        }
        drop(seats);
        Ok(group)
    }

    /// The place of this process in a group; see [`take`](Hub::take).
    pub(super) fn take_here(&self, greeting: Greeting) -> Result<Arc<Group>, String> {
        let group = self.take(greeting)?;
        lock(&self.state).here += 1;
        Ok(group)
    }

    /// Serves a connection until it ends.
    fn serve(self: Arc<Self>, mut stream: TcpStream) {
        let mut greeted = || -> io::Result<Option<Greeting>> {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(GREETING))?;
            let greeting = Greeting::read(&mut stream)?;
            stream.set_read_timeout(None)?;
            Ok(greeting)
        };
        // Whoever says nothing sensible is no rank.
        let Ok(Some(greeting)) = greeted() else { return };
        let taken = self.take(greeting);
        let words = taken.as_ref().err().cloned().unwrap_or_default();
        let group = match (frame::write(&mut stream, words.as_bytes()), taken) {
            (Ok(()), Ok(group)) => group,
            _ => return,
        };
        lock(&self.state).connected += 1;
        let reason = self.serve_rank(&mut stream, &group, greeting.rank as usize);
        group.board.leave(greeting.rank as usize, reason);
        lock(&self.state).connected -= 1;
        self.left.notify_all();
    }

    /// Serves a rank; the reason for which it has left.
    fn serve_rank(&self, stream: &mut TcpStream, group: &Group, rank: usize) -> &'static str {
        loop {
            let Ok(bytes) = frame::read(stream) else { return "its connection closed" };
            match Request::decode(&bytes) {
                Some(Request::Meet(arrival)) => {
                    let answer = self.meet(group, rank, arrival);
                    let answer = answer.map_err(|error| frame::shared(0, error));
                    if frame::write(stream, &frame::encode(&answer)).is_err() {
                        return "its connection closed";
                    }
                }
                Some(Request::Left { panicked: true }) => return "its thread panicked",
                Some(Request::Left { panicked: false }) => return "it left the group",
                Some(Request::Aborted(reason)) => group.board.abort(rank, &reason),
                None => return "it sent data that this version does not send",
            }
        }
    }

    /// A meeting of a group, for one rank.
    pub(super) fn meet(&self, group: &Group, rank: usize, arrival: Arrival) -> Result<Answer> {
        let operation = arrival.call.operation;
        group.board.meet(operation, rank, arrival, |arrivals, answers| {
            let arrivals: Vec<&Arrival> = arrivals.iter().flatten().collect();
            let calls: Vec<Call> = arrivals.iter().map(|arrival| arrival.call).collect();
            agree::check(&calls)?;
            match arrivals[0].wish {
                Wish::Exchange { .. } => route(&arrivals, answers),
                Wish::Split { .. } => {
                    self.split(&arrivals, answers);
                    Ok(())
                }
            }
        })
    }

    /// Gives a place of this process up; after the last one waits for the other processes.
    pub(super) fn leave(&self, group: &Group, rank: usize, panicked: bool) {
        let reason = if panicked { "its thread panicked" } else { "it left the group" };
        group.board.leave(rank, reason);
        let mut state = lock(&self.state);
        state.here -= 1;
        let last = state.here == 0;
        drop(state);
        if last {
            self.wait_for_others();
        }
    }

    pub(super) fn abort(&self, group: &Group, rank: usize, reason: &str) {
        group.board.abort(rank, reason);
    }

    /// Makes a group for each color.
    fn split(&self, arrivals: &[&Arrival], answers: &mut [Option<Answer>]) {
        let mut members: Vec<(u64, u64, usize)> = Vec::with_capacity(arrivals.len());
        for (rank, arrival) in arrivals.iter().enumerate() {
            if let Wish::Split { color, key } = arrival.wish {
                members.push((color, key, rank));
            }
        }
        members.sort_unstable();
        let mut state = lock(&self.state);
        for group in members.chunk_by(|a, b| a.0 == b.0) {
            let (number, size) = (state.next, group.len());
            state.next += 1;
            state.groups.insert(number, Group::new(size, self.deadline));
            for (rank, (_, _, old)) in group.iter().enumerate() {
                let (rank, size) = (rank as u64, size as u64);
                answers[*old] = Some(Answer::Group(Greeting { group: number, rank, size }));
            }
        }
    }

    /// Waits until all connections have ended, or the deadline: the last answers must arrive before
    /// this process ends.
    fn wait_for_others(&self) {
        let end = Instant::now() + self.deadline;
        let mut state = lock(&self.state);
        while state.connected > 0 && Instant::now() < end {
            state = wait_until(&self.left, state, end);
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // Wakes the thread that listens, which then finds no hub.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

/// Hands every rank the messages to it.
fn route(arrivals: &[&Arrival], answers: &mut [Option<Answer>]) -> Result<()> {
    let operation = arrivals[0].call.operation;
    let parts = |arrival: &'_ Arrival| -> (Vec<Sent>, Vec<(usize, Content)>) {
        match &arrival.wish {
            Wish::Exchange { sends, receives } => (sends.clone(), receives.clone()),
            Wish::Split { .. } => (Vec::new(), Vec::new()),
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
        *answer = Some(Answer::Received(messages.into_iter().flatten().collect()));
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

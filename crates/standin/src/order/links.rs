//! Connections between the processes of a group of devices, and exchanges over them.
//!
//! As in NCCL, the loss of a process ends no exchange: a process that waits for messages of the
//! lost one waits until its own member of the group is aborted.

use std::collections::VecDeque;
use std::io::{Read, Result, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// Largest number of messages that wait to be written: more than any test sends at once.
const MESSAGES: usize = 1 << 14;

/// Variable with the number of the point at which this process dies.
const DIE: &str = "MERISTEM_STANDIN_NCCL_DIE";
/// Variable with the number of the group of calls at whose end the calling thread stops for ever.
const HANG: &str = "MERISTEM_STANDIN_NCCL_HANG";
/// Variable with the number of the group of calls that is refused.
const FAIL: &str = "MERISTEM_STANDIN_NCCL_FAIL";
/// Variable with the number of the group of calls that stays in progress.
const STALL: &str = "MERISTEM_STANDIN_NCCL_STALL";
/// Variable with the number of the group of calls at which this machine vanishes.
const VANISH: &str = "MERISTEM_STANDIN_NCCL_VANISH";
/// Variable with the seconds before a large message is read.
const SLOW: &str = "MERISTEM_STANDIN_NCCL_SLOW";
/// Bytes above which a message is large: more than sockets hold.
const LARGE: usize = 16 << 20;

/// A point in the program at which a variable plants a fault: at the occurrence of the given
/// number.
struct FaultPoint {
    variable: &'static str,
    seen: AtomicUsize,
    last: OnceLock<Option<usize>>,
}

impl FaultPoint {
    const fn from_variable(variable: &'static str) -> Self {
        Self { variable, seen: AtomicUsize::new(0), last: OnceLock::new() }
    }

    /// Counts an occurrence; returns whether its number, from 1, is the value of the variable.
    fn is_met(&self) -> bool {
        let last = self.last.get_or_init(|| std::env::var(self.variable).ok()?.parse().ok());
        let met = Some(self.seen.fetch_add(1, Ordering::Relaxed) + 1) == *last;
        if met {
            eprintln!("meristem-standin: {}: the moment has come", self.variable);
        }
        met
    }
}

/// A point at which a process may die.
pub(crate) fn mortal() {
    static FATE: FaultPoint = FaultPoint::from_variable(DIE);
    if FATE.is_met() {
        std::process::abort();
    }
}

/// Called at the end of a group of calls: stops the thread for ever if [`HANG`] names this group.
pub(crate) fn hangs() {
    static FATE: FaultPoint = FaultPoint::from_variable(HANG);
    if FATE.is_met() {
        rest();
    }
}

/// Whether a group of calls is refused.
pub(crate) fn fails() -> bool {
    static FATE: FaultPoint = FaultPoint::from_variable(FAIL);
    FATE.is_met()
}

/// Whether a group of calls stays in progress for ever.
pub(crate) fn stalls() -> bool {
    static FATE: FaultPoint = FaultPoint::from_variable(STALL);
    FATE.is_met()
}

/// Whether the machine vanishes at a group of calls.
pub(crate) fn vanishes() -> bool {
    static FATE: FaultPoint = FaultPoint::from_variable(VANISH);
    FATE.is_met()
}

/// Stops the calling thread for ever.
pub(crate) fn rest() -> ! {
    loop {
        thread::park();
    }
}

/// Connections of a process to the other processes, by rank.
#[derive(Debug)]
pub(crate) struct Links {
    rank: usize,
    /// Messages of the process to itself.
    own: Mutex<PeerInbox>,
    links: Vec<Option<PeerLink>>,
    aborted: AtomicBool,
    /// Whether an exchange waits for a process that is gone.
    starved: AtomicBool,
}

/// A connection. Messages arrive in order.
#[derive(Debug)]
struct PeerLink {
    stream: TcpStream,
    inbox: Arc<Mutex<PeerInbox>>,
    /// Messages for a thread that writes them, because a device sends while it receives.
    writer: SyncSender<Vec<u8>>,
    /// Number of messages that are not written yet.
    unwritten: Arc<AtomicUsize>,
}

/// Messages of another process that have not been read.
#[derive(Debug, Default)]
struct PeerInbox {
    messages: VecDeque<Vec<u8>>,
    /// Whether the process is gone or has left.
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write_number(to: &mut impl Write, number: u64) -> Result<()> {
    to.write_all(&number.to_le_bytes())
}

fn read_number(from: &mut impl Read) -> Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn listen() -> Result<(TcpListener, u16)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Opens a port at which the members of a new group find each other, and returns it.
pub(crate) fn open_group() -> Result<u16> {
    let (listener, port) = listen()?;
    thread::spawn(move || gather(&listener));
    Ok(port)
}

/// Gathers the ports of all members, and broadcasts them.
fn gather(listener: &TcpListener) -> Result<()> {
    let mut members: Vec<(u64, u64, TcpStream)> = Vec::new();
    loop {
        let (mut member, _) = listener.accept()?;
        let rank = read_number(&mut member)?;
        let size = read_number(&mut member)?;
        let port = read_number(&mut member)?;
        members.push((rank, port, member));
        if members.len() as u64 == size {
            break;
        }
    }
    members.sort_by_key(|(rank, _, _)| *rank);
    let ports: Vec<u64> = members.iter().map(|(_, port, _)| *port).collect();
    for (_, _, member) in &mut members {
        ports.iter().try_for_each(|port| write_number(member, *port))?;
    }
    Ok(())
}

impl Links {
    /// Connects to all other members of a group. Waits until all have joined.
    pub(crate) fn join(group: u16, rank: usize, size: usize) -> Result<Self> {
        mortal();
        let (listener, own) = listen()?;
        let connect = |port: u64| TcpStream::connect((Ipv4Addr::LOCALHOST, port as u16));
        let mut root = connect(u64::from(group))?;
        for number in [rank as u64, size as u64, u64::from(own)] {
            write_number(&mut root, number)?;
        }
        mortal();
        let ports: Vec<u64> = (0..size).map(|_| read_number(&mut root)).collect::<Result<_>>()?;
        let mut links: Vec<Option<PeerLink>> = (0..size).map(|_| None).collect();
        for (peer, port) in ports.into_iter().enumerate().take(rank) {
            let mut stream = connect(port)?;
            write_number(&mut stream, rank as u64)?;
            links[peer] = Some(PeerLink::new(stream)?);
        }
        mortal();
        for _ in rank + 1..size {
            let (mut stream, _) = listener.accept()?;
            let peer = read_number(&mut stream)? as usize;
            links[peer] = Some(PeerLink::new(stream)?);
        }
        let (aborted, starved) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { rank, own: Mutex::default(), links, aborted, starved })
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.links.len()
    }

    /// Ends all exchanges, and the connections.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        for link in self.links.iter().flatten() {
            // A failure is ignored: the connection has ended.
            let _ = link.stream.shutdown(Shutdown::Both);
        }
    }

    /// Stops the process for ever, without notice to other processes except that the connections of
    /// this group close: as if the machine was gone.
    pub(crate) fn vanish(&self) -> ! {
        self.abort();
        let process = std::process::id().to_string();
        let _ = std::process::Command::new("kill").args(["-STOP", &process]).status();
        rest()
    }

    /// Whether an exchange waits for a process that is gone.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved.load(Ordering::Acquire)
    }

    /// Whether all sent messages are written.
    pub(crate) fn is_flushed(&self) -> bool {
        let mut links = self.links.iter().flatten();
        links.all(|link| link.unwritten.load(Ordering::Acquire) == 0)
    }

    fn link(&self, peer: usize) -> Option<&PeerLink> {
        self.links.get(peer).and_then(Option::as_ref)
    }

    /// Messages from a rank that have not been read.
    fn inbox(&self, peer: usize) -> Option<MutexGuard<'_, PeerInbox>> {
        let of_link = || self.link(peer).map(|link| lock(&link.inbox));
        if peer == self.rank { Some(lock(&self.own)) } else { of_link() }
    }

    /// Hands a message to the writing thread. Waits only if [`MESSAGES`] messages are unwritten. A
    /// message of the process to itself arrives at once.
    fn send(&self, peer: usize, bytes: Vec<u8>) {
        if peer == self.rank {
            return lock(&self.own).messages.push_back(bytes);
        }
        let Some(link) = self.link(peer) else { return };
        link.unwritten.fetch_add(1, Ordering::AcqRel);
        // A failure is ignored: the writing thread has ended, because the other process is gone.
        let _ = link.writer.send(bytes);
    }

    /// Whether at least `messages` messages of a rank have arrived.
    fn has(&self, peer: usize, messages: usize) -> bool {
        let Some(inbox) = self.inbox(peer) else { return messages == 0 };
        let enough = inbox.messages.len() >= messages;
        if !enough && inbox.closed {
            self.starved.store(true, Ordering::Release);
        }
        enough
    }

    /// Reads a message that has arrived, which must have the length of `bytes`.
    fn receive(&self, peer: usize, bytes: &mut [u8]) -> std::result::Result<(), String> {
        let message = self.inbox(peer).and_then(|mut inbox| inbox.messages.pop_front());
        let message = message.ok_or_else(|| format!("no message of rank {peer}"))?;
        if message.len() != bytes.len() {
            let (sent, received) = (message.len(), bytes.len());
            return Err(format!("rank {peer} sent {sent} bytes, and {received} are received"));
        }
        bytes.copy_from_slice(&message);
        Ok(())
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for link in self.links.iter().flatten() {
            // A failure is ignored: the connection has ended.
            let _ = link.stream.shutdown(Shutdown::Both);
        }
    }
}

impl PeerLink {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        let (writer, messages) = sync_channel(MESSAGES);
        let (inbox, unwritten) =
            (Arc::<Mutex<PeerInbox>>::default(), Arc::<AtomicUsize>::default());
        let (to, left) = (stream.try_clone()?, unwritten.clone());
        thread::spawn(move || write_all(to, &messages, &left));
        let (from, filled) = (stream.try_clone()?, inbox.clone());
        thread::spawn(move || {
            // However the connection ended, no more messages arrive.
            let _ = read_all(from, &filled);
            lock(&filled).closed = true;
        });
        Ok(Self { stream, inbox, writer, unwritten })
    }
}

fn write_all(mut to: TcpStream, messages: &Receiver<Vec<u8>>, left: &AtomicUsize) -> Result<()> {
    for message in messages {
        mortal();
        write_number(&mut to, message.len() as u64)?;
        to.write_all(&message)?;
        left.fetch_sub(1, Ordering::AcqRel);
    }
    Ok(())
}

fn read_all(mut from: TcpStream, inbox: &Mutex<PeerInbox>) -> Result<()> {
    let slow = std::env::var(SLOW).ok().and_then(|seconds| seconds.parse().ok());
    loop {
        let mut message = vec![0; read_number(&mut from)? as usize];
        if message.len() > LARGE {
            // Meanwhile the message stays with the other process.
            thread::sleep(Duration::from_secs(slow.unwrap_or(0)));
        }
        from.read_exact(&mut message)?;
        lock(inbox).messages.push_back(message);
    }
}

/// Memory that is sent to another rank or received from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkMessage {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    pub(crate) peer: usize,
}

/// Messages that are sent and received at once.
#[derive(Clone, Debug)]
pub(crate) struct ExchangeWork {
    links: Arc<Links>,
    sends: Vec<LinkMessage>,
    receives: Vec<LinkMessage>,
    /// Whether the messages were sent.
    begun: Arc<AtomicBool>,
}

impl ExchangeWork {
    pub(crate) fn new(
        links: Arc<Links>,
        sends: Vec<LinkMessage>,
        receives: Vec<LinkMessage>,
    ) -> Self {
        Self { links, sends, receives, begun: Arc::default() }
    }

    /// All memory that is read or written.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &LinkMessage> {
        self.sends.iter().chain(&self.receives)
    }

    /// Sends all messages at the first call. Returns whether all received messages have arrived, or
    /// the exchange was aborted. `DeviceWork::check` has checked the memory.
    pub(crate) fn is_ready(&self) -> bool {
        if self.links.aborted.load(Ordering::Acquire) {
            return true;
        }
        if !self.begun.swap(true, Ordering::AcqRel) {
            for LinkMessage { address, bytes, peer } in &self.sends {
                mortal();
                // SAFETY: the memory was found.
                let from = unsafe { std::slice::from_raw_parts(*address as *const u8, *bytes) };
                self.links.send(*peer, from.to_vec());
            }
        }
        (0..self.links.size()).all(|peer| {
            let of_peer = self.receives.iter().filter(|message| message.peer == peer);
            self.links.has(peer, of_peer.count())
        })
    }

    /// Receives all messages. An aborted exchange leaves the memory unchanged.
    pub(crate) fn run(&self) -> std::result::Result<(), String> {
        if self.links.aborted.load(Ordering::Acquire) {
            return Ok(());
        }
        for LinkMessage { address, bytes, peer } in &self.receives {
            // SAFETY: `DeviceWork::check` found the memory; nothing else runs on the device
            // meanwhile.
            let to = unsafe { std::slice::from_raw_parts_mut(*address as *mut u8, *bytes) };
            self.links.receive(*peer, to)?;
        }
        mortal();
        Ok(())
    }
}

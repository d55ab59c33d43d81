//! Connections between the processes of a group of devices, and exchanges over them.

use std::io::{Read, Result, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Messages that may wait to be written.
const MESSAGES: usize = 1024;

/// Connections of one process to the others, by rank.
#[derive(Debug)]
pub(crate) struct Links(Vec<Option<Link>>);

/// A connection. Messages arrive in order.
#[derive(Debug)]
struct Link {
    reader: Mutex<TcpStream>,
    /// Messages for a thread that writes them, since a device sends while it receives.
    writer: SyncSender<Vec<u8>>,
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

/// Opens a place where the members of a new group find each other; its port.
pub(crate) fn open_group() -> Result<u16> {
    let (listener, port) = listen()?;
    thread::spawn(move || gather(&listener));
    Ok(port)
}

/// Tells all members the ports of all.
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
    /// Connects to all others of a group. Waits until all have come.
    pub(crate) fn join(group: u16, rank: usize, size: usize) -> Result<Self> {
        let (listener, own) = listen()?;
        let connect = |port: u64| TcpStream::connect((Ipv4Addr::LOCALHOST, port as u16));
        let mut root = connect(u64::from(group))?;
        for number in [rank as u64, size as u64, u64::from(own)] {
            write_number(&mut root, number)?;
        }
        let ports: Vec<u64> = (0..size).map(|_| read_number(&mut root)).collect::<Result<_>>()?;
        let mut links: Vec<Option<Link>> = (0..size).map(|_| None).collect();
        for (peer, port) in ports.into_iter().enumerate().take(rank) {
            let mut stream = connect(port)?;
            write_number(&mut stream, rank as u64)?;
            links[peer] = Some(Link::new(stream)?);
        }
        for _ in rank + 1..size {
            let (mut stream, _) = listener.accept()?;
            let peer = read_number(&mut stream)? as usize;
            links[peer] = Some(Link::new(stream)?);
        }
        Ok(Self(links))
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.0.len()
    }

    fn link(&self, peer: usize) -> Result<&Link> {
        let link = self.0.get(peer).and_then(Option::as_ref);
        link.ok_or_else(|| std::io::Error::other(format!("no connection to rank {peer}")))
    }

    /// Hands a message over; does not wait for the other rank, unless very many are on the way.
    pub(crate) fn send(&self, peer: usize, bytes: Vec<u8>) -> Result<()> {
        let gone = |_| std::io::Error::other(format!("rank {peer} is gone"));
        self.link(peer)?.writer.send(bytes).map_err(gone)
    }

    /// Waits for a message of so many bytes.
    pub(crate) fn receive(&self, peer: usize, bytes: &mut [u8]) -> Result<()> {
        let reader = &self.link(peer)?.reader;
        let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
        let len = read_number(&mut *reader)?;
        if len != bytes.len() as u64 {
            let words = format!("rank {peer} sent {len} bytes, and {} are received", bytes.len());
            return Err(std::io::Error::other(words));
        }
        reader.read_exact(bytes)
    }
}

impl Link {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        let (writer, messages) = sync_channel::<Vec<u8>>(MESSAGES);
        let mut to = stream.try_clone()?;
        thread::spawn(move || -> Result<()> {
            for message in messages {
                write_number(&mut to, message.len() as u64)?;
                to.write_all(&message)?;
            }
            Ok(())
        });
        Ok(Self { reader: Mutex::new(stream), writer })
    }
}

/// Memory that goes to another rank or comes from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    pub(crate) peer: usize,
}

/// Messages that are sent and received at once.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub(crate) links: std::sync::Arc<Links>,
    pub(crate) sends: Vec<Message>,
    pub(crate) receives: Vec<Message>,
}

impl Exchange {
    /// Sends all, then waits for all.
    pub(crate) fn run(&self) -> Result<()> {
        for Message { address, bytes, peer } in &self.sends {
            // SAFETY: `Work::check` found the memory.
            let from = unsafe { std::slice::from_raw_parts(*address as *const u8, *bytes) };
            self.links.send(*peer, from.to_vec())?;
        }
        for Message { address, bytes, peer } in &self.receives {
            // SAFETY: as above; nothing else runs on the device meanwhile.
            let to = unsafe { std::slice::from_raw_parts_mut(*address as *mut u8, *bytes) };
            self.links.receive(*peer, to)?;
        }
        Ok(())
    }
}

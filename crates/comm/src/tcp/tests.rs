//! A hub with connections that do not belong to its ranks.
#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use self::port::free_port;
use super::frame::{self, Greeting, GroupMember, HubRequest};
use super::{ProcessPlace, world};
use crate::error::{Error, Result};
use crate::transport::{CollectiveCall, Transport};
use crate::watch::{ExchangeProblem, Heartbeat};

#[path = "../../tests/all/common/port.rs"]
mod port;

const DEADLINE: Duration = Duration::from_secs(30);

type JoinResult = Result<Box<dyn Transport>>;

fn place(rank: usize, size: usize) -> ProcessPlace {
    ProcessPlace { rank, size, address: "127.0.0.1".into(), port: free_port() }
}

/// Starts rank 0 of a group, which waits for the other ranks, and returns its address.
fn hub(size: usize) -> (ProcessPlace, SocketAddr, JoinHandle<JoinResult>) {
    let place = place(0, size);
    let address = place.addresses().unwrap()[0];
    let of = place.clone();
    let first = thread::spawn(move || world(&of, DEADLINE));
    let end = Instant::now() + DEADLINE;
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < end);
    }
    (place, address, first)
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

fn greeting(group: u64, rank: u64, size: u64) -> Vec<u8> {
    Greeting { member: GroupMember { group, rank, size }, watches: false }.encode()
}

/// Reason for which a greeting is rejected; empty if accepted, `None` without an answer.
fn answer(address: SocketAddr, bytes: &[u8]) -> Option<String> {
    let mut stream = connect(address);
    frame::write(&mut stream, bytes).unwrap();
    frame::read(&mut stream).ok().map(|reason| String::from_utf8(reason).unwrap())
}

/// Connections of port scanners and other programs, and of ranks that do not fit.
#[test]
fn foreign_connections_change_nothing() {
    let (place, address, first) = hub(3);
    // Nothing; half a length; another protocol; more than a greeting; an empty message.
    (0..100).for_each(|_| drop(connect(address)));
    let mut kept = vec![];
    for bytes in [&b""[..], b"\x08\0", b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64], &[0; 4096]] {
        for end in [false, true] {
            let mut stream = connect(address);
            // The hub may have closed the connection in the meantime.
            let _ = stream.write_all(bytes);
            let mut rest = vec![];
            if end {
                let _ = stream.shutdown(Shutdown::Write);
                let _ = stream.read_to_end(&mut rest);
            }
            assert!(rest.is_empty(), "{rest:?}");
            kept.push(stream);
        }
    }
    let mut other = greeting(0, 1, 3);
    other[7] ^= 1;
    assert_eq!(answer(address, &other), None, "another version");
    for (bytes, words) in [
        (greeting(9, 1, 3), "there is no such group"),
        (greeting(0, 1, 4), "rank 0 was started with WORLD_SIZE 3"),
        (greeting(0, 3, 3), "a RANK below 3 was expected"),
        (greeting(0, u64::MAX, 3), "a RANK below 3 was expected"),
        (greeting(0, 0, 3), "another process has RANK 0"),
    ] {
        assert_eq!(answer(address, &bytes).as_deref(), Some(words));
    }
    let others = [1, 2].map(|rank| {
        let place = ProcessPlace { rank, ..place.clone() };
        thread::spawn(move || world(&place, DEADLINE))
    });
    let ranks = [first].into_iter().chain(others);
    let meet = |rank: JoinHandle<JoinResult>| {
        thread::spawn(move || {
            let mut rank = rank.join().unwrap().unwrap();
            (0..10).try_for_each(|_| rank.barrier(&CollectiveCall::new("barrier")))
        })
    };
    let met: Vec<_> = ranks.map(meet).collect();
    met.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
}

/// Invalid messages of a joined rank, and the error of the other rank.
#[test]
fn a_rank_that_sends_invalid_bytes_is_named() {
    let barrier = CollectiveCall::new("barrier");
    let header = |kind: u64, words: &[u64]| {
        let rest = words.iter().flat_map(|word| word.to_le_bytes());
        kind.to_le_bytes().into_iter().chain(rest).collect::<Vec<u8>>()
    };
    let split = HubRequest::Meet(frame::TcpArrival {
        call: barrier,
        arguments: frame::TcpArguments::Split { color: 0, key: 0 },
    });
    let cases = [
        vec![],
        header(9, &[]),
        // Lengths beyond the message, a split during a barrier, a heartbeat.
        header(0, &[u64::MAX]),
        header(3, &[1 << 50]),
        split.encode(),
        HubRequest::Heartbeat(Heartbeat {
            problem: Some(ExchangeProblem::Overdue),
            ..Heartbeat::default()
        })
        .encode(),
    ];
    for bytes in cases {
        let (_, address, first) = hub(2);
        let mut stream = connect(address);
        frame::write(&mut stream, &greeting(0, 1, 2)).unwrap();
        assert!(frame::read(&mut stream).unwrap().is_empty());
        let arguments = || frame::TcpArguments::Exchange { sends: vec![], receives: vec![] };
        let call = CollectiveCall::new("rendezvous");
        let arrival = HubRequest::Meet(frame::TcpArrival { call, arguments: arguments() });
        frame::write(&mut stream, &arrival.encode()).unwrap();
        frame::read(&mut stream).unwrap();
        let mut first = first.join().unwrap().unwrap();
        frame::write(&mut stream, &bytes).unwrap();
        let error = first.barrier(&barrier).unwrap_err();
        let words = "it sent data that this version does not send";
        assert!(matches!(error, Error::RankGone { rank: 1, reason, .. } if reason == words));
        drop(stream);
    }
}

/// A shape with more dimensions than tensors have, or more elements than a number can count.
#[test]
fn an_invalid_shape_is_no_request() {
    let call = CollectiveCall::new("barrier");
    let arguments = frame::TcpArguments::Exchange { sends: vec![], receives: vec![] };
    let bytes = HubRequest::Meet(frame::TcpArrival { call, arguments }).encode();
    assert!(HubRequest::decode(&bytes).is_some());
    // The number of dimensions follows the kind, the header's length, the step and the element
    // type.
    let at = 8 + 8 + 8 + 1;
    assert_eq!(bytes[at], 1, "an extent");
    for (rank, extents) in [(200u8, 200), (5, 5), (4, 4)] {
        let mut other = bytes[..at].to_vec();
        other.push(rank);
        other.extend(std::iter::repeat_n(0xff, 8 * extents));
        other.extend_from_slice(&bytes[at + 9..]);
        let len = (other.len() - 24) as u64;
        other[8..16].copy_from_slice(&len.to_le_bytes());
        assert!(HubRequest::decode(&other).is_none(), "{rank}");
    }
}

/// An unreachable address does not use up the next address's time.
#[test]
fn a_rank_tries_every_address() {
    let (_, address, first) = hub(2);
    // A port without a listener.
    let nobody = place(0, 1).addresses().unwrap()[0];
    let greeting = Greeting { member: GroupMember { group: 0, rank: 1, size: 2 }, watches: false };
    let (found, stream) = super::connect_to_hub(&[nobody, address], greeting, DEADLINE).unwrap();
    assert_eq!(found, address);
    drop(stream);
    let error = first.join().unwrap().err().unwrap();
    assert!(matches!(error, Error::RankGone { rank: 1, .. }), "{error}");
}

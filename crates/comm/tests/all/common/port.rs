//! Ports at which groups of processes under test meet.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports below 32,768. From there on Linux takes ports for outgoing connections and for port 0: a
/// connection of another test could take such a port before rank 0 listens at it.
const FIRST: u32 = 16_384;
const COUNT: u32 = 32_768 - FIRST;

/// Distance between the first ports of programs with consecutive process ids, which run beside each
/// other: more than a program's groups.
const STRIDE: u32 = 61;

/// A free port. Each call of a process returns another one.
pub(crate) fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    loop {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let place = std::process::id().wrapping_mul(STRIDE).wrapping_add(call) % COUNT;
        let port = u16::try_from(FIRST + place).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

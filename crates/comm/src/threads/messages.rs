//! Messages between ranks whose tensors are on different devices, through host memory. Devices
//! share nothing, so a rank cannot read another rank's elements in place: it reads its own elements
//! into host memory, and copies the received elements to its device.

use std::sync::Arc;

use meristem_device::DType;

use crate::error::{Error, Result};
use crate::host;
use crate::spans::Spans;
use crate::transport::Parcel;

/// A message of a rank to another.
pub(super) trait Sent {
    /// The rank that gets it.
    fn peer(&self) -> usize;

    /// Type and number of its elements.
    fn content(&self) -> (DType, usize);
}

impl Sent for Parcel {
    fn peer(&self) -> usize {
        self.peer
    }

    fn content(&self) -> (DType, usize) {
        content(&self.elements)
    }
}

/// A message whose elements are in host memory.
pub(super) struct HostMessage {
    peer: usize,
    content: (DType, usize),
    pub(super) bytes: Arc<Vec<u8>>,
}

impl Sent for HostMessage {
    fn peer(&self) -> usize {
        self.peer
    }

    fn content(&self) -> (DType, usize) {
        self.content
    }
}

fn content(elements: &Spans) -> (DType, usize) {
    (elements.dtype(), elements.len())
}

/// Reads the elements of parcels. Waits for the device.
pub(super) fn read(parcels: &[Parcel]) -> Result<Vec<HostMessage>> {
    let bytes = host::fetch(parcels)?.into_iter();
    let message = |(parcel, bytes): (&Parcel, Arc<Vec<u8>>)| HostMessage {
        peer: parcel.peer,
        content: parcel.content(),
        bytes,
    };
    Ok(parcels.iter().zip(bytes).map(message).collect())
}

/// Pairs every message with the parcel that receives it. The n-th message from one rank to another
/// belongs to the n-th parcel that the receiver expects from the sender. `sends` and `receives`
/// have one list for each rank. Calls `pair` with the receiving rank, the index of the parcel in
/// the rank's list, and the message.
///
/// # Errors
/// [`Error::Disagreement`] for a message without a parcel of its type and number of elements, or a
/// parcel without a message; any error of `pair`.
pub(super) fn match_up<S: Sent>(
    operation: &'static str,
    sends: &[&[S]],
    receives: &[&[Parcel]],
    mut pair: impl FnMut(usize, usize, &S) -> Result<()>,
) -> Result<()> {
    for (to, receives) in receives.iter().enumerate() {
        for (from, sends) in sends.iter().enumerate() {
            let mut messages = sends.iter().filter(|message| message.peer() == to);
            let mut parcels = receives.iter().enumerate().filter(|(_, parcel)| parcel.peer == from);
            loop {
                let (message, parcel) = (messages.next(), parcels.next());
                let got = message.map(Sent::content);
                let expected = parcel.map(|(_, parcel)| parcel.content());
                match (message, parcel) {
                    (None, None) => break,
                    (Some(message), Some((index, _))) if got == expected => {
                        pair(to, index, message)?;
                    }
                    _ => {
                        let (expected, got) = (words(expected), words(got));
                        let (rank, what) = (from, "a message of");
                        return Err(Error::Disagreement { operation, rank, what, expected, got });
                    }
                }
            }
        }
    }
    Ok(())
}

/// Description of the contents of a message.
fn words(content: Option<(DType, usize)>) -> String {
    content.map_or("nothing".to_owned(), |(dtype, len)| format!("{len} x {dtype}"))
}

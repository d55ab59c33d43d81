//! Copies between a device and host memory, for transports that send host memory.

use std::sync::Arc;

use meristem_device::{Tensor, read_back};

use crate::error::Result;
use crate::spans::Spans;
use crate::transport::Parcel;

/// Reads the bytes of parcels. Elements for several ranks are read once. Waits for the device.
pub(crate) fn fetch(parcels: &[Parcel]) -> Result<Vec<Arc<Vec<u8>>>> {
    let mut all: Vec<&Spans> = Vec::new();
    let mut places = Vec::with_capacity(parcels.len());
    for Parcel { elements, .. } in parcels {
        let place = all.iter().position(|known| known.is_same(elements));
        places.push(place.unwrap_or(all.len()));
        if place.is_none() {
            all.push(elements);
        }
    }
    let pieces: Vec<&Tensor> = all.iter().flat_map(|spans| spans.pieces()).collect();
    let mut read = read_back(&pieces)?.into_iter();
    let mut message = |spans: &&Spans| {
        let mut pieces: Vec<Vec<u8>> = read.by_ref().take(spans.pieces().len()).collect();
        let whole = pieces.len() == 1;
        Arc::new(if whole { pieces.swap_remove(0) } else { pieces.concat() })
    };
    let bytes: Vec<Arc<Vec<u8>>> = all.iter().map(&mut message).collect();
    Ok(places.into_iter().map(|place| bytes[place].clone()).collect())
}

/// Copies received bytes into a parcel's elements, in stream order. Does not wait for the device.
pub(crate) fn deliver(elements: &Spans, bytes: &Arc<Vec<u8>>) -> Result<()> {
    let mut start = 0;
    for piece in elements.pieces() {
        piece.copy_from_shared(bytes.clone(), start)?;
        start += piece.numel() * piece.dtype().size();
    }
    Ok(())
}

//! Parcels in one piece of device memory each, for transports that move device memory.
//!
//! Sender and receiver may cut the elements of a parcel differently, so a message is one piece. A
//! parcel in several pieces is copied into packing memory before it is sent, and out of packing
//! memory after it was received.

use meristem_device::{Owner, Tensor};

use crate::error::Result;
use crate::spans::Spans;
use crate::transport::{Parcel, Parcels};

/// Packing memory of earlier exchanges, for reuse.
#[derive(Default)]
pub(crate) struct Packing(Vec<Tensor>);

/// The parcels of an exchange, each as one flat tensor.
pub(crate) struct PackedParcels {
    pub(crate) sends: Vec<Tensor>,
    pub(crate) receives: Vec<Tensor>,
}

impl Packing {
    /// The parcels, each in its own memory if that is one piece, otherwise in packing memory.
    /// Copies the elements to send in stream order, once for all ranks that get them; `operation`
    /// names these copies. Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    pub(crate) fn pack(
        &mut self,
        operation: &'static str,
        parcels: Parcels<'_>,
    ) -> Result<PackedParcels> {
        let mut free = std::mem::take(&mut self.0);
        let mut sends: Vec<Tensor> = Vec::with_capacity(parcels.sends.len());
        for (i, Parcel { elements, .. }) in parcels.sends.iter().enumerate() {
            let is_same = |earlier: &Parcel| earlier.elements.is_same(elements);
            if let Some(earlier) = parcels.sends[..i].iter().position(is_same) {
                sends.push(sends[earlier].clone());
                continue;
            }
            let whole = self.whole(&mut free, elements)?;
            copy_pieces(operation, elements, &whole, |piece, part| (piece, part))?;
            sends.push(whole);
        }
        let receives = parcels.receives.iter();
        let receives = receives.map(|parcel| self.whole(&mut free, &parcel.elements));
        let receives = receives.collect::<Result<_>>()?;
        self.0.append(&mut free);
        Ok(PackedParcels { sends, receives })
    }

    /// Memory in one piece for a parcel. Packing memory is the smallest of `free` that is large
    /// enough. If none is, new memory replaces the largest of the same stream and element type.
    fn whole(&mut self, free: &mut Vec<Tensor>, elements: &Spans) -> Result<Tensor> {
        if let [piece] = elements.pieces() {
            return Ok(piece.clone());
        }
        let (stream, dtype, len) = (elements.stream(), elements.dtype(), elements.len());
        let is_alike = |kept: &Tensor| kept.stream() == stream && kept.dtype() == dtype;
        let alike = (0..free.len()).filter(|i| is_alike(&free[*i]));
        // The missing elements come first: 0 for memory that is large enough.
        let best = alike.min_by_key(|i| (len.saturating_sub(free[*i].numel()), free[*i].numel()));
        let kept = best.map(|i| free.swap_remove(i)).filter(|kept| kept.numel() >= len);
        let kept = match kept {
            Some(kept) => kept,
            None => Tensor::empty(stream, [len], dtype, Owner::Collectives)?,
        };
        let whole = kept.view(0, [len])?;
        self.0.push(kept);
        Ok(whole)
    }
}

/// Copies received elements out of packing memory, in stream order; `whole` are the
/// [`receives`](PackedParcels::receives). Does not wait for the device.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device).
pub(crate) fn unpack(operation: &'static str, receives: &[Parcel], whole: &[Tensor]) -> Result<()> {
    let mut parcels = receives.iter().zip(whole);
    parcels.try_for_each(|(Parcel { elements, .. }, whole)| {
        copy_pieces(operation, elements, whole, |piece, part| (part, piece))
    })
}

/// Copies between the pieces of a parcel and memory in one piece; nothing for a parcel in one
/// piece. `direction` orders a piece and its part into source and target.
fn copy_pieces(
    operation: &'static str,
    elements: &Spans,
    whole: &Tensor,
    direction: for<'a> fn(&'a Tensor, &'a Tensor) -> (&'a Tensor, &'a Tensor),
) -> Result<()> {
    let pieces = elements.pieces();
    if pieces.len() == 1 {
        return Ok(());
    }
    let mut start = 0;
    let part = |piece: &Tensor| {
        let part = whole.view(start, [piece.numel()]);
        start += piece.numel();
        part
    };
    let parts = pieces.iter().map(part).collect::<meristem_device::Result<Vec<_>>>()?;
    let pairs: Vec<_> = pieces.iter().zip(&parts).map(|(a, b)| direction(a, b)).collect();
    Ok(elements.stream().copy(operation, &pairs)?)
}

#[cfg(test)]
mod tests {
    use meristem_device::{Counts, Device, DeviceId, DeviceOptions, Stream};

    use super::*;

    fn stream() -> Stream {
        Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().stream("s")
    }

    /// Numbers from `first` on, in pieces of these lengths with gaps between them.
    fn parcel(stream: &Stream, peer: usize, first: u32, lens: &[usize]) -> Parcel {
        let all: usize = lens.iter().map(|len| len + 1).sum();
        let memory = Tensor::zeros(stream, [all], meristem_device::DType::U32, Owner::Other);
        let (memory, mut start, mut number) = (memory.unwrap(), 0, first);
        let piece = |len: &usize| {
            let piece = memory.view(start, [*len]).unwrap();
            let values: Vec<u32> = (number..).take(*len).collect();
            piece.copy_from_slice(&values).unwrap();
            (start, number) = (start + len + 1, number + *len as u32);
            piece
        };
        let pieces: Vec<Tensor> = lens.iter().map(piece).collect();
        let elements = Spans::new("test", &pieces.iter().collect::<Vec<_>>()).unwrap();
        Parcel { peer, elements }
    }

    #[test]
    fn pieces_are_copied_in_order_into_memory_that_is_reused() {
        let stream = stream();
        let mut packing = Packing::default();
        let whole = parcel(&stream, 1, 0, &[5]);
        let cut = parcel(&stream, 1, 10, &[2, 3, 1]);
        let again = Parcel { peer: 2, elements: cut.elements.clone() };
        let sends = [whole, cut, again];
        let receives = [parcel(&stream, 1, 90, &[1, 4, 2]), parcel(&stream, 2, 90, &[3])];
        let mut counts = Vec::new();
        for round in 0..3u32 {
            let before = stream.device().counts();
            let parcels = Parcels { sends: &sends, receives: &receives };
            let packed = packing.pack("test", parcels).unwrap();
            let values = |tensor: &Tensor| tensor.to_vec::<u32>().unwrap();
            counts.push(stream.device().counts() - before);
            assert_eq!(values(&packed.sends[0]), [0, 1, 2, 3, 4]);
            assert_eq!(values(&packed.sends[1]), [10, 11, 12, 13, 14, 15]);
            // Elements for two ranks are copied once.
            assert_eq!(packed.sends[2].address(), packed.sends[1].address());
            let [far, near] = &packed.receives[..] else { panic!("two parcels") };
            far.copy_from_slice(&(0..7).map(|i| 100 * round + i).collect::<Vec<_>>()).unwrap();
            assert_eq!(near.address(), receives[1].elements.pieces()[0].address());
            unpack("test", &receives, &packed.receives).unwrap();
            let pieces = receives[0].elements.pieces().iter().map(values);
            let expected =
                [0..1, 1..5, 5..7].map(|part| part.map(|i| 100 * round + i).collect::<Vec<u32>>());
            assert_eq!(pieces.collect::<Vec<_>>(), expected);
        }
        let copies = Counts { launches: 1, ..Counts::default() };
        assert_eq!(counts, [Counts { allocations: 2, ..copies }, copies, copies]);
    }

    /// Larger memory replaces smaller memory, and smaller parcels fit into it.
    #[test]
    fn memory_of_every_size_is_kept_once() {
        let stream = stream();
        let mut packing = Packing::default();
        for lens in [[3, 4], [300, 4], [3, 5], [20, 40]] {
            let sends = [parcel(&stream, 1, 0, &lens)];
            let parcels = Parcels { sends: &sends, receives: &[] };
            let packed = packing.pack("test", parcels).unwrap();
            assert_eq!(packed.sends[0].numel(), lens[0] + lens[1]);
        }
        assert_eq!(packing.0.iter().map(Tensor::numel).collect::<Vec<_>>(), [304]);
    }
}

//! Link between processes: a transport of `meristem-comm`, on a device used for nothing else.

use meristem_comm::{CollectiveCall, Parcel, Transport};
use meristem_device::{DType, Owner, Stream, Tensor};

use super::meeting::{Receivers, Wire};
use crate::error::Result;

/// Link of this process to the others.
pub(super) struct ProcessLink {
    pub(super) transport: Box<dyn Transport>,
    /// Stream on a device that nothing else uses.
    pub(super) stream: Stream,
}

impl Wire for ProcessLink {
    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn size(&self) -> usize {
        self.transport.size()
    }

    fn exchange(
        &mut self,
        own: &[u8],
        bytes: &[usize],
        receivers: Receivers,
    ) -> Result<Vec<Vec<u8>>> {
        let (me, all) = (self.transport.rank(), 0..self.transport.size());
        let hears = |rank: usize| receivers.contains(rank);
        let mut sends = vec![];
        if bytes[me] > 0 {
            let tensor = Tensor::from_slice(&self.stream, own, [own.len()], Owner::Collectives)?;
            let peers = all.clone().filter(|peer| *peer != me && hears(*peer));
            sends = peers.map(|peer| Parcel::new(peer, &tensor)).collect::<Result<_, _>>()?;
        }
        let (mut receives, mut received) = (vec![], vec![]);
        for peer in all.clone().filter(|peer| hears(me) && *peer != me && bytes[*peer] > 0) {
            let tensor = Tensor::zeros(&self.stream, [bytes[peer]], DType::U8, Owner::Collectives)?;
            receives.push(Parcel::new(peer, &tensor)?);
            received.push((peer, tensor));
        }
        self.transport.exchange(&call(), &self.stream, &sends, &receives)?;
        if !hears(me) {
            return Ok(vec![]);
        }
        let mut heard = vec![vec![]; all.len()];
        heard[me] = own.to_vec();
        for (peer, tensor) in received {
            heard[peer] = tensor.to_vec::<u8>()?;
        }
        Ok(heard)
    }

    fn barrier(&mut self) -> Result<()> {
        Ok(self.transport.barrier(&call())?)
    }
}

/// The name of every meeting, which the transport shows in its errors.
fn call() -> CollectiveCall {
    CollectiveCall::new("train")
}

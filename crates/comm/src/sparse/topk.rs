//! X2: every rank's k largest, gathered by all and added in rank order.

use super::lists::{Entries, Lists, scatter};
use crate::communicator::{Communicator, others};
use crate::error::Result;
use crate::number::with_number;
use crate::transport::Call;
use meristem_device::{DType, Stream, Tensor};

/// Memory for one size of exchange.
pub(crate) struct Buffers {
    /// [n, k]: row r is rank r's list.
    lists: Lists,
    rank: usize,
}

impl Buffers {
    pub(crate) fn new(
        comm: &Communicator,
        stream: &Stream,
        dtype: DType,
        k: usize,
    ) -> Result<Self> {
        Ok(Buffers { lists: Lists::new(stream, dtype, comm.size(), k)?, rank: comm.rank() })
    }

    /// Where this rank's picks go.
    pub(crate) fn picks(&self) -> Result<Lists> {
        self.lists.row(self.rank)
    }

    /// Exchanges the picks and adds them up; returns the indices of those that made it: all.
    pub(crate) fn sum(
        &self,
        comm: &mut Communicator,
        call: &Call,
        divisor: Option<usize>,
        output: &Tensor,
    ) -> Result<Tensor> {
        let (own, mut sends, mut receives) = (self.picks()?, Vec::new(), Vec::new());
        for peer in others(self.rank, comm.size()) {
            sends.extend(own.parcels(peer));
            receives.extend(self.lists.row(peer)?.parcels(peer));
        }
        comm.exchange(call, output.stream(), &sends, &receives)?;
        add(&self.lists, divisor, output)?;
        Ok(own.indices)
    }
}

/// Writes the sum of all rows, in their order.
pub(crate) fn add(lists: &Lists, divisor: Option<usize>, output: &Tensor) -> Result<()> {
    let (stream, len) = (output.stream(), lists.len);
    let launch = stream.launch("topk, add").read(&lists.indices).read(&lists.values).write(output);
    with_number!(output.dtype(), T => launch.run(move |args| {
        let lists = Entries::rows(args.read(0), args.read::<T>(1), len);
        scatter(args.isa(), lists, divisor, args.write(2));
    })?, unreachable!("checked when the exchange was made"));
    Ok(())
}

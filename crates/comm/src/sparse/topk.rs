//! Gathered top-k (X2): all ranks gather every rank's k largest elements and add them in rank
//! order.

use meristem_device::{DType, Stream, Tensor};

use super::lists::{ListEntries, Lists, scatter};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::gpu;
use crate::number::with_number;
use crate::spans::Spans;
use crate::transport::CollectiveCall;

/// Memory for exchanges of one size.
pub(crate) struct TopKBuffers {
    /// [n, k]: row r is rank r's list.
    lists: Lists,
    rank: usize,
}

impl TopKBuffers {
    pub(crate) fn new(
        comm: &Communicator,
        stream: &Stream,
        dtype: DType,
        k: usize,
    ) -> Result<Self> {
        Ok(TopKBuffers { lists: Lists::new(stream, dtype, comm.size(), k)?, rank: comm.rank() })
    }

    /// This rank's row, for its picks.
    pub(crate) fn picks(&self) -> Result<Lists> {
        self.lists.row(self.rank)
    }

    /// Exchanges and adds the picks. Returns the indices of the picks in the result: all of them.
    pub(crate) fn sum(
        &self,
        comm: &mut Communicator,
        call: &CollectiveCall,
        divisor: Option<usize>,
        output: &Spans,
    ) -> Result<Tensor> {
        self.lists.gather(comm, call)?;
        add(&self.lists, divisor, output)?;
        Ok(self.picks()?.indices)
    }
}

/// Writes the sum of all rows, in order.
pub(crate) fn add(lists: &Lists, divisor: Option<usize>, output: &Spans) -> Result<()> {
    let (stream, len) = (output.stream(), lists.len);
    let launch = stream.launch("topk, add").read(&lists.indices).read(&lists.values);
    let launch = output.pieces().iter().fold(launch, |launch, piece| launch.write(piece));
    let launch = launch.gpu(|| {
        let lists = lists.at(0);
        let output_at = |(i, piece): (usize, &Tensor)| gpu::whole(2 + i, piece);
        let outputs: Vec<_> = output.pieces().iter().enumerate().map(output_at).collect();
        gpu::scatter(output.dtype(), lists, len, &outputs, divisor)
    });
    with_number!(output.dtype(), T => launch.run(move |args| {
        let lists = ListEntries::rows(args.read(0), args.read::<T>(1), len);
        scatter(lists, divisor, args, 2..);
    })?, unreachable!("checked when the exchange was made"));
    Ok(())
}
